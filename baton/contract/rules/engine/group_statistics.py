"""Statistics over the jobs of a group: each has one value of a metric, its newest or the one at a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.contract.rules.arithmetic import NAN
from baton.contract.rules.metrics import Goal


class GroupValue(NamedTuple):
    """What is known of each job of a group: its newest value of a metric, or the one at a step."""

    metric: str
    """By its name in rules (`metrics.name_in_rules`)."""
    step: int | None = None
    """At the job's first report at or after that step."""


class GroupValues(Protocol):
    """What the jobs of a group have reported; NaN and infinity are values. It must not raise."""

    def members(self, metric: str, step: int | None) -> Sequence[float] | None:
        """Of every job of the group that has one, this job's own among them; None: the job is in no group."""

    def own(self, metric: str, step: int | None) -> float | None:
        """This job's; None: it has none."""


def group_statistic(
    function: str, values: Sequence[float] | None, own: float | None, goal: Goal | None
) -> float | None:
    """The value of a function of functions.GROUPS; None: not known.

    NaN is a value that is worse than all others. It is counted, and left out of mean, median, min and max, which are
    NaN only if nothing else is there: one job that diverged does not blind the rules of all others.
    """
    if values is None:
        return None
    if function == "group_count":
        return float(len(values))
    if not values:
        return None
    if function == "group_rank":
        return None if own is None else _rank(values, own, 1.0 if goal == "min" else -1.0)
    numbers = sorted(value for value in values if not math.isnan(value))
    if not numbers:
        return NAN
    match function:
        case "group_min":
            return numbers[0]
        case "group_max":
            return numbers[-1]
        case "group_median":
            size = len(numbers)
            return _mean([numbers[(size - 1) // 2], numbers[size // 2]])
    return _mean(numbers)


def _rank(values: Sequence[float], own: float, sign: float) -> float:
    if math.isnan(own):
        better = sum(not math.isnan(value) for value in values)
    else:
        better = sum(value * sign < own * sign for value in values)  # false for NaN
    return better / len(values)


def _mean(numbers: Sequence[float]) -> float:
    """Whatever their order, the same; infinite where one is, NaN where both infinities are."""
    if not (math.isfinite(numbers[0]) and math.isfinite(numbers[-1])):
        return numbers[0] + numbers[-1] if not math.isfinite(numbers[0]) else numbers[-1]
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:
        return 2 * math.fsum(number / len(numbers) / 2 for number in numbers)
