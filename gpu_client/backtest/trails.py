"""What is known of a metric without a window: averages, streaks, the best so far. They go on from block to block.

Each is worked out with the operations that rules use, in their order, so it is exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from baton.contract.rules.typed import Summary, Window
from gpu_client.backtest.blocks import Block, Points
from gpu_client.backtest.history import Flags, Floats, Whole
from gpu_client.backtest.values import Num, Truth, both, truth_of


class Trail(ABC):
    """Of one summary. `values` has to be asked for each block once, in their order, or after `go_back`."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self.window = summary.window or Window()
        self.carry: Any = None
        """What the points before the block have come to."""
        self._before: list[Any] = []

    def values(self, block: Block) -> Num | Truth:
        """At each row."""
        if block.number == len(self._before):
            self._before.append(self.carry)
        return self._values(block, block.points(self.summary.metric))

    def go_back(self, number: int) -> None:
        """To where that block began."""
        self.carry = self._before[number]

    @abstractmethod
    def _values(self, block: Block, points: Points) -> Num | Truth:
        """At each row of the block."""

    def _covered(self, block: Block, points: Points) -> Flags | None:
        """Where the history is as long as the window."""
        if self.window.points:
            least = self.window.points + (self.summary.function != "ema")
            return points.from_on(least)
        if not points.end:
            return np.zeros(block.rows, bool)
        began = block.history.clock[points.column.rows[0]]
        return both(points.from_on(1), block.now - began >= self.window.seconds)


def _own(points: Points) -> Floats:
    """The block's own points."""
    return points.column.values[points.first : points.end]


def _with_one_before(points: Points, own: Any, before: Any) -> Any:
    """As `Points.spread` takes them: where there is a point before the block, with what it came to."""
    return own if points.begin == points.first else np.concatenate(([before], own))


class _Averaged(NamedTuple):
    average: float | None = None
    taken_at: float = 0.0


class Average(Trail):
    """`ema`."""

    def _values(self, block: Block, points: Points) -> Num:
        before: _Averaged = self.carry or _Averaged()
        own = _own(points)
        finite = np.isfinite(own)
        if finite.all():
            averages, after = self._averages(block, points, own, finite, before)
            told = averages
        else:
            averages, after = self._averages(block, points, own[finite], finite, before)
            start = math.nan if before.average is None else before.average
            told = np.where(finite, np.concatenate(([start], averages))[np.cumsum(finite)], own)
        last = points.column.values[points.begin : points.begin + 1]
        earlier = float(last[0]) if len(last) and not math.isfinite(last[0]) else before.average
        self.carry = after
        low = points.spread(_with_one_before(points, told, math.nan if earlier is None else earlier))
        return Num(low, low, self._covered(block, points))

    def _averages(
        self, block: Block, points: Points, own: Floats, finite: Flags, before: _Averaged
    ) -> tuple[Floats, _Averaged]:
        if not len(own):
            return own, before
        first = own[0].item() if before.average is None else before.average
        rest = own if before.average is not None else own[1:]
        if self.window.points:
            weight = 2 / (self.window.points + 1)
            kept = 1 - weight
            found = list(accumulate((rest * weight).tolist(), lambda a, more: a * kept + more, initial=first))
            last_at = 0.0
        else:
            times = block.history.clock[points.column.rows[points.first : points.end]][finite]
            last_at = times[-1].item()
            since = np.diff(times, prepend=before.taken_at) if before.average is not None else np.diff(times)
            weights = [-math.expm1(-gone / self.window.seconds) for gone in np.maximum(since, 0.0).tolist()]
            found = [first]
            average = first
            for value, weight in zip(rest.tolist(), weights, strict=True):
                average = average * (1 - weight) + value * weight
                found.append(average)
        return np.array(found[len(found) - len(own) :]), _Averaged(found[-1], last_at)


class _Bested(NamedTuple):
    best: float | None = None
    at: int = 0
    """Number of that point."""


class Best(Trail):
    """`best` and `since_best`."""

    def _values(self, block: Block, points: Points) -> Num:
        before: _Bested = self.carry or _Bested()
        own = _own(points)
        sign = 1.0 if self.summary.goal == "min" else -1.0
        signed = np.where(np.isfinite(own), own * sign, np.inf)
        reached = np.minimum.accumulate(
            np.concatenate(([math.inf if before.best is None else before.best * sign], signed))
        )
        better = np.flatnonzero(signed < reached[:-1])
        if self.summary.min_delta:
            better = self._far_enough(own, better, before, sign)
        marks = np.full(len(own) + 1, -1, np.int64)
        marks[better + 1] = better
        newest = np.maximum.accumulate(marks)
        values = np.concatenate(([math.nan if before.best is None else before.best], own))[newest + 1]
        at = np.where(newest >= 0, newest + points.first, before.at)
        if len(better):
            self.carry = _Bested(own[better[-1]].item(), int(better[-1]) + points.first)
        skip = 1 if points.begin == points.first else 0
        known = points.spread(~np.isnan(values[skip:]))
        seen = points.from_on(1)
        if self.summary.function == "best":
            low = points.spread(values[skip:])
        else:
            low = points.counts() - 1.0 - points.spread(at[skip:])
        return Num(low, low, both(known, seen))

    def _far_enough(self, own: Floats, better: Whole, before: _Bested, sign: float) -> Whole:
        """Those that are better by enough: only a point that outdoes all before it can be."""
        best, found = before.best, []
        for index, value in zip(better.tolist(), own[better].tolist(), strict=True):
            if best is None or (best - value) * sign > self.summary.min_delta:
                best = value
                found.append(index)
        return np.array(found, np.int64)


class Streak(Trail):
    """`rising`, `falling` and `changed`."""

    def _values(self, block: Block, points: Points) -> Truth:
        broken_at = int(self.carry or 0)
        values = points.column.values
        own, first = _own(points), points.first
        previous = values[first - 1 : points.end - 1] if first else np.concatenate(([math.nan], own[:-1]))
        if self.summary.function == "rising":
            goes_on = own > previous
        elif self.summary.function == "falling":
            goes_on = own < previous
        else:
            goes_on = (own == previous) | (np.isnan(own) & np.isnan(previous))
        if first == 0 and len(goes_on):
            goes_on[0] = False
        marks = np.concatenate(([broken_at], np.where(goes_on, -1, np.arange(first, points.end))))
        breaks = np.maximum.accumulate(marks)
        self.carry = int(breaks[-1])
        broken = breaks[1 if points.begin == first else 0 :]
        length = np.arange(points.begin, points.end) - broken
        known = self._covered(block, points)
        if self.window.points:
            so = length < self.window.points if self.summary.function == "changed" else length >= self.window.points
            return truth_of(points.spread(so), known)
        times = block.history.clock[points.column.rows[broken]]
        if self.summary.function == "changed":
            seen = np.arange(points.begin + 1, points.end + 1)
            more = points.spread(seen > length + 1)
            return truth_of(more & (block.now - points.spread(times) < self.window.seconds), known)
        newest = block.history.clock[points.column.rows[points.begin : points.end]]
        return truth_of(points.spread((length > 0) & (newest - times >= self.window.seconds)), known)


def trail_of(summary: Summary) -> Trail | None:
    """What follows that summary; None if it is no trail."""
    kinds: dict[str, type[Trail]] = {
        "best": Best,
        "since_best": Best,
        "ema": Average,
        "rising": Streak,
        "falling": Streak,
        "changed": Streak,
    }
    kind = kinds.get(summary.function)
    return kind(summary) if kind is not None else None
