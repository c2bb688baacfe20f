"""Which points a window holds at each row, and what needs no sum of them: the ends, the least, the middle."""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

import numpy as np

from baton.contract.rules.limits import Limits
from baton.contract.rules.typed import Summary, Window
from gpu_client.backtest.blocks import Block, Points
from gpu_client.backtest.history import Flags, Floats, Whole

N = TypeVar("N", Floats, Flags, Whole)
LEAST = {"mean": 1, "min": 1, "max": 1, "median": 1, "std": 2, "slope": 2, "zscore": 2, "delta": 2}
"""So many points a window over a duration has to have."""


class Span:
    """Windows as numbers of points: from `start` (with it) to `stop` (without).

    One for each row (`by_row`), or else for each point from `begin` to `end`: then all but the first ones have the
    same size, and lie one after the other.
    """

    def __init__(
        self,
        points: Points,
        known: Flags | None,
        size: Whole | int,
        stops: tuple[int, int] | Whole,
        starts: Whole | None,
    ) -> None:
        """`stops`: the first one and the one after the last, or all of them; then `starts` are all, too."""
        self.points = points
        self.known = known
        self.size = size
        self.by_row = starts is not None
        self._stops = stops
        self._starts = starts
        self._first = stops[0] - int(size) if isinstance(stops, tuple) and isinstance(size, int) else -1
        """Start of the first window; negative if they do not all lie one after the other."""

    @cached_property
    def stop(self) -> Whole:
        """The number after the last point of each."""
        return np.arange(*self._stops) if isinstance(self._stops, tuple) else self._stops

    @cached_property
    def start(self) -> Whole:
        """The number of the first point of each; 0 if it is not full."""
        return np.maximum(self.stop - self.size, 0) if self._starts is None else self._starts

    def __len__(self) -> int:
        return self._stops[1] - self._stops[0] if isinstance(self._stops, tuple) else len(self._stops)

    @property
    def least_start(self) -> int:
        """The first point that is in one."""
        if self._first >= 0 or not len(self):
            return max(self._first, 0)
        return int(self.start.min())

    def at_start(self, array: N, base: int) -> N:
        """What stands there of what begins with number `base`."""
        if self._first >= base:
            return array[self._first - base : self._first - base + len(self)]
        return array[self.start - base]

    def at_stop(self, array: N, base: int, before: int = 0) -> N:
        """The same; `before`: so much earlier."""
        if self._first >= base and isinstance(self._stops, tuple):
            begin = self._stops[0] - before - base
            return array[begin : begin + len(self)]
        return array[np.maximum(self.stop - before - base, 0)]

    def spread(self, values: N) -> N:
        """To rows."""
        return values if self.by_row else self.points.spread(values)


def most_points(summary: Summary, limits: Limits) -> int:
    """What a window holds at most."""
    window = summary.window or Window()
    most = window.points or min(limits.duration_points, limits.window_points)
    return min(most, limits.median_points) if summary.function == "median" else most


def span_of(block: Block, summary: Summary, limits: Limits) -> Span:
    """The windows of a block. What is not known yet has any window with a point in it, if there is one."""
    window = summary.window or Window()
    points = block.points(summary.metric)
    lag = int(summary.function == "zscore")
    most = most_points(summary, limits)
    if window.points:
        stops = points.begin + 1 - lag, points.end + 1 - lag
        return Span(points, points.from_on(most + lag), most, stops, None)
    counts = points.counts()
    stop = np.maximum(counts - lag, 0)
    column = points.column
    oldest = max(points.begin + 1 - lag - most, 0)
    times = block.history.clock[column.rows[oldest : points.end]]
    start = np.searchsorted(times, block.now - window.seconds, side="right") + oldest
    start = np.minimum(np.maximum(start, stop - most), stop)
    size = stop - start
    if summary.function == "count":
        return Span(points, None, size, stop, start)
    known = size >= LEAST[summary.function]
    if points.end:
        known &= block.now - block.history.clock[column.rows[0]] >= window.seconds
    return Span(points, known, size, stop, start)


def extremes(values: Floats, span: Span, base: int, *, least: bool) -> Floats:
    """Of each window; `values` begin with point number `base`. NaN with one."""
    function = np.minimum if least else np.maximum
    if span.by_row:
        return _by_doubling(values, span.start - base, span.stop - base, function)
    size = int(span.size)
    if not len(span) or not len(values):
        return np.zeros(len(span))
    # block by block of the window's size: the rest of one, and the beginning of the next
    length = -(-len(values) // size) * size
    padded = np.full(length, np.inf if least else -np.inf)
    padded[: len(values)] = values
    chunks = padded.reshape(-1, size)
    heads = function.accumulate(chunks, axis=1).ravel()
    tails = function.accumulate(chunks[:, ::-1], axis=1)[:, ::-1].ravel()
    return function(span.at_start(tails, base), span.at_stop(heads, base, 1))


def _by_doubling(values: Floats, start: Whole, stop: Whole, function: np.ufunc) -> Floats:
    size = np.maximum(stop - start, 1)
    if not len(values):
        return np.zeros(len(start))
    level = np.frexp(size.astype(float))[1] - 1
    found = np.zeros(len(start))
    row = values
    for power in range(int(level.max()) + 1):
        here = level == power
        first = np.minimum(start[here], len(row) - 1)
        last = np.maximum(np.minimum(start[here] + size[here], len(values)) - (1 << power), 0)
        found[here] = function(row[first], row[np.minimum(last, len(row) - 1)])
        if len(row) > 1 << power:
            row = function(row[: len(row) - (1 << power)], row[1 << power :])
    return found


def medians(values: Floats, span: Span, base: int) -> Floats:
    """Of each window; NaN with one. By a tree over the bits of the values' ranks, level by level for all windows."""
    rows = len(span)
    if not len(values) or not rows:
        return np.zeros(rows)
    start, stop = span.start - base, np.maximum(span.stop - base, 0)
    size = np.maximum(stop - start, 1)
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values))
    upper = ordered[_quantiles(ranks, start, stop, size // 2)]
    even = size % 2 == 0
    found = upper
    if even.any():
        lower = ordered[_quantiles(ranks, start, stop, np.maximum(size // 2 - 1, 0))]
        middle = (lower + upper) / 2
        middle = np.where(np.isfinite(middle), middle, lower / 2 + upper / 2)
        found = np.where(even, middle, upper)
    missing = np.isnan(values)
    if missing.any():
        sums = np.concatenate(([0], np.cumsum(missing)))
        found = np.where(sums[stop] - sums[start] > 0, np.nan, found)
    return found


def _quantiles(ranks: Whole, start: Whole, stop: Whole, number: Whole) -> Whole:
    """The rank that is `number`-th (from 0) in each window."""
    low, high, left = start.copy(), stop.copy(), number.copy()
    found = np.zeros(len(low), np.int64)
    for bit in reversed(range(max(int(len(ranks) - 1).bit_length(), 1))):
        ones = (ranks >> bit & 1).astype(bool)
        zeros_before = np.concatenate(([0], np.cumsum(~ones)))
        zeros = int(zeros_before[-1])
        zeros_low, zeros_high = zeros_before[low], zeros_before[high]
        inside = zeros_high - zeros_low
        up = left >= inside
        found |= np.where(up, 1 << bit, 0)
        left = np.where(up, left - inside, left)
        low = np.where(up, zeros + low - zeros_low, zeros_low)
        high = np.where(up, zeros + high - zeros_high, zeros_high)
        ranks = np.concatenate((ranks[~ones], ranks[ones]))
    # windows that hold nothing ask for what is not there
    return np.minimum(found, len(ranks) - 1)
