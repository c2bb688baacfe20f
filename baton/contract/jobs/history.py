"""A job's history: events and attempts."""

from __future__ import annotations

from enum import StrEnum

from baton.contract.base import AnswerModel, Epoch, EpochSeconds, JsonObject, Step
from baton.contract.jobs.job import AttemptEnd, FailureClass, Progress, Reason


class EventType(StrEnum):
    """Every kind of line in a job's history. Heartbeats leave none."""

    SUBMITTED = "job.submitted"
    STARTED = "job.started"
    PAUSE_REQUESTED = "job.pause_requested"
    PAUSED = "job.paused"
    RESUMED = "job.resumed"
    RETRIED = "job.retried"
    CANCELED = "job.canceled"
    COMPLETED = "job.completed"
    FAILED = "job.failed"
    BACKOFF_ENDED = "job.backoff_ended"
    ATTEMPT_FAILED = "attempt.failed"
    ATTEMPT_INTERRUPTED = "attempt.interrupted"
    ATTEMPT_RELEASED = "attempt.released"
    ATTEMPT_RECOVERED = "attempt.recovered"
    CHECKPOINT_COMMITTED = "checkpoint.committed"
    CHECKPOINT_DAMAGED = "checkpoint.damaged"
    ROLLED_BACK = "job.rolled_back"
    RULE_FIRED = "rule.fired"
    RULE_CLEARED = "rule.cleared"
    RULE_ERROR = "rule.error"
    RULE_UPDATED = "rule.updated"
    RULE_UNEVALUABLE = "rule.unevaluable"
    ACTION_APPLIED = "action.applied"
    ACTION_FAILED = "action.failed"
    ACTION_REJECTED = "action.rejected"
    RING_QUARANTINED = "ring.quarantined"
    WORLD_JOINED = "world.joined"
    WORLD_LOST = "world.lost"
    WORLD_REPAIRED = "world.repaired"


class EventView(AnswerModel):
    """Line of a job's history. Example: `{"seq": 3, "type": "job.started", "at": 1790000000, "epoch": 1, ...}`

    `event_type` and `timestamp` repeat type and time under the original orchestrator's names.
    """

    seq: int
    type: EventType
    at: EpochSeconds
    epoch: Epoch
    data: JsonObject = {}
    event_type: str
    timestamp: EpochSeconds


class EventPage(AnswerModel):
    """Oldest first. Example: `{"events": [], "next_cursor": null}`"""

    events: list[EventView]
    next_cursor: str | None = None


class AttemptView(AnswerModel):
    """Attempt: a worker holds the job, from claim to end.

    Example: `{"epoch": 1, "started_at": 1790000000, "ended_at": 1790000300, "end": "interrupted", ...}`
    """

    epoch: Epoch
    seat: int | None = None
    """Node of an elastic job; None for another job. The attempts at each seat are numbered from 1."""
    machine_id: str | None = None
    container_group_id: str | None = None
    provider: str | None = None
    worker_id: str | None = None
    gpu_model: str | None = None
    price_usd_per_hour: float | None = None
    """Price of the worker's machine; None if the worker did not report the price."""
    key_id: str | None = None
    started_at: EpochSeconds
    ended_at: EpochSeconds | None = None
    end: AttemptEnd | None = None
    reason: Reason | None = None
    failure_class: FailureClass | None = None
    exit_code: int | None = None
    signal: int | None = None
    log_tail: list[str] = []
    resumed_step: Step | None = None
    checkpoint_step: Step | None = None
    """Newest step that this attempt committed."""
    progress: Progress | None = None
    """Last progress report of this attempt."""


class AttemptPage(AnswerModel):
    """Oldest first; those of an elastic job seat by seat. Example: `{"attempts": [], "next_cursor": null}`"""

    attempts: list[AttemptView]
    next_cursor: str | None = None
