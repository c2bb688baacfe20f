"""Test the cutting of large files into parts: within the limits of S3, always alike, nothing left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.base import MAX_OBJECT_BYTES
from baton.contract.objects.parts import (
    MAX_PART_BYTES,
    MAX_PARTED_BYTES,
    MAX_PARTS,
    MIN_PART_BYTES,
    PARTS_FROM_BYTES,
    count_parts,
    part_bytes_of,
    part_range,
)

MIB = 1024**2


@given(st.integers(PARTS_FROM_BYTES, MAX_PARTED_BYTES))
def test_parts_are_within_the_limits_and_make_the_whole(size_bytes: int) -> None:
    part_bytes = part_bytes_of(size_bytes)
    parts = count_parts(size_bytes, part_bytes)
    assert MIN_PART_BYTES <= part_bytes <= MAX_PART_BYTES
    assert part_bytes % MIB == 0
    assert 2 <= parts <= MAX_PARTS
    for number in {1, 2, parts // 2, parts - 1}:
        if 1 <= number < parts:
            assert part_range(size_bytes, part_bytes, number) == ((number - 1) * part_bytes, part_bytes)
    offset, last_bytes = part_range(size_bytes, part_bytes, parts)
    assert offset + last_bytes == size_bytes
    assert 1 <= last_bytes <= part_bytes


@pytest.mark.parametrize(
    ("size_bytes", "part_mib", "parts"),
    [
        (PARTS_FROM_BYTES, 16, 4),
        (1024 * MIB, 16, 64),
        (4096 * MIB, 16, 256),
        (4096 * MIB + 1, 17, 241),
        (MAX_OBJECT_BYTES, 20, 256),
        (128 * 1024 * MIB, 512, 256),
        (1024**4, 512, 2048),
        (MAX_PARTED_BYTES, 525, 9987),
    ],
)
def test_known_sizes(size_bytes: int, part_mib: int, parts: int) -> None:
    assert part_bytes_of(size_bytes) == part_mib * MIB
    assert count_parts(size_bytes, part_bytes_of(size_bytes)) == parts
