"""A clock for code that receives its clock and its sleep as arguments."""

from __future__ import annotations


class Clock:
    """Seconds that pass only by `advance` and `sleep`, or by setting `now`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        """Advance, and record the duration in `slept`."""
        self.slept.append(seconds)
        self.now += seconds
