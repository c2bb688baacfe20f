"""Committing checkpoints and reading them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from baton.contract.checkpoints import (
    MAX_MISSING_PER_ANSWER,
    BlobUpload,
    BlobUrls,
    BlobUrlsRequest,
    CommitAnswer,
    DamagedRequest,
)
from baton.contract.errors import ErrorCode
from baton.contract.manifest import Manifest, Pack
from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.work import ProgressRequest, StatusAnswer
from functions.api.checkpoints.retention import Retention, checkpoints_of, read_manifest
from functions.api.http.context import Call, Context, job_of
from functions.api.objects.declared_uploads import upload_of
from functions.api.worker.lease_guard import WRITE_TRIES, apply_as_bearer, require_lease
from functions.domain.checkpoints import commit as rules
from functions.domain.checkpoints.object_keys import attempt_prefix, manifest_key, pack_key, zip_step
from functions.domain.checkpoints.packs import PackSnapshot, needs_verification
from functions.domain.errors import Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Transaction
from functions.domain.jobs.transitions import require_running
from functions.domain.records import Attempt, CheckpointRecord, Job

_LOOKED_THROUGH = 20
"""Checkpoints read at once when a sound one is searched for."""


def commit(context: Context, call: Call) -> CommitAnswer:
    """Commit a checkpoint: answers with what is missing, or, once every pack is stored and verified, commits it."""
    for tries in range(WRITE_TRIES):
        # What is let go by the way may be what others are changing: once that failed, the commit goes alone.
        answer = _committed(context, call, call.body, alone=tries > 0)
        if answer is not None:
            return answer
    raise Refusal(ErrorCode.CONFLICT, "The job or its packs are being changed by others all the time.")


def _committed(context: Context, call: Call, manifest: Manifest, *, alone: bool) -> CommitAnswer | None:
    """One look at everything, and the commit if nothing is missing; None if somebody else wrote in between.

    The job is read first: whatever ends its lease, and whatever its retention does to the packs, raises its `rev`, the
    condition of the last write.
    """
    data = manifest.canonical_bytes()
    digest = blake3(data).hexdigest()
    job = job_of(context, call, call.path["id"])
    # Beyond the newest checkpoint this attempt has none.
    behind = job.checkpoint_step is not None and manifest.step <= job.checkpoint_step
    existing = context.jobs.read(CheckpointRecord, job.id, manifest.step) if behind else None
    repeated = rules.is_committed(job, existing, manifest, digest)
    require_lease(context, call.fence(job.id))
    if repeated:
        return CommitAnswer(committed=True, step=manifest.step, epoch=manifest.epoch)
    key = manifest_key(job, manifest.step, digest)
    looked = look_at(context, call, job, manifest.packs, key)
    if not looked.manifest_stored:
        # Already before anything is uploaded: whatever becomes of this attempt, retention learns what to delete.
        context.objects.create(call.tenant, CHECKPOINTS_BUCKET, key, data)
    if looked.missing:
        return CommitAnswer(
            committed=False,
            step=manifest.step,
            epoch=manifest.epoch,
            missing=looked.missing[:MAX_MISSING_PER_ANSWER],
            more_missing=len(looked.missing) > MAX_MISSING_PER_ANSWER,
        )
    records = checkpoints_of(context, job)
    record = CheckpointRecord(
        step=manifest.step,
        epoch=manifest.epoch,
        committed_at=call.now,
        num_files=len(manifest.files),
        total_bytes=manifest.total_bytes,
        new_bytes=looked.new_bytes,
        metrics=manifest.metrics,
        tag=manifest.tag,
        manifest_key=key,
        manifest_blake3=digest,
        # Who reads another branch's checkpoint of this step goes on reading it: `left_behind` spares its manifest.
        protected_until=next((one.protected_until for one in records if one.step == manifest.step), 0),
    )
    change = rules.commit(job, None, record, now=call.now)
    retention = Retention(context, change.job, call.now, {key: manifest.packs})
    # What the attempts before this one have left behind.
    left_behind = job.epoch > 1 and job.attempt_step is None
    plan = None
    if not alone and not left_behind:
        try:
            plan = retention.plan([record, *(one for one in records if one.step != record.step)])
        except (Refusal, StorageUnavailable):
            alone = True  # Retention is tried once more behind the commit, and says what is wrong.
    unnamed = retention.unnamed(looked.held, records, job.checkpoint_step)
    if not context.packs.add_references(call.tenant, job.id, [*looked.stored, *unnamed]):
        return None
    try:
        context.jobs.apply(change if plan is None else change.also(*plan.forgotten))
    except WriteConflict:
        return None
    if plan is not None:
        retention.finish(plan)
    elif alone or left_behind:
        retention.run(left_behind=left_behind)
    return CommitAnswer(committed=True, step=manifest.step, epoch=manifest.epoch)


def blob_urls(context: Context, call: Call) -> BlobUrls:
    """Where to fetch the packs of a committed checkpoint; it is safe from retention while the URLs live."""
    body: BlobUrlsRequest = call.body or BlobUrlsRequest()
    job = job_of(context, call, call.path["id"])
    step = int(call.path["step"])
    record = context.jobs.protect_checkpoint(job.id, step, call.now + context.settings.read_protection_s)
    if record is None or record.legacy_key is not None:
        raise Refusal(ErrorCode.CHECKPOINT_NOT_FOUND, f"Job {job.id} has no checkpoint at step {step}.", field="step")
    named = {pack.blake3 for pack in read_manifest(context, job, record).packs}
    unknown = [digest for digest in body.blake3 if digest not in named]
    if unknown:
        raise Refusal(ErrorCode.INVALID_VALUE, f"The checkpoint does not name pack {unknown[0]}.", field="blake3")
    wanted = body.blake3 or sorted(named)[:MAX_MISSING_PER_ANSWER]
    life_s = context.settings.url_life_s
    urls = {
        digest: context.objects.presign_get(call.tenant, CHECKPOINTS_BUCKET, pack_key(digest), expires_s=life_s)
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
        record = context.jobs.read(CheckpointRecord, job.id, step)
        if record is None or record.epoch != body.epoch:
            raise Refusal(
                ErrorCode.CHECKPOINT_NOT_FOUND,
                f"Job {job.id} has no checkpoint at step {step} of attempt {body.epoch}.",
                field="step",
            )
        return record

    found = reported()
    if found.damaged:
        return StatusAnswer()
    _doubt(context, call, job, found)

    def decision(job: Job, attempt: Attempt) -> Transaction:
        # Read anew behind the job: the step may have been committed again, or its fallback been reported meanwhile.
        record = reported()
        fallback = next(sound_checkpoints(context, job, below=step), None)
        return rules.mark_damaged(job, attempt, fence, record, fallback, message=body.message, now=call.now)

    apply_as_bearer(context, call, fence, decision)
    return StatusAnswer()


def _doubt(context: Context, call: Call, job: Job, record: CheckpointRecord) -> None:
    """Whoever names one of the checkpoint's packs next looks whether it is stored as declared, and replaces it if not.

    Before the checkpoint is marked as damaged, for a repeated report ends there.
    """
    if record.legacy_key is not None:
        return
    try:
        named = read_manifest(context, job, record).packs
    except Refusal:
        return  # It is the manifest that is damaged: of the packs nothing is known.
    context.packs.mark_suspect(call.tenant, job.id, [pack.blake3 for pack in named])


def register_zip(context: Context, call: Call) -> StatusAnswer:
    """The original's progress call: a zipped checkpoint was uploaded to this key."""
    body: ProgressRequest = call.body
    job = job_of(context, call, body.job_id)
    require_running(job)
    fence = call.fence(job.id, body.machine_id, key=body.key)
    lease = require_lease(context, fence)
    prefix, step = attempt_prefix(job.id, lease.epoch), zip_step(body.key)
    if body.bucket_name != CHECKPOINTS_BUCKET or not body.key.startswith(prefix) or step is None:
        raise Refusal(
            ErrorCode.INVALID_VALUE,
            f"A checkpoint is named {prefix}checkpoint-<step>.zip in {CHECKPOINTS_BUCKET}.",
            field="key",
        )
    found = context.objects.head(call.tenant, CHECKPOINTS_BUCKET, body.key)
    if found is None:
        raise Refusal(ErrorCode.NOT_STORED_YET, f"Object {body.key} is not stored.", field="key")
    if job.checkpoint_step == step and job.checkpoint_epoch == job.epoch:
        return StatusAnswer()
    replaced = context.jobs.read(CheckpointRecord, job.id, step)
    record = CheckpointRecord(
        step=step,
        epoch=job.epoch,
        committed_at=call.now,
        # A client that was given a token for the zip of another attempt goes on reading that zip.
        protected_until=replaced.protected_until if replaced else 0,
        num_files=1,
        total_bytes=found.size_bytes,
        manifest_key="",
        legacy_key=body.key,
    )
    progress_by = call.now + context.settings.original_progress_s if lease.claimant else None
    left_behind = job.epoch > 1 and job.attempt_step is None
    job = apply_as_bearer(
        context,
        call,
        fence,
        lambda job, _: rules.commit(job, fence, record, now=call.now, progress_by=progress_by),
    )
    Retention(context, job, call.now).run(left_behind=left_behind)
    return StatusAnswer()


def sound_checkpoints(context: Context, job: Job, *, below: int | None = None) -> Iterator[CheckpointRecord]:
    """What the job may resume from, newest first. A job that has no checkpoint costs no read."""
    if job.checkpoint_step is None:
        return
    up_to_step = job.checkpoint_step if below is None else min(below - 1, job.checkpoint_step)
    cursor: str | None = None
    while up_to_step >= 0:
        page = context.jobs.history(CheckpointRecord, job.id, limit=_LOOKED_THROUGH, cursor=cursor, up_to=up_to_step)
        yield from rules.resumable(job, page.items)
        cursor = page.cursor
        if cursor is None:
            return


@dataclass(frozen=True)
class Look:
    """What a commit found."""

    missing: list[BlobUpload]
    stored: list[PackSnapshot]
    """What the job must hold before it may rely on it."""
    held: list[PackSnapshot]
    """What it holds already. It may rely on what a checkpoint of it names; the rest may be just about to be let go."""
    new_bytes: int
    """Of the packs that the job did not hold."""
    manifest_stored: bool


def look_at(context: Context, call: Call, job: Job, packs: Sequence[Pack], manifest_key: str) -> Look:
    """Read the packs' items, then ask the object store for what they do not tell, and for the manifest.

    In this order: a pack that is deleted after its item was read is told by the item (`packs.may_hold`).
    """
    records = context.packs.get_many(call.tenant, [pack.blake3 for pack in packs])
    unknown: list[PackSnapshot] = []
    held: list[PackSnapshot] = []
    for pack in packs:
        sighting = PackSnapshot(pack, records.get(pack.blake3))
        (unknown if needs_verification(job.id, sighting, call.now) else held).append(sighting)
    keys = [pack_key(sighting.pack.blake3) for sighting in unknown]
    found = context.objects.head_many(call.tenant, CHECKPOINTS_BUCKET, [*keys, manifest_key])
    missing: list[BlobUpload] = []
    stored: list[PackSnapshot] = []
    for sighting, key in zip(unknown, keys, strict=True):
        pack = sighting.pack
        # What is stored otherwise than declared is replaced. `needs_look` has let pass nothing that was verified to be
        # otherwise: such bytes are damaged, or were uploaded by somebody who never committed them.
        signed = upload_of(context, call, key, found.get(key), size_bytes=pack.size_bytes, crc64nvme=pack.crc64nvme)
        if signed is None:
            stored.append(sighting)
        else:
            missing.append(BlobUpload(blake3=pack.blake3, url=signed.url, headers=dict(signed.headers)))
    new_bytes = sum(one.pack.size_bytes for one in stored if not one.referenced_by(job.id))
    return Look(missing, stored, held, new_bytes, manifest_key in found)
