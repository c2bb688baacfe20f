"""Write checkpoints into the agent's shared memory if possible, otherwise into a directory on disk.

Either all ranks write or no rank commits; a failure on one rank fails all ranks, so that no rank waits forever.

The first checkpoint loads torch: a generator of samples has a session too, and writes none.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.contract.checkpoints.marker import MARKER
from gpu_client.training.channel import AgentChannel
from gpu_client.training.checkpoint import checkpoint_directory
from gpu_client.training.distributed.process_group import Ranks
from gpu_client.training.errors import CheckpointWriteError, SessionError
from gpu_client.training.protocol import ARENA_CHECKPOINT

if TYPE_CHECKING:
    from gpu_client.training.checkpoint.background_copy import BackgroundCopy
    from gpu_client.training.checkpoint.shared_memory import Arena, Pairs

log = logging.getLogger("baton.training")

MAX_TAGS = 20
"""Maximum number of tagged checkpoints that stay without an agent, equal to the control plane's."""


class _UnwritableError(Exception):
    """Error of a destination without room or access, on any rank."""


class _Destination(IntEnum):
    """Destination of a checkpoint; the first rank decides for all ranks."""

    DISK = 0
    ARENA = 1
    NOWHERE = 2


class CheckpointWriter:
    """Writer of one session's checkpoints. Every rank has a writer and calls the writer at equal steps."""

    def __init__(
        self,
        output_dir: Path,
        arena: Path | None,
        ranks: Ranks,
        channel: AgentChannel,
        *,
        durable: bool,
        keep_last: int,
        keep: Path | None,
        on_lost: Callable[[], None],
    ) -> None:
        """durable: files on disk survive a crash of the machine after `write`. keep: a directory never to delete.

        on_lost: called from any thread after a failed background copy.
        """
        self._output_dir = output_dir
        self._arena_root = arena
        self._marker = None if arena is None else arena / ARENA_CHECKPOINT / MARKER
        """Exists while the agent owns a complete checkpoint in the arena."""
        self._arena: Arena | None = None
        """None before the first checkpoint."""
        self._ranks = ranks
        self._channel = channel
        self._durable = durable
        self._keep_last = keep_last
        self._keep = keep
        self._on_lost = on_lost
        self._copy: BackgroundCopy | None = None
        self._warned: set[str] = set()
        self.skipped_steps: list[int] = []
        """Steps without a checkpoint, because the agent was still storing the previous checkpoint."""

    def busy(self) -> bool:
        """Return True while the background copy or the agent's upload of the last checkpoint is in progress."""
        if self._copy is not None and self._copy.running:
            return True
        return self._marker is not None and self._channel.connected and self._marker.exists()

    def skip(self, step: int) -> None:
        """Record that a later checkpoint replaces the checkpoint of `step`."""
        self.skipped_steps.append(step)
        if self._ranks.first:
            log.info("no checkpoint of step %d: the last one is still being stored; a newer one follows", step)

    def settle(self) -> None:
        """Wait for the background copy."""
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
        """Write the checkpoint of `step`. Returns its path; None if skipped because of an occupied arena.

        Raises CheckpointWriteError after removing all files of the checkpoint.
        """
        self.settle()
        place = self._choose(must, stateful)
        if place is _Destination.NOWHERE:
            self.skip(step)
            return None
        if place is _Destination.ARENA:
            try:
                return self._stage(step, metrics, stateful, overlap, tag)
            except _UnwritableError as error:
                self._warn_once(f"checkpoints go to disk: {error}")
        return self._write_to_disk(step, metrics, stateful, tag)

    def adopt(self, step: int, metrics: Mapping[str, float], staged: Path | None, tag: str = "") -> None:
        """Commit another library's directory, under its final name or as `staged`.

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
            raise self.write_error(step, error) from error
        if staged is None:
            self._channel.checkpoint_written(step, str(final), metrics)
        else:
            self.announce(step, final, metrics)

    def announce(self, step: int, path: Path, metrics: Mapping[str, float]) -> None:
        """Report a complete directory to the agent, and delete older directories."""
        if self._ranks.first:
            self._channel.checkpoint_written(step, str(path), metrics)
            self._rotate()

    def _choose(self, must: bool, stateful: Mapping[str, Any]) -> _Destination:
        from gpu_client.training.checkpoint import state_files
        from gpu_client.training.checkpoint.shared_memory import Arena

        place = _Destination.DISK
        if self._arena is None and self._arena_root is not None:
            self._arena = Arena(self._arena_root)
        if self._ranks.first and self._arena is not None:
            if not self._channel.connected:
                self._warn_once("checkpoints go to disk: the agent is gone")
            elif not self._ranks.one_machine:
                self._warn_once("checkpoints go to disk: the processes run on several machines")
            elif any(state_files.is_self_writing(holder) for holder in stateful.values()):
                self._warn_once("checkpoints go to disk: a library writes some of their files itself")
            elif not self._arena.occupied:
                place = _Destination.ARENA
            elif not must:
                place = _Destination.NOWHERE
        return _Destination(self._ranks.agree(int(place))[0])

    # --- into shared memory -------------------------------------------------------------------------------------------

    def _stage(
        self, step: int, metrics: Mapping[str, float], stateful: Mapping[str, Any], overlap: bool, tag: str
    ) -> Path:
        """Write into the arena. Raises _UnwritableError, after emptying the arena, if the state does not fit."""
        from gpu_client.training.checkpoint import background_copy, state_files

        arena = self._arena
        assert arena is not None
        started = time.perf_counter()
        pairs: Pairs = []
        collected = state_files.CollectedStates()

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
            optimizers = background_copy.find_optimizers(stateful.values()) if overlap and not collected.sharded else []
            at_once, later = background_copy.split_pairs(pairs, optimizers) if optimizers else (pairs, [])
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
            self._copy = background_copy.BackgroundCopy(later, optimizers, finish_and_announce, lost)
        else:
            announce()
        return arena.directory

    # --- onto disk ----------------------------------------------------------------------------------------------------

    def _write_to_disk(self, step: int, metrics: Mapping[str, float], stateful: Mapping[str, Any], tag: str) -> Path:
        from gpu_client.training.checkpoint import state_files

        staged = checkpoint_directory.staging_path(self._output_dir, step)
        final = checkpoint_directory.checkpoint_path(self._output_dir, step)
        collected = state_files.CollectedStates()

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
            raise self.write_error(step, error) from error.__cause__
        self.announce(step, final, metrics)
        return final

    def _rotate(self) -> None:
        """Delete old session checkpoints, except undelivered, tagged and resumed checkpoints."""
        own = [
            (step, path)
            for step, path in checkpoint_directory.list_checkpoints(self._output_dir)
            if checkpoint_directory.is_session_checkpoint(path)
        ]
        # With an agent the store has the tagged checkpoints. Without an agent these directories are the only copies.
        tagged = _newest_per_tag([path for _, path in own]) if self._durable else set()
        newest_undelivered = any(not self._channel.is_delivered(step) for step, _ in own[-self._keep_last :])
        for step, path in own[: -self._keep_last]:
            if newest_undelivered or not self._channel.is_delivered(step) or path == self._keep or path in tagged:
                continue
            # A directory under deletion must not have a checkpoint's name, therefore the rename comes first.
            doomed = path.with_name(f".{path.name}.old")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    # --- both ---------------------------------------------------------------------------------------------------------

    def _gather_randoms(self, step: int) -> list[dict[str, Any]] | None:
        from gpu_client.training.checkpoint.random_state import capture_random

        captured: dict[str, Any] = {}
        self._phase(step, lambda: captured.update(capture_random()))
        return self._ranks.gather(captured)

    def _phase(self, step: int, action: Callable[[], object] | None) -> None:
        """Run one part of a checkpoint on all ranks; a failure on one rank raises on all ranks.

        Raises SessionError for a faulty state, _UnwritableError for a faulty destination.
        """
        from gpu_client.training.checkpoint.shared_memory import NoRoomError
        from gpu_client.training.checkpoint.state_files import WRITE_ERRORS

        failure: Exception | None = None
        try:
            if action is not None:
                action()
        except (SessionError, NoRoomError, *WRITE_ERRORS) as error:
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

    def write_error(self, step: int, failure: Exception) -> SessionError:
        """Convert `failure` to an error with a remedy."""
        if isinstance(failure, SessionError):
            return failure
        free_bytes = shutil.disk_usage(self._output_dir).free
        return CheckpointWriteError(
            f"the checkpoint of step {step} could not be written ({failure}); "
            f"{free_bytes} bytes are free in {self._output_dir}",
            "Check that the directory can be written; ask for more disk, or keep fewer checkpoints (keep_last=1)",
        )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _newest_per_tag(checkpoints: Sequence[Path]) -> set[Path]:
    """Return the newest checkpoint of each of the last `MAX_TAGS` tags. `checkpoints`: oldest first."""
    newest: dict[str, Path] = {}
    for path in reversed(checkpoints):
        tag = checkpoint_directory.read_marker(path).tag
        if tag and len(newest) < MAX_TAGS:
            newest.setdefault(tag, path)
    return set(newest.values())
