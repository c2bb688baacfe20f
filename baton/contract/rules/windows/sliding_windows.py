"""Sliding windows over the newest points of a series, or over a duration.

Adding and subtracting floats would accumulate rounding errors, and one huge value would leave its error behind.
`Moments` therefore uses the exact sums of `series.py`: every value is the float nearest to the exact result, whatever
passed through the window, on every machine.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Any

from baton.contract.rules.arithmetic import INF, NAN, divide_exactly, root_exactly
from baton.contract.rules.numbers import decode, encode
from baton.contract.rules.windows.series import ObservationClock, Series


class SlidingWindow:
    """Window of the points from number `start` on. The base class counts and keeps the points."""

    __slots__ = ("began", "clock", "lag", "limit", "seconds", "series", "stamp", "start")

    def __init__(self, series: Series, clock: ObservationClock, limit: int, seconds: float = 0.0, lag: int = 0) -> None:
        """Create a window of at most `limit` points that excludes the newest `lag` points."""
        self.series = series
        self.clock = clock
        self.limit = limit
        self.seconds = seconds
        self.lag = lag
        self.start = 0
        self.began: float | None = None
        """Time of the first point, for a window over a duration."""
        self.stamp = 0
        """Counter of changes."""
        series.keeps = True
        series.keeps_times = series.keeps_times or seconds > 0

    @property
    def wants_points(self) -> bool:
        """Return True if `push` must be called for each point."""
        return True

    def __len__(self) -> int:
        return max(0, self.series.total - self.lag - self.start)

    def push(self, value: float, now: float) -> None:
        """Take the newest point."""
        self.stamp += 1
        size = len(self)
        self._add(value, size - 1)
        if size > self.limit:
            self._drop()
        if self.seconds:
            self._begin(now)
            self.trim()

    def _begin(self, now: float) -> None:
        if self.began is None:
            self.began = now

    def trim(self) -> None:
        """Drop points that are too old."""
        edge = self.clock.now - self.seconds
        series = self.series
        end = series.total - self.lag
        while self.start < end and series.times[self.start - series.base] <= edge:
            self.stamp += 1
            self._drop()

    def is_known(self, least: int) -> bool:
        """Check whether the window is full: all its points, or its whole duration with at least `least` points."""
        size = self.series.total - self.lag - self.start
        if not self.seconds:
            return size >= self.limit
        return size >= least and self.began is not None and self.clock.now - self.began >= self.seconds

    def oldest(self) -> float:
        """Return the first point; there must be one."""
        return self.series.values[self.start - self.series.base]

    def _drop(self) -> None:
        value = self.series.values[self.start - self.series.base]
        self.start += 1
        self._remove(value)

    def _add(self, value: float, index: int) -> None:
        """Add a point as number `index` of the window, from 0."""

    def _remove(self, value: float) -> None:
        """Remove the oldest point; `start` has advanced already."""

    def _clear(self) -> None:
        """Reset to the state without points."""

    def first_needed(self) -> int:
        """Return the number of the oldest point that is still needed."""
        return min(self.start, self.series.total)

    def state(self) -> Any:
        """Return the state that does not follow from the points."""
        return {"start": self.start, "began": encode(self.began)}

    def restore(self, state: Any) -> None:
        """Restore a state; the statistic is rebuilt from the points."""
        series = self.series
        self._clear()
        self.stamp += 1
        if state is None:
            self.start, self.began = series.total, None
            return
        start = state["start"]
        if type(start) is not int or not series.base <= start <= series.total:
            raise ValueError("a window lies outside of its points")
        if series.total - self.lag - start > self.limit:
            raise ValueError("a window has too many points")
        self.start, self.began = start, decode(state["began"])
        inside = series.values[start - series.base : max(0, series.total - self.lag - series.base)]
        for index, value in enumerate(inside):
            self._add(value, index)


class Moments(SlidingWindow):
    """Mean, standard deviation and slope from the shared sums of a series."""

    __slots__ = ("sums",)

    def __init__(self, series: Series, clock: ObservationClock, limit: int, seconds: float = 0.0, lag: int = 0) -> None:
        """Create a window; see `SlidingWindow`."""
        super().__init__(series, clock, limit, seconds, lag)
        self.sums = series.summed()

    @property
    def wants_points(self) -> bool:
        """Return True if `push` must be called: a window over points computes its start on demand."""
        return self.seconds > 0

    def push(self, value: float, now: float) -> None:
        """Take the newest point of a window over a duration."""
        self.stamp += 1
        self._begin(now)
        self.trim()

    def trim(self) -> None:
        """Drop points that exceed the limit or are too old."""
        earliest = self.series.total - self.lag - self.limit
        if self.start < earliest:
            self.stamp += 1
            self.start = earliest
        if self.seconds:
            super().trim()

    def first_needed(self) -> int:
        """Return the number of the oldest point that is still needed."""
        self.trim()
        return super().first_needed()

    def _drop(self) -> None:
        self.start += 1

    def _odd(self) -> float | None:
        """Return the sum if a point is NaN or infinite; otherwise None."""
        nan, high, low = self.sums.oddities(self.start, self.lag)
        if nan or (high and low):
            return NAN
        return INF if high else -INF if low else None

    def _sum(self, sums: list[int], power: int = 1) -> int:
        return self.sums.between(sums, self.start, self.series.total - self.lag, power)

    def mean(self) -> float:
        """Compute the mean: NaN if a point is NaN, or if both infinities occur."""
        self.trim()
        odd = self._odd()
        return odd if odd is not None else divide_exactly(self._sum(self.sums.totals), len(self) << self.sums.scale)

    def std(self) -> float:
        """Compute the sample standard deviation (n - 1)."""
        self.trim()
        if self._odd() is not None:
            return NAN
        size, total = len(self), self._sum(self.sums.totals)
        numerator = size * self._sum(self.sums.squares, 2) - total * total
        return root_exactly(numerator, size * (size - 1) << 2 * self.sums.scale)

    def slope(self) -> float:
        """Compute the least-squares slope per point."""
        self.trim()
        if self._odd() is not None:
            return NAN
        size, total = len(self), self._sum(self.sums.totals)
        # The sum weighs values by their number in the training; shift it so that the first point has the number 0.
        weighted = self._sum(self.sums.weighted) - self.start * total
        return divide_exactly(12 * weighted - 6 * (size - 1) * total, size * (size * size - 1) << self.sums.scale)

    def zscore(self) -> float:
        """Compute the z-score of the newest point; infinite if it differs from a constant window."""
        newest = self.series.newest
        return count_deviations((NAN if newest is None else newest) - self.mean(), self.std())


def count_deviations(offset: float, spread: float) -> float:
    """Divide an offset by a standard deviation, which may be 0."""
    if spread:
        return offset / spread
    return offset if offset == 0 or math.isnan(offset) else math.copysign(INF, offset)


class Extreme(SlidingWindow):
    """Least or greatest point, from a queue of candidates that no later point outdoes."""

    __slots__ = ("nans", "queue", "sign")

    def __init__(
        self, series: Series, clock: ObservationClock, limit: int, seconds: float = 0.0, *, sign: float
    ) -> None:
        """Create a window; `sign` is 1 for the least and -1 for the greatest point."""
        super().__init__(series, clock, limit, seconds)
        self.sign = sign
        self._clear()

    def _clear(self) -> None:
        self.nans = 0
        self.queue: deque[tuple[int, float]] = deque()

    def push(self, value: float, now: float) -> None:
        """Take the newest point; inlined for speed."""
        self.stamp += 1
        last = self.series.total - 1
        queue = self.queue
        if value == value:  # noqa: PLR0124 - quicker than isnan
            signed = value * self.sign
            while queue and queue[-1][1] >= signed:
                queue.pop()
            queue.append((last, signed))
        else:
            self.nans += 1
        if last - self.start >= self.limit:
            if self.nans:
                self._drop()
            else:
                self.start += 1
                if queue[0][0] < self.start:
                    queue.popleft()
        if self.seconds:
            self._begin(now)
            self.trim()

    def _add(self, value: float, index: int) -> None:
        if math.isnan(value):
            self.nans += 1
            return
        signed = value * self.sign
        queue = self.queue
        while queue and queue[-1][1] >= signed:
            queue.pop()
        queue.append((self.start + index, signed))

    def _remove(self, value: float) -> None:
        if math.isnan(value):
            self.nans -= 1
        elif self.queue[0][0] < self.start:
            self.queue.popleft()

    def value(self) -> float:
        """Return the extreme; NaN if a point is NaN."""
        return NAN if self.nans else self.queue[0][1] * self.sign


class Median(SlidingWindow):
    """Median from a sorted list: an update takes O(log n) comparisons and moves at most 8 bytes for each point."""

    __slots__ = ("nans", "ordered")

    def __init__(self, series: Series, clock: ObservationClock, limit: int, seconds: float = 0.0) -> None:
        """Create a window; see `SlidingWindow`."""
        super().__init__(series, clock, limit, seconds)
        self._clear()

    def _clear(self) -> None:
        self.nans = 0
        self.ordered: list[float] = []

    def push(self, value: float, now: float) -> None:
        """Take the newest point; inlined for speed."""
        self.stamp += 1
        ordered, series = self.ordered, self.series
        if value == value:  # noqa: PLR0124 - quicker than isnan
            insort(ordered, value)
        else:
            self.nans += 1
        if series.total - self.start > self.limit:
            oldest = series.values[self.start - series.base]
            self.start += 1
            if oldest == oldest:  # noqa: PLR0124
                del ordered[bisect_left(ordered, oldest)]
            else:
                self.nans -= 1
        if self.seconds:
            self._begin(now)
            self.trim()

    def _add(self, value: float, index: int) -> None:
        if math.isnan(value):
            self.nans += 1
        else:
            insort(self.ordered, value)

    def _remove(self, value: float) -> None:
        if math.isnan(value):
            self.nans -= 1
        else:
            del self.ordered[bisect_left(self.ordered, value)]

    def value(self) -> float:
        """Return the median, the mean of the middle two for an even count; NaN if a point is NaN."""
        if self.nans:
            return NAN
        size = len(self.ordered)
        upper = self.ordered[size // 2]
        if size % 2:
            return upper
        lower = self.ordered[size // 2 - 1]
        middle = (lower + upper) / 2
        return middle if middle - middle == 0.0 else lower / 2 + upper / 2
