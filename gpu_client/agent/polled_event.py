"""Adapt a polled condition to the interface of `threading.Event`."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.05


class PolledEvent:
    """A CancelEvent (transport/net/cancellation.py) that is set while `predicate` returns True."""

    def __init__(self, predicate: Callable[[], bool]) -> None:
        self._predicate = predicate

    def is_set(self) -> bool:
        """Return True while the condition holds."""
        return self._predicate()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until the condition holds or `timeout` seconds have passed; return True if the condition holds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._predicate():
            left_s = POLL_S if until is None else min(POLL_S, until - time.monotonic())
            if left_s <= 0:
                return False
            time.sleep(left_s)
        return True
