"""Functions of the language: arguments, results and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Function(NamedTuple):
    """Signature of a function of a metric's history."""

    usage: str
    meaning: str
    window: bool = False
    """The second argument is a window."""
    window_required: bool = True
    least_points: int = 1
    goal: bool = False
    """The function takes `min` or `max`."""
    min_delta: bool = False
    gives: str = "same"
    """Kind of the result; `same` means the metric's kind."""
    points_only: bool = False
    """The window counts points and is never a duration."""
    partner: bool = False
    """The second argument is another metric."""
    any_kind: bool = False
    """The function accepts boolean metrics too."""


SUMMARIES: Mapping[str, Function] = {
    "mean": Function("mean(x, 50)", "mean of the window", window=True),
    "min": Function("min(x, 50)", "least of the window; min(a, b) of values", window=True),
    "max": Function("max(x, 50)", "greatest of the window; max(a, b) of values", window=True),
    "median": Function("median(x, 50)", "middle of the window", window=True),
    "std": Function("std(x, 50)", "standard deviation of the window (n - 1)", window=True, least_points=2),
    "slope": Function("slope(x, 50)", "change per point: the line of least squares", window=True, least_points=2),
    "zscore": Function(
        "zscore(x, 50)",
        "how many standard deviations the newest point is off the mean of the window before it",
        window=True,
        least_points=2,
        gives="number",
    ),
    "ema": Function("ema(x, 50)", "exponential moving average: weight 2 / (n + 1), or time constant", window=True),
    "delta": Function("delta(x, 5)", "newest point less the one 5 points before", window=True, window_required=False),
    "lag": Function("lag(x, 5)", "the point 5 before the newest", window=True, points_only=True),
    "at": Function("at(x, y)", "the value that x had when the newest point of y came", partner=True),
    "rising": Function("rising(x, 5)", "each of the last 5 points above the one before", window=True, gives="bool"),
    "falling": Function("falling(x, 5)", "each of the last 5 points below the one before", window=True, gives="bool"),
    "changed": Function(
        "changed(x, 5)",
        "one of the last 5 points differs from the one before",
        window=True,
        window_required=False,
        gives="bool",
        any_kind=True,
    ),
    "count": Function(
        "count(x, 10m)",
        "points so far, or in the window",
        window=True,
        window_required=False,
        gives="number",
        any_kind=True,
    ),
    "best": Function("best(x, min)", "best finite point so far", goal=True),
    "since_best": Function(
        "since_best(x, min, 0.01)",
        "points since the best so far (better by more than 0.01)",
        goal=True,
        min_delta=True,
        gives="number",
    ),
    "age": Function("age(x)", "time since the newest point", gives="duration", any_kind=True),
}

GROUPS: Mapping[str, Function] = {
    "group_count": Function(
        "group_count(x, 500)", "jobs of the group that have a value, NaN or not", gives="number", any_kind=True
    ),
    "group_mean": Function("group_mean(x, 500)", "mean of the group's values"),
    "group_median": Function("group_median(x, 500)", "middle of the group's values"),
    "group_min": Function("group_min(x, 500)", "least of the group's values"),
    "group_max": Function("group_max(x, 500)", "greatest of the group's values"),
    "group_rank": Function(
        "group_rank(x, 500)",
        "share of the group's jobs that are strictly better: 0 is the best",
        goal=True,
        gives="number",
    ),
}
"""Functions over the jobs of a group, at their newest values or at a step."""

PLAIN: Mapping[str, tuple[str, str]] = {
    "isnan": ("isnan(x)", "whether the value is NaN"),
    "isfinite": ("isfinite(x)", "whether it is neither NaN nor infinite"),
    "missing": ("missing(x)", "whether the value is not known"),
    "coalesce": ("coalesce(x, y)", "the first value that is known"),
    "abs": ("abs(x)", "without its sign"),
    "log": ("log(x)", "natural logarithm"),
    "clamp": ("clamp(x, 0, 1)", "x, at least 0 and at most 1"),
}
"""Functions of values: usage and meaning."""

NAMES = (*SUMMARIES, *GROUPS, *PLAIN)


def find_usage(name: str) -> str:
    """Return the usage text of a function."""
    if name in PLAIN:
        return PLAIN[name][0]
    return (SUMMARIES.get(name) or GROUPS[name]).usage
