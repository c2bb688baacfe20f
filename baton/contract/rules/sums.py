"""Running sums of a series, exact: a window's sum is the difference of two of them, whichever window it is.

Values are added as whole numbers of any length, in units of 2 ** -scale, so nothing is ever rounded: what a window sums
up depends on its points alone, whatever came before them. All windows of a metric share its sums, and cost nothing
when a point comes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from baton.contract.rules.arithmetic import NAN

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
