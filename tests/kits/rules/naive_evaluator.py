"""Naive evaluator of the rule language: computes everything from the whole history each time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from baton.contract.rules import arithmetic
from baton.contract.rules.document.durations import OF_ALL
from baton.contract.rules.document.rule import Rule
from baton.contract.rules.language.typed_ast import (
    Aggregate,
    Chain,
    Constant,
    Grouped,
    HistorySummary,
    Operation,
    Reading,
    Typed,
)
from baton.contract.rules.limits import LIMITS
from baton.contract.rules.metrics import Kind

Value = float | bool | None


@dataclass
class History:
    """History of one metric: all points, and whether its value is known."""

    points: list[tuple[float, float]] = field(default_factory=list)
    """Value and time."""
    current: float | None = None


@dataclass
class World:
    """History of all observations."""

    now: float = -math.inf
    metrics: dict[str, History] = field(default_factory=dict)
    then: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Values of all metrics at the newest point of each metric, by the name of the latter."""

    def take(self, metrics: Mapping[str, float | None], step: int, now: float) -> None:
        """Add an observation."""
        self.now = max(self.now, now)
        given = dict(metrics)
        given.setdefault("step", float(step))
        for name, value in given.items():
            history = self.metrics.setdefault(name, History())
            history.current = value
            if value is not None:
                history.points.append((value, self.now))
        current = {name: history.current for name, history in self.metrics.items()}
        self.then.update({name: current for name, value in given.items() if value is not None})

    def value(self, typed: Typed) -> Value:
        """Evaluate an expression now."""
        match typed:
            case Constant(value):
                return value
            case Reading(metric, kind):
                current = self.metrics.get(metric, History()).current
                if kind is Kind.BOOL:
                    return None if current is None or not math.isfinite(current) else current != 0
                return current
            case Aggregate(summary) if summary.partner:
                return self.then.get(summary.partner, {}).get(summary.metric)
            case Aggregate(summary):
                return aggregate(summary, self.metrics.get(summary.metric, History()).points, self.now)
            case Grouped():
                return None  # nobody says what others report
            case Chain(operators, operands):
                values = [self.value(operand) for operand in operands]
                links = [
                    None if left is None or right is None else arithmetic.COMPARE[operator](left, right)
                    for operator, left, right in zip(operators, values, values[1:], strict=False)
                ]
                return kleene(links, decisive=False)
            case Operation(name, operands):
                return operation(name, [self.value(operand) for operand in operands])


def kleene(values: list[Value], *, decisive: bool) -> bool | None:
    """Combine three-valued results: a deciding one, else unknown, else the other."""
    if any(value is decisive for value in values):
        return decisive
    return None if None in values else not decisive


def operation(name: str, values: list[Value]) -> Value:  # noqa: C901 - one case for each
    """Apply an operation to values, some of them unknown."""
    if name in ("and", "or"):
        return kleene(values, decisive=name == "or")
    if name == "missing":
        return values[0] is None
    if name == "coalesce":
        return next((value for value in values if value is not None), None)
    if any(value is None for value in values):
        return None
    left, *rest = [float(value) for value in values if value is not None]
    match name:
        case "not":
            return not left
        case "negate":
            return -left
        case "abs":
            return math.fabs(left)
        case "isnan":
            return math.isnan(left)
        case "isfinite":
            return math.isfinite(left)
        case "log":
            return -math.inf if left == 0 else math.log(left) if left > 0 else math.nan
        case "min" | "max" | "clamp" if any(map(math.isnan, (left, *rest))):
            return math.nan
        case "min":
            return min(left, *rest)
        case "max":
            return max(left, *rest)
        case "clamp":
            return (
                rest[1]
                if left > rest[1]
                else rest[0]
                if left < rest[0] <= rest[1]
                else min(max(left, rest[0]), rest[1])
            )
        case "/":
            if rest[0] == 0:
                return math.nan if math.isnan(left) or left == 0 else math.inf if left > 0 else -math.inf
            return left / rest[0]
        case "%":
            return math.nan if rest[0] == 0 or not math.isfinite(left) else left % rest[0]
    return {"+": left + rest[0], "-": left - rest[0], "*": left * rest[0]}[name]


def aggregate(summary: HistorySummary, points: list[tuple[float, float]], now: float) -> Value:
    """Summarize a whole history."""
    function, _, window, goal, min_delta, _ = summary
    values = [value for value, _ in points]
    if goal is not None:
        return best(function, values, 1 if goal == "min" else -1, min_delta)
    if function == "age":
        return now - points[-1][1] if points else None
    if function == "count" and window is None:
        return float(len(points))
    assert window is not None
    if function == "ema":
        return ema(points, now, window.points, window.seconds)
    if function in ("rising", "falling", "changed"):
        return streak(function, points, now, window.points, window.seconds)
    if function in ("delta", "lag") and window.points:
        earlier = values[-1 - window.points] if len(values) > window.points else None
        return values[-1] - earlier if function == "delta" and earlier is not None else earlier
    if window.points:
        seen = values[:-1] if function == "zscore" else values
        inside = seen[-window.points :]
        if len(inside) < window.points:
            return None
    else:
        seen_points = points[:-1] if function == "zscore" else points
        inside = [value for value, at in seen_points if at > now - window.seconds][-LIMITS.duration_points :]
        if function == "count":
            return float(len(inside))
        least = 1 if function in ("mean", "min", "max", "median") else 2
        if len(inside) < least or now - points[0][1] < window.seconds:
            return None
    if function == "delta":
        return values[-1] - inside[0]
    return statistic(function, inside, values[-1])


def statistic(function: str, inside: list[float], newest: float) -> float:
    """Compute a statistic of a window's points in fractions."""
    finite = all(map(math.isfinite, inside))
    if any(map(math.isnan, inside)):
        return math.nan
    ordered = sorted(inside)
    size = len(inside)
    if function in ("min", "max"):
        return ordered[0] if function == "min" else ordered[-1]
    if function == "median":
        low, high = ordered[(size - 1) // 2], ordered[size // 2]
        return float((Fraction(low) + Fraction(high)) / 2) if math.isfinite(low) and math.isfinite(high) else low + high
    if not finite:
        return sum(value for value in inside if math.isinf(value)) if function == "mean" else math.nan
    exact = [Fraction(value) for value in inside]
    mean = sum(exact) / size
    if function == "mean":
        return as_float(mean)
    if function == "slope":
        middle = Fraction(size - 1, 2)
        spread = sum((index - middle) ** 2 for index in range(size))
        return as_float(sum((index - middle) * (value - mean) for index, value in enumerate(exact)) / spread)
    deviation = root(sum((value - mean) ** 2 for value in exact) / (size - 1))
    if function == "std":
        return deviation
    offset = newest - as_float(mean)
    if deviation == 0:
        return offset if offset == 0 or math.isnan(offset) else math.copysign(math.inf, offset)
    return offset / deviation


def as_float(value: Fraction) -> float:
    """Round to the nearest float."""
    try:
        return value.numerator / value.denominator
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def root(value: Fraction) -> float:
    """Compute a square root by integers, to more digits than a float has."""
    scaled = math.isqrt((value.numerator << 4400) // value.denominator)
    return as_float(Fraction(scaled, 1 << 2200))


def best(function: str, values: list[float], sign: int, min_delta: float) -> float | None:
    """Find the best value so far, or the points since."""
    found: float | None = None
    at = 0
    for index, value in enumerate(values):
        if math.isfinite(value) and (found is None or (found - value) * sign > min_delta):
            found, at = value, index
    if found is None:
        return None
    return found if function == "best" else float(len(values) - 1 - at)


def ema(points: list[tuple[float, float]], now: float, size: int, seconds: float) -> float | None:
    """Compute the exponential moving average of all points."""
    if not points or (size and len(points) < size) or (seconds and now - points[0][1] < seconds):
        return None
    if not math.isfinite(points[-1][0]):
        return points[-1][0]
    average: float | None = None
    before = 0.0
    for value, at in points:
        if math.isfinite(value):
            weight = -math.expm1((before - at) / seconds) if seconds else 2 / (size + 1)
            average = value if average is None else average * (1 - weight) + value * weight
            before = at
    return average


def streak(function: str, points: list[tuple[float, float]], now: float, size: int, seconds: float) -> bool | None:
    """Count the points back to the streak's start."""
    goes_on = {
        "rising": lambda a, b: b > a,
        "falling": lambda a, b: b < a,
        "changed": lambda a, b: a == b or (math.isnan(a) and math.isnan(b)),
    }[function]
    values = [value for value, _ in points]
    if (size and len(points) <= size) or not points or (seconds and now - points[0][1] < seconds):
        return None
    length = 0
    for before, after in reversed(list(pairwise(values))):
        if not goes_on(before, after):
            break
        length += 1
    since = points[-1 - length][1]
    if function == "changed":
        return length < size if size else length + 1 < len(points) and now - since < seconds
    return length >= size if size else length > 0 and points[-1][1] - since >= seconds


@dataclass
class NaiveRule:
    """State machine of a rule that replays all its results each time."""

    rule: Rule
    checks: list[tuple[bool | None, bool | None, int, float]] = field(default_factory=list)
    """Condition, clear, step, time."""
    fired: list[int] = field(default_factory=list)
    """Indices of checks."""
    cleared: list[int] = field(default_factory=list)

    def check(self, truth: bool | None, clear: bool | None, step: int, now: float) -> str | None:
        """Advance the rule; returns `fired` or `cleared`."""
        self.checks.append((truth, clear, step, now))
        index = len(self.checks) - 1
        rule = self.rule
        if not self._warm(index):
            return None
        last_fired = self.fired[-1] if self.fired else None
        active = last_fired is not None and not any(at > last_fired for at in self.cleared)
        if active and ((truth is False) if rule.clear is None else clear is True):
            self.cleared.append(index)
            return "cleared"
        if rule.max_fires is not None and len(self.fired) >= rule.max_fires:
            return None
        if active and (rule.clear is not None or rule.cooldown is None):
            return None
        if not self._cool(index):
            return None
        ends = [*self.fired, *self.cleared]
        if rule.pending.of == OF_ALL and rule.clear is None and rule.cooldown is not None:
            # it was never held, and being cleared forgets nothing
            ends = self.fired
        begin = max([*(at + 1 for at in ends), 0])
        counted = [one for at, one in enumerate(self.checks) if at >= begin and self._counts(at)]
        if self._holds([one for one in counted if one[0] is not None], truth):
            self.fired.append(index)
            return "fired"
        return None

    def _warm(self, index: int) -> bool:
        return any(self._warm_at(at) for at in range(index + 1))

    def _warm_at(self, index: int) -> bool:
        period = self.rule.warmup
        if period is None:
            return True
        _, _, step, now = self.checks[index]
        gone = {"steps": step, "seconds": now - self.checks[0][3], "checks": index}[period.measure]
        return gone >= period.amount

    def _cool(self, index: int) -> bool:
        fired = [at for at in self.fired if at < index]
        if self.rule.cooldown is None or not fired:
            return True
        _, _, step, now = self.checks[index]
        _, _, step_then, now_then = self.checks[fired[-1]]
        gone = {"steps": step - step_then, "seconds": now - now_then, "checks": index - fired[-1]}
        return gone[self.rule.cooldown.measure] >= self.rule.cooldown.amount

    def _counts(self, index: int) -> bool:
        return self._warm(index) and self._cool(index)

    def _holds(self, counted: list[tuple[bool | None, bool | None, int, float]], truth: bool | None) -> bool:
        if truth is None:
            return False
        period, of = self.rule.pending
        if of == OF_ALL:
            return sum(one[0] is True for one in counted) >= period.amount
        if of:
            return sum(one[0] is True for one in counted[-of:]) >= period.amount
        trailing = []
        for one in reversed(counted):
            if one[0] is not True:
                break
            trailing.append(one)
        if period.measure == "checks":
            return len(trailing) >= period.amount
        column = 2 if period.measure == "steps" else 3
        return bool(trailing) and trailing[0][column] - trailing[-1][column] >= period.amount
