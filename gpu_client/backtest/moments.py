"""Mean, standard deviation, slope and z-score of many windows at once, each between bounds.

The rules' own are the floats nearest to the exact values. Here sums are differences of running sums, so they are
exact only if all numbers are whole (or of few binary digits) and small, or if a window holds one value over and over.
Else each has a bound of its rounding errors: n additions of floats are off by at most n * 2 ** -53 of the sum of the
absolute values (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and everything else by a few of those.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from baton.contract.rules.series import Clock, Series
from baton.contract.rules.windows import Moments
from gpu_client.backtest.history import Flags, Floats, Whole
from gpu_client.backtest.spans import Span
from gpu_client.backtest.values import Num, bounded

_UNIT = 2.0**-53
_WHOLE = 2.0**52
"""Up to here all whole numbers are floats, with a bit to spare."""
_LARGE, _TINY = 1e120, 1e-290
"""Squares of larger numbers, and of smaller ones, may leave the range of floats."""


class Sums:
    """Running sums of a stretch of points, each with a 0 in front."""

    def __init__(self, values: Floats, longest: int) -> None:
        """`longest`: the most points of a window."""
        self.values = values
        finite = np.isfinite(values)
        clean = values
        self.spoiled: tuple[Floats, Floats, Floats] | None = None
        """NaN, infinities, those below zero; None if there are none."""
        if not finite.all():
            clean = np.where(finite, values, 0.0)
            nans, highs, lows = np.isnan(values), values == np.inf, values == -np.inf
            self.spoiled = _running(nans.astype(float)), _running(highs.astype(float)), _running(lows.astype(float))
        self.exact = _exactness(clean, len(values), min(longest, len(values)))
        """Whether sum, squares and weighted sum are exact, and what is made of them."""
        self.origin = 0.0
        """What was taken from each value before."""
        if not self.exact[0]:
            origin = float(np.mean(clean if self.spoiled is None else clean[finite])) if finite.any() else 0.0
            self.origin = origin if math.isfinite(origin) else 0.0
            clean = np.where(finite, clean - self.origin, 0.0) if self.spoiled is not None else clean - self.origin
        self._clean = clean
        self.plain = _running(clean)

    @cached_property
    def sizes(self) -> Floats:
        """Of absolute values."""
        return _running(np.abs(self._clean))

    @cached_property
    def squares(self) -> Floats:
        """Of squares."""
        return _running(self._clean * self._clean)

    @cached_property
    def weighted(self) -> Floats:
        """Of values times their places."""
        return _running(self._clean * np.arange(len(self._clean)))

    @cached_property
    def same(self) -> Floats | None:
        """So many points in a row, this one the last, are the same; None if no two are."""
        equal = self.values[1:] == self.values[:-1]
        if not equal.any():
            return None
        places = np.arange(len(self.values))
        broken = np.where(np.concatenate(([False], equal)), 0, places)
        since: Whole = np.maximum.accumulate(broken)
        return (places - since + 1).astype(np.float64)


def _running(values: Floats) -> Floats:
    found = np.empty(len(values) + 1)
    found[0] = 0.0
    np.cumsum(values, out=found[1:])
    return found


def _exactness(values: Floats, size: int, longest: int) -> tuple[bool, bool, bool]:
    """Whether all sums of these come out without rounding."""
    if not size:
        return True, True, True
    for scale in (1.0, 1024.0):
        few = values[:64] * scale
        if np.array_equal(few, np.rint(few)) and np.array_equal(values * scale, np.rint(values * scale)):
            most = float(np.max(np.abs(values))) * scale
            return (
                most * size < _WHOLE,
                most * most * size * longest < _WHOLE and (most * longest) ** 2 < _WHOLE,
                12 * most * size * size < _WHOLE and 12 * most * size * longest < _WHOLE,
            )
    return False, False, False


class Statistics:
    """Of the windows of one span."""

    def __init__(self, sums: Sums, span: Span, base: int) -> None:
        """`base`: number of the first point that the sums are of."""
        self._sums = sums
        self._span = span
        self._base = base
        self._size = np.maximum(span.size, 1)
        self._total = self._over(sums.plain)
        self._constant: Flags | None = None
        """Where all points are the same."""
        if len(sums.values) and not all(sums.exact) and sums.same is not None:
            constant = span.at_stop(sums.same, base, 1) >= self._size
            self._constant = constant if constant.any() else None
        # twice what the theorem says, for the rounding of the subtractions and of the bound itself
        self._unit = 2 * (len(sums.values) + 16) * _UNIT
        self._error: Floats | float = 0.0 if sums.exact[0] else 2 * self._unit * self._until(sums.sizes)
        self._spoiled: Flags | None = None
        """Where one is not finite."""
        if sums.spoiled is not None:
            nans, highs, lows = (self._over(one) for one in sums.spoiled)
            self._spoiled = nans + highs + lows > 0
            infinite = np.where(highs > 0, np.inf, -np.inf)
            self._spoiled_mean = np.where((nans > 0) | ((highs > 0) & (lows > 0)), np.nan, infinite)

    def _over(self, running: Floats) -> Floats:
        """The windows' sums."""
        return self._until(running) - self._span.at_start(running, self._base)

    def _until(self, running: Floats) -> Floats:
        """The sums from the first point of all to the windows' ends."""
        return self._span.at_stop(running, self._base)

    def _finished(self, low: Floats, high: Floats, *, mean: bool = False) -> Num:
        """Bounds with what is certain put in: windows of one value, and those with what is not finite."""
        exact = high is low
        certain: list[tuple[Flags, Floats | float]] = []
        if self._constant is not None:
            certain.append((self._constant, self._span.at_stop(self._sums.values, self._base, 1) if mean else 0.0))
        if self._spoiled is not None:
            certain.append((self._spoiled, self._spoiled_mean if mean else np.nan))
        unsure: Flags | None = None
        if not exact and self._sums.sizes[-1] > _LARGE:
            unsure = np.ones(len(low), bool)
        for there, value in certain:
            low = np.where(there, value, low)
            high = low if exact else np.where(there, value, high)
            unsure = None if unsure is None else unsure & ~there
        return Num(low, low) if exact else bounded(low, high, None, unsure)

    def mean(self) -> Num:
        """NaN with one, or with infinities of both signs."""
        middle = self._total / self._size
        if self._sums.exact[0]:
            return self._finished(middle, middle, mean=True)
        found = middle + self._sums.origin
        error = self._error / self._size + 8 * _UNIT * (np.abs(middle) + abs(self._sums.origin)) + _TINY
        return self._finished(found - error, found + error, mean=True)

    def _deviations(self) -> tuple[Floats, Floats | None]:
        """The sum of squares about the mean, times the number of points; and its error, None if there is none."""
        sums, size, total = self._sums, self._size, self._total
        squares = self._over(sums.squares)
        found = size * squares - total * total
        if sums.exact[0] and sums.exact[1]:
            return found, None
        error = 2 * self._unit * size * self._until(sums.squares)
        error = error + 2 * np.abs(total) * self._error + self._error * self._error
        return found, error + 8 * _UNIT * (size * squares + total * total) + _TINY

    def std(self) -> Num:
        """With n - 1, as of a sample."""
        found, error = self._deviations()
        by = self._size * np.maximum(self._size - 1, 1)
        if error is None:
            low = np.sqrt(np.maximum(found, 0.0) / by)
            return self._finished(low, low)
        low = np.sqrt(np.maximum(found - error, 0.0) / by) * (1 - 8 * _UNIT)
        high = np.sqrt(np.maximum(found + error, 0.0) / by) * (1 + 8 * _UNIT)
        return self._finished(low, high)

    def slope(self) -> Num:
        """Of the line of least squares, per point."""
        sums, size = self._sums, self._size
        weighted, start = self._over(sums.weighted), self._span.start - self._base
        by = size * np.maximum(size * size - 1.0, 1.0)
        if sums.exact[0] and sums.exact[2]:
            low = (12 * (weighted - start * self._total) - 6 * (size - 1) * self._total) / by
            return self._finished(low, low)
        found = 12 * (weighted - (start + (size - 1) / 2) * self._total)
        length = len(sums.values) + 1
        error = 12 * length * (4 * self._unit * self._until(sums.sizes) + np.asarray(self._error)) + _TINY
        return self._finished((found - error) / by, (found + error) / by)

    def zscore(self, newest: Floats) -> Num:
        """Of the point after the window."""
        mean, spread = self.mean(), self.std()
        exact = mean.exact and spread.exact
        near, far = newest - mean.high, newest - mean.low
        low = np.minimum(_scaled(near, spread.low), _scaled(near, spread.high))
        if exact:
            return Num(low, low)
        high = np.maximum(_scaled(far, spread.low), _scaled(far, spread.high))
        # a spread that may be zero, or a newest point that is not finite, leaves nothing certain
        sure = (mean.low == mean.high) & (spread.low == spread.high)
        nothing = np.isnan(spread.low) | np.isnan(mean.low) | np.isnan(newest)
        low, high = np.where(nothing, np.nan, low), np.where(nothing, np.nan, high)
        unsure = ~sure & ~nothing & ((spread.low <= 0) | ~np.isfinite(newest))
        for one in (mean.vague, spread.vague):
            unsure = unsure if one is None else unsure | one
        return bounded(low, high, None, unsure)


def _scaled(offset: Floats, spread: Floats) -> Floats:
    some = np.where(spread != 0, spread, 1.0)
    edge = np.where((offset == 0) | np.isnan(offset), offset, np.copysign(np.inf, offset))
    return np.where(spread != 0, offset / some, edge)


def exactly_of(function: str, window: Floats, newest: float | None) -> float:
    """As a rule has it, of one window. `newest`: the point after it, for a z-score."""
    series = Series()
    lag = int(newest is not None)
    moments = Moments(series, Clock(), max(len(window), 1), 0.0, lag)
    moments.sums.with_squares = moments.sums.weighs = True
    series.follow("moments", moments)
    for value in window.tolist():
        series.push(value, 0.0)
    if newest is not None:
        series.push(newest, 0.0)
    found: float = getattr(moments, function)()
    return found
