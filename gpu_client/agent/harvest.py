"""From the trainer's output directory to the committer: finished checkpoints are found and taken over."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from contract.work import WorkItem
from gpu_client.agent.committer import Committer, Staged
from gpu_client.agent.supervisor import TrainerProcess
from gpu_client.agent.workspace import JobDirectories
from gpu_client.checkpoints.upload import CommitApi, commit_checkpoint
from gpu_client.checkpoints.watch import CheckpointWatcher, ReadyCheckpoint, StageError, stage
from gpu_client.transport.cancel import CancelEvent
from gpu_client.transport.transfer import Transfer

logger = logging.getLogger("baton.job")

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directories = directories
        self._item = item
        self._clock = clock
        self._looked_at = float("-inf")
        self._takes: Counter[str] = Counter()
        self._trainer: TrainerProcess | None = None
        self._watcher = CheckpointWatcher(directories.output, clock, self._files_open, stable_s)

    def ignore(self, restored: Path) -> None:
        """This checkpoint was put there by the agent."""
        self._watcher.mark_seen(restored)

    def gather(self, trainer: TrainerProcess, committer: Committer, *, now: bool = False) -> None:
        """Take over what has become complete, looking at most twice a second unless there is news (`now`)."""
        if not now and self._clock() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._clock()
        self._trainer = trainer
        self._take_all(self._watcher.poll, committer)

    def gather_rest(self, committer: Committer, *, clean_exit: bool) -> None:
        """The same once all processes of the trainer are gone."""
        self._take_all(lambda: self._watcher.final_poll(clean_exit=clean_exit), committer)

    def commit(self, client: CommitApi, transfer: Transfer, staged: Staged, cancel: CancelEvent) -> None:
        """Commit one checkpoint that was taken over. Raises what `commit_checkpoint` raises."""
        result = commit_checkpoint(
            client,
            transfer,
            self._item,
            staged.path,
            staged.step,
            metrics=staged.metrics,
            created_by="session" if staged.created_by == "session" else "script",
            cancel=cancel,
        )
        logger.info("job %s: checkpoint of step %d committed (%s)", self._item.id, staged.step, result)

    def _files_open(self) -> set[Path]:
        return self._trainer.files_open_for_writing() if self._trainer else set()

    def _take_all(self, find: Callable[[], Iterable[ReadyCheckpoint]], committer: Committer) -> None:
        """Out of the trainer's reach, so that its own rotation cannot pull a checkpoint from under an upload."""
        try:
            found = find()
        except OSError as error:
            logger.warning("job %s: the output directory cannot be looked at: %s", self._item.id, error)
            return
        for ready in found:
            try:
                path = stage(ready, self._directories.staging)
            except (StageError, OSError) as error:
                logger.warning("job %s: step %d cannot be taken over: %s", self._item.id, ready.step, error)
                # It changed at that moment, or the disk was full: what is a checkpoint a second later is not lost.
                self._takes[ready.path.name] += 1
                if self._takes[ready.path.name] < MAX_TAKES:
                    self._watcher.look_again(ready)
                continue
            committer.offer(Staged(ready.step, path, ready.metrics, ready.created_by))
