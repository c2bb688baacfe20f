"""Committing checkpoints, and what becomes of damaged ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from contract.checkpoints import Manifest
from contract.errors import ErrorCode
from contract.history import EventType
from contract.jobs import Progress
from functions.domain.change import Change, CheckLease, changed
from functions.domain.errors import Refusal
from functions.domain.jobs import require_running
from functions.domain.leases import Fence
from functions.domain.records import Attempt, CheckpointRecord, Job


def job_prefix(job_id: str) -> str:
    """Everything of a job in the checkpoints bucket lies below this."""
    return f"jobs/{job_id}/"


def blob_key(job_id: str, blake3: str) -> str:
    """Where the blob with this digest lies; create-only."""
    return f"{job_prefix(job_id)}blobs/{blake3}"


def manifest_key(job_id: str, step: int, epoch: int) -> str:
    """Where the manifest of a checkpoint lies; create-only."""
    return f"{job_prefix(job_id)}manifests/{step}-{epoch}.json"


def artifact_key(job_id: str, epoch: int, path: str) -> str:
    """Where an attempt stores an output. The epoch keeps a paused machine away from a later attempt's files."""
    return f"{job_prefix(job_id)}artifacts/{epoch}/{path}"


def already_committed(job: Job, existing: CheckpointRecord | None, manifest: Manifest, digest: str) -> bool:
    """True if this very manifest is committed: the call was repeated. Refuses what cannot be committed."""
    require_running(job)
    if manifest.job_id != job.id:
        raise Refusal(ErrorCode.INVALID_VALUE, f"The manifest is for job {manifest.job_id}.", field="job_id")
    if manifest.epoch != job.epoch:
        raise Refusal(
            ErrorCode.LEASE_LOST,
            f"The manifest is of attempt {manifest.epoch}; job {job.id} is held by attempt {job.epoch}.",
            field="epoch",
        )
    if existing is not None and existing.epoch == manifest.epoch and not existing.damaged:
        if existing.manifest_blake3 == digest:
            return True
        raise Refusal(ErrorCode.CHECKPOINT_CONFLICT, f"Step {manifest.step} is committed already.", field="step")
    require_newer(job, manifest.step)
    return False


def require_newer(job: Job, step: int) -> None:
    """Within the history that the next attempt would resume, steps only rise."""
    if job.checkpoint_step is not None and step <= job.checkpoint_step:
        raise Refusal(
            ErrorCode.STEP_NOT_NEWER,
            f"Step {step} is not beyond the newest committed checkpoint, step {job.checkpoint_step}.",
            field="step",
        )


def commit(job: Job, attempt: Attempt, fence: Fence, record: CheckpointRecord, *, now: int) -> Change:
    """The checkpoint exists from here on: every byte of it is stored and verified."""
    require_running(job)
    if record.epoch != job.epoch:
        raise Refusal(
            ErrorCode.LEASE_LOST,
            f"The checkpoint is of attempt {record.epoch}; job {job.id} is held by attempt {job.epoch}.",
            field="epoch",
        )
    require_newer(job, record.step)
    total = job.progress.total_steps if job.progress else None
    progress = Progress(step=record.step, total_steps=total, metrics=record.metrics, reported_at=now)
    change = changed(
        job,
        now,
        checkpoint_step=record.step,
        checkpoint_epoch=record.epoch,
        fruitless_interruptions=0,
        progress=progress,
    )
    change = replace(
        change,
        attempt=attempt.model_copy(update={"checkpoint_step": record.step}),
        checkpoint=record,
        lease=CheckLease(fence=fence),
    )
    return change.with_event(
        EventType.CHECKPOINT_COMMITTED, now, step=record.step, total_bytes=record.total_bytes, files=record.num_files
    )


def resumable(job: Job, records: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
    """What an attempt may resume from, newest first: sound, and of the history that the job continues."""
    sound = (record for record in records if not record.damaged and job.in_history(record))
    return sorted(sound, key=lambda record: record.step, reverse=True)


def damaged(
    job: Job, fence: Fence, record: CheckpointRecord, fallback: CheckpointRecord | None, *, message: str, now: int
) -> Change:
    """The bytes of `record` do not verify: the next one to resume from is `fallback`, and steps go on from there."""
    require_running(job)
    was_current = (job.checkpoint_step, job.checkpoint_epoch) == (record.step, record.epoch)
    change = changed(
        job,
        now,
        **(
            {
                "checkpoint_step": fallback.step if fallback else None,
                "checkpoint_epoch": fallback.epoch if fallback else None,
            }
            if was_current
            else {}
        ),
    )
    change = replace(change, checkpoint=record.model_copy(update={"damaged": True}), lease=CheckLease(fence=fence))
    return change.with_event(
        EventType.CHECKPOINT_DAMAGED,
        now,
        step=record.step,
        fallback_step=change.job.checkpoint_step,
        message=message,
    )
