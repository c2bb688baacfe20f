"""What several processes reported, as one observation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from contract.rules.arithmetic import number_of
from gpu_client.controller.engine import Engine

Gathered = list[list[float]]
_GREATEST = frozenset({"step.time", "data.wait", "ckpt.age", "wall", "gpu.temp", "gpu.mem", "host.mem", "host.cpu"})
"""Of these the greatest counts: the slowest and fullest process is what all of them wait for. Of others the mean."""


class Peers(Protocol):
    """The processes of one training."""

    size: int

    @property
    def first(self) -> bool: ...

    def start_gather(self, values: Sequence[float]) -> Callable[[], Gathered]:
        """Begin to gather the values of all, as many from each; the answer waits for the end of it."""

    def share(self, value: Any) -> Any:
        """The first one's value, on all of them."""


class Gathering:
    """Gathers at one step what is read at the next one: no step waits for another process because of rules."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._under_way: tuple[int, list[str], Callable[[], Gathered]] | None = None

    def exchange(
        self, step: int, metrics: Mapping[str, object], engine: Engine
    ) -> tuple[int, dict[str, object]] | None:
        """Hand in this step's metrics; what all processes said of the step before, and which step that was.

        Every process calls this at the same steps, under the same rules.
        """
        before, self._under_way = self._under_way, None
        if engine.active:
            names = sorted(engine.reads)
            values: list[float] = []
            renamed = engine.renamed(metrics)
            for name in names:
                number = _number(renamed.get(name))
                values += (0.0, 0.0) if number is None else (1.0, number)
            self._under_way = step, names, self._peers.start_gather(values)
        if before is None:
            return None
        said_at, names, finish = before
        return said_at, _reduced(names, finish())


def _reduced(names: Sequence[str], rows: Gathered) -> dict[str, object]:
    found: dict[str, object] = {}
    for column, name in enumerate(names):
        said = [row[2 * column + 1] for row in rows if row[2 * column]]
        if not said:
            continue
        if any(math.isnan(value) for value in said):
            found[name] = math.nan
        else:
            found[name] = max(said) if name in _GREATEST else _mean(said)
    return found


def _mean(values: Sequence[float]) -> float:
    """Equal values have themselves as their mean, to the last bit."""
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)


def _number(value: object) -> float | None:
    try:
        return number_of(value)
    except (TypeError, ValueError, RuntimeError):
        return None
