"""Histories from what jobs reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from baton.contract.rules.metrics import is_name, name_in_rules
from gpu_client.backtest.history import Builder, History, HistoryError


class Point(Protocol):
    """What was reported at a step."""

    @property
    def step(self) -> int:
        """Rising from point to point."""

    @property
    def at(self) -> float:
        """Seconds."""

    def numbers(self) -> Mapping[str, float]:
        """The metrics by the names that the training gave them, NaN and infinity among them."""


def history_of_points(points: Iterable[Point], name: str) -> History:
    """Of a job, its attempts in one. Raises HistoryError if there are none."""
    builder = Builder(name)
    for point in points:
        named = {name_in_rules(one): value for one, value in point.numbers().items()}
        builder.add(point.step, point.at, {one: value for one, value in named.items() if is_name(one)})
    if not len(builder):
        raise HistoryError("nothing was reported", "Report metrics from the training.")
    return builder.history()
