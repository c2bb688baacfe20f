"""Finds finished checkpoints in a trainer's output directory, and takes them out of the trainer's reach.

Looked at are the directories ``checkpoint-<step>``, the convention of accelerate and diffusers; what files are in them
is the script's business. One that holds a ``baton.json`` was committed by our session (a rename, or the marker written
last): it is complete. Any other is complete when it has not changed for a while and no process of the trainer has a
file in it open for writing.

There is no way to be told by a foreign script that it is done, so patience is learned: a directory that lacks files
which the script's former checkpoint had is given more time.
"""

import errno
import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from contract.base import MAX_PATH_BYTES, MAX_STEP
from gpu_client.checkpoints.metrics import usable_metrics, usable_tag
from gpu_client.transport.errors import FileChanged

_log = logging.getLogger(__name__)

MARKER = "baton.json"
MARKER_FORMATS = (1, 2)
MARKER_MAX_BYTES = 256 * 1024
STABLE_S = 5.0
# A directory with fewer kinds of files than the script's last checkpoint: more is probably coming.
INCOMPLETE_PATIENCE = 6
# [0-9], not \d: other scripts' digits are not what a training script writes.
_NAME = re.compile(r"checkpoint-([0-9]{1,15})")
_DIGITS = re.compile(r"[0-9]+")

CreatedBy = Literal["session", "foreign"]


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A file of a checkpoint as it was seen: its path inside the directory, size and modification time."""

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class ReadyCheckpoint:
    """A complete checkpoint directory, and the files it had when it was found complete."""

    step: int
    path: Path
    metrics: dict[str, float]
    created_by: CreatedBy
    files: tuple[FileSeen, ...]
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Marker:
    """What the session says about a checkpoint that it has completed."""

    step: int
    metrics: dict[str, float]
    tag: str = ""
    """By which it is to be kept."""


class StageError(Exception):
    """The checkpoint could not be taken over. It may have been rotated away: then the next one will do."""


@dataclass(slots=True)
class _Candidate:
    inode: int
    files: tuple[FileSeen, ...]
    unchanged_since: float


class CheckpointWatcher:
    """Call ``poll`` about once a second, from one thread. Every directory is reported once,
    unless it is to be looked at again.

    ``clock``: monotonic seconds. ``open_for_writing``: the files that the trainer's processes have open for writing;
    asked only when a directory looks complete.
    """

    def __init__(
        self,
        output_dir: Path,
        clock: Callable[[], float],
        open_for_writing: Callable[[], set[Path]],
        stable_s: float = STABLE_S,
    ) -> None:
        self._output_dir = output_dir
        self._clock = clock
        self._open_for_writing = open_for_writing
        self._stable_s = stable_s
        self._candidates: dict[str, _Candidate] = {}
        # By name and inode: a directory that was removed and written anew is a new checkpoint; one that shrinks because
        # it is being removed is not.
        self._reported: dict[str, int] = {}
        self._usual_names: set[str] = set()
        self._warned: set[tuple[str, str]] = set()

    def mark_seen(self, path: Path) -> None:
        """Never report this directory as it is now: the agent put it there itself (a restored checkpoint)."""
        self._reported[path.name] = path.lstat().st_ino

    def look_again(self, checkpoint: ReadyCheckpoint) -> None:
        """It could not be taken over as it was found: report it once more when it is complete."""
        self._reported.pop(checkpoint.path.name, None)

    def poll(self) -> list[ReadyCheckpoint]:
        """The checkpoints that have become complete since the last call, by step. While the trainer runs."""
        return self._look(self._is_settled)

    def final_poll(self, *, clean_exit: bool) -> list[ReadyCheckpoint]:
        """The rest, once all of the trainer's processes are gone. Does not wait.

        After a clean exit (code 0) whatever is there is complete. After a crash or a kill only the session's own
        checkpoints are: a foreign one that had not settled may have been cut off in the middle.
        """
        return self._look(lambda _name, _files: clean_exit)

    def _look(self, is_complete: Callable[[str, tuple[FileSeen, ...]], bool]) -> list[ReadyCheckpoint]:
        ready: list[ReadyCheckpoint] = []
        present = self._directories()
        for name in self._candidates.keys() - present.keys():
            del self._candidates[name]  # Rotated away while we waited.
        for name in self._reported.keys() - present.keys():
            del self._reported[name]
        for name, (step, inode) in present.items():
            if self._reported.get(name) == inode:
                continue
            found = self._examine(name, step, inode, is_complete)
            if found:
                ready.append(found)
        # Only now: if looking at one directory failed, those found before it are found again.
        for found in ready:
            self._reported[found.path.name] = present[found.path.name][1]
            self._candidates.pop(found.path.name, None)
        return sorted(ready, key=lambda checkpoint: checkpoint.step)

    def _directories(self) -> dict[str, tuple[int, int]]:
        """Name -> step, inode."""
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
                self._warn(entry.name, "is a symbolic link and is ignored")
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(info.st_mode):
                # Not entry.inode(): overlay file systems may list another number than they report.
                present[entry.name] = int(matched.group(1)), info.st_ino
        return present

    def _examine(
        self, name: str, step: int, inode: int, is_complete: Callable[[str, tuple[FileSeen, ...]], bool]
    ) -> ReadyCheckpoint | None:
        path = self._output_dir / name
        try:
            files = list_files(path)
        except FileNotFoundError:
            self._candidates.pop(name, None)  # It is being removed, or written: begin again.
            return None
        except OSError as error:
            self._warn(name, f"cannot be read: {error}")
            return None
        known = self._candidates.get(name)
        if known is None or known.inode != inode or known.files != files:
            self._candidates[name] = _Candidate(inode, files, self._clock())
        if not any(file.size_bytes for file in files):
            return None
        try:
            marker = read_marker(path / MARKER)
            if marker is not None and marker.step != step:
                raise ValueError(f"its step is {marker.step}, the directory's {step}")
        except ValueError as error:
            # Damaged, or a copy that is still being written: then what goes for foreign ones goes for it.
            if is_complete(name, files):
                self._warn(name, f"has a {MARKER} that is not usable, and is not taken: {error}")
            return None
        if marker is not None:
            if all(file.path != MARKER for file in files):
                return None  # It came after the files were listed: they may not be all. The next poll sees both.
            return ReadyCheckpoint(step, path, marker.metrics, "session", files, marker.tag)
        if not is_complete(name, files):
            return None
        self._usual_names = {_kind(file.path) for file in files}
        return ReadyCheckpoint(step, path, {}, "foreign", files)

    def _is_settled(self, name: str, files: tuple[FileSeen, ...]) -> bool:
        """It has been left alone for long enough, and nobody has it open."""
        lacking = not self._usual_names <= {_kind(file.path) for file in files}
        patience_s = self._stable_s * (INCOMPLETE_PATIENCE if lacking else 1)
        if self._clock() - self._candidates[name].unchanged_since < patience_s:
            return False
        directory = (self._output_dir / name).resolve()
        return not any(directory in file.parents for file in self._open_for_writing())

    def _warn(self, name: str, text: str) -> None:
        if (name, text) not in self._warned:
            self._warned.add((name, text))
            _log.warning("%s in the output directory %s", name, text)


def list_files(directory: Path) -> tuple[FileSeen, ...]:
    """All files below ``directory``, by path. Links count as themselves.

    Raises OSError, FileNotFoundError if something is removed meanwhile.
    """
    files: list[FileSeen] = []
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                relative = Path(entry.path).relative_to(directory).as_posix()
                if entry.is_dir(follow_symlinks=False):
                    if len(os.fsencode(relative)) > MAX_PATH_BYTES:
                        raise OSError(errno.ENAMETOOLONG, f"a path longer than {MAX_PATH_BYTES} bytes cannot be stored")
                    waiting.append(Path(entry.path))
                    continue
                info = entry.stat(follow_symlinks=False)
                files.append(FileSeen(relative, info.st_size, info.st_mtime_ns))
    return tuple(sorted(files, key=lambda file: file.path))


def stage(checkpoint: ReadyCheckpoint, staging_dir: Path) -> ReadyCheckpoint:
    """Take the files over at once, by hard links (copies where those are impossible), so that the script's rotation
    cannot pull them from under an upload. Returns the checkpoint where it lies now; the caller removes that directory.

    A link does not keep the script from writing into the file: see `require_unchanged`.

    All files or none: raises StageError if the checkpoint is not as it was when it was found complete, or holds
    something other than regular files and links to some inside the output directory; OSError if the disk fails.
    """
    name = f"{checkpoint.path.name}-{uuid.uuid4().hex[:8]}"
    temporary = staging_dir / f".{name}.tmp"
    target = staging_dir / name
    temporary.mkdir(parents=True)
    try:
        for file in checkpoint.files:
            source = checkpoint.path / file.path
            copy = temporary / file.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            _take(source, copy, checkpoint.path.parent.resolve())
            info = copy.stat()
            if not source.is_symlink() and (info.st_size, info.st_mtime_ns) != (file.size_bytes, file.modified_ns):
                raise StageError(f"{source} has changed since the checkpoint was complete")
        taken = list_files(temporary)
        if list_files(checkpoint.path) != checkpoint.files:
            raise StageError(f"{checkpoint.path} has changed since it was complete")
        temporary.rename(target)
    except FileNotFoundError as error:
        raise StageError(f"{checkpoint.path} was removed before it could be taken over") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return replace(checkpoint, path=target, files=taken)


def require_unchanged(directory: Path, files: tuple[FileSeen, ...]) -> None:
    """Raise FileChanged unless the files of a staged checkpoint are as they were when it was taken over.

    To be asked each time before something is said of all of them together: a script that writes into its former
    checkpoint's files would otherwise have a mixture of two stored, each file sound by itself.
    """
    try:
        found = list_files(directory)
    except OSError as error:
        raise FileChanged(f"{directory} cannot be read (any more): {error}") from error
    if found != files:
        names = sorted({file.path for file in set(found) ^ set(files)})
        raise FileChanged(f"{names[0]} of the checkpoint in {directory} was written to after it was complete")


def _take(source: Path, target: Path, output_dir: Path) -> None:
    if source.is_symlink():
        source = source.resolve(strict=True)
        if output_dir not in source.parents:
            raise StageError(f"{source} is outside the output directory, and is not followed")
    if not stat.S_ISREG(source.lstat().st_mode):
        raise StageError(f"{source} is not a regular file")
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        # Another file system; a kernel that protects links to others' files; too many links; a system without them.
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _kind(path: str) -> str:
    """The name of a file without the numbers that tell steps, shards and ranks apart."""
    return _DIGITS.sub("#", path)


def read_marker(path: Path) -> Marker | None:
    """A ``baton.json``; None if there is none. Raises ValueError if it is none of a kind that is known."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(str(error)) from error
    with os.fdopen(fd, "rb") as file:
        try:
            marker = json.loads(file.read(MARKER_MAX_BYTES))
        except (OSError, RecursionError) as error:
            raise ValueError(str(error)) from error
    if not isinstance(marker, dict):
        raise ValueError("it is not an object")
    if marker.get("format") not in MARKER_FORMATS:
        raise ValueError(f"its format is {str(marker.get('format'))[:20]!r}, not one of {MARKER_FORMATS}")
    step = marker.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
        raise ValueError(f"its step is {str(step)[:20]!r}")
    return Marker(step, usable_metrics(marker.get("metrics")), usable_tag(marker.get("tag")))
