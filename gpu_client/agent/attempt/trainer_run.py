"""The training from its start to its end: asked for checkpoints, told to leave, brought to an end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from baton.contract.work import WorkItem
from gpu_client.agent.app.shutdown import StopLevel, StopRequest
from gpu_client.agent.attempt.checkpoint_scheduler import Pace
from gpu_client.agent.control.channel_server import ChannelServer, StopReason
from gpu_client.agent.process.failures import ExitStatus
from gpu_client.agent.process.supervisor import TrainerProcess
from gpu_client.transport.net.cancellation import CancelEvent

logger = logging.getLogger("baton.job")

POLL_S = 0.1
WATCH_S = 0.05
LOST_GRACE_S = 5.0
"""A trainer whose lease is lost works for nothing: it gets only this long to end."""


class TrainerEnd(NamedTuple):
    """How it ended. `silent_s`: ended by us, for it had made no progress for so long; `timeout_s`: it ran too long."""

    status: ExitStatus
    silent_s: int | None = None
    timeout_s: int | None = None


class TrainerRun:
    """Watches over one trainer. `over` is set when the lease is lost; `leaving` says why to hand the job back, if so.

    `gather` takes checkpoints over that have become complete; it is told whether there is news of one. `base` is added
    to the trainer's steps to count them within the job.
    """

    def __init__(
        self,
        item: WorkItem,
        trainer: TrainerProcess,
        channel: ChannelServer,
        *,
        pace: Pace,
        stop: StopRequest,
        over: CancelEvent,
        canceled: Callable[[], bool],
        leaving: Callable[[], StopReason | None],
        gather: Callable[[bool], None],
        base: int = 0,
        timeout_s: int | None = None,
    ) -> None:
        self._base = base
        self._timeout_s = timeout_s
        self._item = item
        self._trainer = trainer
        self._channel = channel
        self._pace = pace
        self._stop = stop
        self._over = over
        self._canceled = canceled
        self._leaving = leaving
        self._gather = gather
        self.asked_to_leave = False
        """It was told so over the channel: its clean end need not be the end of the training."""
        self.last_checkpoint_skipped = ""
        """Why it was not asked for a last checkpoint, if it was not."""

    def run(self) -> TrainerEnd:
        """Until the trainer has ended, by itself or because we ended it."""
        started_at = time.monotonic()
        while True:
            self._channel.wait(POLL_S)
            status = self._trainer.poll()
            if status is not None:
                return TrainerEnd(status)
            self._look()
            if self._over.is_set():
                reason: StopReason = "cancel" if self._canceled() else "lease_lost"
                self._channel.request_stop(reason, checkpoint=False)
                return TrainerEnd(self._end(LOST_GRACE_S))
            leaving = self._leaving()
            if leaving:
                return TrainerEnd(self._ask_to_leave(leaving))
            if self._pace.is_due() and self._channel.request_checkpoint():
                self._pace.asked()
            if self._timeout_s is not None and time.monotonic() - started_at > self._timeout_s:
                return TrainerEnd(self._end(float(self._item.stop_grace_s)), timeout_s=self._timeout_s)
            limit_s = self._item.no_progress_timeout_s
            moved_at = max(self._channel.advanced_at() or started_at, started_at)
            if limit_s is not None and time.monotonic() - moved_at > limit_s:
                logger.warning("job %s: no progress for %d s", self._item.id, limit_s)
                return TrainerEnd(self._end(float(self._item.stop_grace_s)), limit_s)

    def _look(self) -> None:
        """Hear how far the training is, and take over what it has saved."""
        progress = self._channel.progress()
        if progress is not None:
            self._pace.progressed(progress.step + self._base)
        notices = self._channel.take_checkpoints()
        for notice in notices:
            self._pace.saved(notice.stall_s)
        self._gather(bool(notices))

    def _ask_to_leave(self, reason: StopReason) -> ExitStatus:
        """Ask for a last checkpoint if there is time for it, then for the end; a script without our session gets a
        SIGTERM at once."""
        grace_s = float(self._item.stop_grace_s)
        left_s = self._stop.left_s()
        if left_s is not None:
            self.last_checkpoint_skipped = self._pace.why_not_one_more(left_s)
            grace_s = min(grace_s, self._pace.time_for_trainer_s(left_s))
        if self.last_checkpoint_skipped:
            logger.warning("job %s: no last checkpoint: %s", self._item.id, self.last_checkpoint_skipped)
        deadline = time.monotonic() + grace_s
        if self._channel.request_stop(reason, checkpoint=not self.last_checkpoint_skipped):
            self.asked_to_leave = True
            # What the session does not answer within three quarters, SIGTERM may still bring about in the last one.
            while self._trainer.poll() is None and time.monotonic() < deadline - grace_s / 4 and not self._cut_short():
                self._channel.wait(POLL_S)
                self._look()
        return self._end(max(deadline - time.monotonic(), 0.0))

    def _cut_short(self) -> bool:
        return self._over.is_set() or self._stop.level is StopLevel.NOW

    def _end(self, grace_s: float) -> ExitStatus:
        """End the trainer; its grace is cut short by a second SIGTERM, and by the loss of the lease meanwhile."""
        held = not self._over.is_set()
        with _once(
            lambda: self._stop.level is StopLevel.NOW or (held and self._over.is_set()), lambda: self._trainer.stop(0)
        ):
            return self._trainer.stop(0 if self._stop.level is StopLevel.NOW else grace_s)


@contextmanager
def _once(holds: Callable[[], bool], act: Callable[[], object]) -> Iterator[None]:
    """While inside, `act` is called, once and in a thread of its own, as soon as the condition holds."""
    left = threading.Event()

    def watch() -> None:
        while not left.wait(WATCH_S):
            if holds():
                act()
                return

    thread = threading.Thread(target=watch, name="once", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
