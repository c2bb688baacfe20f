"""Moving objects: tokens, redirects to presigned URLs, batches, listings, a job's inputs. No bytes pass here."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from contract.base import Cursor, WireModel
from contract.errors import ErrorCode
from contract.keys import Scope
from contract.transfers import (
    MultipartComplete,
    MultipartCreated,
    ObjectPage,
    ObjectQuery,
    ObjectView,
    TokenAnswer,
    TokenQuery,
    UploadBatch,
    UploadTarget,
    UploadTargets,
)
from contract.work import InputObject, InputPage, StatusAnswer
from functions.api.context import BUCKETS, CHECKPOINTS, DATA, Call, Context, NoContent, Redirect, job_of
from functions.api.leasing import require_lease
from functions.domain.errors import Refusal
from functions.domain.jobs import require_running
from functions.domain.leases import token_digest
from functions.domain.records import TransferGrant

_JOB_KEY = re.compile(r"^jobs/([0-9a-f-]{36})/([^/]+)")
_OURS = ("blobs", "manifests", "artifacts", "logs")
_INPUTS_PER_PAGE = 500


class UploadQuery(WireModel):
    """Query of the upload calls. Example: `?action=mpu-create`, `?uploadId=...&partNumber=1`"""

    action: Annotated[str, Field(pattern=r"^(mpu-create|mpu-uploadpart|mpu-complete|mpu-abort|delete)$")] | None = None
    upload_id: Annotated[str | None, Field(min_length=1, max_length=1024)] = Field(default=None, alias="uploadId")
    part_number: Annotated[int | None, Field(ge=1, le=10_000)] = Field(default=None, alias="partNumber")


class InputsQuery(WireModel):
    """Query of `GET /job/{id}/inputs`. Example: `?cursor=0:...`"""

    cursor: Cursor | None = None


def download_token(context: Context, call: Call) -> TokenAnswer:
    """A token that downloads one object, once."""
    query: TokenQuery = call.query
    _known_bucket(query.bucket)
    if context.objects.head(call.tenant, query.bucket, query.key) is None:
        raise Refusal(ErrorCode.OBJECT_NOT_FOUND, f"No object {query.key} in {query.bucket}.", field="key")
    return _granted(context, call, query, "download", context.settings.download_token_life_s)


def upload_token(context: Context, call: Call) -> TokenAnswer:
    """A token that uploads one object, for some minutes."""
    query: TokenQuery = call.query
    _known_bucket(query.bucket)
    _writable(context, call, query.bucket, query.key)
    return _granted(context, call, query, "upload", context.settings.upload_token_life_s)


def download(context: Context, call: Call) -> Redirect:
    """Redeem a download token: exactly one request gets the redirect."""
    bucket, key = _target(call)
    token = call.headers.get("x-download-token")
    if not token:
        raise Refusal(ErrorCode.TOKEN_INVALID, "The header x-download-token is missing.", field="x-download-token")
    grant = context.tokens.get_grant(token_digest(token))
    if grant is not None and (grant.tenant, grant.bucket, grant.key) != (call.tenant, bucket, key):
        raise Refusal(ErrorCode.TOKEN_WRONG_KEY, field="x-download-token")
    grant = context.tokens.redeem(token_digest(token), call.now) if grant and grant.purpose == "download" else None
    if grant is None:
        raise Refusal(ErrorCode.TOKEN_INVALID, field="x-download-token")
    url = context.objects.presign_get(call.tenant, bucket, key, expires_s=context.settings.url_life_s)
    return Redirect(302, url)


def upload_post(context: Context, call: Call) -> MultipartCreated | StatusAnswer:
    """`action=mpu-create` starts a multipart upload, `action=mpu-complete` finishes it."""
    query: UploadQuery = call.query
    bucket, key = _upload_target(context, call)
    if query.action == "mpu-create":
        return MultipartCreated(key=key, uploadId=context.objects.create_multipart(call.tenant, bucket, key))
    if query.action == "mpu-complete":
        body: MultipartComplete = call.body or MultipartComplete()
        parts = [(part.partNumber, part.etag) for part in body.parts]
        upload_id = _required(query.upload_id, "uploadId")
        if context.objects.complete_multipart(call.tenant, bucket, key, upload_id, parts) is None:
            raise Refusal(ErrorCode.UPLOAD_NOT_FOUND, field="uploadId")
        return StatusAnswer()
    raise Refusal(ErrorCode.INVALID_VALUE, "POST takes mpu-create or mpu-complete.", field="action")


def upload_put(context: Context, call: Call) -> Redirect:
    """Redirects to a presigned PUT: of one part, or of the whole object when no `uploadId` is given."""
    query: UploadQuery = call.query
    bucket, key = _upload_target(context, call)
    if query.action not in (None, "mpu-uploadpart"):
        raise Refusal(ErrorCode.INVALID_VALUE, "PUT takes mpu-uploadpart or no action.", field="action")
    life_s = context.settings.url_life_s
    if query.upload_id is None and query.action is None:
        return Redirect(307, context.objects.presign_put(call.tenant, bucket, key, expires_s=life_s).url)
    upload_id = _required(query.upload_id, "uploadId")
    if query.part_number is None:
        raise Refusal(ErrorCode.MISSING_FIELD, "partNumber is needed.", field="partNumber")
    return Redirect(
        307,
        context.objects.presign_part(call.tenant, bucket, key, upload_id, query.part_number, expires_s=life_s),
    )


def upload_delete(context: Context, call: Call) -> NoContent:
    """`action=mpu-abort` drops a multipart upload, `action=delete` the object."""
    query: UploadQuery = call.query
    bucket, key = _upload_target(context, call)
    if query.action == "mpu-abort":
        if not context.objects.abort_multipart(call.tenant, bucket, key, _required(query.upload_id, "uploadId")):
            raise Refusal(ErrorCode.UPLOAD_NOT_FOUND, field="uploadId")
    elif query.action == "delete":
        context.objects.delete(call.tenant, bucket, key)
    else:
        raise Refusal(ErrorCode.INVALID_VALUE, "DELETE takes mpu-abort or delete.", field="action")
    return NoContent()


def upload_batch(context: Context, call: Call) -> UploadTargets:
    """Presigned PUTs for up to 1,000 files; S3 refuses other bytes than those announced."""
    body: UploadBatch = call.body
    _known_bucket(body.bucket)
    life_s = context.settings.url_life_s
    targets = []
    for file in body.files:
        _writable(context, call, body.bucket, file.key)
        signed = context.objects.presign_put(
            call.tenant,
            body.bucket,
            file.key,
            expires_s=life_s,
            size_bytes=file.size_bytes,
            crc64nvme=file.crc64nvme,
        )
        targets.append(UploadTarget(key=file.key, url=signed.url, headers=dict(signed.headers)))
    return UploadTargets(uploads=targets, expires_at=call.now + life_s)


def list_objects(context: Context, call: Call) -> ObjectPage:
    """Stored objects below a prefix, by key."""
    query: ObjectQuery = call.query
    _known_bucket(query.bucket)
    page = context.objects.list(call.tenant, query.bucket, query.prefix, limit=query.limit, cursor=query.cursor)
    views = [
        ObjectView(key=item.key, size_bytes=item.size_bytes, etag=item.etag, modified_at=item.modified_at)
        for item in page.items
    ]
    return ObjectPage(objects=views, next_cursor=page.cursor)


def list_inputs(context: Context, call: Call) -> InputPage:
    """A running job's input files with URLs, for the worker that holds it."""
    query: InputsQuery = call.query
    job = job_of(context, call, call.path["id"])
    require_running(job)
    require_lease(context, call.fence(job.id))
    life_s = context.settings.url_life_s
    expires_at = call.now + life_s
    number, _, cursor = (query.cursor or "0:").partition(":")
    refs = job.spec.inputs
    if not number.isdigit() or (refs and int(number) >= len(refs)):
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    if not refs:
        return InputPage(inputs=[], expires_at=expires_at)
    ref = refs[int(number)]
    page = context.objects.list(call.tenant, DATA, ref.prefix, limit=_INPUTS_PER_PAGE, cursor=cursor or None)
    inputs = [
        InputObject(
            key=item.key,
            path=_input_path(ref.prefix, ref.into, item.key),
            size_bytes=item.size_bytes,
            etag=item.etag,
            url=context.objects.presign_get(call.tenant, DATA, item.key, expires_s=life_s),
        )
        for item in page.items
    ]
    following = f"{int(number) + 1}:" if int(number) + 1 < len(refs) else None
    return InputPage(
        inputs=inputs,
        next_cursor=f"{number}:{page.cursor}" if page.cursor else following,
        expires_at=expires_at,
    )


def _input_path(prefix: str, into: str, key: str) -> str:
    """Where an input lies below the data directory: its path below the last '/' of the prefix."""
    below = key[prefix.rfind("/") + 1 :]
    return f"{into}/{below}" if into else below


def _granted(context: Context, call: Call, query: TokenQuery, purpose: str, life_s: int) -> TokenAnswer:
    token = context.random.token()
    grant = TransferGrant.model_validate(
        {
            "token_sha256": token_digest(token),
            "purpose": purpose,
            "tenant": call.tenant,
            "bucket": query.bucket,
            "key": query.key,
            "expires_at": call.now + life_s,
        }
    )
    context.tokens.put_grant(grant)
    return TokenAnswer(token=token, expires_at=grant.expires_at)


def _target(call: Call) -> tuple[str, str]:
    _known_bucket(call.path["bucket"])
    return call.path["bucket"], call.path["key"]


def _upload_target(context: Context, call: Call) -> tuple[str, str]:
    """Bucket and key, once the upload token has been checked against them."""
    bucket, key = _target(call)
    token = call.headers.get("x-upload-token")
    if not token:
        raise Refusal(ErrorCode.TOKEN_INVALID, "The header x-upload-token is missing.", field="x-upload-token")
    grant = context.tokens.get_grant(token_digest(token))
    if grant is None or grant.purpose != "upload" or grant.expires_at <= call.now:
        raise Refusal(ErrorCode.TOKEN_INVALID, field="x-upload-token")
    if (grant.tenant, grant.bucket, grant.key) != (call.tenant, bucket, key):
        raise Refusal(ErrorCode.TOKEN_WRONG_KEY, field="x-upload-token")
    _writable(context, call, bucket, key)
    return bucket, key


def _writable(context: Context, call: Call, bucket: str, key: str) -> None:
    """Refuse keys that only commits may write, and keys of jobs that are not running."""
    found = _JOB_KEY.match(key)
    if bucket != CHECKPOINTS or found is None:
        return
    if found[2] in _OURS:
        raise Refusal(ErrorCode.INVALID_KEY, f"{key} belongs to the job's committed contents.", field="key")
    if Scope.SUBMIT not in call.principal.scopes:
        require_running(job_of(context, call, found[1]))


def _known_bucket(bucket: str) -> None:
    if bucket not in BUCKETS:
        raise Refusal(ErrorCode.UNKNOWN_BUCKET, f"No bucket {bucket}.", field="bucket")


def _required(value: str | None, name: str) -> str:
    if value is None:
        raise Refusal(ErrorCode.MISSING_FIELD, f"{name} is needed.", field=name)
    return value
