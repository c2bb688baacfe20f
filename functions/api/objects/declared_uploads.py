"""Blobs and outputs that a worker declares with size and checksum: seen in storage, or a URL that makes it so."""

from __future__ import annotations

from baton.contract.names import CHECKPOINTS_BUCKET
from functions.api.http.context import Call, Context
from functions.domain.ports import Presigned, StoredObject


def matches(found: StoredObject, size_bytes: int, crc64nvme: str) -> bool:
    """True if the stored object has the declared size and checksum."""
    return found.size_bytes == size_bytes and found.crc64nvme == crc64nvme


def upload_of(
    context: Context, call: Call, key: str, found: StoredObject | None, *, size_bytes: int, crc64nvme: str
) -> Presigned | None:
    """Where to PUT an object of the checkpoints bucket so that it is as declared; None if `found` is.

    S3 takes exactly the declared bytes, and only where there is nothing yet. What is stored with other bytes is
    damaged: exactly that version may be replaced.
    """
    if found is not None and matches(found, size_bytes, crc64nvme):
        return None
    return context.objects.presign_put(
        call.tenant,
        CHECKPOINTS_BUCKET,
        key,
        expires_s=context.settings.url_life_s,
        size_bytes=size_bytes,
        crc64nvme=crc64nvme,
        create_only=found is None,
        replace_etag=found.etag if found else None,
    )
