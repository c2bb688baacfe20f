"""What a training reported, in columns: a row for each report, a column for each metric with its points alone."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Whole: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

EVALUATION = "eval."
STEP, LOG, EVALUATE = "step", "log", "evaluate"
EVENTS = frozenset((STEP, LOG, EVALUATE))
"""Those that rows are: see `happens`."""
MAX_COLUMNS = 1_000
_MOST = 2**53
"""Steps that a float can say exactly."""
_AT_ONCE = 65_536


class HistoryError(Exception):
    """A history cannot be used. `line`: where in its file, from 1."""

    def __init__(self, reason: str, remedy: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.line = line


@dataclass(frozen=True)
class Column:
    """One metric. `rows`: at which it had a value, rising. `absent`: at which it was looked for and not there."""

    rows: Whole
    values: Floats
    absent: Whole

    @property
    def total(self) -> int:
        """Points."""
        return len(self.rows)


@dataclass(frozen=True)
class History:
    """All rows. `times`: in seconds from any beginning; None where nobody noted them."""

    steps: Whole
    times: Floats | None
    columns: Mapping[str, Column]
    name: str = ""
    notes: tuple[str, ...] = ()
    """What was left out of it, in words."""
    _derived: dict[str, Column] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.steps)

    @property
    def points(self) -> int:
        """Values of metrics."""
        return sum(column.total for column in self.columns.values())

    @cached_property
    def clock(self) -> Floats:
        """The time of each row; a clock that goes back stands still. Zero where there are no times."""
        if self.times is None:
            return np.zeros(self.rows)
        return np.maximum.accumulate(self.times) if self.rows else self.times

    @cached_property
    def rising(self) -> bool:
        """Whether no step is less than the one before."""
        return bool(np.all(self.steps[1:] >= self.steps[:-1]))

    @cached_property
    def evaluations(self) -> Flags:
        """The rows that tell of an evaluation: with a value, for in lines of JSON its metrics may be null elsewhere."""
        found = np.zeros(self.rows, bool)
        for name, column in self.columns.items():
            if name.startswith(EVALUATION):
                found[column.rows] = True
        return found

    @cached_property
    def _only_evaluations(self) -> Flags:
        """Those that repeat the step of the row before."""
        found = self.evaluations.copy()
        found[:1] = False
        found[1:] &= self.steps[1:] == self.steps[:-1]
        return found

    def happens(self, events: Set[str], low: int, high: int) -> Flags:
        """At which of the rows `low` to `high` one of these events is. A row is a step that was logged, an evaluation
        if it tells of one, and only that if the step was in the row before already."""
        found = np.zeros(high - low, bool)
        if events & {STEP, LOG}:
            found |= ~self._only_evaluations[low:high]
        if EVALUATE in events:
            found |= self.evaluations[low:high]
        return found

    def column(self, name: str) -> Column:
        """That of a metric: empty if it was never reported. The step is one, and so is the time since the beginning
        (`wall`) where nobody reported that."""
        found = self.columns.get(name) or self._derived.get(name)
        if found is None:
            nothing = np.zeros(0, np.int64)
            found = Column(nothing, np.zeros(0), nothing)
            if name == "step":
                found = Column(np.arange(self.rows), self.steps.astype(np.float64), nothing)
            elif name == "wall" and self.times is not None and self.rows:
                found = Column(np.arange(self.rows), self.clock - self.clock[0], nothing)
            self._derived[name] = found
        return found

    def has(self, name: str) -> bool:
        """Whether that metric was ever reported, or is known anyway."""
        return bool(self.column(name).total)

    def observations(self, names: Iterable[str]) -> Iterator[tuple[dict[str, float | None], int, float]]:
        """Metrics, step and time of each row, as an evaluator is told of them."""
        columns = [(name, self.column(name)) for name in dict.fromkeys(names) if name != "step"]
        for low in range(0, self.rows, _AT_ONCE):
            high = min(low + _AT_ONCE, self.rows)
            found: list[dict[str, float | None]] = [{} for _ in range(high - low)]
            for name, column in columns:
                first, last = np.searchsorted(column.rows, (low, high))
                at = (column.rows[first:last] - low).tolist()
                for row, value in zip(at, column.values[first:last].tolist(), strict=True):
                    found[row][name] = value
                first, last = np.searchsorted(column.absent, (low, high))
                for row in (column.absent[first:last] - low).tolist():
                    found[row][name] = None
            steps, times = self.steps[low:high].tolist(), self.clock[low:high].tolist()
            yield from zip(found, steps, times, strict=True)


class Builder:
    """Makes a history, row by row, in memory of 16 bytes a value."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.notes: list[str] = []
        self._steps = array("q")
        self._times = array("d")
        self._timed: bool | None = None
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._absent: dict[str, array[int]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, at: float | None, metrics: Mapping[str, float | None], line: int | None = None) -> None:
        """A row. Raises HistoryError if it cannot come after those before."""
        if self._timed is None:
            self._timed = at is not None
        if at is None and self._timed:
            raise HistoryError("there is no time, as the rows before have it", "Give all rows a time, or none.", line)
        if at is not None and not math.isfinite(at):
            raise HistoryError("the time is no number of seconds", "Write seconds, such as 1790000000.5.", line)
        if not -_MOST <= step <= _MOST:
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
        """What was added. Raises HistoryError if that is nothing."""
        if not self._steps:
            raise HistoryError("there is nothing in it", "Write one row for each report: step and metrics.")
        columns: dict[str, Column] = {}
        for name in [*self._rows, *(name for name in self._absent if name not in self._rows)]:
            # one after the other, so that no two copies of everything are in memory
            rows, values = self._rows.pop(name, array("q")), self._values.pop(name, array("d"))
            absent = self._absent.pop(name, array("q"))
            columns[name] = Column(
                np.frombuffer(rows, np.int64) if rows else np.zeros(0, np.int64),
                (np.frombuffer(values, np.float64) if values else np.zeros(0)) + 0.0,
                np.frombuffer(absent, np.int64) if absent else np.zeros(0, np.int64),
            )
        times = np.frombuffer(self._times, np.float64) if self._timed else None
        return History(np.frombuffer(self._steps, np.int64), times, columns, self.name, tuple(self.notes))
