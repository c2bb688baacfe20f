"""Operators and functions of values, as closures over those of their operands: not known where it cannot be."""

from __future__ import annotations

import operator
from collections.abc import Callable

from baton.contract.rules.readers import Reader, Value
from baton.contract.rules.typed import Constant, Typed


def comparison(
    left: Reader, compare: Callable[[float, float], bool], right: Typed, compiled: Callable[[Typed], Reader]
) -> Reader:
    """`left` against `right`, which is compiled only if it is no constant. `>`, which is frequent, takes no call."""
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
    other = compiled(right)
    if compare is operator.gt:

        def above() -> Value:
            value, bound = left(), other()
            return None if value is None or bound is None else value > bound

        return above

    def against() -> Value:
        value, bound = left(), other()
        return None if value is None or bound is None else compare(value, bound)

    return against


def connective(operands: list[Reader], *, decisive: bool) -> Reader:
    """`or` where true decides, `and` where false does, as Kleene has them."""
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


def negation(operand: Reader) -> Reader:
    """`not`."""

    def negation() -> Value:
        value = operand()
        return None if value is None else not value

    return negation


def first_known(operands: list[Reader]) -> Reader:
    """`coalesce`."""

    def first_known() -> Value:
        for operand in operands:
            value = operand()
            if value is not None:
                return value
        return None

    return first_known


def function_of_one(function: Callable[..., float], operand: Reader) -> Reader:
    """Of one value."""

    def of_one() -> Value:
        value = operand()
        return None if value is None else function(value)

    return of_one


def function_of_two(function: Callable[..., float], first: Reader, second: Reader) -> Reader:
    """Of two."""

    def of_two() -> Value:
        left, right = first(), second()
        return None if left is None or right is None else function(left, right)

    return of_two


def function_with_constant(function: Callable[..., float], first: float, second: Reader) -> Reader:
    """Of two, of which the first never changes."""
    if function is operator.mul:

        def times_constant() -> Value:
            value = second()
            return None if value is None else first * value

        return times_constant

    def with_constant() -> Value:
        value = second()
        return None if value is None else function(first, value)

    return with_constant


def between(
    operands: list[Reader],
    compare: Callable[[float, float], bool],
    compare_next: Callable[[float, float], bool],
) -> Reader:
    """`a < b <= c`: false as soon as one comparison is."""
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


def function(function: Callable[..., float], operands: list[Reader]) -> Reader:
    """Of any number of values."""

    def of_many() -> Value:
        values = [operand() for operand in operands]
        return None if None in values else function(*values)

    return of_many
