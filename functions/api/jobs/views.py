"""Answers made from stored records."""

from __future__ import annotations

from typing import Any

from baton.contract.checkpoints.calls import CheckpointView
from baton.contract.jobs.dreambooth import OriginalEvent, OriginalJob
from baton.contract.jobs.events import event_id
from baton.contract.jobs.history import AttemptView, EventView
from baton.contract.jobs.job import JobState, JobView
from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.worker.calls import TransitionAnswer
from functions.api.jobs.legacy_api import build_columns, format_timestamp, name_event
from functions.domain.checkpoints.object_keys import job_prefix
from functions.domain.jobs.attempt_end import committed_step
from functions.domain.records import Attempt, CheckpointRecord, Event, Job, Lease


def view_job(job: Job, lease: Lease | None = None) -> JobView:
    """Return a job for users. `lease` adds the reports of a running attempt since the last transition."""
    current = lease if lease and lease.epoch == job.epoch and job.state is JobState.RUNNING else None
    spec = job.spec
    return JobView(
        id=job.id,
        status=job.state,
        state=job.state,
        name=spec.name,
        queue=job.queue,
        priority=job.priority,
        recipe=spec.recipe,
        command=spec.command,
        plan=spec.plan,
        parameters=spec.parameters,
        environment=spec.environment,
        inputs=spec.inputs,
        outputs=spec.outputs,
        requirements=spec.requirements,
        policy=spec.policy,
        tags=spec.tags,
        webhook=spec.webhook,
        rings=spec.rings,
        rent=spec.rent,
        nodes=spec.nodes,
        copy_of=job.copy_of,
        epoch=job.epoch,
        counters=job.counters,
        reason=job.reason,
        ended_by=job.ended_by,
        not_before=job.not_before,
        created_at=job.created_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
        failed_at=job.failed_at,
        canceled_at=job.canceled_at,
        updated_at=job.updated_at,
        rev=job.rev,
        checkpoint_step=job.checkpoint_step,
        progress=(current.progress if current else None) or job.progress,
        artifacts=job.artifacts,
        checkpoint_bucket=CHECKPOINTS_BUCKET,
        checkpoint_prefix=job_prefix(job.id),
        machine_id=current.machine_id if current else None,
        lease_expires_at=current.expires_at if current else None,
        **build_columns(job, current),
    )


def view_original_job(job: Job, lease: Lease | None = None) -> OriginalJob:
    """Return the job for a client of the original orchestrator: `view_job` with text for instants."""
    view = view_job(job, lease)
    instants = ("created_at", "started_at", "completed_at", "canceled_at", "failed_at")
    texts = {name: format_timestamp(getattr(view, name)) for name in instants}
    return OriginalJob.model_validate({**view.model_dump(), **texts})


def view_original_event(job: Job, event: Event) -> OriginalEvent:
    """Return the event for a client of the original orchestrator: `view_event` with the columns of its table."""
    named = {"id": event_id(job.id, event.seq), "job_id": job.id, "event_data": event.data}
    return OriginalEvent.model_validate(
        {**view_event(event).model_dump(), **named, "timestamp": format_timestamp(event.at)}
    )


def view_event(event: Event) -> EventView:
    """Return a line of history, also under the original's names."""
    return EventView(**event.model_dump(), event_type=name_event(event.type), timestamp=event.at)


def view_attempt(job: Job, attempt: Attempt, lease: Lease | None = None, *, seat: int | None = None) -> AttemptView:
    """Return an attempt at the job, or at a seat of an elastic job; `lease` adds the progress of a live attempt."""
    values: dict[str, Any] = {**attempt.model_dump(), "seat": seat}
    if attempt.ended_at is None and lease and lease.epoch == attempt.epoch and lease.progress:
        values["progress"] = lease.progress
    if attempt.ended_at is None and attempt.epoch == job.epoch and seat is None:
        values["checkpoint_step"] = committed_step(job, attempt)
    return AttemptView.model_validate(values, from_attributes=True)


def view_checkpoint(job: Job, record: CheckpointRecord) -> CheckpointView:
    """Return a committed checkpoint."""
    return CheckpointView(
        step=record.step,
        epoch=record.epoch,
        committed_at=record.committed_at,
        num_files=record.num_files,
        total_bytes=record.total_bytes,
        new_bytes=record.new_bytes,
        metrics=record.metrics,
        manifest_key=record.legacy_key or record.manifest_key,
        current=record.step == job.checkpoint_step and not record.damaged,
        pinned=record.pinned,
        damaged=record.damaged,
        tag=record.tag,
    )


def answer_transition(job: Job) -> TransitionAnswer:
    """Return the job's state after a transition."""
    return TransitionAnswer(state=job.state.value, not_before=job.not_before)
