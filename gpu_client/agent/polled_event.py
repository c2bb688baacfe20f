"""Conditions in the place of events, and watching them from aside."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.05


class PolledEvent:
    """A CancelEvent (see transport/cancel.py) that is set while a condition holds."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds

    def is_set(self) -> bool:
        """True while the condition holds."""
        return self._holds()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until it holds or until the timeout (seconds); true if it holds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._holds():
            left_s = POLL_S if until is None else min(POLL_S, until - time.monotonic())
            if left_s <= 0:
                return False
            time.sleep(left_s)
        return True
