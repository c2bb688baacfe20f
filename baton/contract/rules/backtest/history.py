"""Store a recorded run in columns: one row for each report, one sparse column for each metric."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

EVALUATION = "eval."
STEP, LOG, EVALUATE = "step", "log", "evaluate"
ROW_EVENTS = frozenset((STEP, LOG, EVALUATE))
"""Possible events of a row; see `History.happens`."""
MAX_COLUMNS = 1_000
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

    rows: Sequence[int]
    values: Sequence[float]
    absent: Sequence[int] = ()

    @property
    def total(self) -> int:
        """Return the number of points."""
        return len(self.rows)


@dataclass(frozen=True)
class History:
    """All rows of a run, at least one. `times`: seconds from any origin; None if no row has a time."""

    steps: Sequence[int]
    times: Sequence[float] | None
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
    def clock(self) -> Sequence[float]:
        """Return a monotonic time for each row: the latest time up to the row; zeros without times."""
        return array("d", accumulate([0.0] * self.rows if self.times is None else self.times, max))

    @cached_property
    def evaluations(self) -> bytearray:
        """Return 1 for the rows with a value of an `eval.` metric. A null of JSON lines is no value."""
        found = bytearray(self.rows)
        for name, column in self.columns.items():
            if name.startswith(EVALUATION):
                for row in column.rows:
                    found[row] = 1
        return found

    def _only_evaluates(self, row: int) -> bool:
        """Return True for an evaluation that repeats the step of the preceding row."""
        return row > 0 and bool(self.evaluations[row]) and self.steps[row] == self.steps[row - 1]

    def happens(self, events: Set[str], low: int, high: int) -> list[bool]:
        """Return a flag for each of the rows `low` to `high`: True if one of the events takes place at the row.

        A row is a step and a log; a row with a value of an `eval.` metric is also an evaluation. A row with such a
        value that repeats the preceding step is an evaluation only.
        """
        steps, evaluates = bool(events & {STEP, LOG}), EVALUATE in events
        return [
            (evaluates and bool(self.evaluations[row])) or (steps and not self._only_evaluates(row))
            for row in range(low, high)
        ]

    def column(self, name: str) -> Column:
        """Return the column of a metric; an empty column if no row reports the metric."""
        return self.columns.get(name) or self._derived.get(name) or Column((), ())

    @cached_property
    def _derived(self) -> dict[str, Column]:
        """Return the metrics without reports: `step`, and `wall` (seconds since the first row) if the run has times."""
        every = range(self.rows)
        derived = {"step": Column(every, array("d", self.steps))}
        if self.times is not None:
            derived["wall"] = Column(every, array("d", (at - self.clock[0] for at in self.clock)))
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
            for place in range(bisect_left(column.rows, low), bisect_left(column.rows, high)):
                found[column.rows[place] - low][name] = column.values[place]
            for place in range(bisect_left(column.absent, low), bisect_left(column.absent, high)):
                found[column.absent[place] - low][name] = None
        return list(zip(found, self.steps[low:high], self.clock[low:high], strict=True))


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
            self._values[name].append(value + 0.0)  # -0.0 becomes 0.0

    def history(self) -> History:
        """Return the history; the builder is of no use afterwards. Raises HistoryError if no row was added."""
        if not self._steps:
            raise HistoryError("there is nothing in it", "Write one row for each report: step and metrics.")
        columns = {
            name: Column(self._rows.get(name, ()), self._values.get(name, ()), self._absent.get(name, ()))
            for name in dict.fromkeys((*self._rows, *self._absent))
        }
        return History(self._steps, self._times if self._timed else None, columns, self.name, tuple(self.notes))
