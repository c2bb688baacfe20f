"""The calls that transfer objects: tokens, uploads, downloads, batches of presigned URLs, listings.

Only small parts and small objects pass through the API; presigned URLs serve everything else. No answer is a redirect:
HTTP clients forward their headers to the host of a redirect, which would thereby receive the API key and the token.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal

from pydantic import Field

from baton.contract.base import WireModel
from baton.contract.errors import ErrorCode
from baton.contract.names import BUCKETS, CHECKPOINTS_BUCKET, DATA_BUCKET, Scope, in_a_ring
from baton.contract.objects.transfers import (
    DownloadQuery,
    MultipartComplete,
    MultipartCreated,
    ObjectPage,
    ObjectQuery,
    ObjectView,
    PresignedUrl,
    TokenAnswer,
    TokenQuery,
    UploadBatch,
    UploadedPart,
    UploadTarget,
    UploadTargets,
)
from baton.contract.worker.calls import StatusAnswer
from functions.api.http.context import ApiCall, Context, NoContent, WithHeaders
from functions.api.objects.machine_access import require_own_job
from functions.api.objects.multipart_uploads import MultipartObject, MultipartUploads
from functions.domain.access.api_keys import token_digest
from functions.domain.checkpoints.object_keys import PACKS, attempt_of, zip_step
from functions.domain.errors import Refusal
from functions.domain.jobs.transitions import require_running
from functions.domain.ports import Presigned, StoredObject
from functions.domain.records import CheckpointRecord, Job, TransferGrant

_JOB_KEY = re.compile(r"^jobs/([0-9a-f-]{36})/([^/]+)")
_OURS = ("manifests", "artifacts", "logs", "curves", "relay")
MAX_ANSWERED_BYTES = 4_500_000
"""Limit of an object in an answer: Lambda's answers end at 6 MB, and base64 adds a third."""


_ACTIONS = "mpu-create|mpu-presign|mpu-uploadpart|mpu-complete|mpu-abort|delete"


class UploadQuery(WireModel):
    """Query of the upload calls. Example: `?action=mpu-create`, `?uploadId=...&partNumber=1`"""

    action: Annotated[str, Field(pattern=rf"^({_ACTIONS})$")] | None = None
    upload_id: Annotated[str | None, Field(min_length=1, max_length=1024)] = Field(default=None, alias="uploadId")
    part_number: Annotated[int | None, Field(ge=1, le=10_000)] = Field(default=None, alias="partNumber")


def download_token(context: Context, call: ApiCall) -> TokenAnswer:
    """Issue a token for one download of one object."""
    query: TokenQuery = call.query
    _require_known_bucket(query.bucket)
    if query.bucket == DATA_BUCKET and in_a_ring(query.key) and Scope.SUBMIT not in call.principal.scopes:
        raise Refusal(
            ErrorCode.WRONG_SCOPE, f"{query.key} belongs to a ring; reading rings needs the scope submit.", field="key"
        )
    _require_own_object(context, call, query.bucket, query.key)
    found = context.objects.head(call.tenant, query.bucket, query.key)
    if found is None:
        raise Refusal(ErrorCode.OBJECT_NOT_FOUND, f"No object {query.key} in {query.bucket}.", field="key")
    _protect_zip(context, call, query)
    granted = _grant_token(context, call, query, "download", context.settings.download_token_life_s)
    return granted.model_copy(update={"crc64nvme": found.crc64nvme})


def upload_token(context: Context, call: ApiCall) -> TokenAnswer:
    """Issue a token for the upload of one object within some minutes."""
    query: TokenQuery = call.query
    _require_known_bucket(query.bucket)
    _require_writable(context, call, query.bucket, query.key)
    return _grant_token(context, call, query, "upload", context.settings.upload_token_life_s)


def download(context: Context, call: ApiCall) -> PresignedUrl | WithHeaders:
    """Redeem a download token: exactly one request receives the bytes, or with `as=url` a presigned URL."""
    query: DownloadQuery = call.query
    bucket, key = _read_target(call)
    token = call.headers.get("x-download-token")
    if not token:
        raise Refusal(ErrorCode.TOKEN_INVALID, "The header x-download-token is missing.", field="x-download-token")
    grant = context.tokens.get_grant(token_digest(token))
    if grant is not None and not _covers(grant, call.tenant, bucket, key):
        raise Refusal(ErrorCode.TOKEN_WRONG_KEY, field="x-download-token")
    if grant is None or grant.purpose != "download" or grant.expires_at <= call.now:
        raise Refusal(ErrorCode.TOKEN_INVALID, field="x-download-token")
    # The token is redeemed last, so that a failure of the object store does not consume the token.
    if query.as_ is None:
        answer: PresignedUrl | WithHeaders = _read_small_object(context, call, bucket, grant.key)
    else:
        life_s = context.settings.url_life_s
        url = context.objects.presign_get(call.tenant, bucket, grant.key, expires_s=life_s)
        answer = PresignedUrl(url=url, expires_at=call.now + life_s)
    if context.tokens.redeem(token_digest(token), call.now) is None:
        raise Refusal(ErrorCode.TOKEN_INVALID, field="x-download-token")
    return answer


def upload_post(context: Context, call: ApiCall) -> MultipartCreated | PresignedUrl | WithHeaders:
    """Start a multipart upload, presign the PUT of one part, or finish the upload and answer with its ETag."""
    query: UploadQuery = call.query
    bucket, key = _authorize_upload(context, call)
    if query.action == "mpu-create":
        return MultipartCreated(key=key, uploadId=context.objects.create_multipart(call.tenant, bucket, key))
    if query.action == "mpu-presign":
        upload_id, number = _require_part(query)
        life_s = context.settings.url_life_s
        signed = context.objects.presign_part(call.tenant, bucket, key, upload_id, number, expires_s=life_s)
        return PresignedUrl(url=signed.url, expires_at=call.now + life_s)
    if query.action == "mpu-complete":
        body: MultipartComplete = call.body or MultipartComplete()
        parts = [(part.partNumber, part.etag) for part in body.parts]
        upload_id = _require_parameter(query.upload_id, "uploadId")
        etag = context.objects.complete_multipart(call.tenant, bucket, key, upload_id, parts)
        if etag is None:
            etag = _require_completed_before(context.objects.head(call.tenant, bucket, key), parts)
        return WithHeaders(StatusAnswer(), {"etag": f'"{etag}"'})
    raise Refusal(ErrorCode.INVALID_VALUE, "POST takes mpu-create, mpu-presign or mpu-complete.", field="action")


def upload_put(context: Context, call: ApiCall) -> UploadedPart:
    """Store one part of a multipart upload."""
    query: UploadQuery = call.query
    bucket, key = _authorize_upload(context, call)
    if query.action not in (None, "mpu-uploadpart"):
        raise Refusal(ErrorCode.INVALID_VALUE, "PUT takes mpu-uploadpart or no action.", field="action")
    upload_id, number = _require_part(query)
    if not call.body:
        raise Refusal(ErrorCode.MISSING_FIELD, "The body is empty; send the bytes of the part.", field="body")
    etag = context.objects.put_part(call.tenant, bucket, key, upload_id, number, data=call.body)
    if etag is None:
        raise Refusal(ErrorCode.UPLOAD_NOT_FOUND, field="uploadId")
    return UploadedPart(etag=etag, partNumber=number)


def upload_delete(context: Context, call: ApiCall) -> NoContent:
    """Abort a multipart upload with `action=mpu-abort`, delete the object with `action=delete`."""
    query: UploadQuery = call.query
    bucket, key = _authorize_upload(context, call)
    if query.action == "mpu-abort":
        if not context.objects.abort_multipart(
            call.tenant, bucket, key, _require_parameter(query.upload_id, "uploadId")
        ):
            raise Refusal(ErrorCode.UPLOAD_NOT_FOUND, field="uploadId")
    elif query.action == "delete":
        context.objects.delete(call.tenant, bucket, key)
    else:
        raise Refusal(ErrorCode.INVALID_VALUE, "DELETE takes mpu-abort or delete.", field="action")
    return NoContent()


def upload_batch(context: Context, call: ApiCall) -> UploadTargets:
    """Presign PUTs for up to 1,000 files; S3 refuses bytes that differ from the declaration.

    A file with parts receives URLs for the parts that are not stored; a call after its last part completes the file.
    """
    body: UploadBatch = call.body
    _require_known_bucket(body.bucket)
    for file in body.files:
        _require_writable(context, call, body.bucket, file.key)
    in_parts = MultipartUploads(context, call, body.bucket)
    large = [file.key for file in body.files if in_parts.accepts(file.parts)]
    found = context.objects.head_many(call.tenant, body.bucket, large)
    life_s = context.settings.url_life_s
    targets: list[UploadTarget] = []
    pending: list[str] = []
    for index, file in enumerate(body.files):
        create_only = _match_job_key(body.bucket, file.key) is not None
        there = found.get(file.key)
        # A completion cannot overwrite a create-only object either; a single PUT fails at once.
        if in_parts.accepts(file.parts) and not (create_only and there is not None):
            whole = MultipartObject(
                key=file.key,
                size_bytes=file.size_bytes,
                crc64nvme=file.crc64nvme,
                parts=file.parts,
                create_only=create_only,
            )
            missing = in_parts.presign_missing(whole, there)
            if missing is not None:
                pending.append(file.key)
                targets += [_build_target(file.key, signed, part=number) for number, signed in missing]
            continue
        in_parts.require_one_put(file.size_bytes, f"files.{index}.size_bytes")
        signed = context.objects.presign_put(
            call.tenant,
            body.bucket,
            file.key,
            expires_s=life_s,
            size_bytes=file.size_bytes,
            crc64nvme=file.crc64nvme,
            create_only=create_only,
        )
        targets.append(_build_target(file.key, signed))
    return UploadTargets(uploads=targets, expires_at=call.now + life_s, pending=pending)


def _build_target(key: str, signed: Presigned, *, part: int | None = None) -> UploadTarget:
    return UploadTarget(key=key, url=signed.url, headers=dict(signed.headers), part=part)


def list_objects(context: Context, call: ApiCall) -> ObjectPage:
    """List stored objects below a prefix, by key."""
    query: ObjectQuery = call.query
    _require_known_bucket(query.bucket)
    page = context.objects.list(call.tenant, query.bucket, query.prefix, limit=query.limit, cursor=query.cursor)
    views = [
        ObjectView(key=item.key, size_bytes=item.size_bytes, etag=item.etag, modified_at=item.modified_at)
        for item in page.items
    ]
    return ObjectPage(objects=views, next_cursor=page.cursor)


def _grant_token(
    context: Context, call: ApiCall, query: TokenQuery, purpose: Literal["download", "upload"], life_s: int
) -> TokenAnswer:
    token = context.random.token()
    grant = TransferGrant(
        token_sha256=token_digest(token),
        purpose=purpose,
        tenant=call.tenant,
        bucket=query.bucket,
        key=query.key,
        expires_at=call.now + life_s,
    )
    context.tokens.put_grant(grant)
    return TokenAnswer(token=token, expires_at=grant.expires_at)


def _read_target(call: ApiCall) -> tuple[str, str]:
    _require_known_bucket(call.path["bucket"])
    return call.path["bucket"], call.path["key"]


def _authorize_upload(context: Context, call: ApiCall) -> tuple[str, str]:
    """Return bucket and key after the check of the upload token."""
    bucket, key = _read_target(call)
    token = call.headers.get("x-upload-token")
    if not token:
        raise Refusal(ErrorCode.TOKEN_INVALID, "The header x-upload-token is missing.", field="x-upload-token")
    grant = context.tokens.get_grant(token_digest(token))
    if grant is None or grant.purpose != "upload" or grant.expires_at <= call.now:
        raise Refusal(ErrorCode.TOKEN_INVALID, field="x-upload-token")
    if not _covers(grant, call.tenant, bucket, key):
        raise Refusal(ErrorCode.TOKEN_WRONG_KEY, field="x-upload-token")
    _require_writable(context, call, bucket, grant.key)
    return bucket, grant.key


def _covers(grant: TransferGrant, tenant: str, bucket: str, key: str) -> bool:
    """Return True if the token is for this object.

    API Gateway cuts a path at "?", even at an escaped "?". The token contains the whole key.
    """
    return (grant.tenant, grant.bucket) == (tenant, bucket) and key in (grant.key, grant.key.partition("?")[0])


def _require_completed_before(found: StoredObject | None, parts: list[tuple[int, str]]) -> str:
    """Return the ETag of an object that exactly these parts made, for a repeated call; refuse otherwise."""
    digests = [etag.strip('"') for _, etag in parts]
    if found is not None and digests and all(re.fullmatch("[0-9a-f]{32}", digest) for digest in digests):
        # The ETag of a multipart object in S3: the MD5 of the parts' MD5s, and the number of parts.
        digest = hashlib.md5(b"".join(map(bytes.fromhex, digests)), usedforsecurity=False)
        if found.etag == f"{digest.hexdigest()}-{len(digests)}":
            return found.etag
    raise Refusal(ErrorCode.UPLOAD_NOT_FOUND, field="uploadId")


def _protect_zip(context: Context, call: ApiCall, query: TokenQuery) -> None:
    """Protect a zipped checkpoint from retention while a client reads the zip."""
    found, step = _match_job_key(query.bucket, query.key), zip_step(query.key)
    job = context.jobs.get(found[1]) if found and step is not None else None
    if job is None or step is None or job.tenant != call.tenant:
        return
    record = context.jobs.read(CheckpointRecord, job.id, step)
    if record is not None and record.legacy_key == query.key:
        context.jobs.protect_checkpoint(job.id, step, call.now + context.settings.read_protection_s)


def _match_job_key(bucket: str, key: str) -> re.Match[str] | None:
    """Match the job's id and the next segment of a key below a job's prefix."""
    return _JOB_KEY.match(key) if bucket == CHECKPOINTS_BUCKET else None


def _require_own_object(context: Context, call: ApiCall, bucket: str, key: str) -> None:
    """Refuse a rented machine the objects of other jobs, and objects of no job."""
    if call.principal.machine is not None:
        found = _match_job_key(bucket, key)
        require_own_job(context, call, context.jobs.get(found[1]) if found else None, field="key")


def _require_writable(context: Context, call: ApiCall, bucket: str, key: str) -> None:
    """Refuse keys that only commits may write, committed objects of a job, and keys of jobs that are not running."""
    if bucket == CHECKPOINTS_BUCKET and key.startswith(PACKS):
        raise Refusal(ErrorCode.INVALID_KEY, f"{key}: only commits write to {PACKS}.", field="key")
    if bucket == DATA_BUCKET and in_a_ring(key):
        raise Refusal(ErrorCode.INVALID_KEY, f"{key}: only the calls for rings write to a ring.", field="key")
    found = _match_job_key(bucket, key)
    _require_own_object(context, call, bucket, key)
    if found is None:
        return
    if found[2] in _OURS:
        raise Refusal(ErrorCode.INVALID_KEY, f"{key}: only commits write to {found[2]}/ of a job.", field="key")
    job = context.jobs.get(found[1])
    if job is None or job.tenant != call.tenant:
        if Scope.SUBMIT in call.principal.scopes:
            return
        raise Refusal(ErrorCode.JOB_NOT_FOUND, f"No job {found[1]}.", field="key")
    epoch = attempt_of(job.id, key)
    if epoch is not None:
        require_running(job)
        if epoch != job.epoch:
            raise Refusal(ErrorCode.LEASE_LOST, f"{key}: attempt {job.epoch} runs the job now.", field="key")
    if Scope.SUBMIT not in call.principal.scopes:
        require_running(job)
    _require_uncommitted(context, job, key)


def _require_uncommitted(context: Context, job: Job, key: str) -> None:
    """Refuse committed objects: a machine that lost the job long ago may still have an upload token."""
    step = zip_step(key)
    record = None if step is None else context.jobs.read(CheckpointRecord, job.id, step)
    # A checkpoint that a retry discarded does not count, because the new attempt may write a zip of the same name.
    if record is not None and record.legacy_key == key and not record.damaged and job.in_history(record):
        raise Refusal(ErrorCode.CHECKPOINT_CONFLICT, f"{key} is a committed checkpoint.", field="key")
    if any((artifact.bucket, artifact.key) == (CHECKPOINTS_BUCKET, key) for artifact in job.artifacts):
        raise Refusal(ErrorCode.JOB_FINISHED, f"{key} is an output of the complete job {job.id}.", field="key")


def _require_known_bucket(bucket: str) -> None:
    if bucket not in BUCKETS:
        raise Refusal(ErrorCode.UNKNOWN_BUCKET, f"No bucket {bucket}.", field="bucket")


def _read_small_object(context: Context, call: ApiCall, bucket: str, key: str) -> WithHeaders:
    """Read a small object; return its bytes and its ETag."""
    found = context.objects.head(call.tenant, bucket, key)
    if found is not None and found.size_bytes > MAX_ANSWERED_BYTES:
        raise Refusal(
            ErrorCode.OBJECT_TOO_LARGE,
            f"{key} has {found.size_bytes} bytes; an answer holds at most {MAX_ANSWERED_BYTES}.",
            field="key",
        )
    data = None if found is None else context.objects.read(call.tenant, bucket, key)
    if found is None or data is None:
        raise Refusal(ErrorCode.OBJECT_NOT_FOUND, f"No object {key} in {bucket}.", field="key")
    return WithHeaders(data, {"etag": f'"{found.etag}"'})


def _require_part(query: UploadQuery) -> tuple[str, int]:
    upload_id = _require_parameter(query.upload_id, "uploadId")
    if query.part_number is None:
        raise Refusal(ErrorCode.MISSING_FIELD, "partNumber is needed.", field="partNumber")
    return upload_id, query.part_number


def _require_parameter(value: str | None, name: str) -> str:
    if value is None:
        raise Refusal(ErrorCode.MISSING_FIELD, f"{name} is needed.", field=name)
    return value
