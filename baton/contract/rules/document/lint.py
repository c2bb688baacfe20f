"""Lint: conditions that contradict themselves, and rules that need more steps than the training has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import NamedTuple

from baton.contract.rules.document.durations import Period
from baton.contract.rules.document.rule import Rule
from baton.contract.rules.language.faults import Code
from baton.contract.rules.language.typed_ast import Aggregate, Chain, Constant, Operation, Reading, Typed
from baton.contract.rules.metrics import BUILT_IN, Metric, MetricCatalog
from baton.contract.yaml_documents import Document, Location

_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_SILENCE = "heartbeat.age"
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_ANY: frozenset[bool | None] = frozenset((True, False, None))
_WITHIN_RANGE = frozenset(("mean", "min", "max", "median", "ema", "best", "lag", "at"))


class TrainingBounds(NamedTuple):
    """Known bounds of the training."""

    max_steps: int | None = None
    metrics: MetricCatalog | None = None
    max_silence_s: float | None = None
    """Greatest age in seconds of a heartbeat before the lease expires."""


class ValueRange(NamedTuple):
    """Interval of values with open or closed ends."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    @property
    def is_empty(self) -> bool:
        """Check whether the interval contains no value."""
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def cut(self, operator: str, bound: float) -> ValueRange:
        """Return the part of the interval that compares so with `bound`."""
        low, high, low_open, high_open = self
        if operator in (">", ">=", "==") and bound >= low:
            low, low_open = bound, (operator == ">") or (bound == low and low_open)
        if operator in ("<", "<=", "==") and bound <= high:
            high, high_open = bound, (operator == "<") or (bound == high and high_open)
        beyond = (operator == "==" and not self.low <= bound <= self.high) or math.isnan(bound)
        return ValueRange(1.0, 0.0) if beyond else ValueRange(low, high, low_open, high_open)


def lint_rule(rule: Rule, reach: TrainingBounds, location: Location, warnings: Document) -> None:
    """Record warnings that follow from the expressions alone; the absence of warnings proves nothing."""
    if isinstance(rule.when, Constant):
        if not rule.when.value:
            _note(warnings, (*location, "when"), "the condition is never true", Code.NEVER_FIRES)
        elif rule.cooldown is None:
            reason = "the condition is always true: without 'cooldown' the rule fires once"
            _note(warnings, (*location, "when"), reason, Code.ALWAYS_TRUE)
    elif is_never_true(rule.when, reach.metrics):
        _note(warnings, (*location, "when"), "the condition contradicts itself", Code.NEVER_FIRES)
    elif reach.max_silence_s is not None and _SILENCE in rule.metrics:
        known: Mapping[str, Metric] = reach.metrics or BUILT_IN
        if is_never_true(rule.when, {**known, _SILENCE: known[_SILENCE]._replace(high=reach.max_silence_s)}):
            reason = f"{_SILENCE} hardly ever exceeds {reach.max_silence_s:g} s: the lease has ended by then"
            remedy = "Choose a smaller bound, or a longer heartbeat_interval_s: a lease is three of them."
            warnings.fault((*location, "when"), reason, remedy, code=Code.NEVER_FIRES)
    if rule.clear is not None and (
        is_never_true(rule.clear, reach.metrics) or (isinstance(rule.clear, Constant) and not rule.clear.value)
    ):
        _note(warnings, (*location, "clear"), "the rule is never cleared: it fires once", Code.NEVER_CLEARS)
    elif rule.clear is not None and _implies(rule.when, rule.clear):
        reason = "is true whenever the condition is: the rule is cleared at the next check, and fires again"
        remedy = "Write a stricter condition, such as 'clear: loss < 3' for 'when: loss > 5', or leave it out."
        warnings.fault((*location, "clear"), reason, remedy, code=Code.ALWAYS_CLEARS)
    if reach.max_steps is None:
        return
    warmup = _steps(rule.warmup)
    for key, needed in (
        ("warmup", warmup),
        ("every", _steps(rule.every)),
        ("for", warmup + (_steps(rule.pending.period) if not rule.pending.of else 0)),
    ):
        if needed > reach.max_steps and (key != "for" or warmup <= reach.max_steps):
            reason = f"needs {needed:,.0f} steps, and the training has {reach.max_steps:,}"
            _note(warnings, (*location, key), reason, Code.NEVER_FIRES)


def is_never_true(typed: Typed, metrics: Mapping[str, Metric] | None = None) -> bool:
    """Check whether a condition is provably never true."""
    if isinstance(typed, Constant):
        return typed.value is False
    if isinstance(typed, Operation) and typed.name == "or":
        return all(is_never_true(one, metrics) for one in typed.operands)
    ranges: dict[str, ValueRange] = {}
    for part in _conjuncts(typed):
        if isinstance(part, Operation) and part.name == "or" and is_never_true(part, metrics):
            return True
        for operand, operator, bound in _bounds(part):
            known = ranges.get(operand.text) or _natural(operand, metrics or MetricCatalog())
            ranges[operand.text] = known.cut(operator, bound)
    return any(found.is_empty for found in ranges.values())


def _implies(condition: Typed, other: Typed) -> bool:
    """Check whether `other` is provably true whenever `condition` is."""
    ranges: dict[str, ValueRange] = {}
    for part in _conjuncts(condition):
        for operand, operator, bound in _bounds(part):
            ranges[operand.text] = ranges.get(operand.text, ValueRange()).cut(operator, bound)
    known_texts = {part.text for part in _conjuncts(condition)}
    return all(part.text in known_texts or _follows(part, ranges) for part in _conjuncts(other))


def _follows(part: Typed, ranges: Mapping[str, ValueRange]) -> bool:
    if isinstance(part, Constant):
        return part.value is True
    bounds = _bounds(part)
    if not isinstance(part, Chain) or len(bounds) < len(part.operators):
        return False
    return all(
        operator in _OPPOSITE
        and operand.text in ranges
        and ranges[operand.text].cut(_OPPOSITE[operator], bound).is_empty
        for operand, operator, bound in bounds
    )


def find_outcomes(condition: Typed, known: Set[str]) -> Set[bool | None]:
    """List the possible results of a condition while only the `known` metrics have values; None means unknown."""
    if isinstance(condition, Constant):
        return {bool(condition.value)}
    if isinstance(condition, Operation) and condition.name in ("and", "or"):
        decisive = condition.name == "or"
        each = [find_outcomes(one, known) for one in condition.operands]
        found = {one for one in (decisive, None) if any(one in possible for possible in each)}
        return found | ({not decisive} if all((not decisive) in possible for possible in each) else set())
    if isinstance(condition, Operation) and condition.name == "not":
        return {None if one is None else not one for one in find_outcomes(condition.operands[0], known)}
    if isinstance(condition, Operation) and condition.name == "missing":
        return {True} if _never_known(condition.operands[0], known) else {True, False}
    return {None} if _never_known(condition, known) else _ANY


def _never_known(typed: Typed, known: Set[str]) -> bool:
    match typed:
        case Reading(metric):
            return metric not in known
        case Aggregate(summary):
            return summary.function != "count" and summary.metric not in known
        case Operation("and" | "or" | "not" | "missing"):
            return find_outcomes(typed, known) == {None}
        case Operation("coalesce", operands):
            return all(_never_known(one, known) for one in operands)
        case Operation(_, operands) | Chain(_, operands):
            return any(_never_known(one, known) for one in operands)
    return False


def _conjuncts(typed: Typed) -> list[Typed]:
    if isinstance(typed, Operation) and typed.name == "and":
        return [part for one in typed.operands for part in _conjuncts(one)]
    return [typed]


def _bounds(part: Typed) -> list[tuple[Typed, str, float]]:
    """List the comparisons with constants: operand, operator, bound."""
    if not isinstance(part, Chain):
        return []
    found: list[tuple[Typed, str, float]] = []
    for operator, left, right in zip(part.operators, part.operands, part.operands[1:], strict=False):
        if isinstance(right, Constant) and not isinstance(left, Constant):
            found.append((left, operator, right.value))
        elif isinstance(left, Constant) and not isinstance(right, Constant):
            found.append((right, _MIRRORED[operator], left.value))
    return found


def _natural(operand: Typed, metrics: Mapping[str, Metric]) -> ValueRange:
    """Return the interval of the operand's possible values."""
    if isinstance(operand, Reading):
        name = operand.metric
    elif isinstance(operand, Aggregate) and operand.summary.function in _WITHIN_RANGE:
        name = operand.summary.metric
    elif isinstance(operand, Aggregate) and operand.summary.function in ("std", "count", "since_best", "age"):
        return ValueRange(low=0.0)
    else:
        return ValueRange()
    known = metrics.get(name) or BUILT_IN.get(name)
    return ValueRange(known.low, known.high) if known is not None else ValueRange()


def _steps(period: Period | None) -> float:
    return period.amount if period is not None and period.measure == "steps" else 0


def _note(warnings: Document, location: Location, reason: str, code: Code) -> None:
    warnings.fault(location, reason, "Correct it, or leave the rule out.", code=code)
