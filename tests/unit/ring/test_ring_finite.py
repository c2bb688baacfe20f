"""Test the check for non-finite values, and the digest that it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from gpu_client.ring.format.codecs import _PART_BYTES, is_finite
from gpu_client.ring.format.objects import Provenance, StoredSamples, encode
from gpu_client.ring.format.sample_tree import flatten

LONG = _PART_BYTES // 4 + 3
FROM = Provenance("w", 1, 1, 0.0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("torch_too", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, LONG - 1])
def test_one_bad_value_is_found_wherever_it_is(dtype: str, torch_too: bool, value: float, place: int) -> None:
    array: Any = np.zeros(LONG, dtype)
    array[place] = value
    (leaf,) = flatten(torch.from_numpy(array) if torch_too else array).leaves
    assert not is_finite(leaf)


@pytest.mark.parametrize("value", [np.finfo("f4").max, -np.finfo("f4").max, 1e-45, 0.0])
def test_any_finite_value_will_do(value: float) -> None:
    (leaf,) = flatten(np.full(LONG, value, "f4")).leaves
    assert is_finite(leaf)


@pytest.mark.parametrize("array", [np.zeros(0, "f4"), np.arange(LONG, dtype="f4"), np.arange(7.0), np.arange(7)])
def test_the_digest_that_comes_with_it_is_the_one_that_is_stored(array: Any) -> None:
    sample = flatten(array)
    plain = b"".join(encode([sample], FROM))
    assert is_finite(sample.leaves[0])
    assert sample.leaves[0].digest in ("", xxhash.xxh3_64_hexdigest(array.tobytes()))
    assert b"".join(encode([sample], FROM)) == plain
    # Compressed bytes have another digest.
    packed = b"".join(encode([sample], FROM, codec="zstd"))
    assert (StoredSamples("x", memoryview(bytearray(packed))).sample() == array).all()
