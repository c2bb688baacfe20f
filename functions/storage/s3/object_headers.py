"""Build the headers of presigned requests and the refusals of the object store, for S3 and for its twin."""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal

CHECKSUM_HEADER = "x-amz-checksum-crc64nvme"
EXPIRING_TAG = ("baton-expiring", "ring-sample")
"""Key and value of the tag that a bucket's lifecycle rule selects."""
EXPIRING_TAGGING = "=".join(EXPIRING_TAG)
"""EXPIRING_TAG as the value of the header `x-amz-tagging`."""


def put_headers(
    size_bytes: int | None, crc64nvme: str | None, create_only: bool, replace_etag: str | None, expiring: bool = False
) -> dict[str, str]:
    """Return the headers that the signature of a presigned PUT covers."""
    headers = {}
    if size_bytes is not None:
        headers["content-length"] = str(size_bytes)
    if crc64nvme is not None:
        headers[CHECKSUM_HEADER] = crc64nvme
    if create_only:
        headers["if-none-match"] = "*"
    if replace_etag is not None:
        headers["if-match"] = quoted(replace_etag)
    if expiring:
        headers["x-amz-tagging"] = EXPIRING_TAGGING
    return headers


def quoted(etag: str) -> str:
    """Return an ETag with quotes, as HTTP requires; Baton keeps ETags without quotes."""
    return f'"{etag.strip(chr(34))}"'


def unknown_bucket(bucket: str) -> Refusal:
    """Return the refusal of an unknown bucket name."""
    return Refusal(ErrorCode.UNKNOWN_BUCKET, f"There is no bucket {bucket[:64]!r}.", field="bucket")


def check_parts(parts: Sequence[tuple[int, str]]) -> None:
    """Refuse a list of parts that S3 would refuse without reading the parts."""
    numbers = [number for number, _ in parts]
    if not numbers:
        raise parts_refused("No part is stored.")
    if numbers != sorted(set(numbers)) or numbers[0] < 1 or numbers[-1] > 10_000:
        raise parts_refused("Part numbers are 1 to 10000, rising, each once.")


def other_bytes(key: str) -> Refusal:
    """Return the refusal of parts whose checksum differs from the declared checksum."""
    return Refusal(ErrorCode.DIGEST_MISMATCH, f"The parts of {key} are not an object with the declared CRC-64/NVME.")


def parts_refused(message: str) -> Refusal:
    """Return the refusal of a list of parts."""
    return Refusal(ErrorCode.INVALID_VALUE, message, field="parts")
