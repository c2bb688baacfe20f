"""The calls for checkpoints: commit, download URLs, damage reports, an original client's zip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from baton.contract.checkpoints.calls import (
    MAX_MISSING_PER_ANSWER,
    BlobUpload,
    BlobUrls,
    BlobUrlsRequest,
    CheckpointRef,
    CommitAnswer,
    DamagedRequest,
)
from baton.contract.checkpoints.manifest import Manifest, Pack
from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import JobState
from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.worker.calls import ProgressRequest, StatusAnswer
from functions.api.checkpoints.retention_runner import RetentionRunner, read_checkpoints, read_manifest
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.objects.declared_uploads import presign_if_missing
from functions.api.objects.machine_access import require_own_job
from functions.api.worker.lease_guard import WRITE_TRIES, apply_as_bearer, require_lease
from functions.api.worlds.seat_settlement import settle_job
from functions.domain.checkpoints import commit as rules
from functions.domain.checkpoints.object_keys import attempt_prefix, manifest_key, pack_key, zip_step
from functions.domain.checkpoints.packs import PackSnapshot, needs_verification
from functions.domain.errors import FenceBroken, Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Transaction
from functions.domain.jobs.transitions import require_running
from functions.domain.records import Attempt, CheckpointRecord, Job
from functions.domain.worlds.seat_ids import seat_id

_CHECKPOINTS_PER_READ = 20
"""Checkpoints of one read in the search for a sound checkpoint."""


@dataclass(frozen=True)
class CheckpointOwner:
    """Job to which the checkpoints of the calling attempt belong: the elastic job of a seat, any other job itself."""

    job: Job
    seat: Job | None = None
    epoch: int | None = None
    """Number of the seat's attempt, which its manifests name; None without a seat."""


def read_owner(context: Context, call: ApiCall, job: Job) -> CheckpointOwner:
    """Return the owner of the checkpoints of a job. Refuses a seat whose elastic job has not recorded the attempt."""
    seat = job.spec.seat
    if seat is None:
        return CheckpointOwner(job)
    require_running(job)
    elastic = context.jobs.get(seat.job)
    if elastic is None or not _runs(elastic, job, seat.seat):
        elastic = settle_job(context.jobs, seat.job, call.now)
    if elastic is None:
        raise Refusal(ErrorCode.JOB_NOT_FOUND, f"No job {seat.job}.", field="id")
    require_running(elastic)
    if not _runs(elastic, job, seat.seat):
        raise Refusal(ErrorCode.LEASE_LOST, f"Attempt {job.epoch} at seat {seat.seat} of job {seat.job} has ended.")
    return CheckpointOwner(elastic, job, elastic.seats[seat.seat].world_epoch)


def _read_holder(context: Context, call: ApiCall, epoch: int) -> Job:
    """Return the job whose lease a commit bears: the named job, or the seat whose attempt has the number `epoch`."""
    job = require_job(context, call, call.path["id"])
    if job.spec.nodes is None:
        return job
    found = [place for place, mark in enumerate(job.seats) if epoch and mark.world_epoch == epoch]
    seat = context.jobs.get(seat_id(job.id, found[0])) if found else None
    if seat is None:
        detail = f"The newest attempts at the seats of job {job.id} do not include attempt {epoch}."
        raise Refusal(ErrorCode.LEASE_LOST, detail, field="epoch")
    return seat


def _runs(elastic: Job, seat: Job, place: int) -> bool:
    """Return True if the elastic job runs and has recorded the present attempt at the seat."""
    mark = elastic.seats[place]
    current = (mark.epoch, mark.running, elastic.generation) == (seat.epoch, True, seat.generation)
    return elastic.state is JobState.RUNNING and current


def commit(context: Context, call: ApiCall) -> CommitAnswer:
    """Commit a checkpoint once every pack is stored and verified; answer with upload URLs of missing packs before."""
    for tries in range(WRITE_TRIES):
        # The retention in the commit's transaction may cause the conflict, therefore the next try commits without.
        answer = _try_commit(context, call, call.body, alone=tries > 0)
        if answer is not None:
            return answer
    raise Refusal(ErrorCode.CONFLICT, f"Other calls changed the job or its packs during all {WRITE_TRIES} tries.")


def _try_commit(context: Context, call: ApiCall, manifest: Manifest, *, alone: bool) -> CommitAnswer | None:
    """Read the state and commit if nothing is missing; None after a conflicting write.

    The job is read first. Every end of the lease, and every change of retention to the packs, raises the job's `rev`,
    which is the condition of the last write.
    """
    data = manifest.canonical_bytes()
    digest = blake3(data).hexdigest()
    holder = _read_holder(context, call, manifest.epoch)
    owner, fence = read_owner(context, call, holder), call.fence(holder.id)
    job = owner.job
    # No attempt has a checkpoint beyond the newest checkpoint.
    behind = job.checkpoint_step is not None and manifest.step <= job.checkpoint_step
    existing = context.jobs.read(CheckpointRecord, job.id, manifest.step) if behind else None
    repeated = rules.is_committed(job, existing, manifest, digest, epoch=owner.epoch)
    require_lease(context, fence)
    if repeated:
        return CommitAnswer(committed=True, step=manifest.step, epoch=manifest.epoch)
    key = manifest_key(job, manifest.step, manifest.epoch, digest)
    status = read_pack_status(context, call, job, manifest.packs, key)
    if not status.manifest_stored:
        # The manifest is stored before any upload: if the attempt ends, retention finds the packs in the manifest.
        context.objects.create(call.tenant, CHECKPOINTS_BUCKET, key, data)
    if status.missing:
        return CommitAnswer(
            committed=False,
            step=manifest.step,
            epoch=manifest.epoch,
            missing=status.missing[:MAX_MISSING_PER_ANSWER],
            more_missing=len(status.missing) > MAX_MISSING_PER_ANSWER,
        )
    records = read_checkpoints(context, job)
    record = CheckpointRecord(
        step=manifest.step,
        epoch=job.epoch,
        manifest_epoch=None if owner.seat is None else manifest.epoch,
        committed_at=call.now,
        num_files=len(manifest.files),
        total_bytes=manifest.total_bytes,
        new_bytes=status.new_bytes,
        metrics=manifest.metrics,
        tag=manifest.tag,
        manifest_key=key,
        manifest_blake3=digest,
        # A client may still read another branch's checkpoint of this step; the protection keeps that manifest.
        protected_until=next((one.protected_until for one in records if one.step == manifest.step), 0),
    )
    change = rules.commit(job, None if owner.seat is None else fence, record, now=call.now)
    retention = RetentionRunner(context, change.job, call.now, {key: manifest.packs})
    # Manifests and zips of former attempts that never became a checkpoint.
    left_behind = job.epoch > 1 and job.attempt_step is None
    plan = None
    if not alone and not left_behind:
        try:
            plan = retention.plan([record, *(one for one in records if one.step != record.step)])
        except (Refusal, StorageUnavailable):
            alone = True  # The retention after the commit tries again, and logs the failure.
    unnamed = retention.find_unreferenced(status.referenced, records, job.checkpoint_step)
    if not context.packs.add_references(call.tenant, job.id, [*status.stored, *unnamed]):
        return None
    try:
        context.jobs.apply(change if plan is None else change.also(*plan.records))
    except WriteConflict:
        return None
    except FenceBroken as broken:
        raise fence.refusal(broken.lease) from broken
    if plan is not None:
        retention.execute_plan(plan)
    elif alone or left_behind:
        retention.run(left_behind=left_behind)
    return CommitAnswer(committed=True, step=manifest.step, epoch=manifest.epoch)


def refer_to(context: Context, call: ApiCall, record: CheckpointRecord) -> CheckpointRef:
    """Return a checkpoint with a URL of its manifest."""
    return CheckpointRef(
        step=record.step,
        epoch=record.named_epoch,
        manifest_url=context.objects.presign_get(
            call.tenant,
            CHECKPOINTS_BUCKET,
            record.legacy_key or record.manifest_key,
            expires_s=context.settings.url_life_s,
        ),
        manifest_blake3=record.manifest_blake3,
        total_bytes=record.total_bytes,
        legacy_key=record.legacy_key,
    )


def blob_urls(context: Context, call: ApiCall) -> BlobUrls:
    """Presign downloads of a committed checkpoint's packs; retention keeps the checkpoint until the URLs expire."""
    body: BlobUrlsRequest = call.body or BlobUrlsRequest()
    job = require_job(context, call, call.path["id"])
    require_own_job(context, call, job, field="id")
    job = read_owner(context, call, job).job
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
    return BlobUrls(urls=urls, expires_at=call.now + life_s, checkpoint=refer_to(context, call, record))


def report_damaged(context: Context, call: ApiCall) -> StatusAnswer:
    """Mark a committed checkpoint as damaged, because its bytes do not verify; no worker resumes from it again."""
    body: DamagedRequest = call.body
    step = int(call.path["step"])
    fence = call.fence(call.path["id"])
    job = read_owner(context, call, require_job(context, call, fence.job_id)).job
    require_lease(context, fence)

    def reported() -> CheckpointRecord:
        record = context.jobs.read(CheckpointRecord, job.id, step)
        if record is None or record.named_epoch != body.epoch:
            raise Refusal(
                ErrorCode.CHECKPOINT_NOT_FOUND,
                f"Job {job.id} has no checkpoint at step {step} of attempt {body.epoch}.",
                field="step",
            )
        return record

    found = reported()
    if found.damaged:
        return StatusAnswer()
    _mark_packs_suspect(context, call, job, found)

    def decision(holder: Job, attempt: Attempt) -> Transaction:
        # Read again after the job: another call may have committed the step again, or reported the fallback.
        owner = read_owner(context, call, holder)
        job, record = owner.job, reported()
        fallback = next(find_sound_checkpoints(context, job, below=step), None)
        mine = attempt if owner.seat is None else None
        return rules.mark_damaged(job, mine, fence, record, fallback, message=body.message, now=call.now)

    apply_as_bearer(context, call, fence, decision)
    return StatusAnswer()


def _mark_packs_suspect(context: Context, call: ApiCall, job: Job, record: CheckpointRecord) -> None:
    """Mark the packs of a damaged checkpoint as suspect: the next commit that names such a pack verifies it.

    Runs before the checkpoint is marked as damaged, because a repeated report ends at that mark.
    """
    if record.legacy_key is not None:
        return
    try:
        named = read_manifest(context, job, record).packs
    except Refusal:
        return  # The manifest itself is damaged, so the packs are unknown.
    context.packs.mark_suspect(call.tenant, job.id, [pack.blake3 for pack in named])


def register_zip(context: Context, call: ApiCall) -> StatusAnswer:
    """Register a zipped checkpoint that an original client has uploaded."""
    body: ProgressRequest = call.body
    job = require_job(context, call, body.job_id)
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
        # A client with a token for the zip of another attempt may still read that zip.
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
    RetentionRunner(context, job, call.now).run(left_behind=left_behind)
    return StatusAnswer()


def find_sound_checkpoints(context: Context, job: Job, *, below: int | None = None) -> Iterator[CheckpointRecord]:
    """Yield the checkpoints that the job may resume from, newest first; no read for a job without a checkpoint."""
    if job.checkpoint_step is None:
        return
    up_to_step = job.checkpoint_step if below is None else min(below - 1, job.checkpoint_step)
    cursor: str | None = None
    while up_to_step >= 0:
        page = context.jobs.history(
            CheckpointRecord, job.id, limit=_CHECKPOINTS_PER_READ, cursor=cursor, up_to=up_to_step
        )
        yield from rules.resumable(job, page.items)
        cursor = page.cursor
        if cursor is None:
            return


@dataclass(frozen=True)
class PackStatus:
    """Result of comparing a manifest's packs with the store."""

    missing: list[BlobUpload]
    stored: list[PackSnapshot]
    """Stored packs to which the job must add a reference before a commit."""
    referenced: list[PackSnapshot]
    """Packs that the job already references. Retention may be about to remove the references to packs that no
    checkpoint of the job names."""
    new_bytes: int
    """Size of the packs that the job did not reference."""
    manifest_stored: bool


def read_pack_status(context: Context, call: ApiCall, job: Job, packs: Sequence[Pack], manifest_key: str) -> PackStatus:
    """Read the packs' items, then query the object store for the unknown packs and the manifest.

    The order matters: the item of a pack that is deleted after the read of its item shows the deletion
    (`packs.may_reference`).
    """
    records = context.packs.get_many(call.tenant, [pack.blake3 for pack in packs])
    unknown: list[PackSnapshot] = []
    referenced: list[PackSnapshot] = []
    for pack in packs:
        snapshot = PackSnapshot(pack, records.get(pack.blake3))
        (unknown if needs_verification(job.id, snapshot, call.now) else referenced).append(snapshot)
    keys = [pack_key(snapshot.pack.blake3) for snapshot in unknown]
    found = context.objects.head_many(call.tenant, CHECKPOINTS_BUCKET, [*keys, manifest_key])
    missing: list[BlobUpload] = []
    stored: list[PackSnapshot] = []
    for snapshot, key in zip(unknown, keys, strict=True):
        pack = snapshot.pack
        # An object that differs from its declaration is replaced: no commit has verified such an object, so the bytes
        # are damaged or come from an upload that was never committed.
        signed = presign_if_missing(
            context, call, key, found.get(key), size_bytes=pack.size_bytes, crc64nvme=pack.crc64nvme
        )
        if signed is None:
            stored.append(snapshot)
        else:
            missing.append(BlobUpload(blake3=pack.blake3, url=signed.url, headers=dict(signed.headers)))
    new_bytes = sum(one.pack.size_bytes for one in stored if not one.referenced_by(job.id))
    return PackStatus(missing, stored, referenced, new_bytes, manifest_key in found)
