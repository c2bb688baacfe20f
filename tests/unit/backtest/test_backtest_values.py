"""Numbers between bounds: whatever the true operands are, what a rule computes from them is within the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.rules import arithmetic
from baton.contract.rules.folding import FUNCTIONS
from gpu_client.backtest import values
from gpu_client.backtest.expressions import _OPERATIONS
from gpu_client.backtest.values import Num
from tests.properties.profiles import machine_settings

EDGES = [math.nan, math.inf, -math.inf, 0.0, 1.0, -1.0, 1e-300, 5e-324, 1e308, -1e308, 0.1]
FINITE = (
    st.floats(-10, 10)
    | st.sampled_from([one for one in EDGES if math.isfinite(one)])
    | st.floats(allow_nan=False, allow_infinity=False)
)


@st.composite
def operands(draw: st.DrawFn) -> tuple[Num, float]:
    """Bounds, and a number between them; exact ones may be anything."""
    if draw(st.booleans()):
        value = draw(st.sampled_from(EDGES) | st.floats()) + 0.0
        low = np.array([value])
        return Num(low, low), value
    low, value, high = sorted((draw(FINITE), draw(FINITE), draw(FINITE)))
    return Num(np.array([low]), np.array([high])), value


def within(found: Num, value: float) -> bool:
    if found.vague is not None and found.vague[0]:
        return True
    low, high = float(found.low[0]), float(found.high[0])
    if math.isnan(value):
        return math.isnan(low) and math.isnan(high)
    return low <= value <= high


ARITIES = {"negate": 1, "abs": 1, "log": 1, "clamp": 3, "min": 3, "max": 2}


@pytest.mark.parametrize("name", sorted(_OPERATIONS))
@machine_settings(runs=400, steps=1)
@given(given_operands=st.tuples(operands(), operands(), operands()))
def test_what_is_computed_is_within_the_bounds(name: str, given_operands: tuple[tuple[Num, float], ...]) -> None:
    used = given_operands[: ARITIES.get(name, 2)]
    expected = float(FUNCTIONS[name](*(value for _, value in used)))
    with np.errstate(all="ignore"):
        found = _OPERATIONS[name](*(bounds for bounds, _ in used))
    assert within(found, expected), (used, expected, found)
    if all(bounds.exact for bounds, _ in used):
        assert found.exact
        assert found.low[0] == expected or (math.isnan(found.low[0]) and math.isnan(expected))


@pytest.mark.parametrize("operator", sorted(arithmetic.COMPARE))
@machine_settings(runs=300, steps=1)
@given(left=operands(), right=operands(), link=st.booleans())
def test_comparisons_say_nothing_that_is_not_so(
    operator: str, left: tuple[Num, float], right: tuple[Num, float], link: bool
) -> None:
    other = left if link else right
    compare: Callable[[float, float], bool] = arithmetic.COMPARE[operator]
    found = values.compared(operator, left[0], other[0], 1)
    if found.vague is not None and found.vague[0]:
        assert not found.yes[0]
        assert not found.no[0]
        assert not (left[0].exact and other[0].exact)
        return
    assert (bool(found.yes[0]), bool(found.no[0])) == ((True, False) if compare(left[1], other[1]) else (False, True))


def test_a_divisor_that_may_be_zero_leaves_everything_open() -> None:
    found = values.over(Num(*[np.array([1.0])] * 2), Num(np.array([-1.0]), np.array([2.0])))
    assert found.vague is not None and found.vague.all()
