"""Histories of metrics: points, and exact running sums that all windows of a metric share.

A series keeps as many points as its longest window needs; each window reads them from its own first point. Point
numbers count from the beginning of the training.

Sums add values as integers in units of 2 ** -scale, therefore never round: the sum of a window is the difference of
two running sums and depends on the window's points alone.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from baton.contract.rules.arithmetic import NAN
from baton.contract.rules.numbers import decode, encode, pack, unpack

SCALE_STEP = 8
"""Bits by which the unit gets finer at once: at most 135 times in the life of a training."""
MAX_FACTOR_BITS = 1000
_NEVER = -1
_NOWHERE = 1 << 62
"""A number that no point reaches."""


class Sums:
    """Running sums of values, squares, and values weighted by point number; `totals[i]` precedes point base + i."""

    __slots__ = (
        "eras", "factor", "high", "high_before", "low", "low_before", "nan", "nan_before", "number", "plain_from",
        "scale", "squares", "totals", "unit", "weighs", "weighted", "with_squares",
    )  # fmt: skip

    def __init__(self) -> None:
        self.with_squares = False
        self.weighs = False
        self.totals = [0]
        self.squares = [0]
        self.weighted = [0]
        self._clear(0)

    def _clear(self, number: int) -> None:
        # Clear in place, because closures keep references to the lists.
        self.totals[:] = self.squares[:] = self.weighted[:] = [0]
        self.scale = 0
        self.factor = self.unit = 1.0
        """2 ** scale and 2 ** -scale, if these are floats."""
        self.number = number
        """Number of the next point."""
        self.eras = [(number, 0)]
        """First point number and scale of each era; `_at` shifts sums of older eras."""
        self.plain_from = number
        """First point number from which all points are finite and all sums have the present scale."""
        # Number of the newest point of each kind that is not finite, and of the one before it.
        self.nan = self.nan_before = self.high = self.high_before = self.low = self.low_before = _NEVER

    def push(self, value: float, now: float) -> None:
        """Take the newest point. The body is one piece, because this method dominates the cost of a step."""
        scaled = value * self.factor
        # Scaling by a power of two is exact. NaN and infinity are no integers either, therefore `_whole` handles them.
        whole = int(scaled) if scaled.is_integer() else self._whole(value)
        totals = self.totals
        totals.append(totals[-1] + whole)
        if self.with_squares:
            squares = self.squares
            squares.append(squares[-1] + whole * whole)
        if self.weighs:
            weighted = self.weighted
            weighted.append(weighted[-1] + self.number * whole)
        self.number += 1

    def _whole(self, value: float) -> int:
        """Convert a value to units of 2 ** -scale and refine the scale if needed; a value that is not finite counts as
        0.
        """
        if value - value != 0.0:
            self.plain_from = max(self.plain_from, self.number + 1)
            if math.isnan(value):
                self.nan, self.nan_before = self.number, self.nan
            elif value > 0:
                self.high, self.high_before = self.number, self.high
            else:
                self.low, self.low_before = self.number, self.low
            return 0
        numerator, denominator = value.as_integer_ratio()
        shift = self.scale + 1 - denominator.bit_length()
        if shift < 0:
            finer = -(shift // SCALE_STEP) * SCALE_STEP
            self.totals[-1] <<= finer
            self.squares[-1] <<= 2 * finer
            self.weighted[-1] <<= finer
            self.scale += finer
            self.eras.append((self.number, self.scale))
            shift += finer
            if self.scale < MAX_FACTOR_BITS:
                self.plain_from = self.number
                self.factor, self.unit = 2.0**self.scale, 2.0**-self.scale
            else:
                self.plain_from, self.factor = _NOWHERE, NAN
        return numerator << shift

    def drop(self, points: int) -> None:
        """Drop the oldest points."""
        del self.totals[:points]
        if self.with_squares:
            del self.squares[:points]
        if self.weighs:
            del self.weighted[:points]

    def rebuild(self, values: Iterable[float], base: int) -> None:
        """Rebuild the sums from points, the first of which has the number `base`. Exact sums are equal after a
        rebuild.
        """
        self._clear(base)
        for value in values:
            self.push(value, 0.0)

    def between(self, sums: list[int], begin: int, end: int, power: int = 1) -> int:
        """Sum the points from number `begin` to before `end`; `power` is 2 for squares."""
        return self._at(sums, end, power) - self._at(sums, begin, power)

    def _at(self, sums: list[int], number: int, power: int) -> int:
        era = bisect_right(self.eras, (number, MAX_FACTOR_BITS * 2)) - 1
        return sums[number - self.number - 1] << power * (self.scale - self.eras[era][1])

    def oddities(self, start: int, lag: int) -> tuple[bool, bool, bool]:
        """Check for NaN, inf and -inf among the points from `start` on, without the newest `lag` (0 or 1)."""
        newest = self.number - 1
        return (
            (self.nan_before if lag and self.nan == newest else self.nan) >= start,
            (self.high_before if lag and self.high == newest else self.high) >= start,
            (self.low_before if lag and self.low == newest else self.low) >= start,
        )


_SLACK = 128


class ObservationClock:
    """Time of the newest observation in seconds; it never goes back, and is constant between observations."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = -math.inf


class Follower(Protocol):
    """Interface of a statistic that follows a series."""

    @property
    def wants_points(self) -> bool:
        """Return True if the series must push each point; otherwise the statistic reads the series on demand."""

    def push(self, value: float, now: float) -> None:
        """Take the newest point, which the series contains already."""

    def first_needed(self) -> int:
        """Return the number of the oldest point that is still needed."""

    def state(self) -> Any:
        """Return the state as plain values."""

    def restore(self, state: Any) -> None:
        """Restore a state, or start with the next point if it is None; the series has restored its points already.

        Raises ValueError, TypeError or KeyError if the state is damaged.
        """


class Series:
    """Points of one metric."""

    __slots__ = (
        "at", "base", "current", "followers", "keeps", "keeps_times", "newest", "previous", "problem", "pushes",
        "sums", "times", "total", "trim_at", "values",
    )  # fmt: skip

    def __init__(self) -> None:
        self.current: float | None = None
        """Current value; None while it is unknown."""
        self.problem = ""
        """Reason why the newest value is invalid."""
        self.newest: float | None = None
        """Newest point, even if the current value is unknown."""
        self.previous: float | None = None
        """Point before the newest."""
        self.at: float | None = None
        """Time of the newest point in seconds."""
        self.total = 0
        self.base = 0
        """Number of the oldest point kept."""
        self.values = array("d")
        self.times = array("d")
        self.keeps = False
        self.keeps_times = False
        self.trim_at = _SLACK
        """Point count above which old points are dropped."""
        self.sums: Sums | None = None
        self.followers: dict[str, Follower] = {}
        self.pushes: list[Callable[[float, float], None]] = []

    def follow(self, name: str, follower: Follower) -> None:
        """Register a follower."""
        self.followers[name] = follower
        if follower.wants_points:
            self.pushes.append(follower.push)

    def summed(self) -> Sums:
        """Return the running sums, kept from the first call on."""
        if self.sums is None:
            self.sums = Sums()
            self.pushes.append(self.sums.push)
        return self.sums

    def push(self, value: float, now: float) -> None:
        """Take a point, in O(1) amortised time besides the followers."""
        self.previous = self.newest
        self.newest = self.current = value
        self.at = now
        self.total = total = self.total + 1
        if self.keeps:
            self.values.append(value)
            if self.keeps_times:
                self.times.append(now)
            for push in self.pushes:
                push(value, now)
            if total > self.trim_at:
                self._trim()
        else:
            for push in self.pushes:
                push(value, now)

    def _trim(self) -> None:
        drop = self._droppable()
        del self.values[:drop]
        del self.times[:drop]
        if self.sums is not None:
            self.sums.drop(drop)
        self.base += drop
        self._trim_later()

    def _trim_later(self) -> None:
        """Schedule the next trim: each point moves a few times at most, at the price of a quarter more points."""
        self.trim_at = self.total + len(self.values) // 4 + _SLACK

    def _droppable(self) -> int:
        needed = min((follower.first_needed() for follower in self.followers.values()), default=self.total)
        return max(0, needed - self.base)

    def state(self) -> dict[str, Any]:
        """Return the state as plain values."""
        skip = self._droppable()
        return {
            "current": encode(self.current),
            "newest": encode(self.newest),
            "previous": encode(self.previous),
            "at": encode(self.at),
            "total": self.total,
            "values": pack(self.values[skip:]),
            "times": pack(self.times[skip:]),
            "problem": self.problem,
        }

    def restore(self, state: Any) -> None:
        """Restore a state. Raises ValueError, TypeError or KeyError if it is damaged."""
        values, times = unpack(state["values"]), unpack(state["times"])
        total = state["total"]
        if type(total) is not int or len(values) > total or len(times) not in (0, len(values)):
            raise ValueError("counts of points disagree")
        self.current, self.newest = decode(state["current"]), decode(state["newest"])
        self.previous, self.at = decode(state["previous"]), decode(state["at"])
        if total and (self.at is None or self.newest is None):
            raise ValueError("the newest point is missing")
        self.total, self.problem = total, str(state["problem"])
        self.values = array("d", values if self.keeps else ())
        # Times may be missing in the state; their reader then restarts, therefore any placeholder is correct.
        self.times = array("d", (times or [0.0] * len(values)) if self.keeps_times else ())
        self.base = total - len(self.values)
        if self.sums is not None:
            self.sums.rebuild(self.values, self.base)
        self._trim_later()
