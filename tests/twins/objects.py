"""The object store in memory, for tests: S3ObjectStore's behaviour, and that of the service behind its URLs."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

from baton.contract.names import BUCKETS
from functions.domain import table_keys
from functions.domain.ports import Presigned, ResultPage, StoredObject, StoredPart
from functions.storage.paging import objects_list, page
from functions.storage.s3.crc64 import crc64nvme as crc64nvme_of
from functions.storage.s3.crc64 import joined
from functions.storage.s3.object_headers import (
    CHECKSUM_HEADER,
    check_parts,
    other_bytes,
    parts_refused,
    put_headers,
    unknown_bucket,
)


@dataclass(frozen=True)
class _Stored:
    data: bytes
    size_bytes: int
    etag: str
    crc64nvme: str | None
    modified_at: int


@dataclass
class _Bucket:
    objects: dict[str, _Stored] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


@dataclass
class _Upload:
    bucket: str
    name: str
    checksummed: bool
    parts: dict[int, _Part] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    data: bytes
    etag: str
    crc64nvme: str | None


@dataclass(frozen=True)
class _Signed:
    """The one request that a presigned URL permits."""

    method: str
    bucket: str
    name: str
    headers: Mapping[str, str] = field(default_factory=dict)
    upload_id: str = ""
    part_number: int = 0
    content_type: str | None = None


class MemoryObjectStore:
    """Twin of S3ObjectStore. `now` gives the time of modification in epoch seconds.

    Test hooks: `put` stores an object directly, `request` does what a client does with a presigned URL. URLs are
    deterministic and do not expire. Like many stores, it knows the checksum only of what was uploaded with one.
    """

    def __init__(self, *, now: Callable[[], int] = lambda: 0) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._buckets = {name: _Bucket() for name in BUCKETS}
        self._uploads: dict[str, _Upload] = {}
        self._signed: dict[str, _Signed] = {}
        self._count = 0

    def put(
        self,
        tenant: str,
        bucket: str,
        key: str,
        data: bytes = b"",
        *,
        size_bytes: int | None = None,
        crc64nvme: str | None = None,
    ) -> StoredObject:
        """Test hook: store an object; `size_bytes` and `crc64nvme` are reported instead of those of `data`."""
        with self._lock:
            crc = crc64nvme or crc64nvme_of(data)
            stored = self._store(bucket, table_keys.object_key(tenant, key), data, size_bytes=size_bytes, crc=crc)
            return _view(key, stored)

    def request(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, data: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        """Test hook: status, headers and body that S3 answers to a client that uses a presigned URL."""
        with self._lock:
            signed = self._signed.get(url)
            if signed is None or signed.method != method:
                return 403, {}, b"SignatureDoesNotMatch"
            sent = {name.lower(): value for name, value in (headers or {}).items()}
            sent["content-length"] = str(len(data))
            if any(sent.get(name) != value for name, value in signed.headers.items()):
                return 403, {}, b"SignatureDoesNotMatch"
            if method == "GET":
                stored = self._bucket(signed.bucket).objects.get(signed.name)
                if stored is None:
                    return 404, {}, b"NoSuchKey"
                shown_as = {"content-type": signed.content_type or "binary/octet-stream"}
                return 200, {"etag": f'"{stored.etag}"', **shown_as}, stored.data
            return self._put_part(signed, sent, data) if signed.upload_id else self._put_object(signed, sent, data)

    def head(self, tenant: str, bucket: str, key: str) -> StoredObject | None:
        with self._lock:
            stored = self._bucket(bucket).objects.get(table_keys.object_key(tenant, key))
        return None if stored is None else _view(key, stored)

    def head_many(self, tenant: str, bucket: str, keys: Iterable[str]) -> dict[str, StoredObject]:
        found = {key: self.head(tenant, bucket, key) for key in keys}
        return {key: stored for key, stored in found.items() if stored is not None}

    def list(
        self, tenant: str, bucket: str, prefix: str, *, limit: int, cursor: str | None = None, after: str | None = None
    ) -> ResultPage[StoredObject]:
        listed = objects_list(tenant, bucket, prefix)
        position = listed.position(cursor)
        start = str(position[0]) if position else after
        begin = table_keys.object_key(tenant, prefix)
        with self._lock:
            kept = self._bucket(bucket)
            first = bisect_left(kept.names, begin)
            if start is not None:
                first = max(first, bisect_right(kept.names, table_keys.object_key(tenant, start)))
            names = [name for name in kept.names[first : first + limit + 1] if name.startswith(begin)]
            found = [_view(name.removeprefix(f"{tenant}/"), kept.objects[name], listed=True) for name in names]
        return page(found, limit, listed, lambda stored: (stored.key,))

    def read(self, tenant: str, bucket: str, key: str) -> bytes | None:
        with self._lock:
            stored = self._bucket(bucket).objects.get(table_keys.object_key(tenant, key))
        return None if stored is None else stored.data

    def read_many(self, tenant: str, bucket: str, keys: Sequence[str]) -> dict[str, bytes]:
        found = {key: self.read(tenant, bucket, key) for key in keys}
        return {key: data for key, data in found.items() if data is not None}

    def create(self, tenant: str, bucket: str, key: str, data: bytes) -> bool:
        with self._lock:
            name = table_keys.object_key(tenant, key)
            if name in self._bucket(bucket).objects:
                return False
            self._store(bucket, name, data)
            return True

    def delete_many(self, tenant: str, bucket: str, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(tenant, bucket, key)

    def delete(self, tenant: str, bucket: str, key: str) -> None:
        with self._lock:
            kept, name = self._bucket(bucket), table_keys.object_key(tenant, key)
            if kept.objects.pop(name, None) is not None:
                del kept.names[bisect_left(kept.names, name)]

    def presign_get(
        self, tenant: str, bucket: str, key: str, *, expires_s: int, content_type: str | None = None
    ) -> str:
        return self._sign(
            _Signed("GET", bucket, table_keys.object_key(tenant, key), content_type=content_type), expires_s
        )

    def presign_put(
        self,
        tenant: str,
        bucket: str,
        key: str,
        *,
        expires_s: int,
        size_bytes: int | None = None,
        crc64nvme: str | None = None,
        create_only: bool = False,
        replace_etag: str | None = None,
        expiring: bool = False,
    ) -> Presigned:
        headers = put_headers(size_bytes, crc64nvme, create_only, replace_etag, expiring)
        url = self._sign(_Signed("PUT", bucket, table_keys.object_key(tenant, key), headers), expires_s)
        return Presigned(url, headers)

    def create_multipart(self, tenant: str, bucket: str, key: str, *, checksummed: bool = False) -> str:
        with self._lock:
            self._bucket(bucket)
            self._count += 1
            upload_id = f"upload-{self._count}"
            self._uploads[upload_id] = _Upload(bucket, table_keys.object_key(tenant, key), checksummed)
            return upload_id

    def put_part(self, tenant: str, bucket: str, key: str, upload_id: str, number: int, *, data: bytes) -> str | None:
        with self._lock:
            upload = self._upload(tenant, bucket, key, upload_id)
            if upload is None:
                return None
            etag = hashlib.md5(data).hexdigest()
            upload.parts[number] = _Part(data, etag, None)
            return etag

    def presign_part(
        self,
        tenant: str,
        bucket: str,
        key: str,
        upload_id: str,
        part_number: int,
        *,
        expires_s: int,
        size_bytes: int | None = None,
        crc64nvme: str | None = None,
    ) -> Presigned:
        headers = put_headers(size_bytes, crc64nvme, False, None)
        name = table_keys.object_key(tenant, key)
        signed = _Signed("PUT", bucket, name, headers, upload_id=upload_id, part_number=part_number)
        return Presigned(self._sign(signed, expires_s), headers)

    def multiparts(self, tenant: str, bucket: str, key: str) -> Sequence[str]:
        with self._lock:
            return [one for one in reversed(self._uploads) if self._upload(tenant, bucket, key, one) is not None]

    def stored_parts(self, tenant: str, bucket: str, key: str, upload_id: str) -> Sequence[StoredPart] | None:
        with self._lock:
            upload = self._upload(tenant, bucket, key, upload_id)
            return None if upload is None else _stored_parts(upload)

    def complete_multipart(
        self, tenant: str, bucket: str, key: str, upload_id: str, parts: Sequence[tuple[int, str]]
    ) -> str | None:
        with self._lock:
            upload = self._upload(tenant, bucket, key, upload_id)
            if upload is None:
                return None
            stored = {number: part.etag for number, part in upload.parts.items()}
            chosen = [(number, etag.strip('"')) for number, etag in parts] or sorted(stored.items())
            check_parts(chosen)
            if any(stored.get(number) != etag for number, etag in chosen):
                raise parts_refused("A part is not stored, or has another ETag.")
            return self._complete(upload_id, upload, [number for number, _ in chosen])

    def complete_checksummed(
        self,
        tenant: str,
        bucket: str,
        key: str,
        upload_id: str,
        parts: Sequence[StoredPart],
        *,
        crc64nvme: str,
        create_only: bool = False,
        replace_etag: str | None = None,
    ) -> str | None:
        with self._lock:
            upload = self._upload(tenant, bucket, key, upload_id)
            there = self._bucket(bucket).objects.get(table_keys.object_key(tenant, key))
            if upload is None or (create_only and there is not None):
                return None
            if replace_etag is not None and (there is None or there.etag != replace_etag):
                return None
            stored = {part.number: part for part in _stored_parts(upload)}
            if any(stored.get(part.number) != part for part in parts):
                return None
            crc = joined((part.crc64nvme or "", part.size_bytes) for part in parts)
            if crc != crc64nvme:
                raise other_bytes(key)
            return self._complete(upload_id, upload, [part.number for part in parts], crc=crc)

    def abort_multipart(self, tenant: str, bucket: str, key: str, upload_id: str) -> bool:
        with self._lock:
            if self._upload(tenant, bucket, key, upload_id) is None:
                return False
            del self._uploads[upload_id]
            return True

    def _complete(self, upload_id: str, upload: _Upload, numbers: Sequence[int], *, crc: str | None = None) -> str:
        chosen = [upload.parts[number] for number in numbers]
        digest = hashlib.md5(b"".join(bytes.fromhex(part.etag) for part in chosen))
        etag = f"{digest.hexdigest()}-{len(chosen)}"
        self._store(upload.bucket, upload.name, b"".join(part.data for part in chosen), etag=etag, crc=crc)
        del self._uploads[upload_id]
        return etag

    def _bucket(self, bucket: str) -> _Bucket:
        if bucket not in self._buckets:
            raise unknown_bucket(bucket)
        return self._buckets[bucket]

    def _upload(self, tenant: str, bucket: str, key: str, upload_id: str) -> _Upload | None:
        self._bucket(bucket)
        upload = self._uploads.get(upload_id)
        same = upload is not None and (upload.bucket, upload.name) == (bucket, table_keys.object_key(tenant, key))
        return upload if same else None

    def _store(
        self,
        bucket: str,
        name: str,
        data: bytes,
        *,
        size_bytes: int | None = None,
        crc: str | None = None,
        etag: str | None = None,
    ) -> _Stored:
        kept = self._bucket(bucket)
        stored = _Stored(
            data=data,
            size_bytes=len(data) if size_bytes is None else size_bytes,
            etag=etag or hashlib.md5(data).hexdigest(),
            crc64nvme=crc,
            modified_at=self._now(),
        )
        if name not in kept.objects:
            insort(kept.names, name)
        kept.objects[name] = stored
        return stored

    def _sign(self, signed: _Signed, expires_s: int) -> str:
        with self._lock:
            self._bucket(signed.bucket)
            query = {"method": signed.method, "expires_s": str(expires_s), **signed.headers}
            if signed.content_type is not None:
                query["response-content-type"] = signed.content_type
            if signed.upload_id:
                query |= {"uploadId": signed.upload_id, "partNumber": str(signed.part_number)}
            url = f"memory://{signed.bucket}/{quote(signed.name)}?{urlencode(query)}"
            self._signed[url] = signed
            return url

    def _put_part(self, signed: _Signed, sent: Mapping[str, str], data: bytes) -> tuple[int, dict[str, str], bytes]:
        upload = self._uploads.get(signed.upload_id)
        if upload is None:
            return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
        if CHECKSUM_HEADER in sent and sent[CHECKSUM_HEADER] != crc64nvme_of(data):
            return 400, {}, b"BadDigest"
        etag = hashlib.md5(data).hexdigest()
        crc = sent.get(CHECKSUM_HEADER) if upload.checksummed else None
        upload.parts[signed.part_number] = _Part(data, etag, crc)
        return 200, {"etag": f'"{etag}"'}, b""

    def _put_object(self, signed: _Signed, sent: Mapping[str, str], data: bytes) -> tuple[int, dict[str, str], bytes]:
        there = self._bucket(signed.bucket).objects.get(signed.name)
        wanted = signed.headers.get("if-match")
        if wanted is not None and there is None:
            return 404, {}, b"NoSuchKey"
        if ("if-none-match" in signed.headers and there is not None) or (
            wanted is not None and there is not None and wanted.strip('"') != there.etag
        ):
            return 412, {}, b"PreconditionFailed"
        if CHECKSUM_HEADER in sent and sent[CHECKSUM_HEADER] != crc64nvme_of(data):
            return 400, {}, b"BadDigest"
        stored = self._store(signed.bucket, signed.name, data, crc=sent.get(CHECKSUM_HEADER))
        return 200, {"etag": f'"{stored.etag}"'}, b""


def _stored_parts(upload: _Upload) -> list[StoredPart]:
    return [
        StoredPart(number, len(part.data), part.etag, part.crc64nvme) for number, part in sorted(upload.parts.items())
    ]


def _view(key: str, stored: _Stored, *, listed: bool = False) -> StoredObject:
    """The object as S3 describes it; a listing does not show checksums."""
    crc = None if listed else stored.crc64nvme
    return StoredObject(key, stored.size_bytes, stored.etag, stored.modified_at, crc)
