"""End an attempt: close the lease, update the counters, and choose the next state of the job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import AttemptEnd, JobCounters, JobState, Progress, Reason, ReasonCode
from baton.contract.worker.control import EndedBy
from functions.domain.jobs import retry as retry_policy
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.transaction import CloseLease, Transaction, update_job
from functions.domain.records import Attempt, Job

LONGEST_URL_LIFE_S = 3600
"""Longest life of a signed URL in any deployment (functions/settings.py)."""
LATE_AFTER_S = LONGEST_URL_LIFE_S + 60
"""Time after a job's end in which its worker may still upload; late retention then deletes these objects too."""
MAX_LOG_TAIL_BYTES = 32 * 1024
"""Size of the newest lines of output that an attempt keeps, as JSON."""


def late_retention_at(job: Job, now: int) -> int | None:
    """Return the time of the sweeper's retention for a job that ends without its worker's call; None if never run.

    The checkpoints of a seat belong to its elastic job.
    """
    return now + LATE_AFTER_S if job.epoch > 0 and job.spec.seat is None else None


def newest_lines(lines: list[str]) -> list[str]:
    """Return as many of the last lines as an attempt can keep."""
    kept: list[str] = []
    left_bytes = MAX_LOG_TAIL_BYTES
    for line in reversed(lines):
        left_bytes -= len(json.dumps(line)) + 1
        if left_bytes < 0:
            break
        kept.append(line)
    return kept[::-1]


def newest_progress(reported: Progress | None, known: Progress | None) -> Progress | None:
    """Return the later of two reports: a commit may be newer than the last heartbeat with a step."""
    reports = [report for report in (reported, known) if report is not None]
    return max(reports, key=lambda report: (report.reported_at or 0, report.step), default=None)


def add_counts(counters: JobCounters, **more: int) -> JobCounters:
    """Return the counters with `more` added."""
    return counters.model_copy(update={name: getattr(counters, name) + by for name, by in more.items()})


def _ran_s(attempt: Attempt, now: int, seen_until: int | None) -> int:
    """Return the seconds that the attempt lasted, up to the last heartbeat of its machine."""
    return max((now if seen_until is None else seen_until) - attempt.started_at, 0)


def _spent(job: Job, attempt: Attempt, ran_s: int) -> dict[str, Any]:
    """Return the updates that add the attempt to the job's cost; empty for an unknown price."""
    if attempt.price_usd_per_hour is None:
        return {}
    return {
        "cost_usd": job.cost_usd + cost_usd(ran_s, attempt.price_usd_per_hour),
        "priced_s": job.priced_s + ran_s,
    }


def cost_usd(ran_s: int, price_usd_per_hour: float) -> float:
    """Return the cost in USD of `ran_s` seconds."""
    return ran_s * price_usd_per_hour / 3600


def committed_step(job: Job, attempt: Attempt) -> int | None:
    """Return the newest step that the present attempt has committed; None for none."""
    return attempt.checkpoint_step if job.attempt_step is None else job.attempt_step


def end_job(
    job: Job, attempt: Attempt | None, end: AttemptEnd, now: int, *, reason: Reason, **updates: Any
) -> Transaction:
    """End the job by `updates`, and its lease, even if the attempt's item is lost. An elastic job has no lease."""
    updates["retention_at"] = late_retention_at(job, now)
    if job.state is not JobState.RUNNING or job.spec.nodes is not None:
        return update_job(job, now, reason=reason, **updates)
    if attempt is None:
        close = CloseLease(job_id=job.id, tenant=job.tenant, epoch=job.epoch, now=now, closed=end.value)
        return update_job(job, now, reason=reason, **updates).also(close)
    return end_attempt(job, attempt, end, now, fence=None, reason=reason, **updates)


def end_attempt(
    job: Job,
    attempt: Attempt,
    end: AttemptEnd,
    now: int,
    *,
    fence: Fence | None,
    expired_at: int | None = None,
    seen_until: int | None = None,
    closed: str | None = None,
    reason: Reason | None = None,
    progress: Progress | None = None,
    **updates: Any,
) -> Transaction:
    """Close the attempt and its lease, and change the job by `updates`."""
    counters = updates.pop("counters", job.counters)
    assert isinstance(counters, JobCounters)
    progress = progress or attempt.progress
    ran_s = _ran_s(attempt, now, seen_until)
    change = update_job(
        job,
        now,
        reason=reason,
        progress=newest_progress(progress, job.progress),
        counters=add_counts(counters, runtime_s=ran_s),
        **_spent(job, attempt, ran_s),
        **updates,
    )
    ended = attempt.model_copy(
        update={
            "ended_at": now,
            "end": end,
            "reason": reason,
            "progress": progress,
            "checkpoint_step": committed_step(job, attempt),
        }
    )
    close = CloseLease(
        job_id=job.id,
        tenant=job.tenant,
        epoch=job.epoch,
        now=now,
        closed=closed or end.value,
        fence=fence,
        expired_at=expired_at,
    )
    return change.put(ended).also(close)


_END_EVENTS = {
    AttemptEnd.FAILED: EventType.ATTEMPT_FAILED,
    AttemptEnd.RELEASED: EventType.ATTEMPT_RELEASED,
    AttemptEnd.INTERRUPTED: EventType.ATTEMPT_INTERRUPTED,
}


def requeue(
    job: Job,
    attempt: Attempt,
    end: AttemptEnd,
    reason: Reason,
    now: int,
    *,
    fence: Fence | None,
    counters: JobCounters,
    progress: Progress | None,
    expired_at: int | None = None,
    seen_until: int | None = None,
    wait_s: int = 0,
    event_data: Mapping[str, Any] | None = None,
    **updates: Any,
) -> Transaction:
    """End the attempt and make the job ready, waiting, paused, or failed for good.

    `event_data`: additional data of the event.
    """
    exhausted = retry_policy.cap_reached(
        job.model_copy(update={"counters": add_counts(counters, runtime_s=_ran_s(attempt, now, seen_until))})
    )
    not_before = now + wait_s if wait_s else None
    state, job_reason = JobState.PENDING, reason
    if exhausted:
        state, job_reason, not_before = JobState.FAILED, exhausted, None
        updates.update(failed_at=now, pause_requested=False, stale=False)
        # The call that reports a failure also runs retention.
        updates.update(retention_at=None if end is AttemptEnd.FAILED else late_retention_at(job, now))
    elif job.pause_requested:
        # The request for the pause has stored the user's reason in the job.
        state, job_reason, not_before = JobState.PAUSED, job.reason or Reason(code=ReasonCode.PAUSED_BY_USER), None
        updates.update(pause_requested=False, stale=False)
    change = end_attempt(
        job,
        attempt,
        end,
        now,
        fence=fence,
        expired_at=expired_at,
        seen_until=seen_until,
        closed="paused" if state is JobState.PAUSED and end is AttemptEnd.RELEASED else None,
        reason=reason,
        progress=progress,
        counters=counters,
        state=state,
        not_before=not_before,
        **updates,
    )
    more = dict(event_data or {})
    change = change.with_job(reason=job_reason).with_event(
        _END_EVENTS[end], now, reason=reason.model_dump(), machine_id=attempt.machine_id, not_before=not_before, **more
    )
    if exhausted:
        change = change.with_event(EventType.FAILED, now, **exhausted.model_dump())
    elif state is JobState.PAUSED:
        change = change.with_event(EventType.PAUSED, now)
    return change


def requeue_interrupted(
    job: Job,
    attempt: Attempt,
    reason: Reason,
    now: int,
    *,
    fence: Fence | None,
    progress: Progress | None,
    expired_at: int | None = None,
    seen_until: int | None = None,
) -> Transaction:
    """Count a lost machine or agent; repeated losses without a new checkpoint cause a backoff.

    The elastic job counts the fruitless interruptions of its seats, because its checkpoints are not theirs.
    """
    without = committed_step(job, attempt) is None and job.spec.seat is None
    fruitless = job.fruitless_interruptions + 1 if without else 0
    wait_s = 0
    if fruitless > retry_policy.FREE_INTERRUPTIONS:
        wait_s = retry_policy.backoff_s(job.spec.policy, fruitless - retry_policy.FREE_INTERRUPTIONS)
    return requeue(
        job.model_copy(update={"fruitless_interruptions": fruitless}),
        attempt,
        AttemptEnd.INTERRUPTED,
        reason,
        now,
        fence=fence,
        expired_at=expired_at,
        seen_until=seen_until,
        progress=progress,
        counters=add_counts(job.counters, interruptions=1),
        wait_s=wait_s,
        stale=True,
    )


def fail_permanently(
    job: Job,
    attempt: Attempt,
    reason: Reason,
    now: int,
    *,
    fence: Fence,
    progress: Progress | None,
    ended_by: EndedBy | None,
) -> Transaction:
    """Fail the attempt and the job at once, regardless of the remaining budget."""
    change = end_attempt(
        job,
        attempt,
        AttemptEnd.FAILED,
        now,
        fence=fence,
        reason=reason,
        progress=progress,
        state=JobState.FAILED,
        failed_at=now,
        not_before=None,
        pause_requested=False,
        ended_by=ended_by,
        ends=job.ends + 1,
    )
    reason_data, cause = reason.model_dump(), cause_data(ended_by)
    change = change.with_event(
        EventType.ATTEMPT_FAILED, now, reason=reason_data, machine_id=attempt.machine_id, not_before=None, **cause
    )
    return change.with_event(EventType.FAILED, now, **reason_data, **cause)


def cause_data(ended_by: EndedBy | None) -> dict[str, Any]:
    """Return the event data of the rule or command that ended a training."""
    return {} if ended_by is None else {"ended_by": ended_by.model_dump(exclude_defaults=True)}
