"""Large files go up in parts, several at a time: how they are cut, within the limits of S3."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import Crc64, WireModel

_MIB = 1024**2

PARTS_FROM_BYTES = 64 * _MIB
"""Smaller files are not worth the calls that parts take."""

MIN_PART_BYTES = 5 * _MIB
MAX_PART_BYTES = 5 * 1024 * _MIB
MAX_PARTS = 10_000
MAX_PARTED_BYTES = 5 * 1024**4
"""The largest object that goes up in parts; without them it is MAX_OBJECT_BYTES. The least of what stores allow."""

LargeSizeBytes = Annotated[int, Field(ge=0, le=MAX_PARTED_BYTES, description="Size in bytes; beyond 5 GiB in parts")]

_USUAL_PART_BYTES = 16 * _MIB
"""What is lost when a connection breaks, and what one carries in a fraction of a second or, on slow lines, a minute."""

_USUAL_PARTS = 256
"""No more while parts need not be huge for it: each costs a request."""

_LARGE_PART_BYTES = 512 * _MIB


class Parts(WireModel):
    """How a large file is cut: all parts have `part_bytes`, the last one what is left. Their checksums, in order.

    Example: `{"part_bytes": 16777216, "crc64nvme": ["UvieJR3alJI=", "AAAAAAAAAAA="]}`
    """

    part_bytes: Annotated[int, Field(ge=MIN_PART_BYTES, le=MAX_PART_BYTES)]
    crc64nvme: Annotated[list[Crc64], Field(min_length=2, max_length=MAX_PARTS)]


def part_bytes_of(size_bytes: int) -> int:
    """The size of the parts that a file of `size_bytes` is cut into, in whole MiB.

    Always the same for the same file, so that an upload can be gone on with by whoever has the file.
    """
    wanted_bytes = min(max(_USUAL_PART_BYTES, -(-size_bytes // _USUAL_PARTS)), _LARGE_PART_BYTES)
    part_bytes = max(wanted_bytes, -(-size_bytes // MAX_PARTS))
    return min(MAX_PART_BYTES, -(-part_bytes // _MIB) * _MIB)


def count_parts(size_bytes: int, part_bytes: int) -> int:
    """How many parts that makes."""
    return -(-size_bytes // part_bytes)


def part_range(size_bytes: int, part_bytes: int, number: int) -> tuple[int, int]:
    """Where part `number`, counted from 1, begins, and how many bytes it has."""
    offset = (number - 1) * part_bytes
    return offset, min(part_bytes, size_bytes - offset)


def require_fitting(parts: Parts | None, size_bytes: int) -> None:
    """Raises ValueError unless a file of `size_bytes` has as many parts as there are checksums."""
    if parts is not None and len(parts.crc64nvme) != count_parts(size_bytes, parts.part_bytes):
        raise ValueError(
            f"{size_bytes} bytes are {count_parts(size_bytes, parts.part_bytes)} parts of {parts.part_bytes} bytes, "
            f"not {len(parts.crc64nvme)}"
        )
