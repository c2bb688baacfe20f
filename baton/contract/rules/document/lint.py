"""Warnings: conditions that contradict themselves, and rules that need longer than the training lasts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import NamedTuple

from baton.contract.documents import Document, Location
from baton.contract.rules.document.durations import Period
from baton.contract.rules.document.rule import Rule
from baton.contract.rules.language.faults import Code
from baton.contract.rules.language.typed_ast import Aggregate, Chain, Constant, Operation, Reading, Typed
from baton.contract.rules.metrics import BUILT_IN, Metric, Metrics

_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_SILENCE = "heartbeat.age"
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_ANY: frozenset[bool | None] = frozenset((True, False, None))
_WITHIN_RANGE = frozenset(("mean", "min", "max", "median", "ema", "best", "lag", "at"))


class Reach(NamedTuple):
    """What is known of the training."""

    max_steps: int | None = None
    metrics: Metrics | None = None
    max_silence_s: float | None = None
    """How old a heartbeat can become before the job is taken from its machine."""


class Range(NamedTuple):
    """Values between two bounds, each of them included or not."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no value lies within."""
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def cut(self, operator: str, bound: float) -> Range:
        """Those values of it that compare so with a bound."""
        low, high, low_open, high_open = self
        if operator in (">", ">=", "==") and bound >= low:
            low, low_open = bound, (operator == ">") or (bound == low and low_open)
        if operator in ("<", "<=", "==") and bound <= high:
            high, high_open = bound, (operator == "<") or (bound == high and high_open)
        beyond = (operator == "==" and not self.low <= bound <= self.high) or math.isnan(bound)
        return Range(1.0, 0.0) if beyond else Range(low, high, low_open, high_open)


def look_for_what_never_happens(rule: Rule, reach: Reach, location: Location, warnings: Document) -> None:
    """Note what can be seen without running it; silence proves nothing."""
    if isinstance(rule.when, Constant):
        if not rule.when.value:
            _note(warnings, (*location, "when"), "the condition is never true", Code.NEVER_FIRES)
        elif rule.cooldown is None:
            reason = "the condition is always true: without 'cooldown' the rule fires once"
            _note(warnings, (*location, "when"), reason, Code.ALWAYS_TRUE)
    elif never_true(rule.when, reach.metrics):
        _note(warnings, (*location, "when"), "the condition contradicts itself", Code.NEVER_FIRES)
    elif reach.max_silence_s is not None and _SILENCE in rule.metrics:
        known: Mapping[str, Metric] = reach.metrics or BUILT_IN
        if never_true(rule.when, {**known, _SILENCE: known[_SILENCE]._replace(high=reach.max_silence_s)}):
            reason = f"{_SILENCE} hardly ever exceeds {reach.max_silence_s:g} s: the lease has ended by then"
            remedy = "Choose a smaller bound, or a longer heartbeat_interval_s: a lease is three of them."
            warnings.fault((*location, "when"), reason, remedy, code=Code.NEVER_FIRES)
    if rule.clear is not None and (
        never_true(rule.clear, reach.metrics) or (isinstance(rule.clear, Constant) and not rule.clear.value)
    ):
        _note(warnings, (*location, "clear"), "the rule is never cleared: it fires once", Code.NEVER_CLEARS)
    elif rule.clear is not None and _implies(rule.when, rule.clear):
        reason = "is true whenever the condition is: the rule is cleared at the next check, and fires again"
        remedy = "Write what shall be reached first, like 'clear: loss < 3' for 'when: loss > 5', or leave it out."
        warnings.fault((*location, "clear"), reason, remedy, code=Code.ALWAYS_CLEARS)
    if reach.max_steps is None:
        return
    warmup = _steps(rule.warmup)
    for key, needed in (
        ("warmup", warmup),
        ("every", _steps(rule.every)),
        ("for", warmup + (_steps(rule.hold.period) if not rule.hold.of else 0)),
    ):
        if needed > reach.max_steps and (key != "for" or warmup <= reach.max_steps):
            reason = f"needs {needed:,.0f} steps, and the training has {reach.max_steps:,}"
            _note(warnings, (*location, key), reason, Code.NEVER_FIRES)


def never_true(typed: Typed, metrics: Mapping[str, Metric] | None = None) -> bool:
    """Whether a condition can be seen to be false, or unknown, whatever comes."""
    if isinstance(typed, Constant):
        return typed.value is False
    if isinstance(typed, Operation) and typed.name == "or":
        return all(never_true(one, metrics) for one in typed.operands)
    ranges: dict[str, Range] = {}
    for part in _conjuncts(typed):
        if isinstance(part, Operation) and part.name == "or" and never_true(part, metrics):
            return True
        for operand, operator, bound in _bounds(part):
            known = ranges.get(operand.text) or _natural(operand, metrics or Metrics())
            ranges[operand.text] = known.cut(operator, bound)
    return any(found.is_empty for found in ranges.values())


def _implies(condition: Typed, other: Typed) -> bool:
    """Whether it can be seen that the other is true whenever the condition is."""
    ranges: dict[str, Range] = {}
    for part in _conjuncts(condition):
        for operand, operator, bound in _bounds(part):
            ranges[operand.text] = ranges.get(operand.text, Range()).cut(operator, bound)
    said = {part.text for part in _conjuncts(condition)}
    return all(part.text in said or _follows(part, ranges) for part in _conjuncts(other))


def _follows(part: Typed, ranges: Mapping[str, Range]) -> bool:
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


def outcomes(condition: Typed, known: Set[str]) -> Set[bool | None]:
    """What can become of a condition while no metric but these has ever come; None for unknown."""
    if isinstance(condition, Constant):
        return {bool(condition.value)}
    if isinstance(condition, Operation) and condition.name in ("and", "or"):
        decisive = condition.name == "or"
        each = [outcomes(one, known) for one in condition.operands]
        found = {one for one in (decisive, None) if any(one in possible for possible in each)}
        return found | ({not decisive} if all((not decisive) in possible for possible in each) else set())
    if isinstance(condition, Operation) and condition.name == "not":
        return {None if one is None else not one for one in outcomes(condition.operands[0], known)}
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
            return outcomes(typed, known) == {None}
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
    """What a comparison says of operands by themselves."""
    if not isinstance(part, Chain):
        return []
    found: list[tuple[Typed, str, float]] = []
    for operator, left, right in zip(part.operators, part.operands, part.operands[1:], strict=False):
        if isinstance(right, Constant) and not isinstance(left, Constant):
            found.append((left, operator, right.value))
        elif isinstance(left, Constant) and not isinstance(right, Constant):
            found.append((right, _MIRRORED[operator], left.value))
    return found


def _natural(operand: Typed, metrics: Mapping[str, Metric]) -> Range:
    """What a metric can be at all."""
    if isinstance(operand, Reading):
        name = operand.metric
    elif isinstance(operand, Aggregate) and operand.summary.function in _WITHIN_RANGE:
        name = operand.summary.metric
    elif isinstance(operand, Aggregate) and operand.summary.function in ("std", "count", "since_best", "age"):
        return Range(low=0.0)
    else:
        return Range()
    known = metrics.get(name) or BUILT_IN.get(name)
    return Range(known.low, known.high) if known is not None else Range()


def _steps(period: Period | None) -> float:
    return period.amount if period is not None and period.measure == "steps" else 0


def _note(warnings: Document, location: Location, reason: str, code: Code) -> None:
    warnings.fault(location, reason, "Correct it, or leave the rule out.", code=code)
