"""Conditions at all rows of a block; and at one row, exactly, with the closures that a training has."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from baton.contract.rules.compiling import Compiler
from baton.contract.rules.limits import Limits
from baton.contract.rules.metrics import Kind
from baton.contract.rules.readers import Reader, Value
from baton.contract.rules.series import Clock
from baton.contract.rules.typed import Aggregate, Chain, Constant, Grouped, Operation, Reading, Summary, Typed, walk
from gpu_client.backtest import values
from gpu_client.backtest.blocks import Block, value_at
from gpu_client.backtest.history import Flags
from gpu_client.backtest.moments import Statistics, Sums, exactly_of
from gpu_client.backtest.spans import Span, extremes, medians, most_points, span_of
from gpu_client.backtest.trails import Trail, trail_of
from gpu_client.backtest.values import Num, Truth, both, truth_of

MOMENTS = ("mean", "std", "slope", "zscore")
_WINDOWED = (*MOMENTS, "min", "max", "median", "delta", "count")
_OPERATIONS: dict[str, Callable[..., Num]] = {
    "+": values.plus,
    "-": values.minus,
    "*": values.times,
    "/": values.over,
    "%": values.modulo,
    "negate": values.negated,
    "abs": values.absolute,
    "log": values.logarithm,
    "min": values.least,
    "max": values.greatest,
    "clamp": values.clamped,
}
_KNOWN = {*_OPERATIONS, "and", "or", "not", "isnan", "isfinite", "missing", "coalesce"}


def has_median(typed: Typed) -> bool:
    """Whether a rough look is cheaper."""
    return any(isinstance(one, Aggregate) and one.summary.function == "median" for one in walk(typed))


def is_understood(typed: Typed) -> bool:
    """Whether all of it is worked out here. What is not is left to the evaluator of trainings."""
    for one in walk(typed):
        if isinstance(one, Operation) and one.name not in _KNOWN:
            return False
        if isinstance(one, Aggregate) and not _is_summary_understood(one.summary):
            return False
    return True


def _is_summary_understood(summary: Summary) -> bool:
    function, _, window, *_ = summary
    if summary.partner:
        return function == "at"
    if trail_of(summary) is not None:
        return True
    if window is None:
        return function in ("count", "age")
    return function in _WINDOWED or (function == "lag" and bool(window.points))


class Expressions:
    """Of some rules. Blocks have to be opened in their order."""

    def __init__(self, all_of_them: Iterable[Typed], limits: Limits) -> None:
        self._limits = limits
        self._trails: dict[Summary, Trail] = {}
        self._reach: dict[str, int] = {}
        """Of each metric: the most points before the newest one that sums are made of."""
        for typed in all_of_them:
            for one in walk(typed):
                if isinstance(one, Aggregate):
                    self._prepare(one.summary)
        self._block: Block | None = None
        self._found: dict[Summary, Num | Truth] = {}
        self._rough: dict[Summary, Num | Truth] = {}
        """Bounds that could be had cheaply."""
        self._roughly = False
        self._spans: dict[Summary, Span] = {}
        self._sums: dict[str, tuple[Sums, int]] = {}

    def _prepare(self, summary: Summary) -> None:
        trail = trail_of(summary)
        if trail is not None:
            self._trails.setdefault(summary, trail)
        elif summary.function in MOMENTS:
            reach = most_points(summary, self._limits) + 1
            self._reach[summary.metric] = max(reach, self._reach.get(summary.metric, 0))

    @property
    def reach(self) -> int:
        """The longest window over points before a block."""
        return max(self._reach.values(), default=0)

    def open(self, block: Block) -> None:
        """Look at these rows now."""
        self._block = block
        self._found, self._rough, self._spans, self._sums = {}, {}, {}, {}
        for summary, trail in self._trails.items():
            self._found[summary] = trail.values(block)

    def open_again(self, block: Block) -> None:
        """Look once more at rows that were looked at before."""
        for trail in self._trails.values():
            trail.go_back(block.number)
        self.open(block)

    @property
    def block(self) -> Block:
        """The rows that are looked at."""
        if self._block is None:
            raise RuntimeError("no block is open")
        return self._block

    def truth(self, typed: Typed) -> Truth:
        """Of a condition, at each row."""
        found = self._value(typed)
        if not isinstance(found, Truth):
            raise TypeError(f"{typed.text} is no condition")
        return found

    def _number(self, typed: Typed) -> Num:
        found = self._value(typed)
        if not isinstance(found, Num):
            raise TypeError(f"{typed.text} is no number")
        return found

    def _value(self, typed: Typed) -> Num | Truth:
        match typed:
            case Constant(value, kind):
                if kind is Kind.BOOL:
                    yes = np.full(self.block.rows, bool(value))
                    return Truth(yes, ~yes)
                number = np.asarray(float(value))
                return Num(number, number)
            case Reading(metric, kind):
                found = self.block.reading(metric)
                if kind is not Kind.BOOL:
                    return found
                return truth_of(found.low != 0, both(found.known, np.isfinite(found.low)))
            case Aggregate(summary):
                return self._summary(summary)
            case Chain():
                return self._chain(typed)
            case Operation():
                return self._operation(typed)
            case Grouped():
                # what other jobs reported is not in the history of one
                unknown = np.zeros(self.block.rows)
                return Num(unknown, unknown, np.zeros(self.block.rows, bool))

    def _chain(self, typed: Chain) -> Truth:
        numbers = [self._number(operand) for operand in typed.operands]
        links = [
            values.compared(operator, left, right, self.block.rows)
            for operator, left, right in zip(typed.operators, numbers, numbers[1:], strict=False)
        ]
        found = links[0]
        for link in links[1:]:
            found = values.conjunction(found, link)
        return found

    def _operation(self, typed: Operation) -> Num | Truth:
        name, operands = typed.name, typed.operands
        if name in ("and", "or"):
            join = values.conjunction if name == "and" else values.disjunction
            found = self.truth(operands[0])
            for operand in operands[1:]:
                found = join(found, self.truth(operand))
            return found
        if name == "not":
            return values.negation(self.truth(operands[0]))
        if name in ("isnan", "isfinite"):
            number = self._number(operands[0])
            test = np.isnan if name == "isnan" else np.isfinite
            return truth_of(np.broadcast_to(test(number.low), (self.block.rows,)), number.known, number.vague)
        if name == "missing":
            return self._missing(self._value(operands[0]))
        if name == "coalesce":
            return self._first_known([self._value(operand) for operand in operands])
        return _OPERATIONS[name](*(self._number(operand) for operand in operands))

    def _missing(self, found: Num | Truth) -> Truth:
        if isinstance(found, Truth):
            there = found.yes | found.no
            vague = found.vague
            return truth_of(~there, None, vague)
        none = np.zeros(self.block.rows, bool)
        missing = none if found.known is None else ~found.known
        return Truth(missing, ~missing)

    def _first_known(self, found: list[Num | Truth]) -> Num | Truth:
        first, *rest = found
        for one in rest:
            if isinstance(first, Truth) and isinstance(one, Truth):
                there = first.yes | first.no
                vague = values.either(first.vague, one.vague)
                if vague is not None:
                    vague = vague & ~there
                yes, no = np.where(there, first.yes, one.yes), np.where(there, first.no, one.no)
                first = truth_of(yes, yes | no, vague)
            elif isinstance(first, Num) and isinstance(one, Num) and first.known is not None:
                first = _either_number(first, one, first.known)
        return first

    def roughly(self, typed: Typed) -> Truth:
        """The same, with less work and more that is vague: a median is known to lie between the extremes."""
        self._roughly = True
        try:
            return self.truth(typed)
        finally:
            self._roughly = False

    def _summary(self, summary: Summary) -> Num | Truth:
        found = self._found.get(summary)
        if found is None and self._roughly:
            found = self._rough.get(summary)
        if found is None:
            found = self._worked_out(summary)
            kept = self._rough if self._roughly and summary.function == "median" else self._found
            kept[summary] = found
        return found

    def _worked_out(self, summary: Summary) -> Num:
        function, metric, window, *_ = summary
        block = self.block
        points = block.points(metric)
        if summary.partner:
            partner = block.points(summary.partner)
            taken, there = value_at(block.history, metric, partner.column.rows[partner.begin : partner.end])
            low = partner.spread(taken)
            return Num(low, low, both(partner.from_on(1), partner.spread(there)))
        if window is None and function == "count":
            low = points.counts().astype(float)
            return Num(low, low)
        if window is None:
            came = points.spread(block.history.clock[points.column.rows[points.begin : points.end]])
            low = block.now - came
            return Num(low, low, points.from_on(1))
        if function in ("delta", "lag") and window.points:
            return self._earlier(summary, window.points)
        span = self._spans[summary] = span_of(block, summary, self._limits)
        if function == "count":
            low = np.asarray(span.size, float)
            return Num(low, low)
        if function in MOMENTS:
            found = self._moments(summary, span)
            low = span.spread(found.low)
            high = low if found.high is found.low else span.spread(found.high)
            vague = None if found.vague is None or not len(found.vague) else found.vague
            if vague is not None and not span.by_row:
                vague = span.points.spread(vague)
            return Num(low, high, span.known, vague)
        base = span.least_start
        inside = points.column.values[base : points.end]
        if function == "median":
            if self._roughly:
                least, most = (extremes(inside, span, base, least=which) for which in (True, False))
                return values.bounded(span.spread(least), span.spread(most), span.known, None)
            told = medians(inside, span, base)
        elif function == "delta":
            first = inside[np.minimum(span.start - base, len(inside) - 1)] if len(inside) else np.zeros(block.rows)
            newest = points.spread(points.column.values[points.begin : points.end])
            told = newest - first
        else:
            told = extremes(inside, span, base, least=function == "min")
        low = span.spread(told)
        return Num(low, low, span.known)

    def _earlier(self, summary: Summary, lag: int) -> Num:
        points = self.block.points(summary.metric)
        column = points.column.values
        numbers = np.arange(points.begin, points.end)
        earlier = column[np.maximum(numbers - lag, 0)]
        low = points.spread(earlier if summary.function == "lag" else column[points.begin : points.end] - earlier)
        return Num(low, low, points.from_on(lag + 1))

    def _moments(self, summary: Summary, span: Span) -> Num:
        metric = summary.metric
        points = span.points
        if metric not in self._sums:
            base = max(points.begin + 1 - self._reach[metric], 0)
            self._sums[metric] = Sums(points.column.values[base : points.end], self._reach[metric]), base
        sums, base = self._sums[metric]
        statistics = Statistics(sums, span, base)
        if summary.function != "zscore":
            found: Num = getattr(statistics, summary.function)()
            return found
        newest = points.column.values[points.begin : points.end]
        return statistics.zscore(points.spread(newest) if span.by_row else newest)

    def value_at(self, leaf: Reading | Aggregate | Grouped, row: int) -> Value:
        """A metric or an aggregate as a training has it, at row number `row` of the block."""
        if isinstance(leaf, Grouped):
            return None
        if isinstance(leaf, Reading):
            found: Num | Truth = self.block.reading(leaf.metric)
        else:
            found = self._summary(leaf.summary)
        if isinstance(found, Truth):
            return True if found.yes[row] else False if found.no[row] else None
        if found.known is not None and not found.known[row]:
            return None
        if isinstance(leaf, Reading):
            value = found.low[row].item()
            if leaf.kind is Kind.BOOL:
                return value != 0 if np.isfinite(value) else None
            return float(value)
        if leaf.summary.function in MOMENTS:
            return self._exactly(leaf.summary, row)
        return float(found.low[row])

    def _exactly(self, summary: Summary, row: int) -> float:
        span = self._spans[summary]
        points = span.points
        place = row
        if not span.by_row and points.seen is not None:
            place = int(points.seen[row]) - 1 - points.begin
        start, stop = int(span.start[place]), int(span.stop[place])
        column = points.column.values
        newest = None
        if summary.function == "zscore":
            newest = float(column[int(points.counts()[row]) - 1])
        return exactly_of(summary.function, column[start:stop], newest)

    def cost_of(self, typed: Typed) -> int:
        """How many points a look at one row takes, about."""
        sizes = [
            most_points(one.summary, self._limits)
            for one in walk(typed)
            if isinstance(one, Aggregate) and one.summary.function in MOMENTS
        ]
        return 20 + sum(sizes)


def _either_number(first: Num, second: Num, there: Flags) -> Num:
    low = np.where(there, first.low, second.low)
    exact = first.high is first.low and second.high is second.low
    high = low if exact else np.where(there, first.high, second.high)
    known = None if second.known is None else there | second.known
    vague = None
    for one, here in ((first.vague, there), (second.vague, ~there)):
        if one is not None:
            vague = values.either(vague, one & here)
    return Num(low, high, known, vague)


class OneRow:
    """A condition at single rows, by the closures that trainings evaluate."""

    def __init__(self, typed: Typed, limits: Limits) -> None:
        self._compiler = _Fed(limits)
        self._read: Reader = self._compiler.compiled(typed)
        self._leaves = {one for one in walk(typed) if isinstance(one, (Reading, Aggregate))}

    def truth(self, expressions: Expressions, row: int) -> bool | None:
        """At row number `row` of the open block."""
        compiler = self._compiler
        for leaf in self._leaves:
            if isinstance(leaf, Reading):
                plain = expressions.value_at(leaf._replace(kind=Kind.NUMBER), row)
                compiler.series[leaf.metric].current = plain
            else:
                compiler.table[leaf.summary] = expressions.value_at(leaf, row)
        found = self._read()
        return None if found is None else bool(found)


class _Fed(Compiler):
    """Its summaries are handed in."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(Clock(), limits)
        self.table: dict[Summary, Value] = {}

    def _summary(self, summary: Summary) -> Reader:
        return lambda: self.table[summary]
