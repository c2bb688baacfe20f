"""Provide the clock of the fleets, of which all times of fleets are. In a demo an hour of rent passes in a minute."""

from __future__ import annotations

import math
from typing import Protocol


class ClockBase(Protocol):
    """Part of FleetStore that remembers when the clock was first read."""

    def clock_base(self, now: int) -> int: ...


class FleetClock:
    """Clock that runs `speed` times as fast as the server's clock, from the first reading on; 1: the server's clock."""

    def __init__(self, store: ClockBase, speed: int = 1) -> None:
        self._store = store
        self._speed = speed
        self._base: int | None = None

    def at(self, server_time: float) -> int:
        """Return the fleets' time at a time of the server."""
        if self._speed == 1:
            return int(server_time)
        base = self._find_base(server_time)
        return base + int((server_time - base) * self._speed)

    def server_time(self, at: int) -> int:
        """Return the server's time at a time of the fleets, rounded up."""
        if self._speed == 1:
            return at
        base = self._find_base(at)
        return base + math.ceil((at - base) / self._speed)

    def server_seconds(self, seconds: float) -> int:
        """Return a duration of the fleets in seconds of the server; at least 1."""
        return max(1, round(seconds / self._speed))

    def _find_base(self, now: float) -> int:
        if self._base is None:
            self._base = self._store.clock_base(int(now))
        return self._base
