"""From stored values to answers."""

from __future__ import annotations

from typing import Any

from baton.contract.checkpoints import CheckpointView
from baton.contract.dreambooth import OriginalEvent, OriginalJob
from baton.contract.events import event_id
from baton.contract.history import AttemptView, EventView
from baton.contract.jobs import JobState, JobView
from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.work import TransitionAnswer
from functions.api.jobs.legacy_api import event_name, job_columns, timestamp
from functions.domain.checkpoints.object_keys import job_prefix
from functions.domain.jobs.attempt_end import committed_step
from functions.domain.records import Attempt, CheckpointRecord, Event, Job, Lease


def job_view(job: Job, lease: Lease | None = None) -> JobView:
    """A job for users. `lease` adds what a running attempt reported since the last transition."""
    held = lease if lease and lease.epoch == job.epoch and job.state is JobState.RUNNING else None
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
        checkpoint_step=job.checkpoint_step,
        progress=(held.progress if held else None) or job.progress,
        artifacts=job.artifacts,
        checkpoint_bucket=CHECKPOINTS_BUCKET,
        checkpoint_prefix=job_prefix(job.id),
        machine_id=held.machine_id if held else None,
        lease_expires_at=held.expires_at if held else None,
        **job_columns(job, held),
    )


def original_job_view(job: Job, lease: Lease | None = None) -> OriginalJob:
    """Return the job for a client of the original orchestrator: `job_view` with text for instants."""
    view = job_view(job, lease)
    instants = ("created_at", "started_at", "completed_at", "canceled_at", "failed_at")
    texts = {name: timestamp(getattr(view, name)) for name in instants}
    return OriginalJob.model_validate({**view.model_dump(), **texts})


def original_event_view(job: Job, event: Event) -> OriginalEvent:
    """Return the event for a client of the original orchestrator: `event_view` with the columns of its table."""
    named = {"id": event_id(job.id, event.seq), "job_id": job.id, "event_data": event.data}
    return OriginalEvent.model_validate({**event_view(event).model_dump(), **named, "timestamp": timestamp(event.at)})


def event_view(event: Event) -> EventView:
    """A line of history, also under the original's names."""
    return EventView(**event.model_dump(), event_type=event_name(event.type), timestamp=event.at)


def attempt_view(job: Job, attempt: Attempt, lease: Lease | None = None) -> AttemptView:
    """An attempt at the job; `lease` adds the progress of a live one."""
    values: dict[str, Any] = attempt.model_dump()
    if attempt.ended_at is None and lease and lease.epoch == attempt.epoch and lease.progress:
        values["progress"] = lease.progress
    if attempt.ended_at is None and attempt.epoch == job.epoch:
        values["checkpoint_step"] = committed_step(job, attempt)
    return AttemptView.model_validate(values, from_attributes=True)


def checkpoint_view(job: Job, record: CheckpointRecord) -> CheckpointView:
    """A committed checkpoint."""
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


def transition_answer(job: Job) -> TransitionAnswer:
    """Where the job stands after a call that moved it."""
    return TransitionAnswer(state=job.state.value, not_before=job.not_before)
