"""Store a recorded run in columns: one row for each report, one sparse column for each metric."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Whole: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

EVALUATION = "eval."
STEP, LOG, EVALUATE = "step", "log", "evaluate"
ROW_EVENTS = frozenset((STEP, LOG, EVALUATE))
"""Possible events of a row; see `History.happens`."""
MAX_COLUMNS = 1_000
_NO_ROWS: Whole = np.zeros(0, np.int64)
_MAX_STEP = 2**53
"""The largest step that a float represents exactly."""


class HistoryError(Exception):
    """Error of an unusable recording. `line`: number of the faulty line in its file, from 1."""

    def __init__(self, reason: str, remedy: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.line = line


@dataclass(frozen=True)
class Column:
    """Points of one metric. `rows`: rows with a value, ascending. `absent`: rows that report the metric as null."""

    rows: Whole
    values: Floats
    absent: Whole

    @property
    def total(self) -> int:
        """Return the number of points."""
        return len(self.rows)


@dataclass(frozen=True)
class History:
    """All rows of a run, at least one. `times`: seconds from any origin; None if no row has a time."""

    steps: Whole
    times: Floats | None
    columns: Mapping[str, Column]
    name: str
    notes: tuple[str, ...]
    """Sentences about omitted columns."""

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.steps)

    @property
    def points(self) -> int:
        """Return the number of points of all metrics."""
        return sum(column.total for column in self.columns.values())

    @cached_property
    def clock(self) -> Floats:
        """Return a monotonic time for each row: the latest time up to the row; zeros without times."""
        if self.times is None:
            return np.zeros(self.rows)
        return np.maximum.accumulate(self.times)

    @cached_property
    def evaluations(self) -> Flags:
        """Return the rows with a value of an `eval.` metric. A null, which JSON lines may contain, is no value."""
        found = np.zeros(self.rows, bool)
        for name, column in self.columns.items():
            if name.startswith(EVALUATION):
                found[column.rows] = True
        return found

    @cached_property
    def _only_evaluations(self) -> Flags:
        """Return the evaluations that repeat the step of the preceding row."""
        found = self.evaluations.copy()
        found[:1] = False
        found[1:] &= self.steps[1:] == self.steps[:-1]
        return found

    def happens(self, events: Set[str], low: int, high: int) -> Flags:
        """Return a flag for each of the rows `low` to `high`: True if one of the events takes place at the row.

        A row is a step and a log; a row with a value of an `eval.` metric is also an evaluation. A row with such a
        value that repeats the preceding step is an evaluation only.
        """
        found = np.zeros(high - low, bool)
        if events & {STEP, LOG}:
            found |= ~self._only_evaluations[low:high]
        if EVALUATE in events:
            found |= self.evaluations[low:high]
        return found

    def column(self, name: str) -> Column:
        """Return the column of a metric; an empty column if no row reports the metric."""
        return self.columns.get(name) or self._derived.get(name) or Column(_NO_ROWS, np.zeros(0), _NO_ROWS)

    @cached_property
    def _derived(self) -> dict[str, Column]:
        """Return the metrics without reports: `step`, and `wall` (seconds since the first row) if the run has times."""
        every = np.arange(self.rows)
        derived = {"step": Column(every, self.steps.astype(np.float64), _NO_ROWS)}
        if self.times is not None:
            derived["wall"] = Column(every, self.clock - self.clock[0], _NO_ROWS)
        return derived

    def has(self, name: str) -> bool:
        """Return True if the metric has a point."""
        return bool(self.column(name).total)

    def reports(self, names: Iterable[str], low: int, high: int) -> list[tuple[dict[str, float | None], int, float]]:
        """Return metrics, step and time of the rows `low` to `high`, in the evaluator's format."""
        found: list[dict[str, float | None]] = [{} for _ in range(high - low)]
        for name in names:
            if name == "step":
                # The evaluator derives this metric from the observed step.
                continue
            column = self.column(name)
            first, last = np.searchsorted(column.rows, (low, high))
            at = (column.rows[first:last] - low).tolist()
            for row, value in zip(at, column.values[first:last].tolist(), strict=True):
                found[row][name] = value
            first, last = np.searchsorted(column.absent, (low, high))
            for row in (column.absent[first:last] - low).tolist():
                found[row][name] = None
        return list(zip(found, self.steps[low:high].tolist(), self.clock[low:high].tolist(), strict=True))


class Builder:
    """Builder of a history, row by row, in 16 bytes of memory for each value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.notes: list[str] = []
        self._steps = array("q")
        self._times = array("d")
        self._timed: bool | None = None
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._absent: dict[str, array[int]] = {}

    def add(self, step: int, at: float | None, metrics: Mapping[str, float | None], line: int | None = None) -> None:
        """Append a row. Raises HistoryError if the row cannot follow the preceding rows."""
        if self._timed is None:
            self._timed = at is not None
        if at is None and self._timed:
            raise HistoryError("there is no time, as the rows before have it", "Give all rows a time, or none.", line)
        if at is not None and not math.isfinite(at):
            raise HistoryError("the time is no number of seconds", "Write seconds, such as 1790000000.5.", line)
        if not -_MAX_STEP <= step <= _MAX_STEP:
            raise HistoryError(f"the step {step} is out of all bounds", "Write whole numbers.", line)
        if self._steps and step < self._steps[-1]:
            raise HistoryError(
                f"the step goes back, from {self._steps[-1]} to {step}",
                "Leave out what a resumed training did again, and give each run a file of its own.",
                line,
            )
        row = len(self._steps)
        self._steps.append(step)
        if self._timed:
            self._times.append(at)  # type: ignore[arg-type]
        for name, value in metrics.items():
            if value is None:
                self._absent.setdefault(name, array("q")).append(row)
                continue
            rows = self._rows.get(name)
            if rows is None:
                if len(self._rows) >= MAX_COLUMNS:
                    raise HistoryError(f"there are more than {MAX_COLUMNS} metrics", "Leave some out.", line)
                rows = self._rows[name] = array("q")
                self._values[name] = array("d")
            rows.append(row)
            self._values[name].append(value)

    def history(self) -> History:
        """Return the history, and empty the builder. Raises HistoryError if no row was added."""
        if not self._steps:
            raise HistoryError("there is nothing in it", "Write one row for each report: step and metrics.")
        columns: dict[str, Column] = {}
        for name in [*self._rows, *(name for name in self._absent if name not in self._rows)]:
            # The loop releases each column before the next copy, so that memory never has two copies of all columns.
            columns[name] = Column(
                np.frombuffer(self._rows.pop(name, array("q")), np.int64),
                np.frombuffer(self._values.pop(name, array("d")), np.float64) + 0.0,
                np.frombuffer(self._absent.pop(name, array("q")), np.int64),
            )
        times = np.frombuffer(self._times, np.float64) if self._timed else None
        return History(np.frombuffer(self._steps, np.int64), times, columns, self.name, tuple(self.notes))
