"""Closures for windows over points: each computes its value once for each new point.

The closures return the same floats as the methods of `sliding_windows.py`, at about half the cost of a step. For
finite points they divide integers first and scale by a power of two afterwards. Only an overflow changes the result,
therefore the exact method then takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

from baton.contract.rules.arithmetic import NAN
from baton.contract.rules.windows.sliding_windows import Extreme, Median, Moments, count_deviations

Value = float | bool | None
"""Value of an expression; None while it is not known."""
Reader = Callable[[], Value]


def _memoise(window: Moments, compute: Callable[[int], float], compute_exactly: Callable[[], float]) -> Reader:
    """Return a closure that computes once for each point. `compute` takes the number of the window's first point."""
    series, sums, span = window.series, window.sums, window.lag + window.limit
    computed_at, value = -1, 0.0

    def read() -> Value:
        nonlocal computed_at, value
        total = series.total
        if total != computed_at:
            start = total - span
            if start < window.start:
                return None
            try:
                value = compute(start) if start >= sums.plain_from else compute_exactly()
            except OverflowError:
                value = compute_exactly()
            computed_at = total
        return value

    return read


def read_mean(window: Moments) -> Reader:
    """Return a closure for the mean of a window over points."""
    sums, limit = window.sums, window.limit
    totals, end, begin = sums.totals, -1 - window.lag, -1 - window.lag - limit
    return _memoise(window, lambda _: (totals[end] - totals[begin]) / limit * sums.unit, window.mean)


def read_std(window: Moments) -> Reader:
    """Return a closure for the standard deviation of a window over points."""
    sums, limit = window.sums, window.limit
    totals, squares, begin, pairs = sums.totals, sums.squares, -1 - limit, limit * (limit - 1)

    def compute(_: int) -> float:
        total = totals[-1] - totals[begin]
        return sqrt((limit * (squares[-1] - squares[begin]) - total * total) / pairs) * sums.unit

    return _memoise(window, compute, window.std)


def read_slope(window: Moments) -> Reader:
    """Return a closure for the slope per point of a window over points."""
    sums, limit = window.sums, window.limit
    totals, weighted, begin = sums.totals, sums.weighted, -1 - limit
    middle, spread = 6 * (limit - 1), limit * (limit * limit - 1)

    def compute(start: int) -> float:
        total = totals[-1] - totals[begin]
        return (12 * (weighted[-1] - weighted[begin] - start * total) - middle * total) / spread * sums.unit

    return _memoise(window, compute, window.slope)


def read_zscore(window: Moments) -> Reader:
    """Return a closure for the z-score of the newest point against the window of points before it."""
    series, sums, limit = window.series, window.sums, window.limit
    totals, squares, begin, pairs = sums.totals, sums.squares, -2 - limit, limit * (limit - 1)

    def compute(_: int) -> float:
        total, unit, newest = totals[-2] - totals[begin], sums.unit, series.newest
        offset = (NAN if newest is None else newest) - total / limit * unit
        spread = sqrt((limit * (squares[-2] - squares[begin]) - total * total) / pairs) * unit
        return offset / spread if spread else count_deviations(offset, spread)

    return _memoise(window, compute, window.zscore)


def read_extreme(window: Extreme) -> Reader:
    """Return a closure for the least or greatest point of a window over points."""
    series, limit, sign = window.series, window.limit, window.sign

    def read() -> Value:
        if series.total - window.start < limit:
            return None
        return NAN if window.nans else window.queue[0][1] * sign

    return read


def read_median(window: Median) -> Reader:
    """Return a closure for the median of a window over points."""
    series, limit = window.series, window.limit
    middle, odd = limit // 2, limit % 2

    def read() -> Value:
        if series.total - window.start < limit:
            return None
        return window.ordered[middle] if odd and not window.nans else window.value()

    return read


MOMENT_READERS: Mapping[str, Callable[[Moments], Reader]] = {
    "mean": read_mean,
    "std": read_std,
    "slope": read_slope,
    "zscore": read_zscore,
}
