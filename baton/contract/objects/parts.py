"""Split large files into parts for concurrent uploads, within the limits of S3."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import Crc64, WireModel

_MIB = 1024**2

PARTS_FROM_BYTES = 64 * _MIB
"""Size from which a file is uploaded in parts; for smaller files the additional calls cost more than parts save."""

MIN_PART_BYTES = 5 * _MIB
MAX_PART_BYTES = 5 * 1024 * _MIB
MAX_PARTS = 10_000
MAX_PARTED_BYTES = 5 * 1024**4
"""Largest object in parts: the smallest limit among the supported stores. Without parts: MAX_OBJECT_BYTES."""

LargeSizeBytes = Annotated[int, Field(ge=0, le=MAX_PARTED_BYTES, description="Size in bytes; beyond 5 GiB in parts")]

_USUAL_PART_BYTES = 16 * _MIB
"""Bytes that a broken connection can lose: a fraction of a second on a fast link, a minute on a slow one."""

_USUAL_PARTS = 256
"""Largest number of parts while parts stay below `_LARGE_PART_BYTES`; each part costs a request."""

_LARGE_PART_BYTES = 512 * _MIB


class Parts(WireModel):
    """Division of a large file: all parts have `part_bytes`, the last part has the rest. Their checksums, in order.

    Example: `{"part_bytes": 16777216, "crc64nvme": ["UvieJR3alJI=", "AAAAAAAAAAA="]}`
    """

    part_bytes: Annotated[int, Field(ge=MIN_PART_BYTES, le=MAX_PART_BYTES)]
    crc64nvme: Annotated[list[Crc64], Field(min_length=2, max_length=MAX_PARTS)]


def part_bytes_of(size_bytes: int) -> int:
    """Return the part size for a file of `size_bytes`, in whole MiB.

    The result depends on `size_bytes` only, so that any client with the file can continue an upload.
    """
    wanted_bytes = min(max(_USUAL_PART_BYTES, -(-size_bytes // _USUAL_PARTS)), _LARGE_PART_BYTES)
    part_bytes = max(wanted_bytes, -(-size_bytes // MAX_PARTS))
    return min(MAX_PART_BYTES, -(-part_bytes // _MIB) * _MIB)


def count_parts(size_bytes: int, part_bytes: int) -> int:
    """Return the number of parts."""
    return -(-size_bytes // part_bytes)


def part_range(size_bytes: int, part_bytes: int, number: int) -> tuple[int, int]:
    """Return offset and length in bytes of part `number`, counted from 1."""
    offset = (number - 1) * part_bytes
    return offset, min(part_bytes, size_bytes - offset)


def require_fitting(parts: Parts | None, size_bytes: int) -> None:
    """Raise ValueError unless the number of checksums is the number of parts of a file of `size_bytes`."""
    if parts is not None and len(parts.crc64nvme) != count_parts(size_bytes, parts.part_bytes):
        raise ValueError(
            f"{size_bytes} bytes are {count_parts(size_bytes, parts.part_bytes)} parts of {parts.part_bytes} bytes, "
            f"not {len(parts.crc64nvme)}"
        )
