"""Multipart uploads of large objects: begin, resume, complete.

The control plane stores no state of an upload: the object store lists the open uploads of a key and their parts with
checksums. Therefore a restarted client receives URLs for the missing parts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from baton.contract.base import MAX_OBJECT_BYTES
from baton.contract.errors import ErrorCode
from baton.contract.objects.parts import Parts, part_range
from functions.api.http.context import ApiCall, Context
from functions.api.objects.declared_uploads import matches
from functions.domain.errors import Refusal
from functions.domain.ports import Presigned, StoredObject, StoredPart

MAX_PART_URLS = 256
"""Limit of the part URLs in one answer: a URL is made when the client can use the URL soon."""

MAX_CHECKS = 8
"""Uploads that one call checks: a completion may take a second or two, and a function has 25 s."""

MAX_UPLOADS_OF_A_KEY = 4
"""Newest open uploads of a key that a call checks; a lifecycle rule aborts abandoned uploads."""


@dataclass(frozen=True, kw_only=True)
class MultipartObject:
    """Declaration of the whole object, its parts, and the object that the upload may overwrite."""

    key: str
    size_bytes: int
    crc64nvme: str
    parts: Parts
    create_only: bool
    replace_etag: str | None = None


class MultipartUploads:
    """Multipart uploads of one call, in one bucket."""

    def __init__(self, context: Context, call: ApiCall, bucket: str) -> None:
        self._context = context
        self._objects = context.objects
        self._tenant = call.tenant
        self._bucket = bucket
        self._urls_left = MAX_PART_URLS
        self._checks_left = MAX_CHECKS

    def accepts(self, parts: Parts | None) -> TypeGuard[Parts]:
        """Return True if the client declared parts and the store supports multipart uploads."""
        return parts is not None and self._context.settings.multipart

    def require_one_put(self, size_bytes: int, field: str) -> None:
        """Refuse a file without parts that is too large for one PUT."""
        if size_bytes <= MAX_OBJECT_BYTES:
            return
        remedy = (
            "declare the file's parts"
            if self._context.settings.multipart
            else "split the file, because this object store supports no parts"
        )
        raise Refusal(
            ErrorCode.INVALID_VALUE,
            f"{size_bytes} bytes exceed the limit of {MAX_OBJECT_BYTES} bytes of one upload; {remedy}.",
            field=field,
        )

    def presign_missing(
        self, whole: MultipartObject, found: StoredObject | None
    ) -> Sequence[tuple[int, Presigned]] | None:
        """Presign the parts that are not stored; None once the object is as declared.

        `found`: the object under the key. The result is empty if this call has reached its limits, or if another client
        has just ended the upload; the next call continues. Raises Refusal (`digest_mismatch`).
        """
        if found is not None and matches(found, whole.size_bytes, whole.crc64nvme):
            return None
        if not self._checks_left or not self._urls_left:
            return ()
        self._checks_left -= 1
        upload_id, stored = self._find_or_create(whole)
        numbers = range(1, len(whole.parts.crc64nvme) + 1)
        presign_missing = [number for number in numbers if number not in stored]
        if not presign_missing:
            return None if self._complete(whole, upload_id, [stored[number] for number in numbers]) else ()
        presign_missing = presign_missing[: self._urls_left]
        self._urls_left -= len(presign_missing)
        return [(number, self._presign(whole, upload_id, number)) for number in presign_missing]

    def _find_or_create(self, whole: MultipartObject) -> tuple[str, dict[int, StoredPart]]:
        """Return an open upload with at least one part whose parts are all as declared, or a new upload.

        Other parts belong to the upload of another object, which may continue.
        """
        for upload_id in self._objects.multiparts(self._tenant, self._bucket, whole.key)[:MAX_UPLOADS_OF_A_KEY]:
            stored = self._objects.stored_parts(self._tenant, self._bucket, whole.key, upload_id)
            if stored and all(_matches_part(part, whole) for part in stored):
                return upload_id, {part.number: part for part in stored}
        return self._objects.create_multipart(self._tenant, self._bucket, whole.key, checksummed=True), {}

    def _complete(self, whole: MultipartObject, upload_id: str, parts: Sequence[StoredPart]) -> bool:
        etag = self._objects.complete_checksummed(
            self._tenant,
            self._bucket,
            whole.key,
            upload_id,
            parts,
            crc64nvme=whole.crc64nvme,
            create_only=whole.create_only,
            replace_etag=whole.replace_etag,
        )
        return etag is not None

    def _presign(self, whole: MultipartObject, upload_id: str, number: int) -> Presigned:
        _, size_bytes = part_range(whole.size_bytes, whole.parts.part_bytes, number)
        return self._objects.presign_part(
            self._tenant,
            self._bucket,
            whole.key,
            upload_id,
            number,
            expires_s=self._context.settings.url_life_s,
            size_bytes=size_bytes,
            crc64nvme=whole.parts.crc64nvme[number - 1],
        )


def _matches_part(part: StoredPart, whole: MultipartObject) -> bool:
    declared = whole.parts.crc64nvme
    if part.number > len(declared):
        return False
    _, size_bytes = part_range(whole.size_bytes, whole.parts.part_bytes, part.number)
    return (part.size_bytes, part.crc64nvme) == (size_bytes, declared[part.number - 1])
