"""Mean, standard deviation, slope and z-score of many windows at once, each between bounds.

The rules' own are the floats nearest to the exact values. Here sums are differences of running sums, so they are
exact only if all numbers are whole (or of few binary digits) and small, or if a window holds one value over and over.
Else each has a bound of its rounding errors: n additions of floats are off by at most n * 2 ** -53 of the sum of the
absolute values (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and everything else by a few of those.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from contract.rules.series import Clock, Series
from contract.rules.windows import Moments
from gpu_client.backtest.history import Flags, Floats
from gpu_client.backtest.spans import Span
from gpu_client.backtest.values import Num, bounded

_UNIT = 2.0**-53
_WHOLE = 2.0**52
"""Up to here all whole numbers are floats, with a bit to spare."""
_LARGE, _TINY = 1e120, 1e-290
"""Squares of larger numbers, and of smaller ones, may leave the range of floats."""


class Sums(NamedTuple):
    """Running sums of a stretch of points, each with a 0 in front."""

    values: Floats
    plain: Floats
    squares: Floats
    weighted: Floats
    sizes: Floats
    """Of absolute values."""
    origin: float
    """What was taken from each value before."""
    exact: tuple[bool, bool, bool]
    """Whether sum, squares and weighted sum are exact, and what is made of them."""
    same: Floats
    """So many points in a row, this one the last, are the same."""
    nans: Floats | None = None
    highs: Floats | None = None
    lows: Floats | None = None


def _running(values: Floats) -> Floats:
    found = np.empty(len(values) + 1)
    found[0] = 0.0
    np.cumsum(values, out=found[1:])
    return found


def sums_of(values: Floats, longest: int) -> Sums:
    """`longest`: the most points of a window."""
    finite = np.isfinite(values)
    counts: list[Floats] = []
    clean = values
    if not finite.all():
        clean = np.where(finite, values, 0.0)
        counts = [_running(here.astype(float)) for here in (np.isnan(values), values == np.inf, values == -np.inf)]
    size = len(values)
    exact = _exactness(clean, size, min(longest, size))
    origin = 0.0
    if not exact[0]:
        with_one = clean[finite] if counts else clean
        origin = float(np.mean(with_one)) if len(with_one) else 0.0
        origin = origin if math.isfinite(origin) else 0.0
        clean = np.where(finite, clean - origin, 0.0)
    places = np.arange(size)
    broken = np.ones(size, bool)
    broken[1:] = values[1:] != values[:-1]
    same = places - np.maximum.accumulate(np.where(broken, places, 0)) + 1.0
    sizes = _running(np.abs(clean))
    squares, weighted = _running(clean * clean), _running(clean * places)
    return Sums(values, _running(clean), squares, weighted, sizes, origin, exact, same, *counts)


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
        self._start, self._stop = span.start - base, span.stop - base
        self._size = np.maximum(span.size, 1)
        filled = len(sums.values) > 0
        last = sums.values[np.maximum(self._stop - 1, 0)] if filled else np.zeros(len(self._stop))
        self._last = last
        self._constant: Flags = (
            sums.same[np.maximum(self._stop - 1, 0)] >= self._size if filled else np.zeros(len(self._stop), bool)
        )
        self._total = sums.plain[self._stop] - sums.plain[self._start]
        # twice what the theorem says, for the rounding of the subtractions and of the bound itself
        self._unit = 2 * (len(sums.values) + 16) * _UNIT
        self._error = 2 * self._unit * sums.sizes[self._stop] if not sums.exact[0] else 0.0
        self._spoiled = self._count(sums.nans) + self._count(sums.highs) + self._count(sums.lows)

    def _count(self, running: Floats | None) -> Floats | float:
        return 0.0 if running is None else running[self._stop] - running[self._start]

    def _finished(self, low: Floats, high: Floats, constant: Floats | float, spoiled: Floats | float) -> Num:
        """Bounds with what is certain put in: windows of one value, and those with what is not finite."""
        exact = high is low
        low = np.where(self._constant, constant, low)
        high = low if exact else np.where(self._constant, constant, high)
        if isinstance(self._spoiled, np.ndarray):
            there = self._spoiled > 0
            low = np.where(there, spoiled, low)
            high = low if exact else np.where(there, spoiled, high)
        if exact:
            return Num(low, low)
        unsure: Flags | None = None
        if self._sums.sizes[-1] > _LARGE:
            unsure = ~(self._constant | (np.asarray(self._spoiled) > 0)) & np.ones(len(low), bool)
        return bounded(low, high, None, unsure)

    def mean(self) -> Num:
        """NaN with one, or with infinities of both signs."""
        sums, size = self._sums, self._size
        middle = self._total / size
        nans, highs, lows = self._count(sums.nans), self._count(sums.highs), self._count(sums.lows)
        spoiled = np.where(
            (np.asarray(nans) > 0) | ((np.asarray(highs) > 0) & (np.asarray(lows) > 0)),
            np.nan,
            np.where(np.asarray(highs) > 0, np.inf, -np.inf),
        )
        if sums.exact[0]:
            return self._finished(middle, middle, self._last, spoiled)
        found = middle + sums.origin
        error = self._error / size + 8 * _UNIT * (np.abs(middle) + abs(sums.origin)) + _TINY
        return self._finished(found - error, found + error, self._last, spoiled)

    def _deviations(self) -> tuple[Floats, Floats | None]:
        """The sum of squares about the mean, times the number of points; and its error, None if there is none."""
        sums, size, total = self._sums, self._size, self._total
        squares = sums.squares[self._stop] - sums.squares[self._start]
        found = size * squares - total * total
        if sums.exact[0] and sums.exact[1]:
            return found, None
        error = 2 * self._unit * size * sums.squares[self._stop]
        error = error + 2 * np.abs(total) * self._error + self._error * self._error
        return found, error + 8 * _UNIT * (size * squares + total * total) + _TINY

    def std(self) -> Num:
        """With n - 1, as of a sample."""
        found, error = self._deviations()
        by = self._size * np.maximum(self._size - 1, 1)
        if error is None:
            low = np.sqrt(np.maximum(found, 0.0) / by)
            return self._finished(low, low, 0.0, np.nan)
        low = np.sqrt(np.maximum(found - error, 0.0) / by) * (1 - 8 * _UNIT)
        high = np.sqrt(np.maximum(found + error, 0.0) / by) * (1 + 8 * _UNIT)
        return self._finished(low, high, 0.0, np.nan)

    def slope(self) -> Num:
        """Of the line of least squares, per point."""
        sums, size = self._sums, self._size
        weighted = sums.weighted[self._stop] - sums.weighted[self._start]
        by = size * np.maximum(size * size - 1.0, 1.0)
        if sums.exact[0] and sums.exact[2]:
            low = (12 * (weighted - self._start * self._total) - 6 * (size - 1) * self._total) / by
            return self._finished(low, low, 0.0, np.nan)
        found = 12 * (weighted - (self._start + (size - 1) / 2) * self._total)
        length = len(sums.values) + 1
        error = 12 * length * (4 * self._unit * sums.sizes[self._stop] + np.asarray(self._error)) + _TINY
        return self._finished((found - error) / by, (found + error) / by, 0.0, np.nan)

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
    moments.with_squares = moments.weighs = True
    series.follow("moments", moments)
    for value in window.tolist():
        series.push(value, 0.0)
    if newest is not None:
        series.push(newest, 0.0)
    found: float = getattr(moments, function)()
    return found
