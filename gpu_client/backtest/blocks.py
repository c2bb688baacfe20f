"""So many rows of a history at a time: small enough for a processor's cache, however long the history is."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from gpu_client.backtest.history import Column, Flags, Floats, History, Whole
from gpu_client.backtest.values import Num

N = TypeVar("N", Floats, Flags, Whole)

BLOCK_ROWS = 8_192


class Points:
    """The points of one metric in a block, and the last one before it: numbers `begin` to `end` of the column."""

    __slots__ = ("begin", "column", "end", "first", "seen")

    def __init__(self, column: Column, low: int, high: int, whole: bool) -> None:
        """`whole`: the column has a point in every row."""
        self.column = column
        self.seen: Whole | None = None
        """Points so far, of each row; None where that is the row's number, counted from 1."""
        if whole:
            self.first = self.begin = low
            self.end = high
            return
        first, end = np.searchsorted(column.rows, (low, high)).tolist()
        self.first = first
        """Of the block itself."""
        self.begin, self.end = max(first - 1, 0), end
        came = np.zeros(high - low, np.int64)
        came[column.rows[first:end] - low] = 1
        self.seen = np.cumsum(came) + first

    def spread(self, values: N) -> N:
        """From points `begin` to `end` to rows; anything where there is no point yet."""
        if self.seen is None:
            return values
        if len(values) == 0:
            return np.zeros(len(self.seen), values.dtype)
        return values[np.maximum(self.seen - 1 - self.begin, 0)]

    def from_on(self, least: int) -> Flags | None:
        """The rows that have seen so many points; None if all have."""
        if self.seen is None:
            if self.begin + 1 >= least:
                return None
            return np.arange(self.begin + 1, self.end + 1) >= least
        known: Flags = self.seen >= least
        return None if known.all() else known

    def counts(self) -> Whole:
        """Points so far, of each row."""
        return np.arange(self.begin + 1, self.end + 1) if self.seen is None else self.seen


class Block:
    """Rows `low` to `high` of a history."""

    def __init__(self, history: History, number: int, size: int) -> None:
        self.history = history
        self.number = number
        self.low = number * size
        self.high = min(self.low + size, history.rows)
        self.now = history.clock[self.low : self.high]
        self._points: dict[str, Points] = {}
        self._readings: dict[str, Num] = {}
        self._present: dict[str, Flags | None] = {}

    @property
    def rows(self) -> int:
        """How many."""
        return self.high - self.low

    def points(self, name: str) -> Points:
        """Of a metric."""
        if name not in self._points:
            column = self.history.column(name)
            self._points[name] = Points(column, self.low, self.high, column.total == self.history.rows)
        return self._points[name]

    def reading(self, name: str) -> Num:
        """The metric's value at each row: that of its newest point, unless it was found missing since."""
        if name not in self._readings:
            points = self.points(name)
            value = points.spread(points.column.values[points.begin : points.end])
            known = points.from_on(1)
            absent = points.column.absent
            if len(absent):
                before = np.searchsorted(absent, np.arange(self.low, self.high), side="right") - 1
                missed = np.where(before >= 0, absent[np.maximum(before, 0)], -1)
                rows = points.column.rows
                counts = points.counts() - 1
                came = np.where(counts >= 0, rows[np.maximum(counts, 0)], -1) if len(rows) else -1
                there = np.asarray(came >= missed)
                known = there if known is None else known & there
            self._readings[name] = Num(value, value, known)
        return self._readings[name]

    def present(self, name: str) -> Flags | None:
        """The rows that told of it, if only that it is not there; None for all of them."""
        if name not in self._present:
            column = self.history.column(name)
            if column.total + len(column.absent) == self.history.rows:
                self._present[name] = None
            else:
                told = np.zeros(self.rows, bool)
                for rows in (column.rows, column.absent):
                    first, end = np.searchsorted(rows, (self.low, self.high))
                    told[rows[first:end] - self.low] = True
                self._present[name] = told
        return self._present[name]


def value_at(history: History, name: str, rows: Whole) -> tuple[Floats, Flags]:
    """The metric's value at any rows, and where it is known."""
    column = history.column(name)
    point = np.searchsorted(column.rows, rows, side="right") - 1
    missed = np.searchsorted(column.absent, rows, side="right") - 1
    known = point >= 0
    if not column.total:
        return np.zeros(len(rows)), known
    if len(column.absent):
        known &= column.rows[np.maximum(point, 0)] >= np.where(missed >= 0, column.absent[np.maximum(missed, 0)], -1)
    return column.values[np.maximum(point, 0)], known
