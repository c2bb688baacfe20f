"""How a checkpoint is written: staged in the agent's shared memory where it can be, else into a directory on disk.

All ranks write, or none commits; one that fails takes the others along instead of leaving them waiting.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from gpu_client.training.channel import Channel
from gpu_client.training.checkpoint import background_copy, checkpoint_directory, state_files
from gpu_client.training.checkpoint.background_copy import BackgroundCopy
from gpu_client.training.checkpoint.random_state import capture_random
from gpu_client.training.checkpoint.shared_memory import Arena, NoRoomError, Pairs
from gpu_client.training.distributed.process_group import Ranks
from gpu_client.training.errors import CheckpointWriteError, SessionError

log = logging.getLogger("baton.training")

MAX_TAGS = 20
"""Of checkpoints that are kept without an agent, as many as the control plane keeps."""


class _UnwritableError(Exception):
    """The place takes no checkpoint (no room, no access), on this rank or on another."""


class _Place(IntEnum):
    """Where a checkpoint goes. The first rank decides for all."""

    DISK = 0
    ARENA = 1
    NOWHERE = 2


class Writer:
    """Writes the checkpoints of one session. Every rank has one and calls it at the same steps."""

    def __init__(
        self,
        output_dir: Path,
        arena: Arena | None,
        ranks: Ranks,
        channel: Channel,
        *,
        durable: bool,
        keep_last: int,
        keep: Path | None,
        on_lost: Callable[[], None],
    ) -> None:
        """durable: what is on disk when `write` returns survives the machine. keep: a directory never to be deleted.
        on_lost is called, from any thread, when a checkpoint that `write` had promised could not be completed.
        """
        self._output_dir = output_dir
        self._arena = arena
        self._ranks = ranks
        self._channel = channel
        self._durable = durable
        self._keep_last = keep_last
        self._keep = keep
        self._on_lost = on_lost
        self._copy: BackgroundCopy | None = None
        self._said: set[str] = set()
        self.skipped_steps: list[int] = []
        """Due, but the one before was still being stored."""

    def busy(self) -> bool:
        """Whether the last checkpoint is still in the way of the next: being copied, or being stored by the agent."""
        if self._copy is not None and self._copy.running:
            return True
        return self._arena is not None and self._channel.connected and self._arena.held

    def skip(self, step: int) -> None:
        """Record that `step` is passed over for a newer one."""
        self.skipped_steps.append(step)
        if self._ranks.first:
            log.info("no checkpoint of step %d: the last one is still being stored; a newer one follows", step)

    def settle(self) -> None:
        """Wait for the copy that goes on behind the training."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        stateful: Mapping[str, Any],
        *,
        must: bool,
        overlap: bool,
        tag: str = "",
    ) -> Path | None:
        """Write the checkpoint of `step`; returns where it lies, None if it is skipped because the arena is not free.

        Raises CheckpointWriteError; nothing of the checkpoint remains then.
        """
        self.settle()
        place = self._choose(must, stateful)
        if place is _Place.NOWHERE:
            self.skip(step)
            return None
        if place is _Place.ARENA:
            try:
                return self._stage(step, metrics, stateful, overlap, tag)
            except _UnwritableError as error:
                self._say_once(f"checkpoints go to disk: {error}")
        return self._write_to_disk(step, metrics, stateful, tag)

    def adopt(self, step: int, metrics: Mapping[str, float], staged: Path | None, tag: str = "") -> None:
        """A directory that another library has written is complete: under its name, or `staged`, then it is ours.

        Raises CheckpointWriteError.
        """
        final = checkpoint_directory.checkpoint_path(self._output_dir, step)
        written = staged or final
        if not written.is_dir():
            raise CheckpointWriteError(f"{written} does not exist", "Write checkpoints into the session's output_dir")
        try:
            by = "script" if staged is None else "session"
            checkpoint_directory.write_marker(written, step, metrics, by, {}, tag=tag, durable=self._durable)
            if staged is not None:
                checkpoint_directory.publish(staged, final, durable=self._durable)
        except OSError as error:
            raise self.explain(step, error) from error
        if staged is None:
            self._channel.checkpoint_written(step, str(final), metrics)
        else:
            self.tell(step, final, metrics)

    def tell(self, step: int, path: Path, metrics: Mapping[str, float]) -> None:
        """A directory of the output directory is complete: the agent is told, older ones go."""
        if self._ranks.first:
            self._channel.checkpoint_written(step, str(path), metrics)
            self._rotate()

    def _choose(self, must: bool, stateful: Mapping[str, Any]) -> _Place:
        place = _Place.DISK
        if self._ranks.first and self._arena is not None:
            if not self._channel.connected:
                self._say_once("checkpoints go to disk: the agent is gone")
            elif not self._ranks.one_machine:
                self._say_once("checkpoints go to disk: the processes run on several machines")
            elif any(state_files.writes_itself(holder) for holder in stateful.values()):
                self._say_once("checkpoints go to disk: a library writes some of their files itself")
            elif not self._arena.held:
                place = _Place.ARENA
            elif not must:
                place = _Place.NOWHERE
        return _Place(self._ranks.agree(int(place))[0])

    # --- into shared memory -------------------------------------------------------------------------------------------

    def _stage(
        self, step: int, metrics: Mapping[str, float], stateful: Mapping[str, Any], overlap: bool, tag: str
    ) -> Path:
        """Raises _UnwritableError when it does not fit; the arena holds nothing then."""
        arena = self._arena
        assert arena is not None
        started = time.perf_counter()
        pairs: Pairs = []
        collected = state_files.Collected()

        def collect() -> None:
            nonlocal collected
            collected = state_files.collect(stateful, rank=self._ranks.rank, size=self._ranks.size)

        def allocate() -> None:
            pairs.extend(arena.allocate(collected.files))

        def finish() -> None:
            arena.finish(step, metrics, collected.forms, tag)

        try:
            self._phase(step, arena.begin if self._ranks.first else None)
            self._phase(step, collect)
            self._phase(step, allocate)
            randoms = self._gather_randoms(step)
            self._phase(step, lambda: state_files.save_bundle(arena.directory, collected, randoms) if randoms else None)
            optimizers = background_copy.stepping(stateful.values()) if overlap and not collected.sharded else []
            at_once, later = background_copy.split(pairs, optimizers) if optimizers else (pairs, [])
            self._phase(step, lambda: background_copy.copy_all(at_once))
            self._phase(step, finish if self._ranks.first and not later else None)
        except _UnwritableError:
            arena.clear()
            raise
        stall_s = time.perf_counter() - started
        if not self._ranks.first:
            return arena.directory
        self._channel.flush()

        def announce() -> None:
            self._channel.announce_checkpoint(step, str(arena.directory), metrics, stall_s)

        def finish_and_announce() -> None:
            finish()
            announce()

        def lost(error: Exception) -> None:
            log.error("the checkpoint of step %d is lost: it could not be copied (%s)", step, error)
            self._on_lost()

        if later:
            self._copy = BackgroundCopy(later, optimizers, finish_and_announce, lost)
        else:
            announce()
        return arena.directory

    # --- onto disk ----------------------------------------------------------------------------------------------------

    def _write_to_disk(self, step: int, metrics: Mapping[str, float], stateful: Mapping[str, Any], tag: str) -> Path:
        staged = checkpoint_directory.staging_path(self._output_dir, step)
        final = checkpoint_directory.checkpoint_path(self._output_dir, step)
        collected = state_files.Collected()

        def prepare() -> None:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()

        def write() -> None:
            nonlocal collected
            collected = state_files.collect(stateful, rank=self._ranks.rank, size=self._ranks.size)
            state_files.save_states(staged, collected, randoms)

        def publish() -> None:
            checkpoint_directory.write_marker(
                staged, step, metrics, "session", collected.forms, tag=tag, durable=self._durable
            )
            checkpoint_directory.publish(staged, final, durable=self._durable)

        try:
            randoms = self._gather_randoms(step)
            self._phase(step, prepare if self._ranks.first else None)
            self._phase(step, write)
            self._phase(step, publish if self._ranks.first else None)
        except (SessionError, _UnwritableError) as error:
            if self._ranks.first:
                shutil.rmtree(staged, ignore_errors=True)
            raise self.explain(step, error) from error.__cause__
        self.tell(step, final, metrics)
        return final

    def _rotate(self) -> None:
        """Delete old session checkpoints, but never one that the agent may not know of, nor the one resumed from."""
        own = [
            (step, path)
            for step, path in checkpoint_directory.complete_checkpoints(self._output_dir)
            if checkpoint_directory.created_by_session(path)
        ]
        # An agent has stored them; alone, these are all that there is.
        tagged = _newest_of_tags([path for _, path in own]) if self._durable else set()
        newest_untold = any(not self._channel.told(step) for step, _ in own[-self._keep_last :])
        for step, path in own[: -self._keep_last]:
            if newest_untold or not self._channel.told(step) or path == self._keep or path in tagged:
                continue
            # Renamed first: a directory that is being deleted must not look like a checkpoint.
            doomed = path.with_name(f".{path.name}.old")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    # --- both ---------------------------------------------------------------------------------------------------------

    def _gather_randoms(self, step: int) -> list[dict[str, Any]] | None:
        captured: dict[str, Any] = {}
        self._phase(step, lambda: captured.update(capture_random()))
        return self._ranks.gather(captured)

    def _phase(self, step: int, action: Callable[[], object] | None) -> None:
        """One part of a checkpoint; it is over when every rank has done its share, and fails on all when on one.

        Raises SessionError for what is wrong with a state, _UnwritableError for what is wrong with the place.
        """
        failure: Exception | None = None
        try:
            if action is not None:
                action()
        except (SessionError, NoRoomError, *state_files.WRITE_ERRORS) as error:
            failure = error
        severity = 0 if failure is None else 2 if isinstance(failure, SessionError) else 1
        worst = self._ranks.agree(severity)[0]
        if isinstance(failure, SessionError):
            raise failure
        elsewhere = f"another process could not write its part of step {step}"
        if worst == 2:
            raise CheckpointWriteError(elsewhere, "See its log")
        if worst == 1:
            raise _UnwritableError(str(failure or elsewhere)) from failure

    def explain(self, step: int, failure: Exception) -> SessionError:
        """`failure` as an error that says what to do."""
        if isinstance(failure, SessionError):
            return failure
        free_bytes = shutil.disk_usage(self._output_dir).free
        return CheckpointWriteError(
            f"the checkpoint of step {step} could not be written ({failure}); "
            f"{free_bytes} bytes are free in {self._output_dir}",
            "Check that the directory can be written; ask for more disk, or keep fewer checkpoints (keep_last=1)",
        )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)


def _newest_of_tags(checkpoints: Sequence[Path]) -> set[Path]:
    """Of checkpoints, oldest first: the newest of each tag, of the `MAX_TAGS` that came last."""
    newest: dict[str, Path] = {}
    for path in reversed(checkpoints):
        tag = checkpoint_directory.read_marker(path).tag
        if tag and len(newest) < MAX_TAGS:
            newest.setdefault(tag, path)
    return set(newest.values())
