"""Codecs: bit-identical round trips; malicious bytes raise errors without harm."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.checkpoints.manifest import Codec
from gpu_client.checkpoints.format.codecs import BadChunk, decode, encode, hash_zeros, is_all_zero
from gpu_client.transport.net.digests import digest_bytes

WIDTHS = (1, 2, 4, 8)
sizes_around_widths = st.integers(0, 12).flatmap(lambda count: st.integers(max(0, 8 * count - 3), 8 * count + 3))
contents = sizes_around_widths.flatmap(lambda size: st.binary(min_size=size, max_size=size)) | st.binary(max_size=5000)


@given(contents, st.sampled_from(WIDTHS))
def test_planes_there_and_back(raw: bytes, width: int) -> None:
    stored = encode("planes", memoryview(raw), width=width)
    assert decode("planes", stored, size_bytes=len(raw), width=width) == raw
    assert decode("planes", memoryview(stored), size_bytes=len(raw), width=width) == raw


@given(contents, st.sampled_from(WIDTHS), st.randoms(use_true_random=False))
def test_delta_there_and_back(raw: bytes, width: int, random) -> None:  # type: ignore[no-untyped-def]
    base = bytes(byte ^ (random.random() < 0.1) for byte in raw)
    stored = encode("delta", memoryview(raw), width=width, base=memoryview(base))
    assert decode("delta", stored, size_bytes=len(raw), width=width, base=base) == raw
    assert decode("delta", stored, size_bytes=len(raw), width=width, base=memoryview(bytearray(base))) == raw


@given(contents)
def test_raw_there_and_back(raw: bytes) -> None:
    assert decode("raw", encode("raw", memoryview(raw), width=1), size_bytes=len(raw), width=1) == raw


def test_zeros_are_not_stored() -> None:
    assert encode("zeros", bytes(100), width=1) == b""
    assert decode("zeros", b"", size_bytes=100, width=1) == bytes(100)
    assert hash_zeros(100) == digest_bytes(bytes(100)).blake3


@pytest.mark.parametrize(
    ("width", "planes"), [(1, b"abcdefghi"), (2, b"acegbdfhi"), (4, b"aebfcgdhi"), (8, b"abcdefghi")]
)
def test_planes_are_as_the_format_says(width: int, planes: bytes) -> None:
    """Another implementation can read them."""
    assert zstandard.decompress(encode("planes", b"abcdefghi", width=width)) == planes


def test_a_delta_is_the_planes_of_the_xor() -> None:
    raw, base = b"abcdefghi", b"abcdXfghi"
    xored = bytes(a ^ b for a, b in zip(raw, base, strict=True))
    assert zstandard.decompress(encode("delta", raw, width=4, base=base)) == zstandard.decompress(
        encode("planes", xored, width=4)
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "bool", "complex64"])
def test_weights_get_smaller_and_come_back(dtype: str) -> None:
    raw = np.random.default_rng(1).normal(0, 0.02, 20_001).astype(dtype).tobytes()
    width = min(8, np.dtype(dtype).itemsize)
    stored = encode("planes", memoryview(raw), width=width)
    assert len(stored) < 0.96 * len(raw)
    assert decode("planes", stored, size_bytes=len(raw), width=width) == raw


def test_a_small_chunk_is_as_small_for_its_size_as_a_large_one() -> None:
    """A sample must tell what the whole will be; planes that share a block spoil each other."""
    raw = np.random.default_rng(1).normal(0, 0.02, 500_000).astype(np.float32).tobytes()
    shares = [len(encode("planes", raw[:size], width=4)) / size for size in (48_000, 400_000, 2_000_000)]
    assert max(shares) - min(shares) < 0.01


def bomb(size_bytes: int) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(size_bytes))


def without_size(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(raw)


@pytest.mark.parametrize("codec", ["planes", "delta"])
@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"no frame at all",
        bomb(200)[:-1],
        bomb(200) + b"x",
        bomb(200) + bomb(200),
        bomb(199),
        bomb(201),
        bomb(0),
        bomb(300_000_000),
        without_size(bytes(199)),
        without_size(bytes(201)),
        without_size(bytes(50_000_000)),
        b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**62) + b"\x00" * 8,  # a frame of exabytes, it says
        b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"skip",
        bomb(200)[:6] + b"\xff" * 10,
    ],
)
def test_hostile_bytes_are_bad_chunks_and_cost_no_memory(codec: Codec, stored: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadChunk):
            decode(codec, stored, size_bytes=200, width=4, base=bytes(200) if codec == "delta" else None)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_frame_that_does_not_say_its_size_is_read() -> None:
    assert decode("planes", without_size(b"a" * 200), size_bytes=200, width=1) == b"a" * 200


@pytest.mark.parametrize(
    ("codec", "stored", "base"),
    [
        ("raw", b"a" * 199, None),
        ("raw", b"a" * 201, None),
        ("zeros", b"a", None),
        ("delta", bomb(200), None),
        ("delta", bomb(200), bytes(199)),
    ],
)
def test_what_does_not_fit_is_a_bad_chunk(codec: Codec, stored: bytes, base: bytes | None) -> None:
    with pytest.raises(BadChunk):
        decode(codec, stored, size_bytes=200, width=2, base=base)


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_the_size_or_not_at_all(stored: bytes) -> None:
    with contextlib.suppress(BadChunk):
        assert len(decode("planes", stored, size_bytes=64, width=4)) == 64


def test_a_delta_needs_a_base_of_the_same_size() -> None:
    with pytest.raises(ValueError, match="same size"):
        encode("delta", b"abc", width=1, base=b"ab")
    with pytest.raises(ValueError, match="same size"):
        encode("delta", b"abc", width=1)


@given(st.integers(1, 20_000), st.integers(0, 20_000))
def test_one_byte_that_is_not_zero_is_found(size: int, place: int) -> None:
    assert is_all_zero(bytes(size))
    raw = bytearray(size)
    raw[place % size] = 1
    assert not is_all_zero(raw)
