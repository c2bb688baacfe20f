"""Translate Python conditions to expressions with equal decisions, or refuse the conditions.

The original evaluates operands from left to right and skips the rule at the first missing metric. The rule language
continues, because `unknown or true` is true. If the decisions would differ, the translation repeats the first operand,
so that an unknown first operand makes the whole expression unknown.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from baton.contract.rules.language.faults import Code, ExpressionError, suggest_name
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
    get_children,
)
from baton.contract.rules.limits import LIMITS
from gpu_client.importers.ibm.metrics import (
    ALWAYS_KNOWN,
    EVALUATED,
    FINAL_SAVE,
    Evaluated,
    Keys,
    MetricSource,
    Size,
    find_presence,
    name_evaluation,
    refuse,
    translate_number,
    translate_size,
)
from gpu_client.importers.ibm.refusals import refuse_call, refuse_node


class ConditionContext(NamedTuple):
    """Requirements of the surrounding expression."""

    positive: bool = True
    """True outside `not`, where a true part supports a true rule."""
    exact: bool = False
    """True if false and unknown must stay distinct: false resets a patience, unknown does not."""
    beside: bool = False
    """True if a later operand may decide without this part, while the original skips the rule."""
    full: frozenset[str] = frozenset()
    """Metrics with full windows whenever this part decides."""


class TranslatedCondition(NamedTuple):
    """Translated condition."""

    node: Node
    may: frozenset[str] = frozenset()
    """Metrics whose absence makes the original skip the rule on some path."""
    sure: frozenset[str] = frozenset()
    """Metrics whose absence makes the translation unknown."""


def join_conditions(
    operator: str, first: TranslatedCondition, rest: TranslatedCondition, context: ConditionContext
) -> TranslatedCondition:
    """Join two conditions by `and` or `or`."""
    inner = rest.node.operands if isinstance(rest.node, Logic) and rest.node.operator == operator else (rest.node,)
    plain = TranslatedCondition(Logic(operator, (first.node, *inner)), first.may | rest.may, first.sure & rest.sure)
    decides = context.exact or context.beside or (operator == "or") is context.positive
    if not (first.may <= rest.sure or not decides):
        other = "or" if operator == "and" else "and"
        plain = TranslatedCondition(
            Logic(other, (plain.node, require_known(first.node, operator))), plain.may, first.sure
        )
    # Nested repetitions multiply, therefore the translation has a size limit.
    if _is_large(plain.node):
        reason = f"its translation has more than {LIMITS.nodes} parts"
        raise refuse(reason, "Split it into several controllers.", Code.TOO_LARGE)
    return plain


def _is_large(node: Node) -> bool:
    seen, pending = 0, [node]
    while pending and seen <= LIMITS.nodes:
        seen += 1
        pending += get_children(pending.pop())
    return seen > LIMITS.nodes


def require_known(node: Node, operator: str) -> Node:
    """Return an expression that is unknown if the condition is, otherwise true for `or` and false for `and`."""
    return Logic(operator, (node, Unary("not", node)))


T = TypeVar("T")
_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_ARITHMETIC: Mapping[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%",
}  # fmt: skip


class Translated(NamedTuple):
    """Translation of a whole rule."""

    text: str
    final: bool
    """True if the rule reads `is_final`."""
    differs: tuple[tuple[int, str], ...]
    """Differences from the original: offset and reason."""


def translate_expression(
    text: str, sources: Mapping[str, MetricSource], *, resets: bool, saves_only: bool | None
) -> Translated:
    """Translate a rule. Raises ExpressionError.

    `resets`: True if a false check resets a patience. `saves_only`: True if only saves trigger the rule, False if no
    save does, None for a mix.
    """
    if len(text) > LIMITS.text_chars:
        raise refuse(
            f"has {len(text)} characters; at most {LIMITS.text_chars} are allowed", "Split it.", Code.TOO_LARGE
        )
    if "__" in text:
        error = refuse("two underscores in a row reach into Python itself", "Name metrics and numbers.")
        error.offset = text.index("__")
        raise error
    translator = _Translator(text, sources, saves_only)
    if _is_deep(translator.tree()):
        raise refuse("is nested too deeply", "Split it into several controllers.", Code.TOO_LARGE)
    part = translator.condition(translator.tree(), ConditionContext(exact=resets and translator.branches()))
    return Translated(format_node(part.node), translator.final, tuple(translator.differs))


class _Translator:
    def __init__(self, text: str, sources: Mapping[str, MetricSource], saves_only: bool | None) -> None:
        self._text = text
        self._begin = len(text) - len(text.lstrip())
        self._lines = text.strip().split("\n")
        self._sources = sources
        self._saves_only = saves_only
        self._parsed = self._parse()
        self._evaluated = self._an_evaluated_metric()
        self.final = False
        self.differs: list[tuple[int, str]] = []

    def tree(self) -> ast.expr:
        return self._parsed

    def branches(self) -> bool:
        """Return True if the rule can be true for more than one reason."""
        return any(isinstance(node, (ast.Or, ast.Not, ast.IfExp)) for node in ast.walk(self._parsed))

    def _parse(self) -> ast.expr:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self._text.strip(), mode="eval").body
        except SyntaxError as error:
            line, column = (error.lineno or 1) - 1, (error.offset or 1) - 1
            offset = self._begin + sum(len(one) + 1 for one in self._lines[:line]) + max(column, 0)
            reason = f"is no Python expression: {error.msg}"
            remedy = "Write one expression that is true or false; the original runs the first of several."
            raise ExpressionError(Code.SYNTAX, reason, remedy, min(offset, len(self._text))) from None
        except (ValueError, RecursionError, MemoryError) as error:
            reason = f"is no Python expression ({type(error).__name__})"
            raise ExpressionError(Code.SYNTAX, reason, "Write it shorter and plainer.", 0) from None

    def _offset(self, node: ast.expr) -> int:
        before = self._lines[: node.lineno - 1]
        line = self._lines[node.lineno - 1].encode()[: node.col_offset].decode()
        return self._begin + sum(len(one) + 1 for one in before) + len(line)

    def _placed(self, error: ExpressionError, node: ast.expr) -> ExpressionError:
        error.offset = self._offset(node)
        return error

    def _an_evaluated_metric(self) -> str:
        """Return an evaluation metric that the rule reads."""
        for node in ast.walk(self._parsed):
            match node:
                case ast.Subscript(_, ast.Constant(str() as key)) | ast.Attribute(_, key) if key.startswith("eval_"):
                    try:
                        return name_evaluation(key)
                    except ExpressionError:
                        break
        return EVALUATED

    # Conditions

    def condition(self, node: ast.expr, context: ConditionContext) -> TranslatedCondition:
        """Translate a boolean expression."""
        match node:
            case ast.Constant(bool() as value):
                return TranslatedCondition(Truth(value))
            case ast.BoolOp(operator, values):
                return self._logic("and" if isinstance(operator, ast.And) else "or", values, context)
            case ast.UnaryOp(ast.Not(), operand):
                part = self.condition(operand, context._replace(positive=not context.positive))
                return part._replace(node=Unary("not", part.node))
            case ast.IfExp(test, body, orelse):
                return self._choice(test, body, orelse, context)
            case ast.Compare():
                return self._comparison(node, context)
        if self._is_final(node):
            return self._final()
        if isinstance(node, (ast.Name, ast.Subscript, ast.Attribute)):
            self._path(node)
        self._refuse_foreign(node)
        reason = "is not true or false: the original would fail, or take it for true"
        raise self._placed(refuse(reason, "Compare it with a number.", Code.WRONG_TYPE), node)

    def _logic(self, operator: str, values: list[ast.expr], context: ConditionContext) -> TranslatedCondition:
        if operator == "and" and context.positive and not context.exact:
            full = {metric for value in values for metric in self._full_windows(value)}
            context = context._replace(full=context.full | full)
        first = context._replace(beside=context.beside or (operator == "or") is context.positive)
        parts = [self.condition(value, first) for value in values[:-1]] + [self.condition(values[-1], context)]
        found = parts.pop()
        while parts:
            found = join_conditions(operator, parts.pop(), found, context)
        return found

    def _choice(
        self, test: ast.expr, body: ast.expr, orelse: ast.expr, context: ConditionContext
    ) -> TranslatedCondition:
        """Translate `a if c else b` as `c and a or not c and b`."""
        negated = ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
        yes = ast.copy_location(ast.BoolOp(ast.And(), [test, body]), test)
        no = ast.copy_location(ast.BoolOp(ast.And(), [negated, orelse]), test)
        return self._logic("or", [yes, no], context)

    def _comparison(self, node: ast.Compare, context: ConditionContext) -> TranslatedCondition:
        parts: list[TranslatedCondition] = []
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, node.comparators, strict=False):
            if type(operator) not in _COMPARISONS:
                error = refuse_node(operator) or refuse("is no comparison here", "Write one of < <= > >= == !=.")
                raise self._placed(error, right)
            parts.append(self._pair(left, _COMPARISONS[type(operator)], right, context))
        found = parts.pop()
        while parts:
            found = join_conditions("and", parts.pop(), found, context)
        return found

    def _pair(self, left: ast.expr, operator: str, right: ast.expr, context: ConditionContext) -> TranslatedCondition:
        for one, other, symbol in ((left, right, operator), (right, left, _MIRRORED[operator])):
            match other:
                case ast.Constant(None):
                    return self._presence(one, symbol, context)
                case ast.Constant(bool() as wanted) if symbol in ("==", "!="):
                    positive = context.positive if wanted is (symbol == "==") else not context.positive
                    part = self.condition(one, context._replace(positive=positive))
                    return part if wanted is (symbol == "==") else part._replace(node=Unary("not", part.node))
            if (path := self._length(one)) is not None:
                return self._size(path, symbol, other, context)
        operands = (self._number(left, context), self._number(right, context))
        needs = frozenset(metric for operand in operands for metric in _metrics_of(operand)) - ALWAYS_KNOWN
        return TranslatedCondition(Comparison((operator,), operands), needs, needs)

    def _presence(self, node: ast.expr, operator: str, context: ConditionContext) -> TranslatedCondition:
        """Translate a comparison with None."""
        if not isinstance(node, ast.Name) or operator not in ("==", "!="):
            reason = "only whether a metric is there at all can be asked"
            raise self._placed(refuse(reason, "Write metric != None."), node)
        source = self._source(node)
        metric = self._tried(node, lambda: find_presence(source, self._evaluated))
        if metric is None:
            return TranslatedCondition(Truth(operator == "!="))
        missing = FunctionCall("missing", (Name(metric),))
        return TranslatedCondition(missing if operator == "==" else Unary("not", missing))

    # Lengths of windows

    def _length(self, node: ast.expr) -> ast.expr | None:
        match node:
            case ast.Call(ast.Name("len"), [path], []):
                return path
        return None

    def _size(self, path: ast.expr, operator: str, other: ast.expr, context: ConditionContext) -> TranslatedCondition:
        source, keys = self._path(path)
        size = self._size_at(path, source, keys)
        bound = self._bound(other)
        if not isinstance(bound, Number):
            reason = "the length of a window is compared with a number here"
            raise self._placed(refuse(reason, f'Write a number, or {source.name}["window_size"].'), other)
        if isinstance(size, Evaluated):
            return self._evaluations(size, operator, bound.value, path, context)
        node, empty = _against(size, operator, bound.value)
        if empty is not context.positive and not context.exact and not context.beside:
            return TranslatedCondition(node)
        reason = f"an empty window decides nothing: the rule waits for the first {size.metric}"
        self.differs.append((self._offset(path), reason))
        # Before the first point the original skips the rule. `unknown and true` and `unknown or false` are unknown,
        # therefore the translation skips the rule, too.
        word = "and" if empty else "or"
        test = FunctionCall("isnan", (Name(size.metric),))
        needs = frozenset((size.metric,))
        return TranslatedCondition(Logic(word, (require_known(test, "or" if empty else "and"), node)), needs, needs)

    def _bound(self, node: ast.expr) -> Node:
        """Translate the bound of a length, the only place where `window_size` may replace its number."""
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            source, keys = self._path(node)
            if keys == ("window_size",):
                return self._tried(node, lambda: translate_number(source, keys, full=False))
        return self._number(node, ConditionContext())

    def _size_at(self, path: ast.expr, source: MetricSource, keys: Keys) -> Size | Evaluated:
        return self._tried(path, lambda: translate_size(source, keys, self._evaluated))

    def _evaluations(
        self, size: Evaluated, operator: str, bound: float, path: ast.expr, context: ConditionContext
    ) -> TranslatedCondition:
        """Translate the length of evaluation metrics, which is at least 3 after an evaluation (metric, step, epoch)."""
        least = {">": 0 <= bound < 3, ">=": 0 < bound <= 3, "!=": bound == 0}.get(operator, False)
        if not least or not context.positive or context.exact or context.beside:
            reason = "only whether there has been an evaluation can be asked, without 'not' or 'or'"
            raise self._placed(refuse(reason, "Write len(...) > 0 and ..."), path)
        return TranslatedCondition(Comparison((">",), (FunctionCall("count", (Name(size.metric),)), Number(0.0, ""))))

    def _full_windows(self, node: ast.expr) -> Iterator[str]:
        """Yield the metrics whose windows are full if a comparison such as `len(x) == size` is true."""
        match node:
            case ast.Compare(left, [ast.Eq() | ast.GtE()], [right]):
                pairs = ((left, right),) if isinstance(node.ops[0], ast.GtE) else ((left, right), (right, left))
                for one, other in pairs:
                    inner = self._length(one)
                    if inner is None:
                        continue
                    source, keys = self._path(inner)
                    size = self._size_at(inner, source, keys)
                    bound = self._bound(other)
                    if isinstance(size, Size) and isinstance(bound, Number) and bound.value == size.limit > 0:
                        yield f"{source.name}.{size.metric}"

    # Numbers

    def _number(self, node: ast.expr, context: ConditionContext) -> Node:
        match node:
            case ast.Constant(int() | float() as value) if not isinstance(value, bool):
                return self._constant(node, value)
            case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, operand):
                return Unary("-" if isinstance(sign, ast.USub) else "+", self._number(operand, context))
            case ast.BinOp(left, operator, right) if type(operator) in _ARITHMETIC:
                operands = self._number(left, context), self._number(right, context)
                return Binary(_ARITHMETIC[type(operator)], *operands)
            case ast.Call(ast.Name("abs"), [operand], []):
                return FunctionCall("abs", (self._number(operand, context),))
            case ast.Call(ast.Name("float"), [operand], []):
                return self._number(operand, context)
            case ast.Name() | ast.Subscript() | ast.Attribute():
                source, keys = self._path(node)
                if keys == ("window_size",):
                    reason = "the size of a window is compared with its length alone"
                    raise self._placed(refuse(reason, "Write it as a number."), node)
                return self._tried(node, lambda: self._number_at(source, keys, context))
        self._refuse_foreign(node)
        reason = "is no number"
        raise self._placed(refuse(reason, "Compare numbers; join conditions with 'and', 'or', 'not'."), node)

    def _number_at(self, source: MetricSource, keys: Keys, context: ConditionContext) -> Node:
        windows = {metric for name, _, metric in (one.partition(".") for one in context.full) if name == source.name}
        found = translate_number(source, keys, full=bool(windows), evaluated=self._evaluated)
        if windows and not set(_metrics_of(found)) <= windows | ALWAYS_KNOWN:
            return translate_number(source, keys, full=False, evaluated=self._evaluated)
        return found

    def _constant(self, node: ast.expr, value: float) -> Node:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._placed(refuse("the number is too large", "Write a smaller one.", Code.INVALID_VALUE), node)
        return Number(number, "")

    def _source(self, node: ast.Name) -> MetricSource:
        if node.id in self._sources:
            return self._sources[node.id]
        remedy = suggest_name(node.id, self._sources) if self._sources else "Define it under controller_metrics."
        raise self._placed(refuse(f"there is no metric {node.id[:40]!r}", remedy, Code.UNKNOWN_METRIC), node)

    def _path(self, node: ast.expr) -> tuple[MetricSource, Keys]:
        keys: list[str | int] = []
        at = node
        while True:
            match at:
                case ast.Name():
                    return self._source(at), tuple(reversed(keys))
                case ast.Subscript(value, ast.Constant((str() | int()) as key)) if not isinstance(key, bool):
                    keys.append(key)
                case ast.Subscript(value, ast.UnaryOp(ast.USub(), ast.Constant(int() as key))):
                    keys.append(-key)
                case ast.Attribute(value, attribute):
                    keys.append(attribute)
                case ast.Subscript(_, index):
                    self._refuse_foreign(index)
                    raise self._placed(refuse("an index is worked out here", "Write a key or a number."), index)
                case _:
                    self._refuse_foreign(at)
                    raise self._placed(refuse("only metrics have keys", "Name a metric first."), at)
            at = value

    def _is_final(self, node: ast.expr) -> bool:
        match node:
            case ast.Subscript(ast.Name(name), ast.Constant("is_final")) | ast.Attribute(ast.Name(name), "is_final"):
                return name in self._sources and self._sources[name].kind == "TrainingState"
        return False

    def _final(self) -> TranslatedCondition:
        if self._saves_only is None:
            remedy = "Make two controllers of it: one with on_save alone."
            raise refuse("is_final is available with on_save alone", remedy)
        if not self._saves_only:
            return TranslatedCondition(Truth(False))
        self.final = True
        return TranslatedCondition(FunctionCall("coalesce", (Name(FINAL_SAVE), Truth(False))))

    def _refuse_foreign(self, node: ast.expr) -> None:
        error = refuse_call(node) if isinstance(node, ast.Call) else refuse_node(node)
        if error is not None:
            raise self._placed(error, node)

    def _tried(self, node: ast.expr, work: Callable[[], T]) -> T:
        try:
            return work()
        except ExpressionError as error:
            raise self._placed(error, node) from None


def _is_deep(tree: ast.expr) -> bool:
    """Return True for an expression of excessive depth. Without recursion, because a key path takes several levels."""
    level: list[ast.AST] = [tree]
    for _ in range(3 * LIMITS.depth):
        level = [child for one in level for child in ast.iter_child_nodes(one)]
    return bool(level)


def _against(size: Size, operator: str, bound: float) -> tuple[Node, bool]:
    """Compare the length of a window with a number. Also returns the result for an empty window."""
    count: Node = FunctionCall("count", (Name(size.metric),))
    limit = size.limit
    of_none = {"<": bound > 0, "<=": bound >= 0, ">": bound < 0, ">=": bound <= 0, "==": bound == 0, "!=": bound != 0}
    empty = of_none[operator]
    if limit > 0:
        if bound == limit and operator in ("==", "!="):
            operator = ">=" if operator == "==" else "<"
        elif not (bound < limit or (bound == limit and operator in ("<", ">="))):
            count = FunctionCall("clamp", (count, Number(0.0, ""), Number(float(limit), "")))
    constant = Number(bound, "")
    return Comparison((operator,), (count, constant)), empty


def _metrics_of(node: Node) -> Iterator[str]:
    if isinstance(node, Name):
        yield node.name
    for child in get_children(node):
        yield from _metrics_of(child)
