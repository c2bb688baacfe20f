"""Upload URLs for objects that a worker declares with size and checksum."""

from __future__ import annotations

from baton.contract.names import CHECKPOINTS_BUCKET
from functions.api.http.context import ApiCall, Context
from functions.domain.ports import Presigned, StoredObject


def matches(found: StoredObject, size_bytes: int, crc64nvme: str) -> bool:
    """Return True if the stored object has the declared size and checksum."""
    return found.size_bytes == size_bytes and found.crc64nvme == crc64nvme


def presign_if_missing(
    context: Context, call: ApiCall, key: str, found: StoredObject | None, *, size_bytes: int, crc64nvme: str
) -> Presigned | None:
    """Presign the upload of a declared object to the checkpoints bucket; None if `found` is as declared.

    S3 accepts exactly the declared bytes, and only under a free key. A stored object with other bytes is damaged; the
    URL permits the replacement of exactly that version.
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
