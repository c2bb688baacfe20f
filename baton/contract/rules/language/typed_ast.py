"""An expression that was checked: every part has a kind, every window a size, every constant its value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from baton.contract.rules.metrics import Goal, Kind


class Window(NamedTuple):
    """The newest points of a metric: so many, or those of so many seconds."""

    points: int = 0
    seconds: float = 0.0


class Summary(NamedTuple):
    """What is kept up to date of a metric's history. Equal ones are kept once, however many rules ask for them."""

    function: str
    metric: str
    window: Window | None = None
    goal: Goal | None = None
    min_delta: float = 0.0
    partner: str = ""
    """The metric whose newest point says when."""


class Constant(NamedTuple):
    """A bool if its kind is that, else a float."""

    value: float
    kind: Kind
    text: str


class Reading(NamedTuple):
    """A metric's newest value."""

    metric: str
    kind: Kind
    text: str


class Aggregate(NamedTuple):
    """A summary's value."""

    summary: Summary
    kind: Kind
    text: str


class Grouped(NamedTuple):
    """A statistic over the jobs of a group, each with one value of a metric."""

    function: str
    metric: str
    step: int | None
    """Each job's value at its first report at or after that step; None: its newest."""
    goal: Goal | None
    kind: Kind
    text: str


class Operation(NamedTuple):
    """An operator or a function of values: `+`, `<`, `and`, `not`, `clamp`, `missing`, ..."""

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
    """All parts, from left to right, the whole first."""
    pending = [typed]
    while pending:
        one = pending.pop()
        yield one
        if isinstance(one, (Operation, Chain)):
            pending += reversed(one.operands)


def metrics_of(typed: Typed) -> list[str]:
    """Names of all metrics of the job itself that it reads, each once."""
    found: dict[str, None] = {}
    for one in walk(typed):
        if isinstance(one, Reading):
            found[one.metric] = None
        elif isinstance(one, Aggregate):
            found[one.summary.metric] = None
            if one.summary.partner:
                found[one.summary.partner] = None
    return list(found)


def moves_by_itself(typed: Typed) -> bool:
    """Whether it may change without a new value of any metric: with time, or when a value goes missing."""
    return any(_moves(one) for one in walk(typed))


def _moves(one: Typed) -> bool:
    if isinstance(one, Grouped):
        return True
    if isinstance(one, Aggregate):
        window = one.summary.window
        return one.summary.function == "age" or (window is not None and window.seconds > 0)
    return isinstance(one, Operation) and one.name in ("missing", "coalesce")
