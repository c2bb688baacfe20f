"""Commit checkpoints, mark damaged checkpoints, and list the checkpoints to resume from."""

from __future__ import annotations

from collections.abc import Iterable

from baton.contract.checkpoints.manifest import Manifest
from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import Progress
from functions.domain.errors import Refusal
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.transaction import CheckLease, Transaction, update_job
from functions.domain.jobs.transitions import require_running
from functions.domain.records import Attempt, CheckpointRecord, Job


def past(job: Job, step: int, epoch: int) -> bool:
    """Return True if a manifest of this step and attempt that is not committed can never be committed.

    An elastic job has several attempts at a time.
    """
    newest = -1 if job.checkpoint_step is None else job.checkpoint_step
    older = step <= newest if job.spec.nodes is not None else (epoch, step) <= (job.epoch, newest)
    return job.state.terminal or older


def is_committed(
    job: Job, existing: CheckpointRecord | None, manifest: Manifest, digest: str, *, epoch: int | None = None
) -> bool:
    """Return True if this manifest is committed, as in a repeated call. Refuses a manifest that cannot be committed.

    `epoch`: the number of the calling seat's attempt, if the job is elastic.
    """
    require_running(job)
    epoch = job.epoch if epoch is None else epoch
    if manifest.job_id != job.id:
        raise Refusal(ErrorCode.INVALID_VALUE, f"The manifest is for job {manifest.job_id}.", field="job_id")
    if manifest.epoch != epoch:
        raise Refusal(
            ErrorCode.LEASE_LOST,
            f"The manifest is of attempt {manifest.epoch}; job {job.id} is held by attempt {epoch}.",
            field="epoch",
        )
    if existing is not None and existing.named_epoch == manifest.epoch and not existing.damaged:
        if existing.manifest_blake3 == digest:
            return True
        raise Refusal(ErrorCode.CHECKPOINT_CONFLICT, f"Step {manifest.step} is committed already.", field="step")
    require_newer(job, manifest.step)
    return False


def require_newer(job: Job, step: int) -> None:
    """Refuse a step that is not beyond the newest checkpoint of the job's history."""
    if job.checkpoint_step is not None and step <= job.checkpoint_step:
        raise Refusal(
            ErrorCode.STEP_NOT_NEWER,
            f"Step {step} is not beyond the newest committed checkpoint, step {job.checkpoint_step}.",
            field="step",
        )


def commit(
    job: Job, fence: Fence | None, record: CheckpointRecord, *, now: int, progress_by: int | None = None
) -> Transaction:
    """Commit a checkpoint whose bytes are all stored and verified.

    Without `fence` the caller has read the lease after `job` and found the lease live. Every write that ends a lease
    raises the job's `rev`, therefore the condition on `rev` replaces the fence. `progress_by`: the instant until which
    an original client must show progress next.
    """
    require_running(job)
    if record.epoch != job.epoch:
        raise Refusal(
            ErrorCode.LEASE_LOST,
            f"The checkpoint is of attempt {record.epoch}; job {job.id} is held by attempt {job.epoch}.",
            field="epoch",
        )
    require_newer(job, record.step)
    total = job.progress.total_steps if job.progress else None
    first_step = record.step if job.checkpoint_step is None else job.first_step
    progress = Progress(step=record.step, total_steps=total, metrics=record.metrics, reported_at=now)
    change = update_job(
        job,
        now,
        checkpoint_step=record.step,
        checkpoint_epoch=record.epoch,
        first_step=first_step,
        fruitless_interruptions=0,
        fruitless_failures=0,
        fruitless_node_faults=0,
        progress=progress,
    )
    change = change.put(record.model_copy(update={"branches": job.branches, "first_step": first_step}))
    if fence is not None:
        change = change.also(CheckLease(fence=fence, progress_by=progress_by))
    return change.with_event(
        EventType.CHECKPOINT_COMMITTED,
        now,
        step=record.step,
        total_bytes=record.total_bytes,
        new_bytes=record.new_bytes,
        files=record.num_files,
    )


def resumable(job: Job, records: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
    """Return the undamaged checkpoints of the job's history, newest first."""
    sound = (record for record in records if not record.damaged and job.in_history(record))
    return sorted(sound, key=lambda record: record.step, reverse=True)


def mark_damaged(
    job: Job,
    attempt: Attempt | None,
    fence: Fence,
    record: CheckpointRecord,
    fallback: CheckpointRecord | None,
    *,
    message: str,
    now: int,
) -> Transaction:
    """Mark a checkpoint whose bytes do not verify; the job continues from `fallback`.

    `attempt`: the present attempt, which resumes from `fallback` instead of `record`.
    """
    require_running(job)
    updates: dict[str, int | None] = {}
    if (job.checkpoint_step, job.checkpoint_epoch) == (record.step, record.epoch):
        updates["checkpoint_step"] = fallback.step if fallback else None
        updates["checkpoint_epoch"] = fallback.epoch if fallback else None
        if record.epoch == job.epoch or job.spec.nodes is not None:
            updates["lapsed_step"] = max(record.step, job.lapsed_step or 0)
    change = update_job(job, now, **updates)
    change = change.put(record.model_copy(update={"damaged": True})).also(CheckLease(fence=fence))
    if attempt is not None and record.epoch != job.epoch and attempt.resumed_step == record.step:
        resumed = attempt.model_copy(update={"resumed_step": fallback.step if fallback else None})
        change = change.put(resumed)
    return change.with_event(
        EventType.CHECKPOINT_DAMAGED,
        now,
        step=record.step,
        fallback_step=change.job.checkpoint_step,
        message=message,
    )
