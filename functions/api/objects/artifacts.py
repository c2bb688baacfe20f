"""The outputs of jobs: presign declared artifacts, verify stored artifacts, list artifacts."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import NamedTuple

from baton.contract.base import path_problem
from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import Artifact, JobState
from baton.contract.names import BUCKETS, CHECKPOINTS_BUCKET
from baton.contract.objects.artifacts import StoredArtifact, StoredArtifactsPage, StoredArtifactsQuery, step_of
from baton.contract.worker.calls import (
    ArtifactsAnswer,
    ArtifactsRequest,
    CompleteRequest,
    DeclaredArtifact,
    PresignedPut,
)
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.objects.declared_uploads import matches, presign_if_missing
from functions.api.objects.multipart_uploads import MultipartObject, MultipartUploads
from functions.api.worker.lease_guard import require_lease
from functions.domain.checkpoints.object_keys import artifact_key, artifacts_prefix
from functions.domain.errors import Refusal
from functions.domain.jobs import transitions as rules
from functions.domain.ports import Presigned, StoredObject
from functions.domain.records import Job
from functions.domain.worlds.seat_ids import seat_id

_PICTURES = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "webp": "image/webp", "gif": "image/gif"}
"""Types that a browser displays instead of saving; no type that a browser executes."""
_PAGE_LIMIT = 100
_MAX_PAGE = 500
"""Limit of a page: each artifact has a URL of up to 2 KB, and an answer is limited to 6 MB."""
_CURSOR = re.compile(r"([0-9a-f]{8})\.([A-Za-z0-9_-]{1,1800})")


class StoredOutput(NamedTuple):
    """Output that an attempt has stored. seat: of an elastic job; None for another job, and for the job's outputs."""

    seat: int | None
    epoch: int
    artifact: Artifact


def list_artifacts(context: Context, call: ApiCall) -> StoredArtifactsPage:
    """List a job's stored outputs with links: the outputs of a complete job, or the outputs of its attempts so far."""
    query: StoredArtifactsQuery = call.query
    job = require_job(context, call, call.path["id"])
    after = _parse_cursor(job.id, query.cursor)
    limit = min(query.limit or _PAGE_LIMIT, _MAX_PAGE)
    final = job.state is JobState.COMPLETE
    if final:
        # One more artifact than fits shows that another page follows. The outputs of an elastic job lie under the
        # prefix of a seat, therefore the cursor names the path.
        rest = sorted((one for one in job.artifacts if one.path > after), key=lambda one: one.path)[: limit + 1]
        found = [StoredOutput(None, job.epoch, one) for one in rest[:limit]]
        more = len(rest) > limit
    elif job.spec.nodes is None:
        found, more = _list_attempts(context, call, job.id, after, limit)
    else:
        found, more = _list_seats(context, call, job, after, limit)
    life_s = context.settings.url_life_s
    return StoredArtifactsPage(
        artifacts=[
            StoredArtifact(
                path=one.path,
                epoch=epoch,
                seat=seat,
                step=step_of(one.path),
                size_bytes=one.size_bytes,
                bucket=one.bucket,
                key=one.key,
                url=context.objects.presign_get(
                    call.tenant, one.bucket, one.key, expires_s=life_s, content_type=_find_content_type(one.path)
                ),
            )
            for seat, epoch, one in found
        ],
        next_cursor=_encode_cursor(job.id, found[-1], final=final) if more and found else None,
        expires_at=call.now + life_s,
        expires_in_s=life_s,
        final=final,
    )


def _find_content_type(path: str) -> str | None:
    return _PICTURES.get(path.rpartition(".")[2].lower())


def _list_attempts(
    context: Context, call: ApiCall, job_id: str, after: str, limit: int
) -> tuple[list[StoredOutput], bool]:
    """Return what attempts at a job, or at a seat, have stored after `<epoch>/<path>`, and True if more follows."""
    prefix = artifacts_prefix(job_id)
    last = prefix + after if after else None
    listed = context.objects.list(call.tenant, CHECKPOINTS_BUCKET, prefix, limit=limit, after=last)
    return [_parse_attempt_object(prefix, entry) for entry in listed.items], listed.cursor is not None


def _list_seats(context: Context, call: ApiCall, job: Job, after: str, limit: int) -> tuple[list[StoredOutput], bool]:
    """Return what attempts at the seats of an elastic job have stored after `<seat>/<epoch>/<path>`, seat by seat."""
    first, _, rest = after.partition("/")
    if after and not (first.isdecimal() and int(first) < len(job.seats)):
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    found: list[StoredOutput] = []
    claimed = [seat for seat, mark in enumerate(job.seats) if mark.epoch and seat >= int(first or 0)]
    for seat in claimed:
        if len(found) >= limit:
            return found, True
        begin = rest if first and seat == int(first) else ""
        stored, more = _list_attempts(context, call, seat_id(job.id, seat), begin, limit - len(found))
        found += [one._replace(seat=seat) for one in stored]
        if more:
            return found, True
    return found, False


def _parse_attempt_object(prefix: str, entry: StoredObject) -> StoredOutput:
    """Return an output. Every name is `<epoch>/<path>`, because only `declare_artifacts` presigns writes."""
    epoch, _, path = entry.key.removeprefix(prefix).partition("/")
    artifact = Artifact(path=path, bucket=CHECKPOINTS_BUCKET, key=entry.key, size_bytes=entry.size_bytes)
    return StoredOutput(None, int(epoch), artifact)


def _encode_cursor(job_id: str, last: StoredOutput, *, final: bool) -> str:
    place = "" if last.seat is None else f"{last.seat}/"
    path = last.artifact.path if final else f"{place}{last.epoch}/{last.artifact.path}"
    return f"{job_id[:8]}.{base64.urlsafe_b64encode(path.encode()).decode().rstrip('=')}"


def _parse_cursor(job_id: str, cursor: str | None) -> str:
    """Return the path of the last output of the page before; "" for the first page."""
    if cursor is None:
        return ""
    found = _CURSOR.fullmatch(cursor)
    try:
        if found is None or found[1] != job_id[:8]:
            raise ValueError(cursor)
        path = base64.urlsafe_b64decode(f"{found[2]}{'=' * (-len(found[2]) % 4)}").decode()
    except ValueError:  # also binascii.Error and UnicodeDecodeError
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor") from None
    if path_problem(path):
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    return path


def declare_artifacts(context: Context, call: ApiCall) -> ArtifactsAnswer:
    """Declare the outputs to upload; answer with URLs for the outputs and parts that are not stored.

    A call after the upload of an output's last part completes the output.
    """
    body: ArtifactsRequest = call.body
    job = require_job(context, call, call.path["id"])
    rules.require_running(job)
    require_lease(context, call.fence(job.id))
    stored = _read_stored(context, call, job, body.artifacts)
    in_parts = MultipartUploads(context, call, CHECKPOINTS_BUCKET)
    missing: list[PresignedPut] = []
    pending: list[str] = []
    for index, artifact in enumerate(body.artifacts):
        key = artifact_key(job.id, job.epoch, artifact.path)
        found = stored.get(key)
        if in_parts.accepts(artifact.parts):
            whole = MultipartObject(
                key=key,
                size_bytes=artifact.size_bytes,
                crc64nvme=artifact.crc64nvme,
                parts=artifact.parts,
                create_only=found is None,
                replace_etag=found.etag if found else None,
            )
            parts = in_parts.presign_missing(whole, found)
            if parts is not None:
                pending.append(artifact.path)
                missing += [_build_put(artifact.path, signed, part=number) for number, signed in parts]
            continue
        in_parts.require_one_put(artifact.size_bytes, f"artifacts.{index}.size_bytes")
        signed = presign_if_missing(
            context, call, key, found, size_bytes=artifact.size_bytes, crc64nvme=artifact.crc64nvme
        )
        if signed is not None:
            missing.append(_build_put(artifact.path, signed))
    return ArtifactsAnswer(missing=missing, pending=pending)


def _build_put(path: str, signed: Presigned, *, part: int | None = None) -> PresignedPut:
    return PresignedPut(name=path, url=signed.url, headers=dict(signed.headers), part=part)


def verify_artifacts(context: Context, call: ApiCall, job: Job, declared: Sequence[DeclaredArtifact]) -> list[Artifact]:
    """Return the declared outputs, verified in storage by size and checksum; refuse otherwise."""
    paths = {artifact.path for artifact in declared}
    undeclared = [output for output in job.spec.outputs if not _is_produced(output, paths)]
    if undeclared:
        raise Refusal(
            ErrorCode.NOT_STORED_YET,
            f"The artifacts do not contain the job's required output {', '.join(undeclared[:5])}.",
            field="artifacts",
        )
    stored = _read_stored(context, call, job, declared)
    artifacts = []
    for index, artifact in enumerate(declared):
        key = artifact_key(job.id, job.epoch, artifact.path)
        found = stored.get(key)
        if found is None:
            raise Refusal(
                ErrorCode.NOT_STORED_YET, f"Artifact {artifact.path} is not stored.", field=f"artifacts.{index}"
            )
        if not matches(found, artifact.size_bytes, artifact.crc64nvme):
            raise Refusal(
                ErrorCode.DIGEST_MISMATCH,
                f"Artifact {artifact.path} is stored with {found.size_bytes} bytes and CRC-64 {found.crc64nvme}; "
                f"declared are {artifact.size_bytes} and {artifact.crc64nvme}.",
                field=f"artifacts.{index}",
            )
        artifacts.append(Artifact(bucket=CHECKPOINTS_BUCKET, key=key, **artifact.model_dump(exclude={"parts"})))
    return artifacts


def verify_original_model(context: Context, call: ApiCall, job: Job, body: CompleteRequest) -> list[Artifact]:
    """Return the model that an original client uploaded; refuse a model that is not stored."""
    if body.bucket_name is None or body.key is None:
        missing = "bucket_name" if body.bucket_name is None else "key"
        raise Refusal(ErrorCode.MISSING_FIELD, f"{missing} is needed without a lease.", field=missing)
    if body.bucket_name not in BUCKETS:
        raise Refusal(ErrorCode.UNKNOWN_BUCKET, f"No bucket {body.bucket_name}.", field="bucket_name")
    found = context.objects.head(call.tenant, body.bucket_name, body.key)
    if found is None:
        raise Refusal(ErrorCode.NOT_STORED_YET, f"Object {body.key} is not stored.", field="key")
    return [
        Artifact(
            path=body.key.rsplit("/", 1)[-1],
            bucket=body.bucket_name,
            key=body.key,
            size_bytes=found.size_bytes,
            crc64nvme=found.crc64nvme,
        )
    ]


def _is_produced(output: str, paths: set[str]) -> bool:
    """Return True if the paths contain a required output: a file, or a directory with at least one file."""
    return output in paths or any(path.startswith(f"{output}/") for path in paths)


def _read_stored(
    context: Context, call: ApiCall, job: Job, declared: Sequence[DeclaredArtifact]
) -> dict[str, StoredObject]:
    keys = [artifact_key(job.id, job.epoch, artifact.path) for artifact in declared]
    return context.objects.head_many(call.tenant, CHECKPOINTS_BUCKET, keys)
