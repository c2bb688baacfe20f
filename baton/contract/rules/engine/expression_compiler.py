"""Compiler: typed expressions become closures over series. Equal summaries share one statistic."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TypeVar

from baton.contract.rules.arithmetic import COMPARE, FUNCTIONS
from baton.contract.rules.engine.group_statistics import GroupValues, compute_group_statistic
from baton.contract.rules.language.typed_ast import (
    Aggregate,
    Chain,
    Constant,
    Grouped,
    HistorySummary,
    Operation,
    Reading,
    Typed,
    WindowSize,
)
from baton.contract.rules.limits import LIMITS, Limits
from baton.contract.rules.metrics import Kind
from baton.contract.rules.windows import window_closures
from baton.contract.rules.windows.running_statistics import Average, BestPoint, Lagged, SampledMetric, Streak, are_equal
from baton.contract.rules.windows.series import Follower, ObservationClock, Series
from baton.contract.rules.windows.sliding_windows import Extreme, Median, Moments, SlidingWindow
from baton.contract.rules.windows.window_closures import Reader, Value

F = TypeVar("F", bound=Follower)

_STREAKS: Mapping[str, Callable[[float, float], bool]] = {
    "rising": operator.gt,
    "falling": operator.lt,
    "changed": are_equal,
}
"""Relation of a point to its predecessor that continues a streak."""


class Compiler:
    """Compiler of the expressions of one rule set, which share their series."""

    def __init__(self, clock: ObservationClock, limits: Limits = LIMITS, group: GroupValues | None = None) -> None:
        """Create a compiler; without `group`, all values of a group are unknown."""
        self.series: dict[str, Series] = {}
        self._clock = clock
        self._limits = limits
        self._group = group
        self._readers: dict[HistorySummary, Reader] = {}
        self.samples: list[SampledMetric] = []
        """Statistics that sample another metric once an observation is complete."""

    def compile(self, typed: Typed) -> Reader:
        """Compile an expression to a closure for its current value: float, bool, or None if unknown. The closure never
        raises.
        """
        match typed:
            case Constant(value):
                return lambda: value
            case Reading():
                return self._reading(typed)
            case Aggregate(summary):
                if summary not in self._readers:
                    self._readers[summary] = self._summary(summary)
                return self._readers[summary]
            case Grouped():
                return _over_group(typed, self._group)
            case Chain():
                return self._chain(typed)
            case Operation():
                return self._operation(typed)

    def keep(self, name: str) -> None:
        """Keep the newest value of a metric that no expression reads."""
        self._series(name)

    def _series(self, name: str) -> Series:
        return self.series.setdefault(name, Series())

    def _reading(self, typed: Reading) -> Reader:
        series = self._series(typed.metric)
        if typed.kind is Kind.BOOL:

            def flag() -> Value:
                value = series.current
                return None if value is None or value - value != 0.0 else value != 0.0

            return flag
        return lambda: series.current

    def _chain(self, typed: Chain) -> Reader:
        first, *rest = typed.operands
        if len(rest) == 1:
            if isinstance(first, Reading) and isinstance(rest[0], Constant):
                return self._reading_against(first, COMPARE[typed.operators[0]], rest[0].value)
            return compile_comparison(self.compile(first), COMPARE[typed.operators[0]], rest[0], self.compile)
        if len(rest) == 2:
            readers_of = [self.compile(operand) for operand in typed.operands]
            return compile_between(readers_of, COMPARE[typed.operators[0]], COMPARE[typed.operators[1]])
        begin = self.compile(first)
        links = [
            (COMPARE[operator], self.compile(operand)) for operator, operand in zip(typed.operators, rest, strict=True)
        ]

        def chain() -> Value:
            left, known = begin(), True
            for compare, read in links:
                right = read()
                if left is None or right is None:
                    known = False
                elif not compare(left, right):
                    return False
                left = right
            return True if known else None

        return chain

    def _reading_against(self, reading: Reading, compare: Callable[[float, float], bool], bound: float) -> Reader:
        """Compile the most frequent comparison to a single closure."""
        series = self._series(reading.metric)

        def against() -> Value:
            value = series.current
            return None if value is None else compare(value, bound)

        return against

    def _test(self, name: str, reading: Reading) -> Reader:
        """Compile a test of a metric to a single closure."""
        series = self._series(reading.metric)

        def is_nan() -> Value:
            value = series.current
            return None if value is None else value != value  # noqa: PLR0124 - quicker than isnan

        def is_finite() -> Value:
            value = series.current
            return None if value is None else value - value == 0.0

        return is_nan if name == "isnan" else is_finite

    def _operation(self, typed: Operation) -> Reader:
        operands = [self.compile(operand) for operand in typed.operands]
        match typed.name:
            case "and":
                return compile_connective(operands, decisive=False)
            case "or":
                return compile_connective(operands, decisive=True)
            case "not":
                return compile_negation(operands[0])
            case "missing":
                inner = operands[0]
                return lambda: inner() is None
            case "coalesce":
                return compile_coalesce(operands)
            case "isnan" | "isfinite" if isinstance(typed.operands[0], Reading):
                return self._test(typed.name, typed.operands[0])
            case name if len(operands) == 1:
                return compile_unary(FUNCTIONS[name], operands[0])
            case name if len(operands) == 2 and isinstance(typed.operands[0], Constant):
                return compile_with_constant(FUNCTIONS[name], typed.operands[0].value, operands[1])
            case name if len(operands) == 2:
                return compile_binary(FUNCTIONS[name], *operands)
            case name:
                return compile_function(FUNCTIONS[name], operands)

    def _follow(self, metric: str, name: str, make: Callable[[Series], F]) -> F:
        """Return the follower called `name`; create it on first use."""
        series = self._series(metric)
        if name not in series.followers:
            series.follow(name, make(series))
        return series.followers[name]  # type: ignore[return-value]

    def _summary(self, summary: HistorySummary) -> Reader:
        function, metric, window, goal, min_delta, partner = summary
        clock = self._clock
        if partner:
            return self._sample(metric, partner)
        if goal is not None:
            name = f"best({goal}, {min_delta!r})"
            best = self._follow(metric, name, lambda series: BestPoint(series, clock, goal, min_delta))
            return best.value if function == "best" else best.since
        if window is None:
            return self._without_window(function, self._series(metric))
        if function in ("rising", "falling", "changed"):
            streak = self._follow(metric, function, lambda series: Streak(series, clock, _STREAKS[function]))
            return _streak(function, streak, window)
        if function == "ema":
            name = f"ema({window.points}, {window.seconds!r})"
            average = self._follow(metric, name, lambda series: Average(series, clock, *window))
            return _when_covered(average, window)
        if function in ("delta", "lag") and window.points:
            lagged = self._follow(
                metric, f"delta({window.points})", lambda series: Lagged(series, clock, window.points)
            )
            return lagged.change if function == "delta" else lagged.earlier
        return self._over_window(function, metric, window)

    def _sample(self, metric: str, partner: str) -> Reader:
        sampled = self._series(metric)
        sample = self._follow(partner, f"at({metric})", lambda series: SampledMetric(series, self._clock, sampled))
        if sample not in self.samples:
            self.samples.append(sample)
        return lambda: sample.value

    def _without_window(self, function: str, series: Series) -> Reader:
        if function == "count":
            return lambda: float(series.total)
        clock = self._clock
        return lambda: None if series.at is None else clock.now - series.at

    def _over_window(self, function: str, metric: str, span: WindowSize) -> Reader:
        clock, seconds = self._clock, span.seconds
        most = span.points or min(self._limits.duration_points, self._limits.window_points)
        size = f"{span.points}, {seconds!r}"
        if function in ("min", "max"):
            sign = 1.0 if function == "min" else -1.0
            extreme = self._follow(
                metric, f"{function}({size})", lambda series: Extreme(series, clock, most, seconds, sign=sign)
            )
            return _over_duration(extreme, extreme.value, 1) if seconds else window_closures.read_extreme(extreme)
        if function == "median":
            most = min(most, self._limits.median_points)
            median = self._follow(metric, f"median({size})", lambda series: Median(series, clock, most, seconds))
            return _over_duration(median, median.value, 1) if seconds else window_closures.read_median(median)
        if function in ("delta", "count"):
            window = self._follow(metric, f"points({size})", lambda series: SlidingWindow(series, clock, most, seconds))
            return _size(window) if function == "count" else _over_duration(window, lambda: _change(window), 2)
        lag = int(function == "zscore")
        moments = self._follow(
            metric, f"moments({size}, {lag})", lambda series: Moments(series, clock, most, seconds, lag)
        )
        moments.sums.with_squares = moments.sums.with_squares or function in ("std", "zscore")
        moments.sums.weighs = moments.sums.weighs or function == "slope"
        if not seconds:
            return window_closures.MOMENT_READERS[function](moments)
        compute = {"mean": moments.mean, "std": moments.std, "slope": moments.slope, "zscore": moments.zscore}[function]
        return _over_duration(moments, compute, 1 if function == "mean" else 2)


def _over_group(typed: Grouped, group: GroupValues | None) -> Reader:
    if group is None:
        return lambda: None
    function, metric, step, goal = typed.function, typed.metric, typed.step, typed.goal
    if goal is None:
        return lambda: compute_group_statistic(function, group.members(metric, step), None, None)
    return lambda: compute_group_statistic(function, group.members(metric, step), group.own(metric, step), goal)


def _over_duration(window: SlidingWindow, compute: Callable[[], float], least: int) -> Reader:
    """Return a closure that recomputes the value of a full window only after a change."""
    stamp, value = -1, 0.0

    def over_duration() -> Value:
        nonlocal stamp, value
        window.trim()
        if not window.is_known(least):
            return None
        if window.stamp != stamp:
            stamp, value = window.stamp, compute()
        return value

    return over_duration


def _change(window: SlidingWindow) -> float:
    newest = window.series.newest
    return (0.0 if newest is None else newest) - window.oldest()


def _size(window: SlidingWindow) -> Reader:
    def size() -> Value:
        window.trim()
        return float(len(window))

    return size


def _streak(function: str, streak: Streak, window: WindowSize) -> Reader:
    points, seconds = window
    if function == "changed":
        if points:
            return lambda: streak.broken_over_points(points)
        return lambda: streak.broken_over_seconds(seconds)
    if points:
        return lambda: streak.over_points(points)
    return lambda: streak.over_seconds(seconds)


def _when_covered(average: Average, window: WindowSize) -> Reader:
    points, seconds = window
    if points:
        series = average.series

        def over_points() -> Value:
            if series.total - average.unseen < points:
                return None
            newest = series.newest
            return newest if newest is not None and newest - newest != 0.0 else average.average

        return over_points
    return lambda: average.value() if average.covers(seconds) else None


def compile_comparison(
    left: Reader, compare: Callable[[float, float], bool], right: Typed, compile_operand: Callable[[Typed], Reader]
) -> Reader:
    """Compile a comparison. A constant operand needs no closure, and the frequent `>` needs no call."""
    if isinstance(right, Constant):
        bound = right.value
        if compare is operator.gt:

            def above_constant() -> Value:
                value = left()
                return None if value is None else value > bound

            return above_constant

        def against_constant() -> Value:
            value = left()
            return None if value is None else compare(value, bound)

        return against_constant
    other = compile_operand(right)
    if compare is operator.gt:

        def above() -> Value:
            value, bound = left(), other()
            return None if value is None or bound is None else value > bound

        return above

    def against() -> Value:
        value, bound = left(), other()
        return None if value is None or bound is None else compare(value, bound)

    return against


def compile_connective(operands: list[Reader], *, decisive: bool) -> Reader:
    """Compile `or` (decisive: true) or `and` (decisive: false) in Kleene logic."""
    if len(operands) == 2:
        first, second = operands

        def both() -> Value:
            left = first()
            if left is decisive:
                return decisive
            right = second()
            if right is decisive:
                return decisive
            return None if left is None or right is None else not decisive

        return both

    def combined() -> Value:
        known = True
        for operand in operands:
            value = operand()
            if value is decisive:
                return decisive
            if value is None:
                known = False
        return not decisive if known else None

    return combined


def compile_negation(operand: Reader) -> Reader:
    """Compile `not`."""

    def negated() -> Value:
        value = operand()
        return None if value is None else not value

    return negated


def compile_coalesce(operands: list[Reader]) -> Reader:
    """Compile `coalesce`."""

    def first_known() -> Value:
        for operand in operands:
            value = operand()
            if value is not None:
                return value
        return None

    return first_known


def compile_unary(function: Callable[..., float], operand: Reader) -> Reader:
    """Compile a function of one value."""

    def of_one() -> Value:
        value = operand()
        return None if value is None else function(value)

    return of_one


def compile_binary(function: Callable[..., float], first: Reader, second: Reader) -> Reader:
    """Compile a function of two values."""

    def of_two() -> Value:
        left, right = first(), second()
        return None if left is None or right is None else function(left, right)

    return of_two


def compile_with_constant(function: Callable[..., float], first: float, second: Reader) -> Reader:
    """Compile a function whose first argument is constant."""
    if function is operator.mul:

        def times_constant() -> Value:
            value = second()
            return None if value is None else first * value

        return times_constant

    def with_constant() -> Value:
        value = second()
        return None if value is None else function(first, value)

    return with_constant


def compile_between(
    operands: list[Reader],
    compare: Callable[[float, float], bool],
    compare_next: Callable[[float, float], bool],
) -> Reader:
    """Compile `a < b <= c`: false as soon as one comparison is false."""
    first, second, third = operands

    def between() -> Value:
        left, middle, right = first(), second(), third()
        if middle is None:
            return None
        if left is not None and not compare(left, middle):
            return False
        if right is not None and not compare_next(middle, right):
            return False
        return None if left is None or right is None else True

    return between


def compile_function(function: Callable[..., float], operands: list[Reader]) -> Reader:
    """Compile a function of any number of values."""

    def of_many() -> Value:
        values = [operand() for operand in operands]
        return None if None in values else function(*values)

    return of_many
