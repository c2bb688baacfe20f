"""The outer step equals torch's SGD, and the hash notices any difference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_client.elastic.outer_optimizer import OuterOptimizer, OuterState, hash_values


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.99)])
def test_outer_steps_equal_torch_sgd_bit_for_bit_in_any_split(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(10_007, generator=generator)
    expected = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([expected], lr=lr, momentum=momentum, nesterov=momentum > 0)
    state, outer = OuterState.begin(start.clone()), OuterOptimizer(lr, momentum)
    for first in (True, False, False, False):
        average = torch.randn(10_007, generator=generator) * 1e-3
        expected.grad = average
        sgd.step()
        for part in (slice(0, 1), slice(1, 4099), slice(4099, None)):
            outer.step(state.params[part], state.momentum[part], average[part], first=first)
        assert torch.equal(state.params, expected)


@given(st.integers(1, 70_000), st.data())
def test_the_hash_notices_each_changed_bit_and_each_swap(size: int, data: st.DataObject) -> None:
    values = torch.arange(size, dtype=torch.float32) + 1
    before = hash_values(values, values)
    assert before == hash_values(values.clone(), torch.cat([torch.zeros(1), values])[1:])
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    changed = values.clone()
    changed.view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert len({before, hash_values(changed, values), hash_values(values, changed)}) == 3
    if place:
        swapped = values.clone()
        swapped[[0, place]] = values[[place, 0]]
        assert hash_values(swapped, values) != before


def test_the_hash_notices_two_changed_signs() -> None:
    values = torch.ones(8)
    for pair in ([1, 3], [0, 2], [1, 2]):
        changed = values.clone()
        changed[pair] *= -1
        assert hash_values(changed) != hash_values(values)
