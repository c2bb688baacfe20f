"""Outputs: where to upload what a worker declares, whether it is stored, and what of a job is."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from baton.contract.artifacts import StoredArtifact, StoredArtifactsPage, StoredArtifactsQuery, step_of
from baton.contract.base import path_problem
from baton.contract.errors import ErrorCode
from baton.contract.jobs import Artifact, JobState
from baton.contract.names import BUCKETS, CHECKPOINTS_BUCKET
from baton.contract.work import ArtifactsAnswer, ArtifactsRequest, CompleteRequest, DeclaredArtifact, PresignedPut
from functions.api.http.context import Call, Context, job_of
from functions.api.objects.declared_uploads import matches, upload_of
from functions.api.objects.multipart_uploads import PartedUploads, Whole
from functions.api.worker.lease_guard import require_lease
from functions.domain.checkpoints.object_keys import artifact_key, artifacts_prefix
from functions.domain.errors import Refusal
from functions.domain.jobs import transitions as rules
from functions.domain.ports import Presigned, StoredObject
from functions.domain.records import Job

_PICTURES = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "webp": "image/webp", "gif": "image/gif"}
"""What a browser shows instead of storing it. Nothing that could run there."""
_PAGE_LIMIT = 100
_MAX_PAGE = 500
"""Each has a URL, which may take 2 KB: an answer holds so many."""
_CURSOR = re.compile(r"([0-9a-f]{8})\.([A-Za-z0-9_-]{1,1800})")


def list_artifacts(context: Context, call: Call) -> StoredArtifactsPage:
    """What is stored of a job's outputs, with links: those of a complete job, or what its attempts have so far."""
    query: StoredArtifactsQuery = call.query
    job = job_of(context, call, call.path["id"])
    after = _position(job.id, query.cursor)
    limit = min(query.limit or _PAGE_LIMIT, _MAX_PAGE)
    final = job.state is JobState.COMPLETE
    if final:
        # One more than fits says that there are more.
        rest = sorted((one for one in job.artifacts if one.key > after), key=lambda one: one.key)[: limit + 1]
        found = [(job.epoch, one) for one in rest[:limit]]
        more = len(rest) > limit
    else:
        prefix = artifacts_prefix(job.id)
        listed = context.objects.list(call.tenant, CHECKPOINTS_BUCKET, prefix, limit=limit, after=after or None)
        found = [_of_an_attempt(prefix, entry) for entry in listed.items]
        more = listed.cursor is not None
    life_s = context.settings.url_life_s
    return StoredArtifactsPage(
        artifacts=[
            StoredArtifact(
                path=one.path,
                epoch=epoch,
                step=step_of(one.path),
                size_bytes=one.size_bytes,
                bucket=one.bucket,
                key=one.key,
                url=context.objects.presign_get(
                    call.tenant, one.bucket, one.key, expires_s=life_s, content_type=_content_type(one.path)
                ),
            )
            for epoch, one in found
        ],
        next_cursor=_cursor(job.id, found[-1][1].key) if more and found else None,
        expires_at=call.now + life_s,
        expires_in_s=life_s,
        final=final,
    )


def _content_type(path: str) -> str | None:
    return _PICTURES.get(path.rpartition(".")[2].lower())


def _of_an_attempt(prefix: str, entry: StoredObject) -> tuple[int, Artifact]:
    """Only `declare_artifacts` gives URLs to write there: every name is `<epoch>/<path>`."""
    epoch, _, path = entry.key.removeprefix(prefix).partition("/")
    return int(epoch), Artifact(path=path, bucket=CHECKPOINTS_BUCKET, key=entry.key, size_bytes=entry.size_bytes)


def _cursor(job_id: str, key: str) -> str:
    path = key.removeprefix(artifacts_prefix(job_id))
    return f"{job_id[:8]}.{base64.urlsafe_b64encode(path.encode()).decode().rstrip('=')}"


def _position(job_id: str, cursor: str | None) -> str:
    """The key that the page before ended with; "" for the beginning."""
    if cursor is None:
        return ""
    found = _CURSOR.fullmatch(cursor)
    try:
        if found is None or found[1] != job_id[:8]:
            raise ValueError(cursor)
        path = base64.urlsafe_b64decode(f"{found[2]}{'=' * (-len(found[2]) % 4)}").decode()
    except ValueError:  # binascii's and Unicode's errors are such
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor") from None
    if path_problem(path):
        raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
    return artifacts_prefix(job_id) + path


def declare_artifacts(context: Context, call: Call) -> ArtifactsAnswer:
    """Say which outputs will be uploaded; the answer has URLs for those, and those of their parts, that are not stored.

    With its last part stored, an output is completed.
    """
    body: ArtifactsRequest = call.body
    job = job_of(context, call, call.path["id"])
    rules.require_running(job)
    require_lease(context, call.fence(job.id))
    stored = _stored(context, call, job, body.artifacts)
    in_parts = PartedUploads(context, call, CHECKPOINTS_BUCKET)
    missing: list[PresignedPut] = []
    pending: list[str] = []
    for index, artifact in enumerate(body.artifacts):
        key = artifact_key(job.id, job.epoch, artifact.path)
        found = stored.get(key)
        if in_parts.take(artifact.parts):
            whole = Whole(
                key=key,
                size_bytes=artifact.size_bytes,
                crc64nvme=artifact.crc64nvme,
                parts=artifact.parts,
                create_only=found is None,
                replace_etag=found.etag if found else None,
            )
            parts = in_parts.missing(whole, found)
            if parts is not None:
                pending.append(artifact.path)
                missing += [_put_of(artifact.path, signed, part=number) for number, signed in parts]
            continue
        in_parts.require_one_put(artifact.size_bytes, f"artifacts.{index}.size_bytes")
        signed = upload_of(context, call, key, found, size_bytes=artifact.size_bytes, crc64nvme=artifact.crc64nvme)
        if signed is not None:
            missing.append(_put_of(artifact.path, signed))
    return ArtifactsAnswer(missing=missing, pending=pending)


def _put_of(path: str, signed: Presigned, *, part: int | None = None) -> PresignedPut:
    return PresignedPut(name=path, url=signed.url, headers=dict(signed.headers), part=part)


def verified_artifacts(context: Context, call: Call, job: Job, declared: Sequence[DeclaredArtifact]) -> list[Artifact]:
    """The declared outputs, each seen in storage with its size and checksum; refuses otherwise."""
    paths = {artifact.path for artifact in declared}
    undeclared = [output for output in job.spec.outputs if not _produced(output, paths)]
    if undeclared:
        raise Refusal(
            ErrorCode.NOT_STORED_YET,
            f"The job must produce {', '.join(undeclared[:5])}, which is not among the artifacts.",
            field="artifacts",
        )
    stored = _stored(context, call, job, declared)
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


def verified_original_model(context: Context, call: Call, job: Job, body: CompleteRequest) -> list[Artifact]:
    """The model that a client of the original uploaded; refuses unless it is stored."""
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


def _produced(output: str, paths: set[str]) -> bool:
    """True if a declared output is there: as a file, or as a directory with at least one file."""
    return output in paths or any(path.startswith(f"{output}/") for path in paths)


def _stored(context: Context, call: Call, job: Job, declared: Sequence[DeclaredArtifact]) -> dict[str, StoredObject]:
    keys = [artifact_key(job.id, job.epoch, artifact.path) for artifact in declared]
    return context.objects.head_many(call.tenant, CHECKPOINTS_BUCKET, keys)
