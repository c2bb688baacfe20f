"""What rules read most: windows over so many points, each in one closure, worked out once for each point.

They say what the windows' own methods say (`windows.py`), of which they are the quick way for finite points: to divide
whole numbers first and to scale them by a power of two then gives the same float, but where one of them is too large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

from baton.contract.rules.arithmetic import NAN
from baton.contract.rules.windows.sliding_windows import Extreme, Median, Moments, deviations

Value = float | bool | None
"""None: not known."""
Reader = Callable[[], Value]


def mean(window: Moments) -> Reader:
    """Of a window over points."""
    series, sums, limit, lag = window.series, window.sums, window.limit, window.lag
    totals, end, begin = sums.totals, -1 - lag, -1 - lag - limit
    seen, value = -1, 0.0

    def read() -> Value:
        nonlocal seen, value
        total = series.total
        if total != seen:
            start = total - lag - limit
            if start < window.start:
                return None
            if start < sums.plain_from:
                value = window.mean()
            else:
                try:
                    value = (totals[end] - totals[begin]) / limit * sums.unit
                except OverflowError:
                    value = window.mean()
            seen = total
        return value

    return read


def std(window: Moments) -> Reader:
    """Of a window over points."""
    series, sums, limit = window.series, window.sums, window.limit
    totals, squares, begin, pairs = sums.totals, sums.squares, -1 - limit, limit * (limit - 1)
    seen, value = -1, 0.0

    def read() -> Value:
        nonlocal seen, value
        total = series.total
        if total != seen:
            start = total - limit
            if start < window.start:
                return None
            if start < sums.plain_from:
                value = window.std()
            else:
                added = totals[-1] - totals[begin]
                squared = limit * (squares[-1] - squares[begin]) - added * added
                try:
                    value = sqrt(squared / pairs) * sums.unit
                except OverflowError:
                    value = window.std()
            seen = total
        return value

    return read


def slope(window: Moments) -> Reader:
    """Of a window over points."""
    series, sums, limit = window.series, window.sums, window.limit
    totals, weighted, begin = sums.totals, sums.weighted, -1 - limit
    middle, spread = 6 * (limit - 1), limit * (limit * limit - 1)
    seen, value = -1, 0.0

    def read() -> Value:
        nonlocal seen, value
        total = series.total
        if total != seen:
            start = total - limit
            if start < window.start:
                return None
            if start < sums.plain_from:
                value = window.slope()
            else:
                added = totals[-1] - totals[begin]
                moment = 12 * (weighted[-1] - weighted[begin] - start * added) - middle * added
                try:
                    value = moment / spread * sums.unit
                except OverflowError:
                    value = window.slope()
            seen = total
        return value

    return read


def zscore(window: Moments) -> Reader:
    """Of a window over points, without the newest."""
    series, sums, limit = window.series, window.sums, window.limit
    totals, squares, begin, pairs = sums.totals, sums.squares, -2 - limit, limit * (limit - 1)
    seen, value = -1, 0.0

    def read() -> Value:
        nonlocal seen, value
        total = series.total
        if total != seen:
            start = total - 1 - limit
            if start < window.start:
                return None
            if start < sums.plain_from:
                value = window.zscore()
            else:
                added, unit, newest = totals[-2] - totals[begin], sums.unit, series.newest
                squared = limit * (squares[-2] - squares[begin]) - added * added
                try:
                    offset = (NAN if newest is None else newest) - added / limit * unit
                    spread = sqrt(squared / pairs) * unit
                    value = offset / spread if spread else deviations(offset, spread)
                except OverflowError:
                    value = window.zscore()
            seen = total
        return value

    return read


def extreme(window: Extreme) -> Reader:
    """Of a window over points."""
    series, limit, sign = window.series, window.limit, window.sign

    def read() -> Value:
        if series.total - window.start < limit:
            return None
        return NAN if window.nans else window.queue[0][1] * sign

    return read


def median(window: Median) -> Reader:
    """Of a window over points."""
    series, limit = window.series, window.limit
    middle, odd = limit // 2, limit % 2

    def read() -> Value:
        if series.total - window.start < limit:
            return None
        return window.ordered[middle] if odd and not window.nans else window.value()

    return read


OF_MOMENTS: Mapping[str, Callable[[Moments], Reader]] = {"mean": mean, "std": std, "slope": slope, "zscore": zscore}
