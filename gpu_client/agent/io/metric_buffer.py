"""What the training reported, waiting to be shipped with its output. Bounded: what comes too fast is thinned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.contract.output import MAX_POINTS, ReportedPoint

MAX_POINTS_BYTES = 128 * 1024
"""Of all that wait, as JSON: one chunk's, beside its lines. API Gateway bills each 512 KB of a request."""
_MAX_SPECIAL_SHARE = 0.75

Readings = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class _BufferedPoint:
    number: int
    size_bytes: int
    special: bool
    """Its metrics are not those of the point before it: an evaluation's, say, or the first that is NaN."""
    point: ReportedPoint


class MetricBuffer:
    """At most one chunk's. When it is full, every second point goes, then every fourth, and so on: evenly over the time
    since the last chunk. Never the newest; those with other metrics than the point before them only at last.

    `now`: seconds since 1970, by the control plane's clock.
    """

    def __init__(
        self, now: Callable[[], float], *, max_points: int = MAX_POINTS, max_bytes: int = MAX_POINTS_BYTES
    ) -> None:
        self._now = now
        self._max_points = max_points
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: list[_BufferedPoint] = []
        self._newest: _BufferedPoint | None = None
        """Passed over, unless nothing newer comes."""
        self._every = 1
        self._size_bytes = 0  # of those kept
        self._number = 0
        self._last: tuple[int, dict[str, float | str]] | None = None
        self._shape: frozenset[tuple[str, bool]] = frozenset()

    def append(self, step: int, metrics: Readings) -> None:
        """Add what was reported; nothing if that was the same as last time. Never blocks on the consumer."""
        found = dict(metrics)
        with self._lock:
            if self._last == (step, found):
                return
            self._last = step, found
            shape = frozenset((name, isinstance(value, str)) for name, value in found.items())
            special, self._shape = shape != self._shape, shape
            point = ReportedPoint(step=step, at=round(self._now(), 3), metrics=found)
            self._number += 1
            waiting = _BufferedPoint(self._number, len(point.model_dump_json()) + 1, special, point)
            if not special and self._number % self._every:
                self._newest = waiting
                return
            self._newest = None
            self._kept.append(waiting)
            self._size_bytes += waiting.size_bytes
            while len(self._kept) >= self._max_points or self._size_bytes >= self._max_bytes:
                self._thin()

    def take(self) -> list[ReportedPoint]:
        """All that waits, oldest first; it is the caller's now."""
        with self._lock:
            waiting = [*self._kept, *([self._newest] if self._newest is not None else [])]
            self._kept, self._newest, self._size_bytes, self._every = [], None, 0, 1
            return [one.point for one in waiting]

    def _thin(self) -> None:
        newest = self._kept[-1]
        self._every *= 2
        kept = [one for one in self._kept if one.special or one.number % self._every == 0]
        if len(kept) > _MAX_SPECIAL_SHARE * len(self._kept):
            kept = [one for one in self._kept if one.number % self._every == 0]
        self._kept = kept
        self._size_bytes = sum(one.size_bytes for one in kept)
        if not kept or kept[-1] is not newest:
            self._newest = newest
