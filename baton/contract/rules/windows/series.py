"""A metric's history: its newest value, and as many points as the longest window needs.

All windows of a metric look at the same points, each from its own first one on. Points are counted through from the
beginning of the training; memory is bounded by the longest window.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from baton.contract.rules.arithmetic import NAN
from baton.contract.rules.numbers import decoded, encoded, packed, unpacked

SCALE_STEP = 8
"""The unit gets finer by so many bits at once: at most 135 times in a training's life."""
MAX_FACTOR_BITS = 1000
_NEVER = -1
_NOWHERE = 1 << 62
"""A number that no point has."""


class Sums:
    """Of values, their squares and their values weighed by their number; `totals[i]` is that before point base + i."""

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
        # in place: readers hold on to the lists
        self.totals[:] = self.squares[:] = self.weighted[:] = [0]
        self.scale = 0
        self.factor = self.unit = 1.0
        """2 ** scale and 2 ** -scale, where that is a float."""
        self.number = number
        """Of the next point."""
        self.eras = [(number, 0)]
        """From which sums on they are in which scale: older ones are shifted by who reads them."""
        self.plain_from = number
        """From that point on all are finite, and their sums in the present scale, of which `unit` is the unit."""
        # of each kind of those that are not finite the number of the newest, and of the one before it
        self.nan = self.nan_before = self.high = self.high_before = self.low = self.low_before = _NEVER

    def push(self, value: float, now: float) -> None:
        """Take the newest point; in one piece, for here rules spend much of their time."""
        scaled = value * self.factor
        # a power of two as a factor is exact; what is not finite is no whole number either
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
        """The value in units of 2 ** -scale, which gets finer where it has to; 0 for what is only remembered."""
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
        """Let the oldest points go."""
        del self.totals[:points]
        if self.with_squares:
            del self.squares[:points]
        if self.weighs:
            del self.weighted[:points]

    def rebuild(self, values: Iterable[float], base: int) -> None:
        """Anew from points, of which the first has the number `base`: exact, so the same as before."""
        self._clear(base)
        for value in values:
            self.push(value, 0.0)

    def between(self, sums: list[int], begin: int, end: int, power: int = 1) -> int:
        """What the points from number `begin` to before `end` add up to; `power`: 2 of squares."""
        return self._at(sums, end, power) - self._at(sums, begin, power)

    def _at(self, sums: list[int], number: int, power: int) -> int:
        era = bisect_right(self.eras, (number, MAX_FACTOR_BITS * 2)) - 1
        return sums[number - self.number - 1] << power * (self.scale - self.eras[era][1])

    def oddities(self, start: int, lag: int) -> tuple[bool, bool, bool]:
        """Whether there is NaN, inf, -inf among the points from `start` on, without the newest `lag` (0 or 1)."""
        newest = self.number - 1
        return (
            (self.nan_before if lag and self.nan == newest else self.nan) >= start,
            (self.high_before if lag and self.high == newest else self.high) >= start,
            (self.low_before if lag and self.low == newest else self.low) >= start,
        )


_SLACK = 128


class Clock:
    """The time of the newest observation, in seconds: it never goes back, and stands still between observations."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = -math.inf


class Follower(Protocol):
    """What is kept up to date with a series."""

    @property
    def wants_points(self) -> bool:
        """Whether it is to be told of each point as it comes; else it looks at the series when it is asked."""

    def push(self, value: float, now: float) -> None:
        """Take the newest point, which the series holds already."""

    def first_needed(self) -> int:
        """Number of the oldest point that it will still look at."""

    def state(self) -> Any:
        """As plain values."""

    def restore(self, state: Any) -> None:
        """Take that back, or begin with the next point if it is None; the series has its points already.

        Raises ValueError, TypeError or KeyError if it is damaged.
        """


class Series:
    """The points of one metric."""

    __slots__ = (
        "at", "base", "current", "followers", "keeps", "keeps_times", "newest", "previous", "problem", "pushes",
        "sums", "times", "total", "trim_at", "values",
    )  # fmt: skip

    def __init__(self) -> None:
        self.current: float | None = None
        """The value; None while it is not known."""
        self.problem = ""
        """Why the newest value could not be taken."""
        self.newest: float | None = None
        """The newest point, whether or not the value is still known."""
        self.previous: float | None = None
        """The point before that."""
        self.at: float | None = None
        """When the newest point came."""
        self.total = 0
        self.base = 0
        """Number of the oldest point that is kept."""
        self.values = array("d")
        self.times = array("d")
        self.keeps = False
        self.keeps_times = False
        self.trim_at = _SLACK
        """As soon as there are more points than that, old ones go."""
        self.sums: Sums | None = None
        self.followers: dict[str, Follower] = {}
        self.pushes: list[Callable[[float, float], None]] = []

    def follow(self, name: str, follower: Follower) -> None:
        """Keep it up to date from now on."""
        self.followers[name] = follower
        if follower.wants_points:
            self.pushes.append(follower.push)

    def summed(self) -> Sums:
        """Its running sums, kept from now on."""
        if self.sums is None:
            self.sums = Sums()
            self.pushes.append(self.sums.push)
        return self.sums

    def push(self, value: float, now: float) -> None:
        """Take a point; amortised O(1) besides what the followers take."""
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
        """So late that each point is moved a few times at most, and a quarter more is kept than is needed."""
        self.trim_at = self.total + len(self.values) // 4 + _SLACK

    def _droppable(self) -> int:
        needed = min((follower.first_needed() for follower in self.followers.values()), default=self.total)
        return max(0, needed - self.base)

    def state(self) -> dict[str, Any]:
        """As plain values."""
        skip = self._droppable()
        return {
            "current": encoded(self.current),
            "newest": encoded(self.newest),
            "previous": encoded(self.previous),
            "at": encoded(self.at),
            "total": self.total,
            "values": packed(self.values[skip:]),
            "times": packed(self.times[skip:]),
            "problem": self.problem,
        }

    def restore(self, state: Any) -> None:
        """Take that back. Raises ValueError, TypeError or KeyError if it is damaged."""
        values, times = unpacked(state["values"]), unpacked(state["times"])
        total = state["total"]
        if type(total) is not int or len(values) > total or len(times) not in (0, len(values)):
            raise ValueError("counts of points disagree")
        self.current, self.newest = decoded(state["current"]), decoded(state["newest"])
        self.previous, self.at = decoded(state["previous"]), decoded(state["at"])
        if total and (self.at is None or self.newest is None):
            raise ValueError("the newest point is missing")
        self.total, self.problem = total, str(state["problem"])
        self.values = array("d", values if self.keeps else ())
        # who looks at times begins anew if there were none: older points need some, whichever
        self.times = array("d", (times or [0.0] * len(values)) if self.keeps_times else ())
        self.base = total - len(self.values)
        if self.sums is not None:
            self.sums.rebuild(self.values, self.base)
        self._trim_later()
