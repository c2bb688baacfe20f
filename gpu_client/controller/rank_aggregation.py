"""What several processes reported, as one observation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from baton.contract.rules.arithmetic import to_number
from baton.contract.rules.document.rule import REPORT
from baton.contract.rules.metrics import Reduce
from baton.contract.rules.numbers import decode, encode
from gpu_client.controller.rule_engine import Engine

_STEPS = ("step", REPORT)


class Peers(Protocol):
    """The processes of one training."""

    size: int

    @property
    def first(self) -> bool: ...

    def share(self, value: Any) -> Any:
        """The first one's value, on all of them."""


class Observed(NamedTuple):
    """A step, or another event of the first process, and what came with it."""

    event: str
    step: int
    now: float
    """Seconds, as the engine has them."""
    metrics: Mapping[str, object]
    rank: int = 0
    """The first process that reported a value that is not finite; 0 where none did."""

    def as_values(self) -> dict[str, Any]:
        """Plain JSON."""
        numbers = {name: encode(_number(value)) for name, value in self.metrics.items()}
        return {"event": self.event, "step": self.step, "now": self.now, "metrics": numbers}

    @staticmethod
    def of_values(values: Mapping[str, Any]) -> Observed:
        """From that. Raises KeyError, TypeError or ValueError."""
        metrics = {str(name): decode(value) for name, value in values["metrics"].items()}
        return Observed(str(values["event"]), int(values["step"]), float(values["now"]), metrics)


class Gathering:
    """What this process hands in for a step, and what all of them together handed in.

    Their numbers travel with the vote that processes send each other after every step, so rules add no message.
    The order of steps and events is that in which the first process told them.
    """

    def __init__(self) -> None:
        self._mine: list[Observed] = []
        """Since the last vote: at most one of them is a step."""
        self._sent: list[Observed] = []
        """What came with the last vote, until that is heard."""
        self._reads: frozenset[str] = frozenset()
        self._names: Sequence[str] = ()
        """Of the numbers that were contributed last: those that rules read, in order."""

    def hand_in(self, step: int, metrics: Mapping[str, object], *, now: float, logged: bool = False) -> None:
        """What this process reports, once or more often, or not at all: processes need not do alike.

        logged: these are what the loop logs of the step.
        """
        event = REPORT if logged else "step"
        for place, one in enumerate(self._mine):
            if one.event in _STEPS:
                event = REPORT if REPORT in (one.event, event) else event
                self._mine[place] = Observed(event, step, now, {**one.metrics, **metrics})
                return
        self._mine.append(Observed(event, step, now, metrics))

    def note(self, event: Observed) -> None:
        """Something else than a step; the first process alone says so."""
        self._mine.append(event)

    def contribution(self, engine: Engine) -> list[float]:
        """The numbers of this process: of each metric that rules read whether it is known, and its value.

        Every process asks this at the same moments, under the same rules, and contributes as many.
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

    def heard(self, rows: Sequence[Sequence[float]], engine: Engine) -> list[Observed]:
        """What was contributed by all, as the step and events with which this process came to that vote."""
        sent, self._sent = self._sent, []
        found, rank = _reduced(self._names, rows, engine.reducers), _odd_one(rows)
        return [one._replace(metrics=found, rank=rank) if one.event in _STEPS else one for one in sent]

    def rest(self) -> list[Observed]:
        """What this process said, and no vote tells of any more."""
        rest, self._sent, self._mine = [*self._sent, *self._mine], [], []
        return rest

    def forget(self) -> None:
        """Rules begin anew: what was handed in before is none of theirs."""
        self._sent, self._mine = [], []

    def state(self, engine: Engine) -> list[dict[str, Any]]:
        """What came after the last vote, as plain JSON; it goes on afterwards."""
        reads = engine.reads
        return [
            one._replace(
                metrics={name: value for name, value in engine.renamed(one.metrics).items() if name in reads}
            ).as_values()
            for one in self._mine
        ]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on with that. Raises KeyError, TypeError or ValueError."""
        self._mine = [Observed.of_values(one) for one in state]


def _reduced(
    names: Sequence[str], rows: Sequence[Sequence[float]], reducers: Mapping[str, Reduce]
) -> dict[str, object]:
    """A value that is no number on one process is none on all, however it is reduced."""
    found: dict[str, object] = {}
    for column, name in enumerate(names):
        said = [row[2 * column + 1] for row in rows if row[2 * column]]
        if not said:
            continue
        # At every step: without a generator, and of NaN the sum is NaN.
        if math.isnan(sum(said)) and any(map(math.isnan, said)):
            found[name] = math.nan
        else:
            found[name] = _REDUCERS[reducers.get(name, "mean")](said)
    return found


def _odd_one(rows: Sequence[Sequence[float]]) -> int:
    for rank, row in enumerate(rows):
        if not math.isfinite(sum(row)) and not all(map(math.isfinite, row)):
            return rank
    return 0


def _mean(values: Sequence[float]) -> float:
    """Equal values have themselves as their mean, to the last bit."""
    return values[0] if values.count(values[0]) == len(values) else sum(values) / len(values)


_REDUCERS: Mapping[Reduce, Callable[[list[float]], float]] = {"mean": _mean, "max": max, "min": min, "sum": sum}


def _number(value: object) -> float | None:
    try:
        return to_number(value)
    except Exception:  # noqa: BLE001 - a value can be any object, and fail in any way: then it is missing
        return None
