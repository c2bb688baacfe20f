"""What needs no metric is worked out once, when a rule is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from baton.contract.rules import arithmetic
from baton.contract.rules.metrics import Kind
from baton.contract.rules.typed import Chain, Constant, Operation, Typed

FUNCTIONS: Mapping[str, Callable[..., float]] = {
    **arithmetic.OPERATE,
    "negate": lambda value: -value,
    "abs": abs,
    "isnan": math.isnan,
    "isfinite": math.isfinite,
    "log": arithmetic.logarithm,
    "clamp": arithmetic.clamp,
    "min": arithmetic.least,
    "max": arithmetic.greatest,
}
"""Of values that are all known."""


def folded(typed: Operation | Chain) -> Typed:
    """A constant where nothing in it can change, whatever is unknown."""
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
            return FUNCTIONS[name](*values)
