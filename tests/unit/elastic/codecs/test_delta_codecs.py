"""Codecs keep their error bounds for all sizes, write equal bytes, and refuse values that are not finite."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_client.elastic.codecs import CODECS, check_finite
from gpu_client.elastic.codecs.codec import ALIGNMENT, PIECE, Codec
from gpu_client.elastic.errors import NotFiniteError

BYTES = {"fp32": lambda n: 4 * n, "bf16": lambda n: 2 * n}
BYTES |= {"int8": lambda n: n + 2 * math.ceil(n / 512), "int4": lambda n: 34 * math.ceil(n / 64)}
# A value's error is at most half a step of its block, and a block's scale may be rounded.
STEPS = {"fp32": (1, 0.0), "bf16": (1, 2**-8), "int8": (512, 0.502 / 127), "int4": (64, 0.505 / 7)}
SIZES = [0, 1, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1025, PIECE - 1, PIECE, PIECE + 65, 2 * PIECE + 1]

each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = torch.full((codec.encoded_bytes(len(values)),), 0xA5, dtype=torch.uint8)
    codec.encode(values, data)
    return data


def decoded(codec: Codec, data: torch.Tensor, count: int) -> torch.Tensor:
    values = torch.full((count,), math.nan)
    codec.decode(data, values)
    return values


def bound(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    block, step = STEPS[codec.name]
    padded = torch.cat([values, torch.zeros(-len(values) % block)]).view(-1, block)
    return (padded.abs().amax(1, keepdim=True) * step + 1e-29).expand_as(padded).reshape(-1)[: len(values)]


@each_codec
@pytest.mark.parametrize("count", SIZES)
def test_values_survive_within_half_a_step(codec: Codec, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    values *= torch.logspace(-6, 6, count) if count > 1 else 1
    data = encoded(codec, values)
    assert len(data) == BYTES[codec.name](count)
    assert ((decoded(codec, data, count) - values).abs() <= bound(codec, values)).all()


@each_codec
@given(st.lists(st.floats(-(2.0**125), 2.0**125, width=32), max_size=130))
def test_any_finite_value_survives(codec: Codec, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    found = decoded(codec, encoded(codec, values), len(values))
    assert ((found - values).abs() <= bound(codec, values)).all()


@each_codec
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert torch.equal(decoded(codec, encoded(codec, torch.zeros(2050)), 2050), torch.zeros(2050))


@each_codec
@pytest.mark.parametrize("count", [1, 65, 1025, PIECE + 1])
def test_accumulation_adds_weighted_values(codec: Codec, count: int) -> None:
    values, before = torch.randn(count), torch.randn(count)
    data, out = encoded(codec, values), before.clone()
    codec.accumulate(data, 0.25, out)
    assert torch.allclose(out, before + 0.25 * decoded(codec, data, count), rtol=1e-6, atol=1e-6)


@each_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**126, -(2.0**126)])
@pytest.mark.parametrize("place", [0, 1024, PIECE + 1])
def test_values_that_are_not_finite_are_refused(codec: Codec, bad: float, place: int) -> None:
    values = torch.ones(PIECE + 2)
    values[place] = bad
    with pytest.raises(NotFiniteError):
        encoded(codec, values)
    with pytest.raises(NotFiniteError):
        check_finite(values)


@each_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_data_that_are_not_finite_are_refused(codec: Codec, bad: float) -> None:
    """A peer may send any bytes: the scale, or the value, of the last block is not finite."""
    count = PIECE + 1
    data = encoded(codec, torch.ones(count))
    upper = np.float32(bad).tobytes()[2:]
    last = {"fp32": len(data), "bf16": len(data), "int8": len(data) - count, "int4": 2 * math.ceil(count / 64)}
    data.numpy()[last[codec.name] - 2 : last[codec.name]] = np.frombuffer(upper, np.uint8)
    with pytest.raises(NotFiniteError):
        codec.decode(data, torch.empty(count))
    with pytest.raises(NotFiniteError):
        codec.accumulate(data, 0.5, torch.zeros(count))


@each_codec
def test_parts_at_aligned_places_have_the_values_of_the_whole(codec: Codec) -> None:
    values = torch.randn(3 * ALIGNMENT + 7)
    whole = decoded(codec, encoded(codec, values), len(values))
    parts = values[: 2 * ALIGNMENT], values[2 * ALIGNMENT :]
    assert torch.equal(torch.cat([decoded(codec, encoded(codec, part), len(part)) for part in parts]), whole)


@each_codec
def test_threads_write_equal_bytes(codec: Codec) -> None:
    values = torch.randn(2 * PIECE + 77)
    expected = encoded(codec, values)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: encoded(codec, values), range(12)))
    assert all(torch.equal(data, expected) for data in found)


def test_bytes_of_int8_and_int4_are_fixed() -> None:
    """Members of one world may run different processors and versions, which must agree."""
    values = torch.tensor([127.0, -127.0, 0.5, 1.5, -2.5, 0.0])
    assert bytes(encoded(CODECS["int8"], values).tolist()) == b"\x80\x3f" + bytes([127, 129, 0, 2, 254, 0])
    small = torch.zeros(64)
    small[[0, 1, 32, 33]] = torch.tensor([7.0, -7.0, 3.4, -1.0])
    assert bytes(encoded(CODECS["int4"], small).tolist()) == b"\x80\x3f" + bytes([0x37, 0xF9]) + bytes(30)


def test_bf16_equals_torch() -> None:
    values = torch.randn(5000) * torch.logspace(-38, 37, 5000)
    assert torch.equal(decoded(CODECS["bf16"], encoded(CODECS["bf16"], values), 5000), values.bfloat16().float())
