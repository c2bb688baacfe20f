"""Test that an S3-compatible store verifies checksums and upload URLs, on which committed checkpoints depend.

The control plane never reads the bytes of a checkpoint. The control plane trusts the size and the checksum that the
store reports, and relies on upload URLs that accept the declared bytes only. Some stores accept any bytes and report
the claimed checksum (rclone's `serve s3` does); with such a store the control plane would commit damaged checkpoints.
"""

from __future__ import annotations

import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping

from botocore.exceptions import ClientError

from functions.domain.errors import Refusal
from functions.domain.ports import ObjectStore
from functions.storage.s3.crc64 import crc64nvme

TENANT = ".store-check"
"""Tenant of the test objects; no valid tenant name begins with a dot."""
LIFE_S = 60
TIMEOUT_S = 20
_RIGHT, _WRONG = b"the right bytes", b"THE right bytes"

Send = Callable[[str, str, Mapping[str, str], bytes], int]
"""Function from HTTP method, URL, headers and body to the status of the answer."""


def send(method: str, url: str, headers: Mapping[str, str], data: bytes) -> int:
    """Send one request as a worker does; return the status. Raises OSError if the store cannot be reached."""
    # Without a content type urllib would add the type of a form.
    request = urllib.request.Request(  # noqa: S310 - this program has signed the URL
        url, data=data, headers={"content-type": "application/octet-stream", **headers}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)


def missing_promises(objects: ObjectStore, bucket: str, put: Send = send) -> list[str]:
    """Return a sentence for each unmet requirement; empty for a usable store. Removes its test objects.

    Raises StorageUnavailable, ClientError or OSError if the store refuses or does not answer.
    """
    key = secrets.token_hex(8)
    try:
        return list(_missing(objects, bucket, key, put))
    finally:
        objects.delete_many(TENANT, bucket, [key, f"{key}-2"])


def _missing(objects: ObjectStore, bucket: str, key: str, put: Send) -> list[str]:
    crc = crc64nvme(_RIGHT)
    lacks = []
    if objects.list(TENANT, bucket, key, limit=1).items:
        return ["it lists objects that are not there"]
    create = objects.presign_put(
        TENANT, bucket, key, expires_s=LIFE_S, size_bytes=len(_RIGHT), crc64nvme=crc, create_only=True
    )
    refused = put("PUT", create.url, create.headers, _WRONG) >= 400
    if not refused or objects.head(TENANT, bucket, key) is not None:
        lacks.append("it stores other bytes than x-amz-checksum-crc64nvme says")
        objects.delete(TENANT, bucket, key)
    without = {name: value for name, value in create.headers.items() if not name.startswith("x-amz-checksum")}
    if put("PUT", create.url, without, _WRONG) < 400:
        lacks.append("it takes an upload without a header that was signed")
        objects.delete(TENANT, bucket, key)
    sized = objects.presign_put(TENANT, bucket, f"{key}-2", expires_s=LIFE_S, size_bytes=len(_RIGHT))
    if put("PUT", sized.url, {}, _RIGHT + b"!") < 400:
        lacks.append("it takes more bytes than the signed content-length says")
    status = put("PUT", create.url, create.headers, _RIGHT)
    if status >= 400:
        return [*lacks, f"it refuses an upload as a worker makes it (status {status})"]
    stored = objects.head(TENANT, bucket, key)
    if stored is None or stored.size_bytes != len(_RIGHT):
        lacks.append("it does not show at once what was stored")
    elif stored.crc64nvme != crc:
        lacks.append("it does not report the CRC-64/NVME of what is stored")
    if put("PUT", create.url, create.headers, _RIGHT) != 412 or objects.create(TENANT, bucket, key, _RIGHT):
        lacks.append("it overwrites an object in spite of If-None-Match")
    if stored is not None:
        replace = objects.presign_put(
            TENANT, bucket, key, expires_s=LIFE_S, size_bytes=len(_RIGHT), crc64nvme=crc, replace_etag="0" * 32
        )
        if put("PUT", replace.url, replace.headers, _RIGHT) != 412:
            lacks.append("it overwrites another version than If-Match names")
    return lacks


def missing_of_multipart(objects: ObjectStore, bucket: str, put: Send = send) -> list[str]:
    """Return a sentence for each unmet requirement of multipart uploads. Removes its test objects.

    The store must pass `missing_promises`. Raises the same errors as `missing_promises`.
    """
    key = secrets.token_hex(8)
    uploads: list[str] = []
    try:
        return list(_missing_of_multipart(objects, bucket, key, uploads, put))
    except ClientError as error:
        return [f"it refuses a request of an upload in parts ({error})"]
    finally:
        for upload_id in uploads:
            objects.abort_multipart(TENANT, bucket, key, upload_id)
        objects.delete(TENANT, bucket, key)


def _missing_of_multipart(objects: ObjectStore, bucket: str, key: str, uploads: list[str], put: Send) -> Iterator[str]:
    """Try an upload of one small part, since the last part of an upload may have any size."""
    if objects.multiparts(TENANT, bucket, key):
        yield "it lists uploads that are not under way"
    upload_id = objects.create_multipart(TENANT, bucket, key, checksummed=True)
    uploads.append(upload_id)
    if list(objects.multiparts(TENANT, bucket, key)) != [upload_id]:
        yield "it does not list an upload that is under way"
    crc = crc64nvme(_RIGHT)
    part = objects.presign_part(
        TENANT, bucket, key, upload_id, 1, expires_s=LIFE_S, size_bytes=len(_RIGHT), crc64nvme=crc
    )
    if put("PUT", part.url, part.headers, _WRONG) < 400:
        yield "it stores a part with other bytes than x-amz-checksum-crc64nvme says"
    status = put("PUT", part.url, part.headers, _RIGHT)
    if status >= 400:
        yield f"it refuses a part as a worker sends it (status {status})"
        return
    parts = objects.stored_parts(TENANT, bucket, key, upload_id) or ()
    if [(one.number, one.size_bytes, one.crc64nvme) for one in parts] != [(1, len(_RIGHT), crc)]:
        yield "it does not list a part with its size and CRC-64/NVME"
        return

    def complete(data: bytes, *, create_only: bool = False) -> bool:
        try:
            etag = objects.complete_checksummed(
                TENANT,
                bucket,
                key,
                upload_id,
                parts,
                crc64nvme=crc64nvme(data),
                create_only=create_only,
            )
        except Refusal:
            return False
        return etag is not None

    if complete(_WRONG):
        yield "it completes an upload whose parts have another CRC-64/NVME than the whole is said to have"
        return
    objects.create(TENANT, bucket, key, _WRONG)
    if complete(_RIGHT, create_only=True):
        yield "it overwrites an object by an upload in parts in spite of If-None-Match"
        return
    if not complete(_RIGHT):
        yield "it does not complete an upload in parts"
        return
    stored = objects.head(TENANT, bucket, key)
    if stored is None or (stored.size_bytes, stored.crc64nvme) != (len(_RIGHT), crc):
        yield "it does not report the CRC-64/NVME of an object that was made of parts"
