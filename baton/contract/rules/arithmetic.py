"""Operators and functions of plain values, defined for every float.

Floats follow IEEE 754: 1 / 0 is inf, 0 / 0 is NaN, an overflow is inf, a comparison with NaN is false.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Final

NAN: Final = math.nan
INF: Final = math.inf


def divide(left: float, right: float) -> float:
    """Divide `left` by `right`."""
    if right:
        return left / right
    return NAN if left == 0 or math.isnan(left) else math.copysign(INF, left)


def take_remainder(left: float, right: float) -> float:
    """Compute `left % right`, with the sign of `right`."""
    return left % right if right and left - left == 0 else NAN


def take_logarithm(value: float) -> float:
    """Compute the natural logarithm: -inf for 0, NaN for a negative value."""
    if value > 0:
        return math.log(value)
    return -INF if value == 0 else NAN


def clamp(value: float, low: float, high: float) -> float:
    """Clamp `value` to [`low`, `high`]; `high` wins if it is less than `low`."""
    if math.isnan(value) or math.isnan(low) or math.isnan(high):
        return NAN
    return min(max(value, low), high)


def find_least(*values: float) -> float:
    """Find the least value, or NaN if a value is NaN."""
    return NAN if any(map(math.isnan, values)) else min(values)


def find_greatest(*values: float) -> float:
    """Find the greatest value, or NaN if a value is NaN."""
    return NAN if any(map(math.isnan, values)) else max(values)


def divide_exactly(numerator: int, denominator: int) -> float:
    """Divide two integers, rounding once; the denominator is positive."""
    try:
        return numerator / denominator
    except OverflowError:
        return INF if numerator > 0 else -INF


def root_exactly(numerator: int, denominator: int) -> float:
    """Compute the square root of a fraction of integers, also where the fraction overflows a float."""
    if numerator <= 0:
        return 0.0
    excess = numerator.bit_length() - denominator.bit_length()
    if -900 < excess < 900:
        return math.sqrt(numerator / denominator)
    half = excess // 2
    if half > 0:
        denominator <<= 2 * half
    else:
        numerator <<= -2 * half
    try:
        return math.ldexp(math.sqrt(numerator / denominator), half)
    except OverflowError:
        return INF


def to_number(value: object) -> float | None:
    """Convert a reported value to a float; None stays None.

    Raises TypeError if the value is no number. Minus zero becomes zero, so that equal values have equal bits.
    """
    if value is None:
        return None
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError("it is text")
    try:
        return float(value) + 0.0  # type: ignore[arg-type]
    except OverflowError:
        # Only integers of any length overflow, therefore the sign can be compared.
        return INF if value > 0 else -INF  # type: ignore[operator]


COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
OPERATE: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": divide,
    "%": take_remainder,
}
FUNCTIONS: Mapping[str, Callable[..., float]] = {
    **OPERATE,
    "negate": lambda value: -value,
    "abs": abs,
    "isnan": math.isnan,
    "isfinite": math.isfinite,
    "log": take_logarithm,
    "clamp": clamp,
    "min": find_least,
    "max": find_greatest,
}
"""Functions of operands that are all known."""
