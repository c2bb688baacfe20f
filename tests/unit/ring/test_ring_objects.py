"""Test objects: samples come back bit for bit, and every altered bit is detected."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from gpu_client.ring.errors import ObjectDamaged, SampleRefused
from gpu_client.ring.format.objects import _LARGE_BYTES, _PART_BYTES, Provenance, StoredSamples, encode
from gpu_client.ring.format.sample_tree import ALIGNED, MAX_DEPTH, flatten
from gpu_client.ring.settings import Codec

FROM = Provenance("w-1", 3, 7, 1_790_000_000.25, "shapes:make", "2")
NUMPY = [
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G",
    ">i4", ">f8", "M8[s]", "M8[D]", "m8[ns]", "S5", "U3", "V3", [("a", "<i4"), ("b", ">f8", (2, 3))],
    [("nested", [("x", "i2"), ("y", "U2")]), ("z", "?")],
]  # fmt: skip
TORCH = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
LOSSLESS: list[Codec] = ["none", "zstd", "lz4"]
SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (2, 3, 4), (1, 2, 3, 4), (2, 1, 3, 1, 2)]


def stored(*samples: object, codec: Codec = "none", seeds: Sequence[object] = (), **more: Any) -> StoredSamples:
    made = encode([flatten(sample) for sample in samples], FROM, codec=codec, seeds=seeds, **more)
    data = bytearray(b"".join(made))
    assert len(data) == made.size_bytes
    return StoredSamples("samples/x", memoryview(data))


def random_bytes(count: int) -> bytes:
    return random.Random(count).randbytes(count)


@pytest.mark.parametrize("dtype", NUMPY, ids=str)
def test_every_numpy_dtype_comes_back(dtype: Any) -> None:
    for shape, codec in product(SHAPES, LOSSLESS):
        numpy_comes_back(np.dtype(dtype), codec, shape)


def numpy_comes_back(kind: np.dtype[Any], codec: Codec, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    raw = random_bytes(count * kind.itemsize)
    if kind.kind in "?U" or kind.names:
        raw = bytes(len(raw))
    array = np.frombuffer(raw, kind, count).reshape(shape) if count else np.empty(shape, kind)
    found = stored(array, codec=codec).sample()
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape, found.tobytes()) == (kind, shape, array.tobytes())
    if found.size:
        found[...] = found.reshape(-1)[0]  # a sample is the reader's own


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_every_torch_dtype_comes_back(dtype: torch.dtype) -> None:
    for shape, codec in product(SHAPES, LOSSLESS):
        torch_comes_back(dtype, codec, shape)


def torch_comes_back(dtype: torch.dtype, codec: Codec, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    size_bytes = torch.empty(1, dtype=dtype).element_size()
    raw = bytes(count) if dtype is torch.bool else random_bytes(count * size_bytes)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    found = stored(tensor.reshape(shape), codec=codec).sample()
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)
    assert bytes(found.contiguous().reshape(-1).view(torch.uint8).numpy() if count else b"") == raw


def test_nested_samples_come_back() -> None:
    sample = {
        "image": np.arange(24, dtype="f4").reshape(2, 3, 4)[:, ::-1],
        "masks": (torch.ones(3, 2).t(), [np.float32(2.5), np.datetime64("2026-01-02")]),
        "text": "shape: ü",
        "count": 2**70,
        "share": 0.1,
        "none": None,
        "yes": True,
        "raw": b"\x00\xff",
        "empty": {},
        "pair": (),
    }
    found = stored(sample).sample()
    assert np.array_equal(found.pop("image"), sample.pop("image"))
    masks, expected = found.pop("masks"), sample.pop("masks")
    assert isinstance(masks, tuple)
    assert torch.equal(masks[0], expected[0])
    assert masks[1] == expected[1]
    assert type(masks[1][0]) is np.float32
    assert found == sample


def test_a_conjugated_tensor_and_one_that_needs_gradients_come_back() -> None:
    made = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(stored(made).sample(), made.resolve_conj())
    weights = torch.ones(3, requires_grad=True)
    assert torch.equal(stored(weights).sample(), weights.detach())


def test_a_pack_has_its_samples_and_their_seeds() -> None:
    found = stored(*(np.full(5, number) for number in range(4)), seeds=[10, "eleven", [12], None])
    assert len(found) == 4
    assert [int(found.sample(number)[0]) for number in range(4)] == [0, 1, 2, 3]
    assert [found.seed(number) for number in range(4)] == [10, "eleven", [12], None]
    assert found.provenance == FROM


@pytest.mark.parametrize("codec", LOSSLESS)
def test_any_flipped_bit_is_noticed(codec: Codec) -> None:
    sample = {"a": np.arange(60, dtype="u1"), "b": torch.arange(5.0)}
    made = encode([flatten(sample)] * 2, FROM, codec=codec)
    data = b"".join(made)
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1 << (place % 8)
        with pytest.raises(ObjectDamaged):
            StoredSamples("samples/x", memoryview(altered)).verify()


def test_anything_cut_off_or_added_is_noticed() -> None:
    data = b"".join(encode([flatten(np.arange(100))], FROM))
    for length in [*range(0, len(data), 7), len(data) - 1]:
        with pytest.raises(ObjectDamaged):
            StoredSamples("samples/x", memoryview(bytearray(data[:length]))).verify()
    with pytest.raises(ObjectDamaged):
        StoredSamples("samples/x", memoryview(bytearray(data + b"\0"))).verify()


def test_a_large_object_is_hashed_while_it_is_written() -> None:
    large = np.frombuffer(random_bytes(_LARGE_BYTES), np.uint8)
    sample = {"before": np.arange(7.0), "large": large, "small": large[:9], "again": large.reshape(2, -1)}
    expected = b"".join(encode([flatten(sample)], FROM))
    made = encode([flatten(sample)], FROM)
    head_bytes = made.head_bytes
    known = [made.head_is_known]
    next(made.behind_head())  # and then the disk was full
    known.append(made.head_is_known)
    behind = b"".join(piece for some in made.behind_head() for piece in some)
    assert (len(made.head()), bytes(made.head()) + behind) == (head_bytes, expected)
    assert [*known, made.head_is_known] == [False, False, True]
    assert b"".join(piece for some in made.behind_head() for piece in some) == behind
    assert [bytes(piece) for piece in made] == [bytes(made[place]) for place in range(len(made))]
    found = StoredSamples("samples/x", memoryview(bytearray(expected))).sample()
    assert all(np.array_equal(found[name], array) for name, array in sample.items())
    for place in (0, head_bytes - ALIGNED, head_bytes, len(expected) // 2, len(expected) - 1):
        altered = bytearray(expected)
        altered[place] ^= 1
        with pytest.raises(ObjectDamaged):
            StoredSamples("samples/x", memoryview(altered)).verify()


def test_parts_of_large_arrays_end_where_pages_of_files_do() -> None:
    arrays = [np.zeros(size, np.uint8) for size in (_LARGE_BYTES + 100, 5, 2 * _LARGE_BYTES - 1)]
    made = encode([flatten(arrays)], FROM)
    ends, end = [], made.head_bytes
    for some in made.behind_head():
        end += sum(map(len, some))
        ends.append(end)
    in_between = made.head_bytes + _LARGE_BYTES + 100
    assert [one for one in ends if one % _PART_BYTES] == [in_between, made.size_bytes - 1, made.size_bytes]
    assert ends == sorted(set(ends))


def test_a_sample_is_verified_when_it_is_first_read() -> None:
    data = bytearray(b"".join(encode([flatten(np.arange(100)), flatten(np.arange(100))], FROM)))
    data[-1] ^= 1
    found = StoredSamples("samples/x", memoryview(data))
    assert np.array_equal(found.sample(0), np.arange(100))
    with pytest.raises(ObjectDamaged, match="were altered"):
        found.sample(1)


@pytest.mark.parametrize("codec", ["uint8", "uint16"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_quantised_arrays_are_as_near_as_the_grid(codec: Codec, dtype: str) -> None:
    values = np.random.default_rng(1).normal(size=(9, 9)).astype(dtype)
    found = stored({"x": values, "y": values}, quantised={"sample['x']": codec}).sample()
    step = (float(values.max()) - float(values.min())) / (255 if codec == "uint8" else 65535)
    assert found["x"].dtype == values.dtype
    assert np.abs(found["x"].astype("f8") - values).max() <= step / 2 + np.finfo(dtype).eps * 8
    assert np.array_equal(found["y"], values)
    constant = stored({"x": np.full(3, 2.5)}, quantised={"sample['x']": codec}).sample()
    assert np.array_equal(constant["x"], np.full(3, 2.5))


def refused_samples() -> list[tuple[object, str]]:
    deep: object = np.zeros(1)
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    return [
        ({1: np.zeros(1)}, "not a text"),
        (np.array([object()]), "dtype object"),
        (np.array([(1, None)], dtype=[("a", "i4"), ("b", "O")]), "dtype"),
        ({"x": {"y": object()}}, r"sample\['x'\]\['y'\] is a builtins.object"),
        (torch.eye(3).to_sparse(), "sparse"),
        (deep, "levels deep"),
        ([np.zeros(1)] * 5000, "more than"),
        (1 + 2j, "complex"),
    ]


@pytest.mark.parametrize(("sample", "reason"), refused_samples(), ids=lambda value: str(value)[:20])
def test_what_cannot_be_stored_is_refused_with_its_place(sample: object, reason: str) -> None:
    with pytest.raises(SampleRefused, match=reason):
        flatten(sample)


def test_schemas_tell_kinds_of_samples_apart() -> None:
    def schema(sample: object, shapes: bool = True) -> str:
        return flatten(sample).schema(shapes=shapes)

    one = {"x": np.zeros((2, 3), "f4"), "y": 1}
    assert schema(one) == schema({"x": np.ones((2, 3), "f4"), "y": 7})
    others = [
        {"x": np.zeros((2, 3), "f8"), "y": 1},
        {"x": np.zeros((2, 4), "f4"), "y": 1},
        {"x": torch.zeros(2, 3), "y": 1},
        {"x": np.zeros((2, 3), "f4"), "y": 1.0},
        {"x": np.zeros((2, 3), "f4")},
        (np.zeros((2, 3), "f4"), 1),
    ]
    assert all(schema(one) != schema(other) for other in others)
    assert schema(one, shapes=False) == schema(others[1], shapes=False)
