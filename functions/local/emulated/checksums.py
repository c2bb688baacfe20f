"""CRC-64/NVME checksums by the AWS common runtime.

ministack computes the checksum byte by byte in Python, at 10 MB/s. For an object uploaded in parts ministack computes a
checksum of the checksums; S3 combines them into the checksum of the whole object, and compares the result with the
checksum in the completion. (The checksum type that ministack reports stays `COMPOSITE`.)
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from awscrt import checksums

_ALGORITHM = "CRC64NVME"


class _OfPart(str):
    """Checksum of a part in base64, with the size of the part in bytes."""

    __slots__ = ("size_bytes",)
    size_bytes: int


def install(s3: Any) -> None:
    """Replace the checksum of bytes and the checksum of parts in the s3 module."""
    s3._crc64nvme = checksums.crc64nvme
    part_checksums = s3._resolve_part_checksums
    composite = s3._composite_checksum

    def sized_part_checksums(body: bytes, headers: dict[str, str], upload: dict[str, Any]) -> tuple[Any, Any]:
        found, refusal = part_checksums(body, headers, upload)
        if _ALGORITHM in found:
            found[_ALGORITHM] = sized = _OfPart(found[_ALGORITHM])
            sized.size_bytes = len(body)
        return found, refusal

    def whole_checksum(algorithm: str, parts: Sequence[_OfPart]) -> str | None:
        if algorithm != _ALGORITHM:
            found: str | None = composite(algorithm, parts)
            return found
        return _joined(parts)

    s3._resolve_part_checksums = sized_part_checksums
    s3._composite_checksum = whole_checksum


def _joined(parts: Sequence[_OfPart]) -> str:
    whole = 0
    for part in parts:
        checksum = int.from_bytes(base64.b64decode(part), "big")
        whole = checksums.combine_crc64nvme(whole, checksum, part.size_bytes)
    return base64.b64encode(whole.to_bytes(8, "big")).decode()
