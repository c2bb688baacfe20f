"""From the trainer's output directory to the committer: finished checkpoints are found and taken over."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from contract.checkpoints import CommitAnswer
from contract.manifest import Manifest
from contract.work import WorkItem
from gpu_client.agent.arena import find_staged, give_back
from gpu_client.agent.committer import Committer, Staged
from gpu_client.agent.ledger import StepLedger
from gpu_client.agent.supervisor import TrainerProcess
from gpu_client.agent.workspace import JobDirectories
from gpu_client.checkpoints.known import Known
from gpu_client.checkpoints.store import LocalStore
from gpu_client.checkpoints.upload import CommitApi, Committed, bookkeeping, commit_checkpoint
from gpu_client.checkpoints.watch import (
    CheckpointWatcher,
    ReadyCheckpoint,
    StageError,
    list_files,
    require_unchanged,
    stage,
)
from gpu_client.transport.cancel import CancelEvent
from gpu_client.transport.transfer import Transfer

logger = logging.getLogger("baton.job")

COPY_BELOW_BYTES_PER_S = 100e6
"""A checkpoint in memory is copied into the local store where uploads are slower: copying takes a tenth of their time
then, and deltas against it save most of the next one. Elsewhere nothing is encoded, and it would only cost."""

LOOK_EVERY_S = 0.5
MAX_TAKES = 5
"""How often one directory is tried that cannot be taken over."""


class Harvest:
    """The checkpoints of one attempt. One thread gathers; `commit` is the committer's."""

    def __init__(
        self,
        directories: JobDirectories,
        item: WorkItem,
        stable_s: float,
        store: LocalStore,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_committed: Callable[[Committed], object] = lambda result: None,
        ledger: StepLedger | None = None,
    ) -> None:
        self._directories = directories
        self._item = item
        self._clock = clock
        self._looked_at = float("-inf")
        self._takes: Counter[str] = Counter()
        self._trainer: TrainerProcess | None = None
        self._staged_version: tuple[int, int] | None = None
        self._store = store
        self._on_committed = on_committed
        self._known = Known.of(store.manifests, store)
        self._speed: tuple[Staged, float | None] | None = None
        self._stable_s = stable_s
        self._ledger = ledger or StepLedger([], directories)
        self.highest = 0
        """The largest step that was taken over, as the job counts."""
        self._watcher = CheckpointWatcher(directories.output, clock, self._files_open, stable_s)

    def begin(self, resume_from: Path | None) -> None:
        """A step begins: what is in the output directory now, but for what it resumes from, is its own."""
        self._watcher = CheckpointWatcher(self._directories.output, self._clock, self._files_open, self._stable_s)
        self._trainer = None
        if resume_from is not None:
            self.ignore(resume_from)

    def ignore(self, restored: Path) -> None:
        """This checkpoint was put there by the agent."""
        self._watcher.mark_seen(restored)

    def gather(self, trainer: TrainerProcess, committer: Committer, *, now: bool = False) -> None:
        """Take over what has become complete, looking at most twice a second unless there is news (`now`)."""
        if not now and self._clock() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._clock()
        self._trainer = trainer
        self._take_staged(committer)
        self._take_all(self._watcher.poll, committer)

    def gather_rest(self, committer: Committer, *, clean_exit: bool) -> None:
        """The same once all processes of the trainer are gone."""
        self._take_staged(committer)
        self._take_all(lambda: self._watcher.final_poll(clean_exit=clean_exit), committer)

    def commit(self, client: CommitApi, transfer: Transfer, staged: Staged, cancel: CancelEvent) -> None:
        """Commit one checkpoint that was taken over. Raises what `commit_checkpoint` raises, and nothing once it is
        committed."""
        if self._speed is None or self._speed[0] is not staged:
            # Of a commit that is repeated, the codecs must choose as they did.
            self._speed = staged, transfer.speed.upload_bytes_per_s()
        upload_bytes_per_s = self._speed[1]
        result = commit_checkpoint(
            _Unchanged(client, staged),
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
        in_memory = staged.give_back is not None
        if not in_memory or upload_bytes_per_s is None or upload_bytes_per_s < COPY_BELOW_BYTES_PER_S:
            with bookkeeping("keeping it on this machine"):
                self._store.committed(result.manifest, staged.path, copy=in_memory)
        with bookkeeping("reporting it"):
            self._on_committed(result)
        logger.info(
            "job %s: checkpoint of step %d committed: %d bytes, of which %d were sent, in %.1f s",
            self._item.id,
            staged.step,
            result.raw_bytes,
            result.uploaded_bytes,
            result.seconds,
        )

    def _files_open(self) -> set[Path]:
        return self._trainer.files_open_for_writing() if self._trainer else set()

    def _take_staged(self, committer: Committer) -> None:
        """What lies complete in the arena is committed from where it is: it stays untouched until it is given back."""
        arena = self._directories.arena
        staged = find_staged(arena) if arena else None
        if arena is None or staged is None or staged.version == self._staged_version:
            return
        self._staged_version = staged.version
        step = self._counted(staged.step)
        committer.offer(
            Staged(step, staged.path, staged.metrics, "session", give_back=lambda: give_back(arena), tag=staged.tag)
        )

    def _counted(self, step: int) -> int:
        """The step's number within the whole job."""
        counted = step + self._ledger.base
        self.highest = max(self.highest, counted)
        return counted

    def _take_all(self, find: Callable[[], Iterable[ReadyCheckpoint]], committer: Committer) -> None:
        """Out of the trainer's reach, so that its own rotation cannot pull a checkpoint from under an upload."""
        try:
            found = find()
        except OSError as error:
            logger.warning("job %s: the output directory cannot be looked at: %s", self._item.id, error)
            return
        for ready in found:
            try:
                taken = stage(ready, self._directories.staging)
                files = list_files(taken.path) if self._ledger.attach(taken.path) else taken.files
            except (StageError, OSError) as error:
                logger.warning("job %s: step %d cannot be taken over: %s", self._item.id, ready.step, error)
                # It changed at that moment, or the disk was full: what is a checkpoint a second later is not lost.
                self._takes[ready.path.name] += 1
                if self._takes[ready.path.name] < MAX_TAKES:
                    self._watcher.look_again(ready)
                continue
            step = self._counted(taken.step)
            committer.offer(Staged(step, taken.path, taken.metrics, taken.created_by, files, tag=taken.tag))


class _Unchanged:
    """Posts a manifest only while the files of the staged checkpoint are as they were when it was taken over."""

    def __init__(self, client: CommitApi, staged: Staged) -> None:
        self._client = client
        self._staged = staged

    def commit(self, lease_token: str, manifest: Manifest) -> CommitAnswer:
        if self._staged.files is not None:
            require_unchanged(self._staged.path, self._staged.files)
        return self._client.commit(lease_token, manifest)
