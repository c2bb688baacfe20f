"""Committing checkpoints, reading them, and letting old ones go."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

from blake3 import blake3
from pydantic import ValidationError

from contract.checkpoints import (
    MAX_MISSING_PER_ANSWER,
    BlobUpload,
    BlobUrls,
    BlobUrlsRequest,
    CommitAnswer,
    DamagedRequest,
    Manifest,
    ManifestFile,
)
from contract.errors import ErrorCode
from contract.names import CHECKPOINTS_BUCKET
from contract.work import ProgressRequest, StatusAnswer
from functions.api.context import Call, Context, job_of
from functions.api.declared import upload_of
from functions.api.leasing import apply_as_bearer, require_lease
from functions.api.original import zip_step
from functions.api.paging import every_item
from functions.domain import checkpoints as rules
from functions.domain.change import Change
from functions.domain.errors import Refusal, StorageUnavailable
from functions.domain.jobs import require_running
from functions.domain.records import Attempt, CheckpointRecord, Job
from functions.domain.retention import expendable

logger = logging.getLogger("baton.checkpoints")

_MANIFEST_NAME = re.compile(r"([0-9]+)-([0-9]+)\.json")
_LOOKED_THROUGH = 20
"""Checkpoints read at once when a sound one is searched for."""


def commit(context: Context, call: Call) -> CommitAnswer:
    """Commit a checkpoint: answers with what is missing, or, once every blob is stored and verified, commits it."""
    manifest: Manifest = call.body
    job = job_of(context, call, call.path["id"])
    digest = blake3(manifest.canonical_bytes()).hexdigest()
    existing = context.jobs.checkpoint(job.id, manifest.step)
    committed = CommitAnswer(committed=True, step=manifest.step, epoch=manifest.epoch)
    repeated = rules.already_committed(job, existing, manifest, digest)
    fence = call.fence(job.id)
    require_lease(context, fence)
    if repeated:
        return committed
    missing = _missing_blobs(context, call, manifest)
    if missing:
        return CommitAnswer(
            committed=False,
            step=manifest.step,
            epoch=manifest.epoch,
            missing=missing[:MAX_MISSING_PER_ANSWER],
            more_missing=len(missing) > MAX_MISSING_PER_ANSWER,
        )
    record = CheckpointRecord(
        step=manifest.step,
        epoch=manifest.epoch,
        committed_at=call.now,
        num_files=len(manifest.files),
        total_bytes=manifest.total_bytes,
        metrics=manifest.metrics,
        manifest_key=rules.manifest_key(job.id, manifest.step, manifest.epoch),
        manifest_blake3=digest,
        # Who reads another branch's checkpoint of this step goes on reading it: `_let_go` spares its bytes as long.
        protected_until=existing.protected_until if existing else 0,
    )
    _store_manifest(context, call, record, manifest.canonical_bytes())
    job = apply_as_bearer(
        context, call, fence, lambda job, attempt: rules.commit(job, attempt, fence, record, now=call.now), seen=job
    )
    let_go_of_old(context, call, job)
    return committed


def blob_urls(context: Context, call: Call) -> BlobUrls:
    """Where to fetch the blobs of a committed checkpoint; it is safe from retention while the URLs live."""
    body: BlobUrlsRequest = call.body or BlobUrlsRequest()
    job = job_of(context, call, call.path["id"])
    step = int(call.path["step"])
    record = context.jobs.protect_checkpoint(job.id, step, call.now + context.settings.read_protection_s)
    if record is None or record.legacy_key is not None:
        raise Refusal(ErrorCode.CHECKPOINT_NOT_FOUND, f"Job {job.id} has no checkpoint at step {step}.", field="step")
    named = {file.blake3 for file in _read_manifest(context, call, record).files}
    unknown = [digest for digest in body.blake3 if digest not in named]
    if unknown:
        raise Refusal(ErrorCode.INVALID_VALUE, f"The checkpoint does not name blob {unknown[0]}.", field="blake3")
    wanted = body.blake3 or sorted(named)[:MAX_MISSING_PER_ANSWER]
    life_s = context.settings.url_life_s
    urls = {
        digest: context.objects.presign_get(
            call.tenant, CHECKPOINTS_BUCKET, rules.blob_key(job.id, digest), expires_s=life_s
        )
        for digest in wanted
    }
    return BlobUrls(urls=urls, expires_at=call.now + life_s)


def report_damaged(context: Context, call: Call) -> StatusAnswer:
    """The bytes of a committed checkpoint do not verify: nobody is sent to it again."""
    body: DamagedRequest = call.body
    step = int(call.path["step"])
    fence = call.fence(call.path["id"])
    job = job_of(context, call, fence.job_id)
    require_lease(context, fence)

    def reported() -> CheckpointRecord:
        record = context.jobs.checkpoint(job.id, step)
        if record is None or record.epoch != body.epoch:
            raise Refusal(
                ErrorCode.CHECKPOINT_NOT_FOUND,
                f"Job {job.id} has no checkpoint at step {step} of attempt {body.epoch}.",
                field="step",
            )
        return record

    if reported().damaged:
        return StatusAnswer()

    def decision(job: Job, _: Attempt) -> Change:
        # Read anew behind the job: the step may have been committed again, or its fallback been reported meanwhile.
        record = reported()
        fallback = next(sound_checkpoints(context, job, below=step), None)
        return rules.damaged(job, fence, record, fallback, message=body.message, now=call.now)

    apply_as_bearer(context, call, fence, decision)
    return StatusAnswer()


def register_zip(context: Context, call: Call) -> StatusAnswer:
    """The original's progress call: a zipped checkpoint was uploaded to this key."""
    body: ProgressRequest = call.body
    job = job_of(context, call, body.job_id)
    require_running(job)
    fence = call.fence(job.id, body.machine_id)
    require_lease(context, fence)
    step = zip_step(body.key)
    if body.bucket_name != CHECKPOINTS_BUCKET or not body.key.startswith(rules.job_prefix(job.id)) or step is None:
        raise Refusal(
            ErrorCode.INVALID_VALUE,
            f"A checkpoint is named {rules.job_prefix(job.id)}checkpoint-<step>.zip in {CHECKPOINTS_BUCKET}.",
            field="key",
        )
    found = context.objects.head(call.tenant, CHECKPOINTS_BUCKET, body.key)
    if found is None:
        raise Refusal(ErrorCode.NOT_STORED_YET, f"Object {body.key} is not stored.", field="key")
    if job.checkpoint_step == step and job.checkpoint_epoch == job.epoch:
        return StatusAnswer()
    record = CheckpointRecord(
        step=step,
        epoch=job.epoch,
        committed_at=call.now,
        num_files=1,
        total_bytes=found.size_bytes,
        manifest_key="",
        legacy_key=body.key,
    )
    job = apply_as_bearer(
        context, call, fence, lambda job, attempt: rules.commit(job, attempt, fence, record, now=call.now)
    )
    let_go_of_old(context, call, job)
    return StatusAnswer()


def sound_checkpoints(context: Context, job: Job, *, below: int | None = None) -> Iterator[CheckpointRecord]:
    """What the job may resume from, newest first. A job that has no checkpoint costs no read."""
    if job.checkpoint_step is None:
        return
    up_to_step = job.checkpoint_step if below is None else min(below - 1, job.checkpoint_step)
    cursor: str | None = None
    while up_to_step >= 0:
        page = context.jobs.checkpoints(job.id, limit=_LOOKED_THROUGH, cursor=cursor, up_to_step=up_to_step)
        yield from rules.resumable(job, page.items)
        cursor = page.cursor
        if cursor is None:
            return


def let_go_of_old(context: Context, call: Call, job: Job) -> None:
    """Retention, after a commit. A failure here is logged and made good after a later commit: the commit stands.

    Only the attempt that holds the job commits to it, and it does so one checkpoint at a time, so no other commit
    is looking at these blobs.
    """
    try:
        _let_go(context, call, job)
    except (Refusal, StorageUnavailable) as error:
        logger.warning("retention left something behind", extra={"job_id": job.id, "reason": str(error)})


def _let_go(context: Context, call: Call, job: Job) -> None:
    """Forget the records, then delete the blobs that no remaining manifest names, then the manifests.

    Whatever is interrupted leaves a manifest without a record behind, which says what is still to be deleted. It stops
    when the job has moved on: a later commit may rely on blobs that were expendable before, and lets go itself.
    """
    records = list(every_item(lambda cursor: context.jobs.checkpoints(job.id, limit=1000, cursor=cursor)))
    going = expendable(
        records,
        job.spec.policy.retention,
        current_step=job.checkpoint_step,
        now=call.now,
        in_history=job.in_history,
    )
    if not going:
        return
    going_ids = {(record.step, record.epoch) for record in going}
    kept: set[str] = set()
    for record in records:
        if (record.step, record.epoch) not in going_ids:
            kept |= _blobs_of(_read_manifest(context, call, record)) if record.legacy_key is None else set()
    if _moved_on(context, job):
        return
    doomed: set[str] = set()
    manifests: list[str] = []
    for record in going:
        named = _blobs_named_at(context, call, record.manifest_key) if record.legacy_key is None else set()
        if not context.jobs.delete_checkpoint(job.id, record, call.now):
            kept |= named
            continue
        doomed |= named
        if record.legacy_key is None:
            manifests.append(record.manifest_key)
        else:
            doomed.add(record.legacy_key)
    protected = {record.step for record in records if record.protected_until > call.now}
    for step, key in _manifests_without_record(context, call, job, {(record.step, record.epoch) for record in records}):
        named = _blobs_named_at(context, call, key)
        if step in protected:
            kept |= named
            continue
        doomed |= named
        manifests.append(key)
    if _moved_on(context, job):
        return
    context.objects.delete_many(call.tenant, CHECKPOINTS_BUCKET, sorted(doomed - kept))
    context.objects.delete_many(call.tenant, CHECKPOINTS_BUCKET, manifests)


def _moved_on(context: Context, seen: Job) -> bool:
    """True if something was committed, reported damaged or retried since `seen`."""
    job = context.jobs.get(seen.id)
    return job is None or (job.epoch, job.checkpoint_step, job.checkpoint_epoch, job.branches) != (
        seen.epoch,
        seen.checkpoint_step,
        seen.checkpoint_epoch,
        seen.branches,
    )


def _manifests_without_record(
    context: Context, call: Call, job: Job, recorded: set[tuple[int, int]]
) -> Iterator[tuple[int, str]]:
    """Steps and keys of manifests of which nothing can become a checkpoint any more, and nothing is one."""
    prefix = f"{rules.job_prefix(job.id)}manifests/"
    newest = (job.epoch, -1 if job.checkpoint_step is None else job.checkpoint_step)
    listing = every_item(
        lambda cursor: context.objects.list(call.tenant, CHECKPOINTS_BUCKET, prefix, limit=1000, cursor=cursor)
    )
    for entry in listing:
        named = _MANIFEST_NAME.fullmatch(entry.key.removeprefix(prefix))
        if named is None:
            continue
        step, epoch = int(named[1]), int(named[2])
        if (step, epoch) not in recorded and (epoch, step) < newest:
            yield step, entry.key


def _blobs_named_at(context: Context, call: Call, manifest_key: str) -> set[str]:
    """The blobs of a manifest that is to be deleted; none if nobody can read it any more."""
    data = context.objects.read(call.tenant, CHECKPOINTS_BUCKET, manifest_key)
    if data is None:
        return set()
    try:
        return _blobs_of(Manifest.model_validate_json(data))
    except ValidationError:
        logger.warning("a manifest cannot be read; its blobs stay", extra={"reason": manifest_key})
        return set()


def _blobs_of(manifest: Manifest) -> set[str]:
    return {rules.blob_key(manifest.job_id, file.blake3) for file in manifest.files}


def _read_manifest(context: Context, call: Call, record: CheckpointRecord) -> Manifest:
    data = context.objects.read(call.tenant, CHECKPOINTS_BUCKET, record.manifest_key)
    if data is None or blake3(data).hexdigest() != record.manifest_blake3:
        raise Refusal(
            ErrorCode.CHECKPOINT_NOT_FOUND, f"The manifest of step {record.step} is damaged or gone.", field="step"
        )
    return Manifest.model_validate_json(data)


def _store_manifest(context: Context, call: Call, record: CheckpointRecord, data: bytes) -> None:
    """Create-only. A repeat of an interrupted commit finds its own bytes; other bytes were never committed."""
    if context.objects.create(call.tenant, CHECKPOINTS_BUCKET, record.manifest_key, data):
        return
    if context.objects.read(call.tenant, CHECKPOINTS_BUCKET, record.manifest_key) != data:
        raise Refusal(
            ErrorCode.CHECKPOINT_CONFLICT,
            f"Attempt {record.epoch} already offered other contents for step {record.step}.",
            field="step",
        )


def _missing_blobs(context: Context, call: Call, manifest: Manifest) -> list[BlobUpload]:
    """Blobs that are not stored, or not with the declared size and checksum, each with a URL that makes it so."""
    files: dict[str, ManifestFile] = {file.blake3: file for file in manifest.files}
    keys = {digest: rules.blob_key(manifest.job_id, digest) for digest in files}
    stored = context.objects.head_many(call.tenant, CHECKPOINTS_BUCKET, keys.values())
    missing = []
    for digest, file in files.items():
        key = keys[digest]
        signed = upload_of(context, call, key, stored.get(key), size_bytes=file.size_bytes, crc64nvme=file.crc64nvme)
        if signed is not None:
            missing.append(BlobUpload(blake3=digest, url=signed.url, headers=dict(signed.headers)))
        if len(missing) > MAX_MISSING_PER_ANSWER:
            break
    return missing
