"""Static check: a syntax tree becomes a typed expression, or a list of faults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.contract.rules import arithmetic
from baton.contract.rules.language.faults import Code, ExpressionError, suggest_name
from baton.contract.rules.language.function_signatures import GROUPS, NAMES, PLAIN, SUMMARIES, Function, find_usage
from baton.contract.rules.language.parser import parse
from baton.contract.rules.language.syntax_tree import (
    Binary,
    Comparison,
    FunctionCall,
    Logic,
    Name,
    Node,
    Number,
    Truth,
    Unary,
    format_node,
    format_number,
)
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
from baton.contract.rules.limits import LIMITS, MAX_STEP, Limits
from baton.contract.rules.metrics import SIGNALS, UNITS, Kind, Metric, MetricCatalog, explain_doubt, is_name

_QUANTITIES = (Kind.NUMBER, Kind.DURATION, Kind.SIZE)
_EXAMPLES = {Kind.NUMBER: "a number", Kind.DURATION: "a duration such as 90s", Kind.SIZE: "a size such as 10GiB"}


class Checked(NamedTuple):
    """Result of a check; `typed` is set if there are no faults."""

    typed: Typed | None
    faults: list[ExpressionError]
    doubts: list[ExpressionError]
    """Warnings: names that are probably misspelt."""


def check_condition(text: str, metrics: MetricCatalog | None = None, limits: Limits = LIMITS) -> Checked:
    """Check an expression that must be boolean."""
    checked = check(text, metrics, limits)
    if checked.typed is None or checked.typed.kind is Kind.BOOL:
        return checked
    return Checked(None, [_not_bool(checked.typed, 0)], checked.doubts)


def check(text: str, metrics: MetricCatalog | None = None, limits: Limits = LIMITS) -> Checked:
    """Check an expression of any kind."""
    checker = _Checker(metrics if metrics is not None else MetricCatalog(), limits)
    try:
        typed = checker.typed(parse(text, limits))
    except ExpressionError as error:
        return Checked(None, [error], [])
    return Checked(None if checker.faults else typed, checker.faults, checker.doubts)


def _not_bool(typed: Typed, offset: int) -> ExpressionError:
    reason = f"{typed.text} is {_article(typed.kind)}, not true or false"
    return ExpressionError(Code.WRONG_TYPE, reason, f"Compare it: {typed.text} > 0.", offset)


def _article(kind: Kind) -> str:
    return "true or false" if kind is Kind.BOOL else f"a {kind.value}"


def _all_of(found: Iterable[Typed | None]) -> list[Typed] | None:
    """Return the typed operands, or None if one is missing; its fault is recorded already."""
    typed = list(found)
    return None if None in typed else [one for one in typed if one is not None]


class _Checker:
    def __init__(self, metrics: MetricCatalog, limits: Limits) -> None:
        self._metrics = metrics
        self._limits = limits
        self.faults: list[ExpressionError] = []
        self.doubts: list[ExpressionError] = []

    def _fault(self, code: Code, reason: str, remedy: str, offset: int) -> None:
        self.faults.append(ExpressionError(code, reason, remedy, offset))

    def typed(self, node: Node) -> Typed | None:
        """Type a node; None if the node is wrong, with its faults in `faults`."""
        match node:
            case Number():
                return self._number(node)
            case Truth(value):
                return Constant(value, Kind.BOOL, format_node(node))
            case Name("inf"):
                return Constant(math.inf, Kind.NUMBER, "inf")
            case Name():
                metric = self._metric(node)
                return metric and Reading(metric.name, metric.kind, metric.name)
            case Unary():
                return self._unary(node)
            case Binary():
                return self._binary(node)
            case Comparison():
                return self._comparison(node)
            case Logic():
                return self._logic(node)
            case FunctionCall():
                return self._call(node)

    def _number(self, node: Number) -> Constant | None:
        if not node.unit:
            return Constant(node.value, Kind.NUMBER, format_node(node))
        if node.unit not in UNITS:
            self._fault(
                Code.UNKNOWN_UNIT, f"there is no unit {node.unit!r}", suggest_name(node.unit, UNITS), node.offset
            )
            return None
        kind, factor = UNITS[node.unit]
        return Constant(node.value * factor, kind, format_node(node))

    def _metric(self, node: Node) -> Metric | None:
        if not isinstance(node, Name):
            reason = f"{format_node(node)} is no metric, and only metrics have a history"
            self._fault(Code.WRONG_TYPE, reason, "Name a metric: mean(loss, 50).", node.offset)
            return None
        name = node.name
        if name in self._metrics:
            return self._metrics[name]
        if name in NAMES:
            self._fault(Code.WRONG_ARITY, f"{name} is a function", f"Write it like {find_usage(name)}.", node.offset)
        elif not is_name(name):
            self._fault(
                Code.SYNTAX,
                f"{name!r} is no metric",
                "Names are like eval.f1_macro; there are no attributes.",
                node.offset,
            )
        elif not self._metrics.open:
            reason = f"the metric {name} never appears"
            self._fault(Code.UNKNOWN_METRIC, reason, suggest_name(name, self._metrics), node.offset)
        else:
            if doubt := explain_doubt(name, self._metrics):
                self.doubts.append(ExpressionError(Code.DOUBTFUL_NAME, *doubt, node.offset))
            return Metric(name)
        return None

    def _quantity(self, node: Node) -> Typed | None:
        typed = self.typed(node)
        if typed is not None and typed.kind not in _QUANTITIES:
            reason = f"{typed.text} is true or false, not a number"
            self._fault(Code.WRONG_TYPE, reason, "Join conditions with 'and', 'or', 'not'.", node.offset)
            return None
        return typed

    def _condition(self, node: Node) -> Typed | None:
        typed = self.typed(node)
        if typed is not None and typed.kind is not Kind.BOOL:
            self.faults.append(_not_bool(typed, node.offset))
            return None
        return typed

    def _unary(self, node: Unary) -> Typed | None:
        if node.operator == "not":
            operand = self._condition(node.operand)
            return operand and fold(Operation("not", (operand,), Kind.BOOL, format_node(node)))
        operand = self._quantity(node.operand)
        if operand is None or node.operator == "+":
            return operand
        return fold(Operation("negate", (operand,), operand.kind, format_node(node)))

    def _binary(self, node: Binary) -> Typed | None:
        left, right = self._quantity(node.left), self._quantity(node.right)
        if left is None or right is None:
            return None
        kind = self._kind_of(node, left, right)
        return fold(Operation(node.operator, (left, right), kind, format_node(node))) if kind else None

    def _kind_of(self, node: Binary, left: Typed, right: Typed) -> Kind | None:
        sides = {left.kind, right.kind}
        if node.operator == "*" and Kind.NUMBER in sides:
            return left.kind if right.kind is Kind.NUMBER else right.kind
        if node.operator == "/" and right.kind in (Kind.NUMBER, left.kind):
            return left.kind if right.kind is Kind.NUMBER else Kind.NUMBER
        if node.operator in "+-%":
            return self._common([left, right], node)
        reason = f"{_article(left.kind)} and {_article(right.kind)} cannot be combined with '{node.operator}'"
        remedy = "Make a number of it first: wall / 1s, gpu.mem / 1GiB."
        self._fault(Code.WRONG_TYPE, reason, remedy, node.offset)
        return None

    def _common(self, operands: Sequence[Typed], node: Node) -> Kind | None:
        """Find the common kind of the operands; 0 and inf fit every kind."""
        fixed = [one for one in operands if not (isinstance(one, Constant) and one.value in (0, math.inf, -math.inf))]
        kind = (fixed or operands)[0].kind
        for one in fixed:
            if one.kind is not kind:
                other = (fixed or operands)[0]
                reason = f"{other.text} is {_article(kind)}, and {one.text} {_article(one.kind)}"
                remedy = f"Write {_EXAMPLES[kind]} instead of {one.text}."
                if isinstance(other, Constant):
                    remedy = f"Write {_EXAMPLES[one.kind]} instead of {other.text}."
                self._fault(Code.WRONG_TYPE, reason, remedy, node.offset)
                return None
        return kind

    def _comparison(self, node: Comparison) -> Typed | None:
        found = _all_of(map(self._quantity, node.operands))
        if found is None or self._common(found, node) is None:
            return None
        return fold(Chain(node.operators, tuple(found), Kind.BOOL, format_node(node)))

    def _logic(self, node: Logic) -> Typed | None:
        found = _all_of(map(self._condition, node.operands))
        return fold(Operation(node.operator, tuple(found), Kind.BOOL, format_node(node))) if found else None

    def _call(self, node: FunctionCall) -> Typed | None:
        name = node.function
        if name in PLAIN:
            return self._plain(node)
        if name in ("min", "max") and not self._over_window(node):
            return self._extreme(node)
        if name in SUMMARIES:
            return self._summary(node, SUMMARIES[name])
        if name in GROUPS:
            return self._grouped(node, GROUPS[name])
        if name in self._metrics:
            self._fault(Code.UNKNOWN_FUNCTION, f"{name} is a metric, no function", f"Write {name}.", node.offset)
        else:
            self._fault(Code.UNKNOWN_FUNCTION, f"there is no function {name!r}", suggest_name(name, NAMES), node.offset)
        return None

    @staticmethod
    def _over_window(node: FunctionCall) -> bool:
        arguments = node.arguments
        return len(arguments) < 2 or (len(arguments) == 2 and isinstance(arguments[1], Number))

    def _extreme(self, node: FunctionCall) -> Typed | None:
        if any(isinstance(argument, Number) for argument in node.arguments):
            remedy = f"Bound values with clamp(x, 0, 1); a window comes second: {node.function}(loss, 50)."
            self._fault(Code.WRONG_ARITY, f"{node.function} of a value and a number", remedy, node.offset)
            return None
        found = _all_of(map(self._quantity, node.arguments))
        if not found:
            return None
        kind = self._common(found, node)
        return fold(Operation(node.function, tuple(found), kind, format_node(node))) if kind else None

    def _arity(self, node: FunctionCall, least: int, most: int) -> bool:
        given = len(node.arguments)
        if least <= given <= most:
            return True
        wanted = str(least) if least == most else f"{least} to {most}" if most < 99 else f"at least {least}"
        reason = f"{node.function} takes {wanted} argument{'s' * (wanted != '1')}, not {given}"
        self._fault(Code.WRONG_ARITY, reason, f"Write it like {find_usage(node.function)}.", node.offset)
        return False

    def _plain(self, node: FunctionCall) -> Typed | None:
        name = node.function
        least, most = {"clamp": (3, 3), "coalesce": (2, 99)}.get(name, (1, 1))
        if not self._arity(node, least, most):
            return None
        if name == "coalesce":
            return self._coalesce(node)
        found = _all_of(map(self.typed if name == "missing" else self._quantity, node.arguments))
        if not found:
            return None
        kind: Kind | None = Kind.BOOL
        if name in ("abs", "clamp"):
            kind = self._common(found, node)
        elif name == "log":
            kind = Kind.NUMBER
            if found[0].kind is not Kind.NUMBER:
                remedy = "Make a number of it first: log(wall / 1s)."
                self._fault(Code.WRONG_TYPE, f"{found[0].text} is {_article(found[0].kind)}", remedy, node.offset)
                return None
        return fold(Operation(name, tuple(found), kind, format_node(node))) if kind else None

    def _coalesce(self, node: FunctionCall) -> Typed | None:
        found = _all_of(map(self.typed, node.arguments))
        if found is None:
            return None
        kinds = {one.kind for one in found}
        if Kind.BOOL in kinds:
            if len(kinds) > 1:
                reason = "coalesce mixes numbers with what is true or false"
                self._fault(Code.WRONG_TYPE, reason, "Give values of one kind.", node.offset)
                return None
            return fold(Operation("coalesce", tuple(found), Kind.BOOL, format_node(node)))
        kind = self._common(found, node)
        return fold(Operation("coalesce", tuple(found), kind, format_node(node))) if kind else None

    def _summary(self, node: FunctionCall, function: Function) -> Typed | None:
        name = node.function
        least = 2 if (function.window and function.window_required) or function.partner else 1
        most = 1 + function.window + function.goal + function.min_delta + function.partner
        if not self._arity(node, least, most):
            return None
        metric = self._metric_for(node, function)
        if metric is None:
            return None
        kind = metric.kind if function.gives == "same" else Kind(function.gives)
        summary = HistorySummary(name, metric.name)
        if function.window:
            if len(node.arguments) == 2:
                window = self._window(node, function)
                if window is None:
                    return None
                summary = summary._replace(window=window)
            elif name in ("delta", "changed"):
                summary = summary._replace(window=WindowSize(points=1))
        if function.partner:
            partner = self._metric(node.arguments[1])
            if partner is None:
                return None
            summary = summary._replace(partner=partner.name)
        if function.goal:
            with_goal = self._with_goal(node, summary, metric, node.arguments[1:])
            if with_goal is None:
                return None
            summary = with_goal
        return Aggregate(summary, kind, format_node(node))

    def _metric_for(self, node: FunctionCall, function: Function) -> Metric | None:
        metric = self._metric(node.arguments[0])
        if metric is not None and metric.kind is Kind.BOOL and not function.any_kind:
            reason = f"{metric.name} is true or false; {node.function} takes numbers"
            self._fault(Code.WRONG_TYPE, reason, "Use it as a condition.", node.offset)
            return None
        return metric

    def _grouped(self, node: FunctionCall, function: Function) -> Typed | None:
        metric = self._metric_for(node, function) if self._arity(node, 1, 2 + function.goal) else None
        if metric is None:
            return None
        if metric.control_plane and not metric.name.startswith(SIGNALS):
            remedy = "Name one that trainings report: group_median(loss)."
            self._fault(Code.WRONG_TYPE, f"the jobs of a group do not report {metric.name}", remedy, node.offset)
            return None
        step, rest = None, node.arguments[1:]
        if rest and not (function.goal and isinstance(rest[0], Name)):
            given, rest = rest[0], rest[1:]
            if not isinstance(given, Number) or given.unit or given.value > MAX_STEP or given.value % 1:
                remedy = f"Write a whole number: {function.usage}."
                self._fault(Code.INVALID_WINDOW, f"{format_node(given)} is no step", remedy, given.offset)
                return None
            step = int(given.value)
        goal = None
        if function.goal:
            with_goal = self._with_goal(node, HistorySummary(node.function, metric.name), metric, rest)
            if with_goal is None:
                return None
            goal = with_goal.goal
        kind = metric.kind if function.gives == "same" else Kind(function.gives)
        return Grouped(node.function, metric.name, step, goal, kind, format_node(node))

    def _window(self, node: FunctionCall, function: Function) -> WindowSize | None:
        given = node.arguments[1]
        foreign = not isinstance(given, Number) or (
            given.unit and (function.points_only or UNITS.get(given.unit, (None,))[0] is not Kind.DURATION)
        )
        if foreign or not isinstance(given, Number):
            reason = f"{format_node(given)} is no window"
            remedy = f"Write a number of points or a duration: {find_usage(node.function)}, {node.function}(loss, 10m)."
            if function.points_only:
                remedy = f"Write a number of points: {find_usage(node.function)}."
            self._fault(Code.INVALID_WINDOW, reason, remedy, given.offset)
            return None
        if given.unit:
            seconds = given.value * UNITS[given.unit][1]
            if not 0 < seconds <= 366 * 86400:
                self._fault(
                    Code.INVALID_WINDOW, f"a window of {format_node(given)}", "Write 1ms to 366d.", given.offset
                )
                return None
            return WindowSize(seconds=seconds)
        most = self._limits.median_points if node.function == "median" else self._limits.window_points
        if node.function == "count":
            remedy = "Write count(x) for all points so far, or count(x, 10m)."
            self._fault(Code.INVALID_WINDOW, "count over points is their number", remedy, given.offset)
            return None
        if not (function.least_points <= given.value <= most and given.value == int(given.value)):
            reason = f"a window of {format_number(given.value)} points"
            remedy = f"{node.function} takes {function.least_points} to {most:,} points."
            self._fault(Code.INVALID_WINDOW, reason, remedy, given.offset)
            return None
        return WindowSize(points=int(given.value))

    def _with_goal(
        self, node: FunctionCall, summary: HistorySummary, metric: Metric, arguments: Sequence[Node]
    ) -> HistorySummary | None:
        rest = list(arguments)
        goal = metric.goal
        if rest and isinstance(rest[0], Name):
            goal_name = rest.pop(0)
            if goal_name.name not in ("min", "max"):  # type: ignore[union-attr]
                self._fault(
                    Code.WRONG_TYPE, f"{format_node(goal_name)} is no goal", "Write min or max.", goal_name.offset
                )
                return None
            goal = "min" if goal_name.name == "min" else "max"  # type: ignore[union-attr]
        if goal is None:
            reason = f"{metric.name} has no goal: whether less or more is better is undeclared"
            remedy = f"Write {node.function}({metric.name}, min) or {node.function}({metric.name}, max)."
            self._fault(Code.WRONG_ARITY, reason, remedy, node.offset)
            return None
        if not rest:
            return summary._replace(goal=goal)
        wanted = SUMMARIES.get(node.function) or GROUPS[node.function]
        delta = self._number(rest[0]) if isinstance(rest[0], Number) and wanted.min_delta and len(rest) == 1 else None
        if delta is None or delta.kind is not metric.kind:
            self._fault(
                Code.WRONG_ARITY, f"{format_node(rest[0])} is out of place", f"Write {wanted.usage}.", rest[0].offset
            )
            return None
        return summary._replace(goal=goal, min_delta=delta.value)


def fold(typed: Operation | Chain) -> Typed:
    """Fold an operation to a constant if no metric can change its value."""
    constants = [one for one in typed.operands if isinstance(one, Constant)]
    if isinstance(typed, Operation) and typed.name in ("and", "or"):
        decisive = typed.name == "or"
        if any(bool(one.value) is decisive for one in constants):
            return Constant(decisive, Kind.BOOL, typed.text)
    if len(constants) < len(typed.operands):
        return typed
    return Constant(_value_of(typed, [one.value for one in constants]), typed.kind, typed.text)


def _value_of(typed: Operation | Chain, values: list[float]) -> float:
    if isinstance(typed, Chain):
        pairs = zip(typed.operators, values, values[1:], strict=False)
        return all(arithmetic.COMPARE[operator](left, right) for operator, left, right in pairs)
    match typed.name:
        case "and":
            return all(values)
        case "or":
            return any(values)
        case "not":
            return not values[0]
        case "missing":
            return False
        case "coalesce":
            return values[0]
        case name:
            return arithmetic.FUNCTIONS[name](*values)
