"""What operators and functions of plain values give: total, for whatever numbers come.

Floats as IEEE 754 has them: 1 / 0 is inf, 0 / 0 is NaN, what is too large is inf, a comparison with NaN is false.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Final

NAN: Final = math.nan
INF: Final = math.inf


def divide(left: float, right: float) -> float:
    """`left / right`."""
    if right:
        return left / right
    return NAN if left == 0 or math.isnan(left) else math.copysign(INF, left)


def remainder(left: float, right: float) -> float:
    """`left % right`, with the sign of `right`."""
    return left % right if right and left - left == 0 else NAN


def logarithm(value: float) -> float:
    """The natural one; of 0 it is -inf, of what is less NaN."""
    if value > 0:
        return math.log(value)
    return -INF if value == 0 else NAN


def clamp(value: float, low: float, high: float) -> float:
    """`value`, at least `low`, and at most `high` even if that is less."""
    if math.isnan(value) or math.isnan(low) or math.isnan(high):
        return NAN
    return min(max(value, low), high)


def least(*values: float) -> float:
    """NaN if there is one."""
    return NAN if any(map(math.isnan, values)) else min(values)


def greatest(*values: float) -> float:
    """NaN if there is one."""
    return NAN if any(map(math.isnan, values)) else max(values)


def ratio(numerator: int, denominator: int) -> float:
    """The float nearest to a fraction of whole numbers; the denominator is positive."""
    try:
        return numerator / denominator
    except OverflowError:
        return INF if numerator > 0 else -INF


def root_of_ratio(numerator: int, denominator: int) -> float:
    """The square root of such a fraction, also where the fraction itself is no float."""
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


def number_of(value: object) -> float | None:
    """A reported value as a float; None if it is none.

    Raises TypeError for what is no number. Minus zero becomes zero, so that equal values are the same value.
    """
    if value is None:
        return None
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError("it is text")
    try:
        return float(value) + 0.0  # type: ignore[arg-type]
    except OverflowError:
        # only whole numbers of any length do that
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
    "%": remainder,
}
FUNCTIONS: Mapping[str, Callable[..., float]] = {
    **OPERATE,
    "negate": lambda value: -value,
    "abs": abs,
    "isnan": math.isnan,
    "isfinite": math.isfinite,
    "log": logarithm,
    "clamp": clamp,
    "min": least,
    "max": greatest,
}
"""Of values that are all known."""
