"""Reduce the reports of several ranks to one observation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from baton.contract.rules.arithmetic import to_number
from baton.contract.rules.document.rule import REPORT
from baton.contract.rules.metrics import Reduce
from baton.contract.rules.numbers import decode, encode
from gpu_client.controller.rule_engine import RuleEngine

_STEPS = ("step", REPORT)


class RankPeers(Protocol):
    """Ranks of one training."""

    size: int

    @property
    def first(self) -> bool: ...

    def share(self, value: Any) -> Any:
        """Broadcast the first rank's value to all ranks."""


class Observation(NamedTuple):
    """Step, or other event of the first rank, with its metrics."""

    event: str
    step: int
    now: float
    """Time by the engine's clock, in seconds."""
    metrics: Mapping[str, object]
    rank: int = 0
    """Lowest rank that reported NaN or an infinity; 0 without such a value."""

    def as_values(self) -> dict[str, Any]:
        """Return the observation as plain JSON."""
        numbers = {name: encode(_number(value)) for name, value in self.metrics.items()}
        return {"event": self.event, "step": self.step, "now": self.now, "metrics": numbers}

    @staticmethod
    def of_values(values: Mapping[str, Any]) -> Observation:
        """Make an observation from plain JSON. Raises KeyError, TypeError or ValueError."""
        metrics = {str(name): decode(value) for name, value in values["metrics"].items()}
        return Observation(str(values["event"]), int(values["step"]), float(values["now"]), metrics)


class RankAggregator:
    """Collector of this rank's reports, which also reduces the reports of all ranks.

    The vote of each step carries the numbers, therefore rules need no message of their own. The order of steps and
    events is the order on the first rank.
    """

    def __init__(self) -> None:
        self._mine: list[Observation] = []
        """Reports since the last vote; at most one is a step."""
        self._sent: list[Observation] = []
        """Reports in the last vote, until its result is read."""
        self._reads: frozenset[str] = frozenset()
        self._names: Sequence[str] = ()
        """Names of the contributed numbers, sorted."""

    def add_step(self, step: int, metrics: Mapping[str, object], *, now: float, logged: bool = False) -> None:
        """Add a report of this rank; ranks may report once, repeatedly, or not at all.

        logged: True if the loop logs these metrics for the step.
        """
        event = REPORT if logged else "step"
        for place, one in enumerate(self._mine):
            if one.event in _STEPS:
                event = REPORT if REPORT in (one.event, event) else event
                self._mine[place] = Observation(event, step, now, {**one.metrics, **metrics})
                return
        self._mine.append(Observation(event, step, now, metrics))

    def add_event(self, event: Observation) -> None:
        """Add an event that is no step; only the first rank calls this method."""
        self._mine.append(event)

    def contribution(self, engine: RuleEngine) -> list[float]:
        """Return this rank's numbers: for each metric that rules read, a flag for its presence, and the value.

        All ranks call this method at equal votes and under equal rules, so that all contribute equally many numbers.
        """
        if self._reads is not engine.reads:
            self._reads, self._names = engine.reads, sorted(engine.reads)
        self._sent, self._mine = self._mine, []
        renamed = engine.renamed(next((one.metrics for one in self._sent if one.event in _STEPS), {}))
        values: list[float] = []
        for name in self._names:
            number = _number(renamed.get(name))
            values += (0.0, 0.0) if number is None else (1.0, number)
        return values

    def reduce_rows(self, rows: Sequence[Sequence[float]], engine: RuleEngine) -> list[Observation]:
        """Reduce the numbers of all ranks to the steps and events of this rank."""
        sent, self._sent = self._sent, []
        found, rank = _reduced(self._names, rows, engine.reducers), _nonfinite_rank(rows)
        return [one._replace(metrics=found, rank=rank) if one.event in _STEPS else one for one in sent]

    def take_rest(self) -> list[Observation]:
        """Remove and return the reports that no vote will carry."""
        rest, self._sent, self._mine = [*self._sent, *self._mine], [], []
        return rest

    def clear(self) -> None:
        """Drop earlier reports, because new rules must not evaluate earlier reports."""
        self._sent, self._mine = [], []

    def state(self, engine: RuleEngine) -> list[dict[str, Any]]:
        """Return the reports since the last vote as plain JSON, without removing them."""
        reads = engine.reads
        return [
            one._replace(
                metrics={name: value for name, value in engine.renamed(one.metrics).items() if name in reads}
            ).as_values()
            for one in self._mine
        ]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore saved reports. Raises KeyError, TypeError or ValueError."""
        self._mine = [Observation.of_values(one) for one in state]


def _reduced(
    names: Sequence[str], rows: Sequence[Sequence[float]], reducers: Mapping[str, Reduce]
) -> dict[str, object]:
    """Reduce each metric; a NaN on one rank makes the result NaN."""
    found: dict[str, object] = {}
    for column, name in enumerate(names):
        reported = [row[2 * column + 1] for row in rows if row[2 * column]]
        if not reported:
            continue
        # Every step runs this code, and a sum without a generator detects NaN fast.
        if math.isnan(sum(reported)) and any(map(math.isnan, reported)):
            found[name] = math.nan
        else:
            found[name] = _REDUCERS[reducers.get(name, "mean")](reported)
    return found


def _nonfinite_rank(rows: Sequence[Sequence[float]]) -> int:
    for rank, row in enumerate(rows):
        if not math.isfinite(sum(row)) and not all(map(math.isfinite, row)):
            return rank
    return 0


def _mean(values: Sequence[float]) -> float:
    """Return the mean; the mean of equal values is exactly their value."""
    return values[0] if values.count(values[0]) == len(values) else sum(values) / len(values)


_REDUCERS: Mapping[Reduce, Callable[[list[float]], float]] = {"mean": _mean, "max": max, "min": min, "sum": sum}


def _number(value: object) -> float | None:
    try:
        return to_number(value)
    except Exception:  # noqa: BLE001 - a value can be any object, and fail in any way: then it is missing
        return None
