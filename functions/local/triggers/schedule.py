"""EventBridge Scheduler's part on one machine: the sweeper is invoked at a fixed rate."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from functions.domain.packs import SWEEPER_TIMEOUT_S
from functions.local.lambda_context import LambdaHandler, LocalContext
from functions.local.lifecycle import Background, Stopper

logger = logging.getLogger(__name__)


def scheduled_event(now_s: float) -> dict[str, Any]:
    """The event that a schedule sends when it names no input of its own."""
    return {
        "version": "0",
        "id": str(uuid.uuid4()),
        "detail-type": "Scheduled Event",
        "source": "aws.scheduler",
        "account": "000000000000",
        "time": datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "region": "us-east-1",
        "resources": ["arn:aws:scheduler:us-east-1:000000000000:schedule/default/baton-sweeper"],
        "detail": "{}",
    }


class Schedule(Background):
    """Calls `handler` every `interval_s` seconds in a thread.

    The first call comes after one interval. A call that fails is logged and the next one comes all the same; one that
    takes longer than the interval delays the next, which is never doubled up.
    """

    def __init__(
        self,
        handler: LambdaHandler,
        *,
        interval_s: float = 60.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        stopper: Stopper | None = None,
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s must be positive, not {interval_s}")
        super().__init__("schedule", stopper)
        self._handler = handler
        self._interval_s = interval_s
        self._clock = clock
        self._monotonic = monotonic

    def run(self) -> None:
        """The thread's loop; returns when stopped."""
        due = self._monotonic() + self._interval_s
        while not self._stopper.wait(max(0.0, due - self._monotonic())):
            self.tick()
            due = max(due + self._interval_s, self._monotonic())

    def tick(self) -> None:
        """One invocation. Nothing comes out of it: a schedule outlives every failure of what it calls."""
        name = getattr(self._handler, "__name__", type(self._handler).__name__)
        try:
            self._handler(scheduled_event(self._clock()), LocalContext(name, timeout_s=SWEEPER_TIMEOUT_S))
        except Exception:  # the boundary at which Lambda reports a failed invocation
            logger.exception("the scheduled call of %s failed", name)
