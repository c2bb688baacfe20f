"""Find finished checkpoints in the trainer's output directory, stage them, and hand them to the committer."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from baton.contract.base import MAX_STEP
from baton.contract.checkpoints.calls import CommitAnswer
from baton.contract.checkpoints.manifest import Manifest
from baton.contract.worker.calls import WorkItem
from gpu_client.agent.io.committer import Committer, StagedCheckpoint
from gpu_client.agent.io.step_ledger import StepLedger
from gpu_client.agent.workspace.arena import find_checkpoint, release_checkpoint
from gpu_client.agent.workspace.slots import JobDirectories
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.checkpoints.local.directory_files import BadDirectory, FileState, list_files
from gpu_client.checkpoints.local.foreign_checkpoint_watcher import CheckpointWatcher
from gpu_client.checkpoints.local.staging import (
    ReadyCheckpoint,
    StagingError,
    find_added_file,
    require_unchanged,
    stage,
)
from gpu_client.checkpoints.save.checkpoint_commit import CommitApi, Committed, commit_checkpoint, log_failures
from gpu_client.checkpoints.save.chunk_index import ChunkIndex
from gpu_client.transport.errors import FileChanged
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.transfer.manager import Transfer

logger = logging.getLogger("baton.job")

COPY_BELOW_BYTES_PER_S = 100e6
"""Upload speed below which a checkpoint in memory is copied into the local cache. The copy takes a tenth of the
upload's time, and deltas against the copy save most of the next upload. A faster network makes deltas, and therefore
the copy, useless."""

POLL_S = 0.5
HURRY_S = 0.1
"""Poll interval in seconds after the script has removed a checkpoint before its staging."""
MAX_STAGE_TRIES = 5
"""Tries to stage one directory."""


class TrainerFiles(Protocol):
    """View of the files of a trainer's processes."""

    def files_open_for_writing(self) -> set[Path]:
        """Return the files that a process holds open for writing."""
        ...


class CheckpointCollector:
    """Collector of one attempt's checkpoints. One thread calls `collect`; the committer calls `commit`."""

    def __init__(
        self,
        directories: JobDirectories,
        item: WorkItem,
        stable_s: float,
        store: LocalChunkCache,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_committed: Callable[[Committed], object] = lambda result: None,
        ledger: StepLedger | None = None,
        on_total: Callable[[int], object] = lambda total: None,
        log_line: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`on_total` receives the job's last step from the script's files; `log_line` writes to the job's log."""
        self._directories = directories
        self._item = item
        self._clock = clock
        self._polled_at = float("-inf")
        self._stage_tries: Counter[str] = Counter()
        self._trainer: TrainerFiles | None = None
        self._staged_version: tuple[int, int] | None = None
        self._store = store
        self._on_committed = on_committed
        self._known = ChunkIndex.from_manifests(store.manifests, store)
        self._speed: tuple[StagedCheckpoint, float | None] | None = None
        self._stable_s = stable_s
        self._grown: deque[ReadyCheckpoint] = deque()
        """Checkpoints that have grown after staging, found at the commit."""
        self._uncommitted: StagedCheckpoint | None = None
        """The newest staged checkpoint, until its commit."""
        self._missed = 0
        self._log_line = log_line
        self._on_total = on_total
        self._ledger = ledger or StepLedger([], directories)
        self.highest = 0
        """Largest staged step of the job."""
        self._watcher = self._new_watcher()

    def begin(self, resume_from: Path | None) -> None:
        """Start a step. New files in the output directory, except the files of `resume_from`, belong to the step."""
        self._watcher.close()
        self._missed += len(self._watcher.missed)
        self._watcher = self._new_watcher()
        self._trainer = None
        self._stage_tries.clear()
        self._grown.clear()
        self._uncommitted = None
        if resume_from is not None:
            self._watcher.mark_seen(resume_from)
            self._report_total(resume_from)

    @property
    def missed(self) -> int:
        """Return the number of checkpoints that the script removed before their staging."""
        return self._missed + len(self._watcher.missed)

    def collect(self, trainer: TrainerFiles, committer: Committer, *, now: bool = False) -> None:
        """Stage new complete checkpoints, at most twice a second unless `now` demands a poll."""
        every_s = HURRY_S if self.missed else POLL_S
        if not now and self._clock() - self._polled_at < every_s:
            return
        self._polled_at = self._clock()
        self._trainer = trainer
        self._offer_arena_checkpoint(committer)
        self._stage_all(self._watcher.poll, committer)

    def collect_rest(self, committer: Committer, *, clean_exit: bool) -> None:
        """Stage the last checkpoints after all processes of the trainer have ended."""
        self._offer_arena_checkpoint(committer)
        # No later poll exists, and the commit would refuse a grown checkpoint, therefore the collector stages the
        # checkpoint again.
        if (newest := self._uncommitted) is not None and newest.origin is not None and _has_grown(newest):
            self._watcher.report_again(newest.origin)
        self._stage_all(lambda: self._watcher.final_poll(clean_exit=clean_exit), committer, tries=1)

    def commit(self, client: CommitApi, transfer: Transfer, staged: StagedCheckpoint, cancel: CancelEvent) -> None:
        """Commit one staged checkpoint. Raises the errors of `commit_checkpoint`, and none after the commit."""
        if self._speed is None or self._speed[0] is not staged:
            # The codecs depend on the speed, and a repeated commit must choose the same codecs.
            self._speed = staged, transfer.speed.upload_bytes_per_s()
        upload_bytes_per_s = self._speed[1]
        try:
            result = commit_checkpoint(
                _GuardedCommit(client, staged),
                transfer,
                self._item,
                staged.path,
                staged.step,
                metrics=staged.metrics,
                tag=staged.tag,
                created_by="session" if staged.created_by == "session" else "script",
                known=self._known,
                upload_bytes_per_s=upload_bytes_per_s,
                spool=self._directories.root / "spool",
                cancel=cancel,
            )
        except (BadDirectory, FileChanged) as error:
            if staged.origin is not None and _has_grown(staged):
                self._grown.append(staged.origin)
            else:
                self._log_line(f"[baton] the checkpoint of step {staged.step} is not stored: {error}")
            raise
        if self._uncommitted is staged:
            self._uncommitted = None
        in_memory = staged.release is not None
        if not in_memory or upload_bytes_per_s is None or upload_bytes_per_s < COPY_BELOW_BYTES_PER_S:
            with log_failures("keeping it on this machine"):
                self._store.record_committed(result.manifest, staged.path, copy=in_memory)
        with log_failures("reporting it"):
            self._on_committed(result)
        logger.info(
            "job %s: checkpoint of step %d committed: %d bytes, of which %d were sent, in %.1f s",
            self._item.id,
            staged.step,
            result.raw_bytes,
            result.uploaded_bytes,
            result.seconds,
        )

    def _new_watcher(self) -> CheckpointWatcher:
        output, staging = self._directories.output, self._directories.staging
        return CheckpointWatcher(
            output, self._clock, self._files_open, self._stable_s, staging, log_to_job=self._log_line
        )

    def _files_open(self) -> set[Path]:
        return self._trainer.files_open_for_writing() if self._trainer else set()

    def _offer_arena_checkpoint(self, committer: Committer) -> None:
        """Offer the complete checkpoint in the arena. The session does not change the checkpoint until its release."""
        arena = self._directories.arena
        staged = find_checkpoint(arena) if arena else None
        if arena is None or staged is None or staged.version == self._staged_version:
            return
        self._staged_version = staged.version
        step = self._job_step(staged.step)
        committer.offer(
            StagedCheckpoint(
                step, staged.path, staged.metrics, "session", release=lambda: release_checkpoint(arena), tag=staged.tag
            )
        )

    def _job_step(self, step: int) -> int:
        """Convert a step of the training to a step of the job."""
        counted = self._ledger.to_job_step(step)
        self.highest = max(self.highest, counted)
        return counted

    def _stage_all(
        self, find: Callable[[], Iterable[ReadyCheckpoint]], committer: Committer, tries: int = MAX_STAGE_TRIES
    ) -> None:
        """Stage found checkpoints, so that the trainer's rotation cannot delete a checkpoint during its upload."""
        while self._grown:
            self._watcher.report_again(self._grown.popleft())
        missed = self.missed
        try:
            found = find()
        except OSError as error:
            logger.warning("job %s: the output directory cannot be read: %s", self._item.id, error)
            return
        if self.missed > missed:
            self._report_missed(self._watcher.missed[-1])
        for ready in found:
            try:
                taken, files = self._stage(ready)
            except (StagingError, OSError) as error:
                self._handle_stage_error(ready, error, tries)
                continue
            step = self._job_step(taken.step)
            self._report_total(taken.path)
            # The commit uses `origin` to check the original directory for growth.
            origin = replace(ready, links=None) if ready.created_by == "foreign" else None
            offered = StagedCheckpoint(
                step, taken.path, taken.metrics, taken.created_by, files, tag=taken.tag, origin=origin
            )
            self._uncommitted = offered
            committer.offer(offered)

    def _stage(self, ready: ReadyCheckpoint) -> tuple[ReadyCheckpoint, tuple[FileState, ...]]:
        """Stage one checkpoint and add the record of finished steps. Raises StageError, OSError."""
        taken = stage(ready, self._directories.staging)
        try:
            if not self._ledger.attach_record(taken.path):
                return taken, taken.files
            files = list_files(taken.path)
            if changed := set(taken.files) - set(files):
                raise StagingError(f"{min(file.path for file in changed)} was written to meanwhile")
        except (StagingError, OSError):
            if ready.links is None:
                shutil.rmtree(taken.path, ignore_errors=True)
            raise
        return taken, files

    def _handle_stage_error(self, ready: ReadyCheckpoint, error: Exception, tries: int) -> None:
        """Schedule another try, because the directory changed during the staging or the disk was full."""
        logger.warning("job %s: step %d cannot be staged: %s", self._item.id, ready.step, error)
        if not (ready.links or ready.path).exists():
            self._missed += 1
            self._report_missed(ready.step)
            return
        self._stage_tries[ready.path.name] += 1
        if self._stage_tries[ready.path.name] < tries:
            self._watcher.report_again(ready)
        else:
            self._watcher.discard(ready)
            self._log_line(f"[baton] {ready.path.name} is not stored, for it could not be taken over: {error}")

    def _report_total(self, checkpoint: Path) -> None:
        if (total := _read_total(checkpoint)) is not None:
            self._on_total(self._ledger.to_job_step(total))

    def _report_missed(self, step: int) -> None:
        """Write a line into the job's log at each power of two."""
        if self.missed & (self.missed - 1) == 0:
            self._log_line(
                f"[baton] checkpoint-{step} was removed by the script before it could be taken over ({self.missed} so "
                "far): keep one checkpoint more (save_total_limit, checkpoints_total_limit), or save less often"
            )


class _GuardedCommit:
    """Commit API that posts a manifest only if the staged files have not changed since staging."""

    def __init__(self, client: CommitApi, staged: StagedCheckpoint) -> None:
        self._client = client
        self._staged = staged

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        if self._staged.files is not None:
            require_unchanged(self._staged.path, self._staged.files)
        origin = self._staged.origin
        if origin is not None and (new := find_added_file(origin)):
            raise FileChanged(f"{new} was added to {origin.path} after it looked complete")
        return self._client.commit(lease_token, manifest)


def _has_grown(staged: StagedCheckpoint) -> bool:
    """Return True if the script has added or replaced files of its checkpoint directory since the staging.

    Returns False if the script wrote to a staged file: the script may be turning these files into its next checkpoint,
    and a second staging would mix two checkpoints.
    """
    try:
        require_unchanged(staged.path, staged.files or ())
    except FileChanged:
        return False
    return staged.origin is not None and bool(find_added_file(staged.origin))


def _read_total(checkpoint: Path) -> int | None:
    """Read `max_steps` of the Hugging Face Trainer's state; returns None without a state."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    total = state.get("max_steps") if isinstance(state, dict) else None
    return total if type(total) is int and 0 < total <= MAX_STEP else None
