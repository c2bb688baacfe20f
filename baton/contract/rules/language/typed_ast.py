"""Typed expression: every node has a kind, every window a size, every constant its value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from baton.contract.rules.metrics import Goal, Kind


class WindowSize(NamedTuple):
    """Size of a window: a number of points, or a duration in seconds."""

    points: int = 0
    seconds: float = 0.0


class HistorySummary(NamedTuple):
    """Key of a statistic over a history. Equal keys share one statistic across all rules."""

    function: str
    metric: str
    window: WindowSize | None = None
    goal: Goal | None = None
    min_delta: float = 0.0
    partner: str = ""
    """Metric whose newest point sets the sampling time."""


class Constant(NamedTuple):
    """A constant: a bool if its kind is BOOL, otherwise a float."""

    value: float
    kind: Kind
    text: str


class Reading(NamedTuple):
    """The newest value of a metric."""

    metric: str
    kind: Kind
    text: str


class Aggregate(NamedTuple):
    """The value of a summary."""

    summary: HistorySummary
    kind: Kind
    text: str


class Grouped(NamedTuple):
    """A statistic over the jobs of a group, with one value of a metric for each job."""

    function: str
    metric: str
    step: int | None
    """Step of the compared values: each job's first report at or after it; None for the newest value."""
    goal: Goal | None
    kind: Kind
    text: str


class Operation(NamedTuple):
    """An operator or function of values: `+`, `and`, `not`, `clamp`, `missing`, ..."""

    name: str
    operands: tuple[Typed, ...]
    kind: Kind
    text: str


class Chain(NamedTuple):
    """`a < b <= c`."""

    operators: tuple[str, ...]
    operands: tuple[Typed, ...]
    kind: Kind
    text: str


Typed: TypeAlias = Constant | Reading | Aggregate | Grouped | Operation | Chain


def walk(typed: Typed) -> Iterator[Typed]:
    """Yield all nodes in pre-order, left to right."""
    pending = [typed]
    while pending:
        one = pending.pop()
        yield one
        if isinstance(one, (Operation, Chain)):
            pending += reversed(one.operands)


def find_metrics(typed: Typed) -> list[str]:
    """List the job's own metrics that an expression reads, each once."""
    found: dict[str, None] = {}
    for one in walk(typed):
        if isinstance(one, Reading):
            found[one.metric] = None
        elif isinstance(one, Aggregate):
            found[one.summary.metric] = None
            if one.summary.partner:
                found[one.summary.partner] = None
    return list(found)


def is_time_dependent(typed: Typed) -> bool:
    """Check whether the value can change without a new point: with time, or when a value goes missing."""
    return any(_moves(one) for one in walk(typed))


def _moves(one: Typed) -> bool:
    if isinstance(one, Grouped):
        return True
    if isinstance(one, Aggregate):
        window = one.summary.window
        return one.summary.function == "age" or (window is not None and window.seconds > 0)
    return isinstance(one, Operation) and one.name in ("missing", "coalesce")
