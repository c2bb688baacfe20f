"""Whether an object store keeps what a checkpoint rests on. For stores that only speak S3's language.

The control plane never sees the bytes of a checkpoint. It believes the size and the checksum that the store reports,
and that an upload URL is good for exactly the bytes it was made for. Some stores accept any bytes and report the
checksum that was claimed (rclone's `serve s3` does): there, damage would be committed as verified.
"""

from __future__ import annotations

import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from functions.domain.ports import ObjectStore
from functions.storage.crc64 import crc64nvme

TENANT = ".store-check"
"""No tenant can be called so. What is written for a moment lies below it."""
LIFE_S = 60
TIMEOUT_S = 20
_RIGHT, _WRONG = b"the right bytes", b"THE right bytes"

Send = Callable[[str, str, Mapping[str, str], bytes], int]
"""HTTP method, URL, headers and body to the status of the answer."""


def send(method: str, url: str, headers: Mapping[str, str], data: bytes) -> int:
    """One request, as a worker sends it. Raises OSError if the store cannot be reached."""
    # urllib would add a content type of its own; this one is harmless.
    request = urllib.request.Request(  # noqa: S310 - the URL is one that we have just signed
        url, data=data, headers={"content-type": "application/octet-stream", **headers}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)


def missing_promises(objects: ObjectStore, bucket: str, put: Send = send) -> list[str]:
    """What the store does not do, a sentence each; empty if it may be used. Leaves nothing behind.

    Raises what the store raises if it cannot be used at all: StorageUnavailable, ClientError, OSError.
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
