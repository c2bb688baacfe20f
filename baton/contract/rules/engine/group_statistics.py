"""Statistics over the jobs of a group, each with its newest value of a metric or its value at a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.contract.rules.arithmetic import NAN
from baton.contract.rules.metrics import Goal


class GroupValue(NamedTuple):
    """Key of a value that each job of a group keeps."""

    metric: str
    """Name in rules (`metrics.name_in_rules`)."""
    step: int | None = None
    """Step of the value: the job's first report at or after it; None for the newest value."""


class GroupValues(Protocol):
    """Source of the values of a group, NaN and infinity included. Implementations must not raise."""

    def members(self, metric: str, step: int | None) -> Sequence[float] | None:
        """Return the values of all jobs that have one, this job's included; None if the job is in no group."""

    def own(self, metric: str, step: int | None) -> float | None:
        """Return this job's value; None if it has none."""


def compute_group_statistic(
    function: str, values: Sequence[float] | None, own: float | None, goal: Goal | None
) -> float | None:
    """Compute a function of `functions.GROUPS`; None while it is unknown.

    NaN ranks behind all numbers. `group_count` counts NaN, but mean, median, min and max ignore it unless all values
    are NaN, so that one diverged job does not disable the rules of the others.
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
    """Compute the mean independently of the order; infinite if one value is, NaN if both infinities occur."""
    if not (math.isfinite(numbers[0]) and math.isfinite(numbers[-1])):
        return numbers[0] + numbers[-1] if not math.isfinite(numbers[0]) else numbers[-1]
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:
        return 2 * math.fsum(number / len(numbers) / 2 for number in numbers)
