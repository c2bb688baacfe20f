"""Store objects in S3, or in a store with S3's protocol, conditional writes and CRC-64/NVME."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from functions.domain.errors import StorageUnavailable
from functions.domain.ports import Presigned, ResultPage, StoredObject, StoredPart
from functions.domain.table_keys import object_key
from functions.storage.failures import error_code, failures_translated, http_status
from functions.storage.paging import objects_list, page
from functions.storage.s3.object_headers import (
    EXPIRING_TAGGING,
    check_parts,
    other_bytes,
    parts_refused,
    put_headers,
    quoted,
    unknown_bucket,
)

T = TypeVar("T")

MAX_KEYS_PER_CALL = 1000
CALLS_IN_PARALLEL = 16
MAX_COLLISIONS = 5
PART_ERRORS = frozenset(("InvalidPart", "InvalidPartOrder", "EntityTooSmall", "MalformedXML"))
NOT_AS_LISTED = frozenset(("InvalidPart", "InvalidPartOrder", "NoSuchKey", "NoSuchUpload"))
"""Codes after which the listed parts are obsolete: another client replaced a part, ended the upload or deleted the
object."""


class S3ObjectStore:
    """ObjectStore over a low-level S3 client.

    `presigner`: a client with the endpoint by which workers reach S3; the client only signs, and may be `client`.
    `buckets`: physical name by the API's name. `client` must allow `CALLS_IN_PARALLEL` connections.
    """

    def __init__(self, client: Any, presigner: Any, buckets: Mapping[str, str]) -> None:
        self._client = client
        self._presigner = presigner
        self._buckets = dict(buckets)

    def head(self, tenant: str, bucket: str, key: str) -> StoredObject | None:
        try:
            with failures_translated():
                answer = self._client.head_object(**self._place(tenant, bucket, key), ChecksumMode="ENABLED")
        except ClientError as error:
            if http_status(error) == 404:
                return None
            raise
        return StoredObject(
            key=key,
            size_bytes=answer["ContentLength"],
            etag=answer["ETag"].strip('"'),
            modified_at=int(answer["LastModified"].timestamp()),
            crc64nvme=answer.get("ChecksumCRC64NVME"),
        )

    def head_many(self, tenant: str, bucket: str, keys: Iterable[str]) -> dict[str, StoredObject]:
        found = _call_in_parallel(lambda key: self.head(tenant, bucket, key), keys)
        return {key: stored for key, stored in found.items() if stored is not None}

    def list(
        self, tenant: str, bucket: str, prefix: str, *, limit: int, cursor: str | None = None, after: str | None = None
    ) -> ResultPage[StoredObject]:
        listed = objects_list(tenant, bucket, prefix)
        position = listed.position(cursor)
        start = str(position[0]) if position else after
        found: list[StoredObject] = []
        more = True
        while more and len(found) <= limit:
            request: dict[str, Any] = {"StartAfter": object_key(tenant, start)} if start is not None else {}
            with failures_translated():
                answer = self._client.list_objects_v2(
                    Bucket=self._physical(bucket),
                    Prefix=object_key(tenant, prefix),
                    MaxKeys=min(limit + 1 - len(found), MAX_KEYS_PER_CALL),
                    **request,
                )
            found += [_listed(tenant, entry) for entry in answer.get("Contents", [])]
            more = bool(answer.get("IsTruncated")) and bool(answer.get("Contents"))
            start = found[-1].key if found else start
        return page(found, limit, listed, lambda stored: (stored.key,))

    def read(self, tenant: str, bucket: str, key: str) -> bytes | None:
        try:
            with failures_translated():
                data: bytes = self._client.get_object(**self._place(tenant, bucket, key))["Body"].read()
        except ClientError as error:
            if http_status(error) == 404:
                return None
            raise
        return data

    def read_many(self, tenant: str, bucket: str, keys: Sequence[str]) -> dict[str, bytes]:
        found = _call_in_parallel(lambda key: self.read(tenant, bucket, key), keys)
        return {key: data for key, data in found.items() if data is not None}

    def create(self, tenant: str, bucket: str, key: str, data: bytes) -> bool:
        for _ in range(MAX_COLLISIONS):
            try:
                with failures_translated():
                    self._client.put_object(**self._place(tenant, bucket, key), Body=data, IfNoneMatch="*")
            except ClientError as error:
                if http_status(error) == 412:
                    return False
                # 409: another write of the key is in progress and may still fail, therefore try again.
                if http_status(error) != 409:
                    raise
            else:
                return True
        raise StorageUnavailable(f"PutObject: {key} is being written by others all the time")

    def delete(self, tenant: str, bucket: str, key: str) -> None:
        with failures_translated():
            self._client.delete_object(**self._place(tenant, bucket, key))

    def delete_many(self, tenant: str, bucket: str, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), MAX_KEYS_PER_CALL):
            names = [{"Key": object_key(tenant, key)} for key in keys[first : first + MAX_KEYS_PER_CALL]]
            with failures_translated():
                answer = self._client.delete_objects(
                    Bucket=self._physical(bucket), Delete={"Objects": names, "Quiet": True}
                )
            if failed := answer.get("Errors"):
                codes = sorted({str(error.get("Code")) for error in failed})
                raise StorageUnavailable(f"DeleteObjects: {len(failed)} objects were left ({', '.join(codes)})")

    def presign_get(
        self, tenant: str, bucket: str, key: str, *, expires_s: int, content_type: str | None = None
    ) -> str:
        shown_as = {} if content_type is None else {"ResponseContentType": content_type}
        return self._presigned("get_object", {**self._place(tenant, bucket, key), **shown_as}, expires_s)

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
        request: dict[str, Any] = self._place(tenant, bucket, key)
        if size_bytes is not None:
            request["ContentLength"] = size_bytes
        if crc64nvme is not None:
            request["ChecksumCRC64NVME"] = crc64nvme
        if create_only:
            request["IfNoneMatch"] = "*"
        if replace_etag is not None:
            request["IfMatch"] = quoted(replace_etag)
        if expiring:
            request["Tagging"] = EXPIRING_TAGGING
        return Presigned(
            self._presigned("put_object", request, expires_s),
            put_headers(size_bytes, crc64nvme, create_only, replace_etag, expiring),
        )

    def create_multipart(self, tenant: str, bucket: str, key: str, *, checksummed: bool = False) -> str:
        request = self._place(tenant, bucket, key)
        if checksummed:
            request |= {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        with failures_translated():
            upload = self._client.create_multipart_upload(**request)
        return str(upload["UploadId"])

    def put_part(self, tenant: str, bucket: str, key: str, upload_id: str, number: int, *, data: bytes) -> str | None:
        request = self._place(tenant, bucket, key) | {"UploadId": upload_id, "PartNumber": number}
        try:
            with failures_translated():
                answer = self._client.upload_part(**request, Body=data)
        except ClientError as error:
            if error_code(error) == "NoSuchUpload":
                return None
            raise
        return str(answer["ETag"]).strip('"')

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
        request = self._place(tenant, bucket, key) | {"UploadId": upload_id, "PartNumber": part_number}
        if size_bytes is not None:
            request["ContentLength"] = size_bytes
        if crc64nvme is not None:
            request["ChecksumCRC64NVME"] = crc64nvme
        return Presigned(
            self._presigned("upload_part", request, expires_s), put_headers(size_bytes, crc64nvme, False, None)
        )

    def multiparts(self, tenant: str, bucket: str, key: str) -> Sequence[str]:
        place = self._place(tenant, bucket, key)
        with failures_translated():
            # S3 sorts uploads by key, therefore the uploads of this key precede those of longer keys.
            answer = self._client.list_multipart_uploads(Bucket=place["Bucket"], Prefix=place["Key"])
        found = [
            (upload["Initiated"], str(upload["UploadId"]))
            for upload in answer.get("Uploads", [])
            if upload["Key"] == place["Key"]
        ]
        return [upload_id for _, upload_id in sorted(found, reverse=True)]

    def stored_parts(self, tenant: str, bucket: str, key: str, upload_id: str) -> Sequence[StoredPart] | None:
        try:
            return self._stored_parts(self._place(tenant, bucket, key), upload_id)
        except ClientError as error:
            if error_code(error) == "NoSuchUpload":
                return None
            raise

    def complete_multipart(
        self, tenant: str, bucket: str, key: str, upload_id: str, parts: Sequence[tuple[int, str]]
    ) -> str | None:
        place = self._place(tenant, bucket, key)
        try:
            chosen = list(parts) or [(part.number, part.etag) for part in self._stored_parts(place, upload_id)]
            check_parts(chosen)
            with failures_translated():
                answer = self._client.complete_multipart_upload(
                    **place,
                    UploadId=upload_id,
                    MultipartUpload={
                        "Parts": [{"PartNumber": part_number, "ETag": quoted(etag)} for part_number, etag in chosen]
                    },
                )
        except ClientError as error:
            if error_code(error) == "NoSuchUpload":
                return None
            if error_code(error) in PART_ERRORS:
                raise parts_refused("A part is not stored, has another ETag, or is smaller than 5 MiB.") from error
            raise
        return str(answer["ETag"]).strip('"')

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
        request = self._place(tenant, bucket, key) | {
            "UploadId": upload_id,
            "ChecksumType": "FULL_OBJECT",
            "ChecksumCRC64NVME": crc64nvme,
            "MultipartUpload": {"Parts": [_named(part) for part in parts]},
        }
        if create_only:
            request["IfNoneMatch"] = "*"
        if replace_etag is not None:
            request["IfMatch"] = quoted(replace_etag)
        try:
            with failures_translated():
                answer = self._client.complete_multipart_upload(**request)
        except ClientError as error:
            if error_code(error) in NOT_AS_LISTED or http_status(error) in (409, 412):
                return None
            if error_code(error) == "BadDigest":
                raise other_bytes(key) from error
            raise
        return str(answer["ETag"]).strip('"')

    def abort_multipart(self, tenant: str, bucket: str, key: str, upload_id: str) -> bool:
        try:
            with failures_translated():
                self._client.abort_multipart_upload(**self._place(tenant, bucket, key), UploadId=upload_id)
        except ClientError as error:
            if error_code(error) == "NoSuchUpload":
                return False
            raise
        return True

    def _physical(self, bucket: str) -> str:
        if bucket not in self._buckets:
            raise unknown_bucket(bucket)
        return self._buckets[bucket]

    def _place(self, tenant: str, bucket: str, key: str) -> dict[str, Any]:
        return {"Bucket": self._physical(bucket), "Key": object_key(tenant, key)}

    def _presigned(self, operation: str, request: dict[str, Any], expires_s: int) -> str:
        # Presigning is local; only a refresh of the credentials uses the network.
        with failures_translated():
            url: str = self._presigner.generate_presigned_url(operation, Params=request, ExpiresIn=expires_s)
        return url

    def _stored_parts(self, place: dict[str, Any], upload_id: str) -> Sequence[StoredPart]:
        parts: builtins.list[StoredPart] = []
        marker = 0
        while True:
            with failures_translated():
                answer = self._client.list_parts(**place, UploadId=upload_id, PartNumberMarker=marker)
            parts += [
                StoredPart(
                    int(part["PartNumber"]), part["Size"], part["ETag"].strip('"'), part.get("ChecksumCRC64NVME")
                )
                for part in answer.get("Parts", [])
            ]
            if not answer.get("IsTruncated"):
                return parts
            marker = answer["NextPartNumberMarker"]


def _call_in_parallel(call: Callable[[str], T], keys: Iterable[str]) -> dict[str, T]:
    wanted = list(dict.fromkeys(keys))
    if len(wanted) < 2:
        return {key: call(key) for key in wanted}
    with ThreadPoolExecutor(min(len(wanted), CALLS_IN_PARALLEL)) as pool:
        return dict(zip(wanted, pool.map(call, wanted), strict=True))


def _named(part: StoredPart) -> dict[str, Any]:
    """Return a part in the form of CompleteMultipartUpload."""
    named: dict[str, Any] = {"PartNumber": part.number, "ETag": quoted(part.etag)}
    return named if part.crc64nvme is None else named | {"ChecksumCRC64NVME": part.crc64nvme}


def _listed(tenant: str, entry: dict[str, Any]) -> StoredObject:
    return StoredObject(
        key=entry["Key"].removeprefix(f"{tenant}/"),
        size_bytes=entry["Size"],
        etag=entry["ETag"].strip('"'),
        modified_at=int(entry["LastModified"].timestamp()),
    )
