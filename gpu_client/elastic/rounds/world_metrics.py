"""Reduce the metrics that nodes report to the metrics of the world, and define who observes the metrics of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from baton.contract.rules.metrics import BUILT_IN, Metric, Reduce, name_in_rules
from gpu_client.elastic.rounds.member_status import MemberStatus

ALWAYS_SENT = frozenset({"loss", "eval.loss", "world.stall", "world.sent_bytes", "world.link_mbit_s"})
"""Metrics that each contribution bears besides those that rules read."""
MAX_SENT = 64
_BITS = 8e-6
"""Megabits of a byte."""

Orders = Sequence[Mapping[str, Any]]
"""Orders of one member in a status. The observers read orders, the rounds only pass orders on."""


class RoundObserver(Protocol):
    """Rules and commands of the training at one node; called in the round thread."""

    @property
    def reads(self) -> frozenset[str]:
        """Return the metrics that rules read."""

    @property
    def reducers(self) -> Mapping[str, Reduce]:
        """Return the declared reductions."""

    def describe(self, *, leads: bool, enters: bool) -> Orders:
        """Return the orders for the next status. leads: first member. enters: first status in an epoch."""

    def enter(self, statuses: Sequence[Orders]) -> None:
        """Receive the orders in the first statuses of an epoch, by rank."""

    def observe(self, number: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a round before its commit."""

    def commit(self, number: int, statuses: Sequence[Orders], *, saves: bool) -> None:
        """Receive the orders of all members right before a commit; number is 0 at a node without a part in the round.

        saves: this node saves the round.
        """


class SilentObserver:
    """Observer of a training without rules and commands of a world."""

    reads: frozenset[str] = frozenset()
    reducers: Mapping[str, Reduce] = {}

    def describe(self, *, leads: bool, enters: bool) -> Orders:
        """Return no orders."""
        return ()

    def enter(self, statuses: Sequence[Orders]) -> None:
        """Ignore all orders."""

    def observe(self, number: int, metrics: Mapping[str, float]) -> None:
        """Ignore the metrics."""

    def commit(self, number: int, statuses: Sequence[Orders], *, saves: bool) -> None:
        """Ignore all orders."""


_REDUCERS: Mapping[Reduce, Callable[[Iterable[float]], float]] = {"max": max, "min": min, "sum": sum}


def choose_metrics(reported: Mapping[str, object], reads: frozenset[str] = frozenset()) -> dict[str, float]:
    """Return the numbers among the reported metrics that other nodes need, by their names in rules."""
    chosen: dict[str, float] = {}
    for given, value in reported.items():
        name = name_in_rules(given)
        if (name in ALWAYS_SENT or name in reads) and len(chosen) < MAX_SENT:
            with suppress(Exception):  # A value can be any object, and fail in any way: then it is missing.
                # torch warns of a conversion of a loss, and not of its item().
                chosen[name] = float(value.item() if hasattr(value, "item") else value)  # type: ignore[arg-type]
    return chosen


def reduce_metrics(
    statuses: Sequence[MemberStatus], weights: Mapping[str, int], reducers: Mapping[str, Reduce] | None = None
) -> dict[str, float]:
    """Reduce each metric over the nodes in `weights`; a mean is weighted by tokens. NaN at one node gives NaN.

    `reducers`: declared reductions. All members compute the same values, because they have exchanged the statuses.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for one in statuses:
        if one.node in weights:
            for name, value in one.metrics.items():
                found.setdefault(name, []).append((weights[one.node], value))
    return {
        name: _reduce(values, (reducers or {}).get(name) or BUILT_IN.get(name, Metric(name)).reduced_by)
        for name, values in sorted(found.items())
    }


def _reduce(values: Sequence[tuple[int, float]], how: Reduce) -> float:
    numbers = [value for _, value in values]
    if any(map(math.isnan, numbers)):
        return math.nan
    if how != "mean":
        return float(_REDUCERS[how](numbers))
    if numbers.count(numbers[0]) == len(numbers):
        return numbers[0]
    return sum(weight * value for weight, value in values) / sum(weight for weight, _ in values)


def measure_round(
    number: int, nodes: int, tokens: int, *, round_s: float, reduced: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a round that all members share."""
    found = {"world.round": float(number), "world.nodes": float(nodes), "world.round_s": round_s}
    if round_s > 0:
        found["world.tokens_per_s"] = tokens / round_s
    if "loss" in reduced:
        found["world.loss"] = reduced["loss"]
    return found


def measure_link(sent_bytes: int, reduce_s: float) -> dict[str, float]:
    """Return the bytes that this node has sent in a round, and the speed of its uplink during the reduce."""
    found = {"world.sent_bytes": float(sent_bytes)}
    if sent_bytes and reduce_s > 0:
        found["world.link_mbit_s"] = sent_bytes * _BITS / reduce_s
    return found
