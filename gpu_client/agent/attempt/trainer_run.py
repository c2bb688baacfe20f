"""Watch one trainer from its start to its end: ask for checkpoints, ask to leave, stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from baton.contract.worker.calls import WorkItem
from gpu_client.agent.app.shutdown import ShutdownLevel, ShutdownRequest
from gpu_client.agent.attempt.checkpoint_scheduler import CheckpointScheduler
from gpu_client.agent.control.channel_server import ChannelServer, StopReason
from gpu_client.agent.process.failures import ExitStatus
from gpu_client.agent.process.supervisor import TrainerProcess
from gpu_client.transport.net.cancellation import CancelEvent

logger = logging.getLogger("baton.job")

POLL_S = 0.1
WATCH_S = 0.05
LOST_GRACE_S = 5.0
"""Grace in seconds of a trainer after the loss of the lease, which makes the trainer's work worthless."""


class TrainerResult(NamedTuple):
    """End of a trainer.

    `silent_s`: seconds without progress after which the agent stopped the trainer. `timeout_s`: time limit at which the
    agent stopped the trainer. `is_refused`: the agent has stopped a trainer that must not go on.
    """

    status: ExitStatus
    silent_s: int | None = None
    timeout_s: int | None = None
    is_refused: bool = False


class TrainerRun:
    """Run of a trainer, from its start to its end.

    `lease_lost` is set when the lease is lost; `stop_reason` returns the reason to release the job. `collect` stages
    complete checkpoints; its argument is True after a checkpoint notice. `stalled_s` returns the duration of a stall
    that ends the run; 0.0 without one. `is_refused` returns True if the trainer must not go on. `base` is added to the
    trainer's steps to count them within the job.
    """

    def __init__(
        self,
        item: WorkItem,
        trainer: TrainerProcess,
        channel: ChannelServer,
        *,
        scheduler: CheckpointScheduler,
        stop: ShutdownRequest,
        lease_lost: CancelEvent,
        canceled: Callable[[], bool],
        stop_reason: Callable[[], StopReason | None],
        collect: Callable[[bool], None],
        is_refused: Callable[[], bool] = lambda: False,
        stalled_s: Callable[[], float] = lambda: 0.0,
        base: int = 0,
        timeout_s: int | None = None,
    ) -> None:
        self._base = base
        self._timeout_s = timeout_s
        self._item = item
        self._trainer = trainer
        self._channel = channel
        self._scheduler = scheduler
        self._stop = stop
        self._lease_lost = lease_lost
        self._canceled = canceled
        self._stop_reason = stop_reason
        self._collect = collect
        self._is_refused = is_refused
        self._stalled_s = stalled_s
        self.asked_to_leave = False
        """True after a stop request on the channel; a clean exit then need not be the end of the training."""
        self.last_checkpoint_skipped = ""
        """Reason why the trainer was not asked for a last checkpoint; "" otherwise."""

    def run(self) -> TrainerResult:
        """Watch until the trainer has ended, by itself or stopped by the agent."""
        started_at = time.monotonic()
        while True:
            self._channel.wait(POLL_S)
            status = self._trainer.poll()
            if status is not None:
                return TrainerResult(status)
            self._poll_checkpoints()
            if self._is_refused():
                return TrainerResult(self._stop_trainer(0), is_refused=True)
            if self._lease_lost.is_set():
                reason: StopReason = "cancel" if self._canceled() else "lease_lost"
                self._channel.request_stop(reason, checkpoint=False)
                return TrainerResult(self._stop_trainer(LOST_GRACE_S))
            stop_reason = self._stop_reason()
            if stop_reason:
                return TrainerResult(self._ask_to_leave(stop_reason))
            if self._scheduler.is_due() and self._channel.request_checkpoint():
                self._scheduler.record_request()
            if self._timeout_s is not None and time.monotonic() - started_at > self._timeout_s:
                return TrainerResult(self._stop_trainer(float(self._item.stop_grace_s)), timeout_s=self._timeout_s)
            limit_s = self._item.no_progress_timeout_s
            moved_at = max(self._channel.advanced_at() or started_at, started_at)
            if limit_s is not None and time.monotonic() - moved_at > limit_s:
                logger.warning("job %s: no progress for %d s", self._item.id, limit_s)
                return TrainerResult(self._stop_trainer(float(self._item.stop_grace_s)), limit_s)
            if stalled_s := self._stalled_s():
                logger.warning("job %s: stalled for %.0f s", self._item.id, stalled_s)
                self._channel.request_stacks()
                return TrainerResult(self._ask_to_leave("release"), round(stalled_s))

    def _poll_checkpoints(self) -> None:
        """Record the progress of the training, and stage the checkpoints that it has saved."""
        progress = self._channel.progress()
        if progress is not None:
            self._scheduler.record_step(progress.step + self._base)
        notices = self._channel.take_checkpoints()
        for notice in notices:
            self._scheduler.record_saved(notice.stall_s)
        self._collect(bool(notices))

    def _ask_to_leave(self, reason: StopReason) -> ExitStatus:
        """Ask the session to end, with a last checkpoint if time permits; send SIGTERM to a foreign script."""
        grace_s = float(self._item.stop_grace_s)
        left_s = self._stop.remaining_s()
        if left_s is not None:
            self.last_checkpoint_skipped = self._scheduler.last_checkpoint_problem(left_s)
            grace_s = min(grace_s, self._scheduler.trainer_time_s(left_s))
        if self.last_checkpoint_skipped:
            logger.warning("job %s: no last checkpoint: %s", self._item.id, self.last_checkpoint_skipped)
        deadline = time.monotonic() + grace_s
        if self._channel.request_stop(reason, checkpoint=not self.last_checkpoint_skipped, grace_s=grace_s):
            self.asked_to_leave = True
            # After 75% of the grace the agent escalates to SIGTERM.
            while self._trainer.poll() is None and time.monotonic() < deadline - grace_s / 4 and not self._cut_short():
                self._channel.wait(POLL_S)
                self._poll_checkpoints()
        return self._stop_trainer(max(deadline - time.monotonic(), 0.0))

    def _cut_short(self) -> bool:
        return self._lease_lost.is_set() or self._stop.level is ShutdownLevel.NOW

    def _stop_trainer(self, grace_s: float) -> ExitStatus:
        """Stop the trainer. A second SIGTERM or the loss of the lease cuts the grace short."""
        had_lease = not self._lease_lost.is_set()
        with _run_when(
            lambda: self._stop.level is ShutdownLevel.NOW or (had_lease and self._lease_lost.is_set()),
            lambda: self._trainer.stop(0),
        ):
            return self._trainer.stop(0 if self._stop.level is ShutdownLevel.NOW else grace_s)


@contextmanager
def _run_when(predicate: Callable[[], bool], act: Callable[[], object]) -> Iterator[None]:
    """Call `act` once, in a thread, as soon as `predicate` returns True inside the context."""
    left = threading.Event()

    def watch() -> None:
        while not left.wait(WATCH_S):
            if predicate():
                act()
                return

    thread = threading.Thread(target=watch, name="once", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
