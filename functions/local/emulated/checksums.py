"""CRC-64/NVME as S3 has it, by the AWS common runtime.

ministack's own takes one byte at a time in Python: 10 MB/s, and one core. And there an object made of parts gets a
checksum of their checksums, as with other algorithms; S3 puts them together to that of the whole object, which it
compares with the one that the upload is completed with. (The type that ministack names for it stays `COMPOSITE`.)
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from awscrt import checksums

_ALGORITHM = "CRC64NVME"


class _OfPart(str):
    """The checksum of a part, in base64, that knows how many bytes it is of."""

    __slots__ = ("size_bytes",)
    size_bytes: int


def install(s3: Any) -> None:
    """Replace, in the s3 module, the checksum of bytes and that of an object made of parts."""
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
