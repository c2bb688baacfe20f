"""Find finished checkpoints in a trainer's output directory.

The watcher lists the directories `checkpoint-<step>` (the convention of accelerate and diffusers) with any content. A
directory with a `baton.json` is a session checkpoint: the session writes the marker last, therefore the directory is
complete. A foreign directory is complete when it has not changed for a while and no process of the trainer has one of
its files open for writing.

A foreign script announces no end, therefore the watcher learns the files to expect. A directory that lacks files of the
former checkpoint gets more time, and so does the first directory without a file that trainers write last. A directory
with a file that is shorter than declared gets as much time and then counts as complete, because the file may never
become longer. The watcher never reports a directory with a truncated tensor file: no resume could load such a
checkpoint, while the former checkpoint is good.

A script can delete its checkpoints before they have settled. Therefore each poll links the files of unfinished
directories (`LinkedFiles`). A directory that the script deletes, or that has a successor, is finished, and the watcher
reports its links.
"""

import logging
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.contract.base import MAX_STEP
from baton.contract.checkpoints.marker import MARKER
from gpu_client.checkpoints.local.directory_files import FileState, list_files, read_marker
from gpu_client.checkpoints.local.expected_files import ExpectedFiles, strip_numbers
from gpu_client.checkpoints.local.staging import LinkedFiles, ReadyCheckpoint
from gpu_client.checkpoints.local.truncated_files import MissingPart, find_missing_part

_log = logging.getLogger(__name__)

INCOMPLETE_PATIENCE = 6
"""Factor on the wait for a directory that probably lacks files or parts of files."""
# [0-9] and not \d, which also matches the digits of other writing systems.
_NAME = re.compile(r"checkpoint-([0-9]{1,15})")


@dataclass(slots=True)
class _Candidate:
    step: int
    inode: int
    files: tuple[FileState, ...]
    unchanged_since: float
    first_scan: int
    links: LinkedFiles | None
    whole: tuple[FileState, ...] = ()
    """Newest listing that is no subset of a former listing."""
    polls: int = 0
    """Number of polls that found `whole` or a part of it."""
    foreign: bool = False

    def record(self, files: tuple[FileState, ...], now: float) -> None:
        """Record the newest listing."""
        if files != self.files:
            self.files, self.unchanged_since = files, now
        if not self.whole or not set(files) <= set(self.whole):
            self.whole, self.polls = files, 0
        self.polls += 1


class CheckpointWatcher:
    """Watcher that reports each finished checkpoint directory once. One thread calls `poll` about once a second.

    clock: monotonic seconds. open_for_writing: returns the files that processes of the trainer have open for writing;
    called only when a directory appears complete. stable_s: seconds without a change after which a directory counts as
    complete. links_dir: directory for hard links, on the same file system.
    log_to_job: writes a line to the job's log, such as the reason why the watcher skips a directory, once for each kind
    of reason.
    """

    def __init__(
        self,
        output_dir: Path,
        clock: Callable[[], float],
        open_for_writing: Callable[[], set[Path]],
        stable_s: float,
        links_dir: Path | None = None,
        *,
        log_to_job: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._output_dir = output_dir
        self._clock = clock
        self._open_for_writing = open_for_writing
        self._stable_s = stable_s
        self._candidates: dict[str, _Candidate] = {}
        # Inode by name. A directory with a new inode was written anew and is a new checkpoint; a directory that shrinks
        # during its removal keeps its inode.
        self._reported: dict[str, int] = {}
        self._expected = ExpectedFiles()
        self._links_dir = links_dir
        self._polls = 0
        self._removed: list[tuple[str, _Candidate]] = []
        self.missed: list[int] = []
        """Steps of directories that the script removed before the watcher could report them."""
        self._again: list[tuple[float, ReadyCheckpoint]] = []
        """Linked checkpoints whose staging failed, and the time of each next report."""
        self._log_to_job = log_to_job
        self._warned: set[tuple[str, str]] = set()
        self._explained: set[str] = set()

    def mark_seen(self, path: Path) -> None:
        """Mark a directory that the agent restored, so that the watcher does not report its present state."""
        self._reported[path.name] = path.lstat().st_ino
        if not (path / MARKER).exists():
            self._expected.learn(file.path for file in list_files(path))

    def close(self) -> None:
        """Remove the links to files of unreported and unstaged directories."""
        for candidate in self._candidates.values():
            if candidate.links:
                candidate.links.release()
        self._candidates.clear()
        while self._again:
            self.discard(self._again.pop()[1])

    def report_again(self, checkpoint: ReadyCheckpoint) -> None:
        """Schedule another report of a checkpoint whose staging failed.

        The watcher reports a directory when the directory is complete again, and a linked checkpoint, which cannot
        change any more, after the stable time.
        """
        if checkpoint.links is None:
            self._reported.pop(checkpoint.path.name, None)
        else:
            self._again.append((self._clock() + self._stable_s, checkpoint))

    def discard(self, checkpoint: ReadyCheckpoint) -> None:
        """Remove the links, if any, of a checkpoint that the caller does not stage."""
        if checkpoint.links is not None:
            shutil.rmtree(checkpoint.links, ignore_errors=True)

    def poll(self) -> list[ReadyCheckpoint]:
        """Return the checkpoints that a running trainer has completed since the last call, ordered by step."""
        return self._scan(self._is_settled, self._clock())

    def final_poll(self, *, clean_exit: bool) -> list[ReadyCheckpoint]:
        """Return the remaining checkpoints after the last process of the trainer has ended, without waiting.

        After a clean exit (code 0) every directory without a truncated tensor file is complete. After a crash or a kill
        only session checkpoints count as complete, because an unsettled foreign checkpoint can be truncated.
        """
        ready = self._scan(lambda _name, _files: clean_exit, math.inf)
        for name, candidate in self._candidates.items():
            if candidate.foreign and not clean_exit:
                self._explain(
                    name,
                    "is not taken over: the script ended before the directory had settled, so a file may be truncated",
                )
        return ready

    def _scan(
        self, is_complete: Callable[[str, tuple[FileState, ...]], bool], again_until: float
    ) -> list[ReadyCheckpoint]:
        """List the directories once. `again_until`: linked checkpoints with another report due by then are included."""
        ready: list[ReadyCheckpoint] = []
        self._polls += 1
        present = self._directories()
        for name in self._reported.keys() - present.keys():
            del self._reported[name]
        for name, candidate in list(self._candidates.items()):
            if present.get(name, (0, 0))[1] != candidate.inode:
                self._removed.append((name, self._candidates.pop(name)))
        for name, (step, inode) in present.items():
            if self._reported.get(name) == inode:
                continue
            found = self._examine(name, step, inode, is_complete)
            if found:
                ready.append(found)
        ready.extend(self._superseded({found.path.name for found in ready}))
        # Reading a directory may raise. The record comes last, so that the next poll then reports the others again.
        for found in ready:
            name = found.path.name
            self._reported[name] = present[name][1]
            done = self._candidates.pop(name, None)
            if done and done.links and done.links.path != found.links:
                done.links.release()
        while self._removed:
            ready.extend(self._deleted_checkpoint(*self._removed.pop()))
        ready.extend(checkpoint for due, checkpoint in self._again if due <= again_until)
        self._again = [again for again in self._again if again[0] > again_until]
        return sorted(ready, key=lambda checkpoint: checkpoint.step)

    def _deleted_checkpoint(self, name: str, candidate: _Candidate) -> Iterable[ReadyCheckpoint]:
        """Yield the checkpoint of a deleted directory, if its links have all files of the former checkpoint.

        Without a former checkpoint the method yields nothing, because the script may have added files after the last
        poll.
        """
        if not candidate.foreign:
            self._release(candidate)
            return
        names = [file.path for file in candidate.whole]
        has_all = self._expected.known and not self._expected.lacks(names)
        found = self._linked_checkpoint(name, candidate) if has_all else None
        if found is not None:
            self._expected.learn(names)
        elif not has_all and candidate.polls > 1:  # A single poll may have listed a part of the files.
            self._expected.learn_from_missed(names)
        if found is None:
            self._release(candidate)
            self.missed.append(candidate.step)
            _log.warning("%s was removed by the script before it could be taken over", name)
        else:
            yield found

    def _superseded(self, done: set[str]) -> Iterable[ReadyCheckpoint]:
        """Yield the checkpoints with a successor, because a script writes one directory at a time."""
        foreign = {name: one for name, one in self._candidates.items() if one.foreign}
        for name, candidate in foreign.items():
            if name in done or candidate.polls < 2 or candidate.files != candidate.whole:
                continue
            if not any(one.step > candidate.step and one.first_scan > candidate.first_scan for one in foreign.values()):
                continue
            path, names = self._output_dir / name, [file.path for file in candidate.files]
            if self._expected.known and self._expected.lacks(names):
                continue  # A second writer may still be busy in the directory.
            if self._is_open(path) or self._missing(name, path, candidate.files):
                continue
            self._expected.learn(names)
            held = self._linked_checkpoint(name, candidate)
            yield held or ReadyCheckpoint(candidate.step, path, {}, "foreign", candidate.files)

    def _linked_checkpoint(self, name: str, candidate: _Candidate) -> ReadyCheckpoint | None:
        """Return the checkpoint by its links, if the links cover all files in their last listed or final state."""
        hold = candidate.links
        if hold is None:
            return None
        try:
            hold.drop_others({file.path for file in candidate.whole})
            files = list_files(hold.path)
            if [file.path for file in files] != [file.path for file in candidate.whole]:
                return None
            changed = {file.path for file in set(files) - set(candidate.whole)}
            # The script may turn a changed file that has another name into a part of another checkpoint.
            if not all(hold.is_deleted(path) for path in changed) or self._missing(name, hold.path, files):
                return None
        except OSError as error:
            _log.warning("the links to step %d cannot be read: %s", candidate.step, error)
            return None
        return ReadyCheckpoint(candidate.step, self._output_dir / name, {}, "foreign", files, links=hold.path)

    def _link_files(self, name: str, candidate: _Candidate) -> None:
        if candidate.links is None:
            return
        try:
            candidate.links.follow(file.path for file in candidate.files)
        except OSError as error:
            # Copies are no alternative, because each poll would copy the files anew. `stage` copies the files of a
            # directory that settles or has a successor.
            self._warn("A checkpoint", f"is lost if the script removes it at once, for it cannot be linked: {error}")
            self._release(candidate)

    def _release(self, candidate: _Candidate) -> None:
        if candidate.links:
            candidate.links.release()
            candidate.links = None

    def _directories(self) -> dict[str, tuple[int, int]]:
        """Return step and inode of each checkpoint directory, by name."""
        present: dict[str, tuple[int, int]] = {}
        try:
            entries = list(os.scandir(self._output_dir))
        except (FileNotFoundError, NotADirectoryError):
            return present
        for entry in entries:
            matched = _NAME.fullmatch(entry.name)
            if not matched or int(matched.group(1)) > MAX_STEP:
                continue
            if entry.is_symlink():
                self._explain(entry.name, "is a symbolic link and is ignored")
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(info.st_mode):
                # Overlay file systems list another number in entry.inode() than stat() reports.
                present[entry.name] = int(matched.group(1)), info.st_ino
        return present

    def _examine(
        self, name: str, step: int, inode: int, is_complete: Callable[[str, tuple[FileState, ...]], bool]
    ) -> ReadyCheckpoint | None:
        path = self._output_dir / name
        try:
            files = list_files(path)
        except FileNotFoundError:
            return None  # The script removes or writes the directory; the next poll decides.
        except OSError as error:
            self._explain(name, f"cannot be read, and is not taken: {error}")
            return None
        known = self._candidates.get(name)
        if known is None:
            hold = LinkedFiles(path, self._links_dir) if self._links_dir else None
            known = _Candidate(step, inode, files, self._clock(), self._polls, hold)
            self._candidates[name] = known
        known.record(files, self._clock())
        if not any(file.size_bytes for file in files):
            return None
        try:
            marker = read_marker(path / MARKER)
            if marker is not None and marker.step != step:
                raise ValueError(f"its step is {marker.step}, the directory's {step}")
        except ValueError as error:
            # The marker is damaged, or a copy is in progress, therefore the rules of a foreign directory apply.
            if is_complete(name, files):
                self._explain(name, f"has a {MARKER} that is not usable, and is not taken: {error}")
            return None
        if marker is not None:
            if all(file.path != MARKER for file in files):
                return None  # The listing precedes the marker and may be partial; the next poll is complete.
            return ReadyCheckpoint(step, path, dict(marker.metrics), "session", files, marker.tag)
        known.foreign = True
        self._link_files(name, known)
        return self._take_foreign(name, step, path, files) if is_complete(name, files) else None

    def _take_foreign(self, name: str, step: int, path: Path, files: tuple[FileState, ...]) -> ReadyCheckpoint | None:
        """Return a settled foreign checkpoint; None if one of its files is truncated."""
        missing = self._missing(name, path, files)
        if missing and missing.truncated:
            return None
        if missing:
            _log.warning("%s is taken over as it is: %s", name, missing)
        self._expected.learn(file.path for file in files)
        return ReadyCheckpoint(step, path, {}, "foreign", files)

    def _is_settled(self, name: str, files: tuple[FileState, ...]) -> bool:
        """Return True if the directory has not changed for `stable_s` and no process has its files open."""
        unchanged_s = self._clock() - self._candidates[name].unchanged_since
        patient = unchanged_s >= self._stable_s * INCOMPLETE_PATIENCE
        if not patient and (unchanged_s < self._stable_s or self._expected.lacks(file.path for file in files)):
            return False
        path = self._output_dir / name
        if self._is_open(path):
            if patient:
                self._explain(
                    name,
                    "is not taken over yet: a process of the script has a file in it open for writing, unchanged "
                    f"for {self._stable_s * INCOMPLETE_PATIENCE:g} s",
                )
            return False
        return patient or not self._missing(name, path, files)

    def _is_open(self, path: Path) -> bool:
        directory = path.resolve()
        return any(directory in file.parents for file in self._open_for_writing())

    def _missing(self, name: str, directory: Path, files: tuple[FileState, ...]) -> MissingPart | None:
        """Return the missing part of a file by its own declaration, and log the part to the job."""
        try:
            missing = find_missing_part(directory, (file.path for file in files))
        except OSError:
            return None  # The staging fails, too, and reports the reason.
        if missing:
            wait_s = INCOMPLETE_PATIENCE * self._stable_s
            remedy = (
                "Baton does not take it over unless the file becomes whole; is the disk full?"
                if missing.truncated
                else f"Baton takes it over as it is once it has not changed for {wait_s:g} s, or when the script has "
                "exited with code 0"
            )
            self._explain(name, f"is not whole: {missing}. {remedy}", missing.path)
        return missing

    def _explain(self, name: str, text: str, about: str = "") -> None:
        """Log to the job why the watcher skips a directory, once for texts that differ only in numbers.

        `about`: key of the reason that replaces the text.
        """
        self._warn(name, text)
        kind = strip_numbers(about or text)
        if kind not in self._explained:
            self._explained.add(kind)
            line = f"[baton] {name} in the output directory {text}"
            self._log_to_job("".join(character if character.isprintable() else "?" for character in line))

    def _warn(self, name: str, text: str) -> None:
        if (name, text) not in self._warned:
            self._warned.add((name, text))
            _log.warning("%s in the output directory %s", name, text)
