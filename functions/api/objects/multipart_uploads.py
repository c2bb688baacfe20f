"""Large objects uploaded in parts: begun, gone on with where they were, completed.

Nothing is written down here: the store tells which uploads of a key are under way and which of their parts it has, each
with its checksum. So a client that was killed is told only what is still missing, whoever asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from baton.contract.base import MAX_OBJECT_BYTES
from baton.contract.errors import ErrorCode
from baton.contract.parts import Parts, part_range
from functions.api.http.context import Call, Context
from functions.api.objects.declared_uploads import matches
from functions.domain.errors import Refusal
from functions.domain.ports import Presigned, StoredObject, StoredPart

MAX_PART_URLS = 256
"""In one answer: they are made when they can be used soon."""

MAX_LOOKS = 8
"""Uploads looked at in one call: a completion may take a second or two, and a function has 25 s."""

MAX_UPLOADS_OF_A_KEY = 4
"""Of several that are under way the newest are looked at; a lifecycle rule ends those that nobody goes on with."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What the parts have to be together, and what may be overwritten by it."""

    key: str
    size_bytes: int
    crc64nvme: str
    parts: Parts
    create_only: bool
    replace_etag: str | None = None


class PartedUploads:
    """Those of one call, in one bucket."""

    def __init__(self, context: Context, call: Call, bucket: str) -> None:
        self._context = context
        self._objects = context.objects
        self._tenant = call.tenant
        self._bucket = bucket
        self._urls_left = MAX_PART_URLS
        self._looks_left = MAX_LOOKS

    def take(self, parts: Parts | None) -> TypeGuard[Parts]:
        """True if a file is to go up in parts: they were declared, and the store is one that can put them together."""
        return parts is not None and self._context.settings.multipart

    def require_one_put(self, size_bytes: int, field: str) -> None:
        """Raises Refusal for a file that does not go up in parts, and is too large to go up without."""
        if size_bytes <= MAX_OBJECT_BYTES:
            return
        remedy = (
            "declare its parts" if self._context.settings.multipart else "this object store takes no parts: split it"
        )
        raise Refusal(
            ErrorCode.INVALID_VALUE,
            f"{size_bytes} bytes are more than the {MAX_OBJECT_BYTES} of one upload; {remedy}.",
            field=field,
        )

    def missing(self, whole: Whole, found: StoredObject | None) -> Sequence[tuple[int, Presigned]] | None:
        """Numbers of the parts that are not stored, with where to PUT them; None once the object is as declared.

        `found`: what is stored under the key. No part is named where this call has done enough, and where somebody else
        has just ended the upload: the next call tells. Raises Refusal (`digest_mismatch`).
        """
        if found is not None and matches(found, whole.size_bytes, whole.crc64nvme):
            return None
        if not self._looks_left or not self._urls_left:
            return ()
        self._looks_left -= 1
        upload_id, stored = self._begun(whole)
        numbers = range(1, len(whole.parts.crc64nvme) + 1)
        missing = [number for number in numbers if number not in stored]
        if not missing:
            return None if self._complete(whole, upload_id, [stored[number] for number in numbers]) else ()
        missing = missing[: self._urls_left]
        self._urls_left -= len(missing)
        return [(number, self._signed(whole, upload_id, number)) for number in missing]

    def _begun(self, whole: Whole) -> tuple[str, dict[int, StoredPart]]:
        """An upload of this very object: one under way whose parts, some at least, are all as declared, or a new one.

        Parts that differ are of another object, whose upload may go on: it is left alone.
        """
        for upload_id in self._objects.multiparts(self._tenant, self._bucket, whole.key)[:MAX_UPLOADS_OF_A_KEY]:
            stored = self._objects.stored_parts(self._tenant, self._bucket, whole.key, upload_id)
            if stored and all(_as_declared(part, whole) for part in stored):
                return upload_id, {part.number: part for part in stored}
        return self._objects.create_multipart(self._tenant, self._bucket, whole.key, checksummed=True), {}

    def _complete(self, whole: Whole, upload_id: str, parts: Sequence[StoredPart]) -> bool:
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

    def _signed(self, whole: Whole, upload_id: str, number: int) -> Presigned:
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


def _as_declared(part: StoredPart, whole: Whole) -> bool:
    declared = whole.parts.crc64nvme
    if part.number > len(declared):
        return False
    _, size_bytes = part_range(whole.size_bytes, whole.parts.part_bytes, part.number)
    return (part.size_bytes, part.crc64nvme) == (size_bytes, declared[part.number - 1])
