"""Whether a loss that had been going down is suddenly up again, and stays there."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

POINTS = 20
"""Of one level: their median. Spikes of up to ten reports are not in it."""
NOW = 4
"""So many of the newest levels have to be high: what comes down within 80 reports was a spike."""
BEFORE = 8
"""They are compared with the level before as many."""
LEAST = 16
"""Levels before anything is said: 320 reports."""
KEPT = 500
"""Changes from which the usual one, their median, is worked out: 10,000 reports."""
LEAST_CHANGE = 1e-3
LEAST_PROGRESS = 0.1
"""Of the loss's magnitude; where it is constant, there would be neither."""


class LossTrend:
    """Fed with each new value. Constant time and memory, but for a look at 500 numbers once in 20 values."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._newest: deque[float] = deque(maxlen=BEFORE + 1)
        self._changes: deque[float] = deque(maxlen=KEPT)
        self._late: deque[float] = deque(maxlen=BEFORE)
        """Changes that are too new to be usual ones."""
        self._levels = 0
        self._best = math.inf
        self._worst = -math.inf
        """Of the levels up to `BEFORE` ago."""

    def push(self, value: float) -> dict[str, float] | None:
        """What is known anew: once in `POINTS` values, None in between. Values that are not finite are passed over.

        loss.level: the lowest of the newest levels. loss.before: the one to compare it with. loss.jump: the difference
        in usual changes. loss.lost: share of the way from the worst to the best level that is lost again.
        """
        if not math.isfinite(value):
            return None
        self._points.append(value)
        if len(self._points) < POINTS:
            return None
        level = median(self._points)
        self._points.clear()
        return self._leveled(level)

    def _leveled(self, level: float) -> dict[str, float] | None:
        newest, late = self._newest, self._late
        if newest:
            if len(late) == BEFORE:
                self._changes.append(late[0])
            late.append(abs(level - newest[-1]))
        newest.append(level)
        self._best = min(self._best, level)
        if len(newest) == BEFORE + 1:
            self._worst = max(self._worst, newest[0])
        self._levels += 1
        if self._levels < LEAST:
            return None
        now, before = min(list(newest)[-NOW:]), newest[0]
        magnitude = max(abs(self._best), abs(self._worst))
        usual = max(median(self._changes), LEAST_CHANGE * magnitude)
        progress = max(self._worst - self._best, LEAST_PROGRESS * magnitude)
        return {
            "loss.level": now,
            "loss.before": before,
            "loss.jump": (now - before) / usual if usual else 0.0,
            "loss.lost": (now - self._best) / progress if progress else 0.0,
        }
