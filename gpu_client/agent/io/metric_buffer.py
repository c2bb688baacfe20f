"""Buffer the training's reported values for the next log chunk. The bounded buffer thins fast reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.contract.worker.output import MAX_POINTS, ReportedPoint

MAX_POINTS_BYTES = 128 * 1024
"""Limit of the waiting points in JSON bytes: points and lines share a call, and API Gateway bills each 512 KB."""
_MAX_SPECIAL_SHARE = 0.75

Readings = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class _BufferedPoint:
    number: int
    size_bytes: int
    special: bool
    """True if the metric names differ from the last point's: an evaluation, the first NaN."""
    point: ReportedPoint


class MetricBuffer:
    """Buffer of the points for one chunk.

    A full buffer drops every second point, then keeps every fourth, and so on: evenly over the time since the last
    chunk. The buffer always keeps the newest point, and drops special points last.

    `now`: seconds since 1970, by the control plane's clock.
    """

    def __init__(
        self, now: Callable[[], float], *, max_points: int = MAX_POINTS, max_bytes: int = MAX_POINTS_BYTES
    ) -> None:
        self._now = now
        self._max_points = max_points
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._buffered: list[_BufferedPoint] = []
        self._newest: _BufferedPoint | None = None
        """The newest point, if the thinning would drop the point."""
        self._every = 1
        self._size_bytes = 0  # Bytes of the kept points.
        self._number = 0
        self._last: tuple[int, dict[str, float | str]] | None = None
        self._shape: frozenset[tuple[str, bool]] = frozenset()

    def append(self, step: int, metrics: Readings) -> None:
        """Add reported values; ignore a repetition of the last report. Never waits for the consumer."""
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
            self._buffered.append(waiting)
            self._size_bytes += waiting.size_bytes
            while len(self._buffered) >= self._max_points or self._size_bytes >= self._max_bytes:
                self._thin()

    def take(self) -> list[ReportedPoint]:
        """Remove and return all waiting points, oldest first."""
        with self._lock:
            waiting = [*self._buffered, *([self._newest] if self._newest is not None else [])]
            self._buffered, self._newest, self._size_bytes, self._every = [], None, 0, 1
            return [one.point for one in waiting]

    def _thin(self) -> None:
        newest = self._buffered[-1]
        self._every *= 2
        remaining = [one for one in self._buffered if one.special or one.number % self._every == 0]
        if len(remaining) > _MAX_SPECIAL_SHARE * len(self._buffered):
            remaining = [one for one in self._buffered if one.number % self._every == 0]
        self._buffered = remaining
        self._size_bytes = sum(one.size_bytes for one in remaining)
        if not remaining or remaining[-1] is not newest:
            self._newest = newest
