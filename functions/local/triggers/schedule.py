"""Invocation of the scheduled functions at a fixed rate, as EventBridge Scheduler does."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from functions.domain.checkpoints.packs import SWEEPER_TIMEOUT_S
from functions.local.lambda_context import LambdaHandler, LocalContext
from functions.local.lifecycle import BackgroundLoop, StopSignal

logger = logging.getLogger(__name__)


def scheduled_event(now_s: float) -> dict[str, Any]:
    """Build the default event of a schedule."""
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


class Schedule(BackgroundLoop):
    """Thread that calls `handler` every `interval_s` seconds.

    The first call follows after one interval. A failed call is logged and does not stop the schedule. A call longer
    than the interval delays the next call; calls never overlap.
    """

    def __init__(
        self,
        handler: LambdaHandler,
        *,
        interval_s: float = 60.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        stopper: StopSignal | None = None,
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s must be positive, not {interval_s}")
        super().__init__("schedule", stopper)
        self._handler = handler
        self._interval_s = interval_s
        self._clock = clock
        self._monotonic = monotonic

    def run(self) -> None:
        """Invoke the handler until stopped."""
        due = self._monotonic() + self._interval_s
        while not self._stopper.wait(max(0.0, due - self._monotonic())):
            self.tick()
            due = max(due + self._interval_s, self._monotonic())

    def tick(self) -> None:
        """Invoke the handler once; log an exception instead of raising."""
        name = getattr(self._handler, "__name__", type(self._handler).__name__)
        try:
            self._handler(scheduled_event(self._clock()), LocalContext(name, timeout_s=SWEEPER_TIMEOUT_S))
        except Exception:  # the boundary at which Lambda reports a failed invocation
            logger.exception("the scheduled call of %s failed", name)
