"""Values of many rows at once: numbers between two bounds, and truths that may be unknown or undecided.

What is computed here for many rows may differ from what a rule would see by a rounding; both bounds are such that the
rule's own value lies between them, or is one of them. Where that leaves open what a comparison gives, the row is
`vague`, and looked at once more, alone and exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpu_client.backtest.history import Flags, Floats

_ULP = 2.0**-52


class Num(NamedTuple):
    """A number of each row. `high` is `low` itself where it is exact."""

    low: Floats
    high: Floats
    known: Flags | None = None
    """None: everywhere."""
    vague: Flags | None = None
    """Where the bounds say nothing. None: nowhere."""

    @property
    def exact(self) -> bool:
        """Whether it is what the rule would see, to the last bit."""
        return self.high is self.low and self.vague is None


class Truth(NamedTuple):
    """Yes, no, not decided here (`vague`), or else unknown."""

    yes: Flags
    no: Flags
    vague: Flags | None = None


def both(left: Flags | None, right: Flags | None) -> Flags | None:
    """Where both are known."""
    if left is None or right is None:
        return right if left is None else left
    return left & right


def either(left: Flags | None, right: Flags | None) -> Flags | None:
    """Where one of them is vague."""
    if left is None or right is None:
        return right if left is None else left
    return left | right


def bounded(low: Floats, high: Floats, known: Flags | None, vague: Flags | None) -> Num:
    """With inexact bounds: infinite ones say nothing, for infinity less infinity is no number."""
    unsure = (low != high) & ~(np.isfinite(low) & np.isfinite(high)) & ~(np.isnan(low) & np.isnan(high))
    if unsure.any():
        vague = either(vague, unsure)
    return Num(low, high, known, vague)


def _from(ends: list[Floats], operands: tuple[Num, ...]) -> Num:
    """Between the least and the greatest of what the ends of the operands give."""
    low, high = ends[0], ends[0]
    for end in ends[1:]:
        low, high = np.minimum(low, end), np.maximum(high, end)
    known: Flags | None = None
    vague: Flags | None = None
    sure = np.zeros(np.shape(low), bool)
    for operand in operands:
        known, vague = both(known, operand.known), either(vague, operand.vague)
        sure = sure | np.isnan(operand.low)
    # no number, though each operand is one: perhaps only at the ends
    unsure = np.isnan(low) & ~sure
    if unsure.any():
        vague = either(vague, unsure)
    return bounded(low, high, known, vague)


def exactly(function: Callable[..., Floats], *operands: Num) -> Num:
    """Of exact operands."""
    value = function(*(operand.low for operand in operands))
    known: Flags | None = None
    for operand in operands:
        known = both(known, operand.known)
    return Num(value, value, known)


def plus(left: Num, right: Num) -> Num:
    """Rounding is monotonous: the bounds' sums are bounds of the sum as it is rounded."""
    if left.exact and right.exact:
        return exactly(np.add, left, right)
    return _from([left.low + right.low, left.high + right.high], (left, right))


def minus(left: Num, right: Num) -> Num:
    """As `plus`."""
    if left.exact and right.exact:
        return exactly(np.subtract, left, right)
    return _from([left.low - right.high, left.high - right.low], (left, right))


def times(left: Num, right: Num) -> Num:
    """The product."""
    if left.exact and right.exact:
        return exactly(np.multiply, left, right)
    ends = [
        left.low * right.low, left.low * right.high, left.high * right.low, left.high * right.high,
    ]  # fmt: skip
    return _from(ends, (left, right))


def _quotient(left: Floats, right: Floats) -> Floats:
    found: Floats = left / right
    zero = np.asarray(right == 0)
    if zero.any():
        instead = np.where((left == 0) | np.isnan(left), np.nan, np.copysign(np.inf, left))
        found = np.where(zero, instead, found)
    return found


def over(left: Num, right: Num) -> Num:
    """The quotient; by zero as rules have it."""
    if left.exact and right.exact:
        return exactly(_quotient, left, right)
    ends = [
        _quotient(left.low, right.low), _quotient(left.low, right.high),
        _quotient(left.high, right.low), _quotient(left.high, right.high),
    ]  # fmt: skip
    found = _from(ends, (left, right))
    around_zero = np.asarray((right.low <= 0) & (right.high >= 0) & (right.low != right.high))
    if around_zero.any():
        found = found._replace(vague=either(found.vague, np.broadcast_to(around_zero, np.shape(found.low))))
    return found


def _rest(left: Floats, right: Floats) -> Floats:
    return np.where((right != 0) & np.isfinite(left), np.remainder(left, right), np.nan)


def modulo(left: Num, right: Num) -> Num:
    """The remainder: it jumps, so bounds say nothing of it."""
    found = exactly(_rest, left, right)
    if left.exact and right.exact:
        return found
    return found._replace(vague=np.ones(np.shape(found.low), bool))


def negated(value: Num) -> Num:
    """With the other sign."""
    if value.high is value.low:
        low = -value.low
        return value._replace(low=low, high=low)
    return value._replace(low=-value.high, high=-value.low)


def absolute(value: Num) -> Num:
    """Without its sign."""
    if value.high is value.low:
        low = np.abs(value.low)
        return value._replace(low=low, high=low)
    ends = np.abs(value.low), np.abs(value.high)
    low = np.where((value.low <= 0) & (value.high >= 0), 0.0, np.minimum(*ends))
    return value._replace(low=low, high=np.maximum(*ends))


def _logarithms(values: Floats) -> Floats:
    # the library that Python uses, for it rounds in its own way
    shape = np.shape(values)
    found = [math.log(one) if one > 0 else -math.inf if one == 0 else math.nan for one in np.ravel(values).tolist()]
    return np.array(found).reshape(shape)


def logarithm(value: Num) -> Num:
    """The natural one."""
    low = _logarithms(value.low)
    if value.high is value.low:
        return value._replace(low=low, high=low)
    high = _logarithms(value.high)
    apart = low != high
    low = np.where(apart, low - 4 * _ULP * np.abs(low), low)
    high = np.where(apart, high + 4 * _ULP * np.abs(high), high)
    unsure = np.isnan(low) & ~np.isnan(value.low)
    return bounded(low, high, value.known, either(value.vague, unsure) if unsure.any() else value.vague)


def least(*values: Num) -> Num:
    """The least of them; NaN if there is one."""
    return _pairwise(np.minimum, values)


def greatest(*values: Num) -> Num:
    """The greatest."""
    return _pairwise(np.maximum, values)


def clamped(value: Num, low: Num, high: Num) -> Num:
    """At least `low`, and at most `high` even if that is less."""
    return least(greatest(value, low), high)


def _pairwise(function: Callable[[Floats, Floats], Floats], values: tuple[Num, ...]) -> Num:
    found = values[0]
    for value in values[1:]:
        low = function(found.low, value.low)
        exact = found.high is found.low and value.high is value.low
        high = low if exact else function(found.high, value.high)
        found = Num(low, high, both(found.known, value.known), either(found.vague, value.vague))
    return found


def compared(operator: str, left: Num, right: Num, rows: int) -> Truth:
    """A comparison; false with NaN, but for `!=`."""
    known, vague = both(left.known, right.known), either(left.vague, right.vague)
    surely, maybe = _BOUNDS[operator](left, right)
    yes = np.broadcast_to(surely, (rows,))
    if left.high is not left.low or right.high is not right.low:
        vague = either(vague, np.broadcast_to(maybe & ~surely, (rows,)))
    no = ~yes
    if vague is not None:
        yes, no = yes & ~vague, no & ~vague
    if known is not None:
        yes, no = yes & known, no & known
        vague = None if vague is None else vague & known
    return Truth(yes, no, vague)


def _less(left: Num, right: Num) -> tuple[Flags, Flags]:
    return left.high < right.low, left.low < right.high


def _at_most(left: Num, right: Num) -> tuple[Flags, Flags]:
    return left.high <= right.low, left.low <= right.high


def _equal(left: Num, right: Num) -> tuple[Flags, Flags]:
    surely = (left.low == left.high) & (right.low == right.high) & (left.low == right.low)
    return surely, (left.low <= right.high) & (right.low <= left.high)


def _unequal(left: Num, right: Num) -> tuple[Flags, Flags]:
    surely, maybe = _equal(left, right)
    return ~maybe, ~surely


_BOUNDS: dict[str, Callable[[Num, Num], tuple[Flags, Flags]]] = {
    "<": _less,
    "<=": _at_most,
    ">": lambda left, right: _less(right, left),
    ">=": lambda left, right: _at_most(right, left),
    "==": _equal,
    "!=": _unequal,
}


def conjunction(left: Truth, right: Truth) -> Truth:
    """`and`, as Kleene has it."""
    yes, no, vague = left.yes & right.yes, left.no | right.no, either(left.vague, right.vague)
    return Truth(yes, no, None if vague is None else vague & ~(yes | no))


def disjunction(left: Truth, right: Truth) -> Truth:
    """`or`."""
    yes, no, vague = left.yes | right.yes, left.no & right.no, either(left.vague, right.vague)
    return Truth(yes, no, None if vague is None else vague & ~(yes | no))


def negation(value: Truth) -> Truth:
    """`not`."""
    return Truth(value.no, value.yes, value.vague)


def truth_of(yes: Flags, known: Flags | None, vague: Flags | None = None) -> Truth:
    """From what is so where it is known."""
    no = ~yes
    if vague is not None:
        yes, no = yes & ~vague, no & ~vague
    if known is not None:
        yes, no = yes & known, no & known
        vague = None if vague is None else vague & known
    return Truth(yes, no, vague)
