"""Transitions of the state machine of jobs and attempts.

Each function takes records and returns a transaction, or refuses. No function reads a clock, draws a random number or
calls a store.

    submit -> pending -claim-> running -complete-> complete
                 ^               |  |-fail (cap)-> failed
                 |--- released, interrupted, failed with budget left
    pause: pending -> paused; running -> (directive) -> released -> paused      cancel: any live state -> canceled
    resume: paused -> pending        retry: complete, failed, canceled -> pending (same id)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import (
    Artifact,
    AttemptEnd,
    FailureClass,
    JobCounters,
    JobState,
    Progress,
    Reason,
    ReasonCode,
)
from baton.contract.worker.control import Directive, EndedBy
from baton.contract.worker.lease_grace import LEASE_INTERVALS
from functions.domain.errors import Refusal
from functions.domain.jobs import retry as retry_policy
from functions.domain.jobs.attempt_end import (
    add_counts,
    cause_data,
    committed_step,
    cost_usd,
    end_attempt,
    end_job,
    fail_permanently,
    newest_lines,
    requeue,
    requeue_interrupted,
)
from functions.domain.jobs.lease_fence import Fence, describe_expiry
from functions.domain.jobs.transaction import (
    DirectLease,
    OpenLease,
    ReopenLease,
    Transaction,
    evaluate_soon,
    update_job,
    write_job,
)
from functions.domain.records import Attempt, CheckpointRecord, Job, Lease, RulesRecord, RuleStateRecord, Spec

if TYPE_CHECKING:
    # The function `fleet` settles seats and loads no call of a worker.
    from baton.contract.worker.calls import FailRequest, WorkQuery

MAX_SPEC_BYTES = 100_000
"""Limit of a spec. The job's item grows during the run (machines to avoid, progress, artifacts), and the limit of
DynamoDB for an item is 400 KB."""


def submit(
    *,
    job_id: str,
    tenant: str,
    spec: Spec,
    queue: str,
    shard: int,
    priority: int,
    now: int,
    idempotency_digest: str | None = None,
    rules: RulesRecord | None = None,
    watched: bool = False,
) -> Transaction:
    """Create a claimable job. `watched`: the control plane evaluates some of the job's rules."""
    spec_bytes = len(spec.model_dump_json().encode())
    if spec_bytes > MAX_SPEC_BYTES:
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"The job takes {spec_bytes} bytes to store; at most {MAX_SPEC_BYTES} are allowed.",
        )
    deadline_at = spec.policy.deadline_at
    if deadline_at is not None and deadline_at <= now:
        raise Refusal(
            ErrorCode.INVALID_VALUE,
            f"The deadline {deadline_at} has passed; it is {now} now.",
            field="policy.deadline_at",
        )
    job = Job(
        id=job_id,
        tenant=tenant,
        queue=queue,
        shard=shard,
        priority=priority,
        spec=spec,
        idempotency_digest=idempotency_digest,
        rules_revision=rules.revision if rules is not None else 0,
        watched=watched,
        waiting_since=now if watched else None,
        created_at=now,
        updated_at=now,
        rev=1,
    )
    change = write_job(job).with_event(EventType.SUBMITTED, now, queue=queue, priority=priority)
    if rules is not None:
        change = change.put(rules)
    return change.put(evaluate_soon(None, now)) if watched else change


def claim(job: Job, worker: WorkQuery, *, token_sha256: str | None, key_id: str | None, now: int) -> Transaction:
    """Give a ready job to a worker: raise the epoch and open a lease."""
    if not job.claimable:
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"Job {job.id} is {job.state}, not ready.")
    policy = job.spec.policy
    epoch = job.epoch + 1
    duration_s = LEASE_INTERVALS * policy.heartbeat_interval_s
    limits = [policy.deadline_at]
    if policy.max_runtime_s is not None:
        limits.append(now + max(policy.max_runtime_s - job.counters.runtime_s, 0))
    lease = Lease(
        job_id=job.id,
        tenant=job.tenant,
        epoch=epoch,
        token_sha256=token_sha256,
        machine_id=worker.machine_id,
        expires_at=now + duration_s,
        duration_s=duration_s,
        heartbeat_interval_s=policy.heartbeat_interval_s,
        stop_at=min((limit for limit in limits if limit is not None), default=None),
        rules_revision=job.rules_revision,
        commands_seq=job.commands_seq,
        watched=job.watched,
    )
    attempt = Attempt(
        epoch=epoch,
        machine_id=worker.machine_id,
        container_group_id=worker.container_group_id,
        provider=worker.provider,
        worker_id=worker.worker_id,
        gpu_model=worker.gpu_model,
        price_usd_per_hour=worker.price_usd_per_hour,
        key_id=key_id,
        started_at=now,
        resumed_step=job.checkpoint_step,
    )
    change = update_job(
        job,
        now,
        state=JobState.RUNNING,
        epoch=epoch,
        started_at=now if job.started_at is None else job.started_at,
        reason=None,
        stale=False,
        lapsed_step=None,
        decided=0,
        ended_by=None,
        counters=add_counts(job.counters, attempts=1),
    )
    change = change.put(attempt).also(OpenLease(lease=lease))
    return change.with_event(EventType.STARTED, now, machine_id=worker.machine_id, resumed_step=job.checkpoint_step)


def complete(
    job: Job,
    attempt: Attempt,
    fence: Fence,
    *,
    artifacts: list[Artifact],
    progress: Progress | None,
    now: int,
    ended_by: EndedBy | None = None,
) -> Transaction:
    """Complete a job whose declared artifacts are stored."""
    require_running(job)
    change = end_attempt(
        job,
        attempt,
        AttemptEnd.COMPLETE,
        now,
        fence=fence,
        progress=progress,
        state=JobState.COMPLETE,
        completed_at=now,
        artifacts=artifacts,
        pause_requested=False,
        ended_by=ended_by,
        ends=job.ends + (ended_by is not None),
    )
    return change.with_event(
        EventType.COMPLETED, now, artifacts=[one.path for one in artifacts], **cause_data(ended_by)
    )


def fail(
    job: Job, attempt: Attempt, fence: Fence, report: FailRequest, *, progress: Progress | None, now: int
) -> Transaction:
    """End the attempt after a failure: requeue the job after a backoff, or fail the job for good."""
    require_running(job)
    reason = Reason(code=report.failure_class.value, message=report.message)
    attempt = attempt.model_copy(
        update={
            "failure_class": report.failure_class,
            "exit_code": report.exit_code,
            "signal": report.signal,
            "log_tail": newest_lines(report.log_tail),
        }
    )
    if report.failure_class is FailureClass.STOPPED_BY_RULE:
        # A rule has ordered the end, therefore no failure is counted and no attempt follows.
        return fail_permanently(job, attempt, reason, now, fence=fence, progress=progress, ended_by=report.ended_by)
    now_avoided = retry_policy.avoided(job.avoid, attempt.machine_id, job.spec.policy, now)
    node_fault = report.failure_class.node_fault
    counters = add_counts(job.counters, **{"node_faults" if node_fault else "failures": 1})
    wait_s = retry_policy.backoff_s(job.spec.policy, counters.node_faults if node_fault else counters.failures)
    return requeue(
        job,
        attempt,
        AttemptEnd.FAILED,
        reason,
        now,
        fence=fence,
        progress=progress,
        counters=counters,
        # Another machine may try at once if the job avoids this machine.
        wait_s=0 if node_fault and attempt.machine_id in now_avoided else wait_s,
        event_data=cause_data(report.ended_by),
        avoid=now_avoided,
        ended_by=report.ended_by,
    )


def release(
    job: Job, attempt: Attempt, fence: Fence, *, reason: Reason, progress: Progress | None, now: int
) -> Transaction:
    """Return the job to the queue at once, or pause the job if a user has asked for a pause.

    The release of an agent that crashed counts as an interruption, because the job may be the cause of the crash.
    """
    from baton.contract.worker.calls import AGENT_CRASHED

    require_running(job)
    if reason.code == AGENT_CRASHED:
        return requeue_interrupted(job, attempt, reason, now, fence=fence, progress=progress)
    return requeue(
        job,
        attempt,
        AttemptEnd.RELEASED,
        reason,
        now,
        fence=fence,
        progress=progress,
        counters=add_counts(job.counters, releases=1),
        stale=True,
    )


def interrupt(job: Job, attempt: Attempt, lease: Lease, *, now: int) -> Transaction:
    """Interrupt an attempt whose lease expired; the job has not failed."""
    require_running(job)
    if lease.closed or lease.epoch != job.epoch or lease.expires_at > now:
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"The lease of job {job.id} has not run out.")
    last_seen_at = lease.expires_at - lease.duration_s
    reason = Reason(code=ReasonCode.LEASE_EXPIRED, message=describe_expiry(lease, now))
    return requeue_interrupted(
        job, attempt, reason, now, fence=None, expired_at=now, seen_until=last_seen_at, progress=lease.progress
    )


def cancel(
    job: Job, attempt: Attempt | None, *, message: str, now: int, code: ReasonCode = ReasonCode.CANCELED_BY_USER
) -> Transaction:
    """Cancel a job at once; the next heartbeat of a running worker learns of the cancellation."""
    if job.state is JobState.CANCELED:
        raise Refusal(ErrorCode.JOB_CANCELED, f"Job {job.id} is already canceled.")
    if job.state.terminal:
        raise Refusal(ErrorCode.JOB_FINISHED, f"Job {job.id} is {job.state}.")
    reason = Reason(code=code, message=message)
    updates: dict[str, Any] = {
        "state": JobState.CANCELED,
        "canceled_at": now,
        "not_before": None,
        "pause_requested": False,
    }
    change = end_job(job, attempt, AttemptEnd.CANCELED, now, reason=reason, **updates)
    return change.with_event(EventType.CANCELED, now, message=message)


def pause(job: Job, *, message: str, now: int, code: ReasonCode = ReasonCode.PAUSED_BY_USER) -> Transaction:
    """Pause a job. A running job first commits a checkpoint and is released; an elastic job waits for its seats."""
    reason = Reason(code=code, message=message)
    if job.state is JobState.PENDING:
        change = update_job(job, now, state=JobState.PAUSED, reason=reason, not_before=None)
        return change.with_event(EventType.PAUSED, now, message=message)
    if job.state is JobState.RUNNING and not job.pause_requested:
        change = update_job(job, now, pause_requested=True, reason=reason)
        change = change.also(*_direct(job, Directive.PAUSE, code))
        return change.with_event(EventType.PAUSE_REQUESTED, now, message=message)
    if job.state.terminal:
        raise Refusal(ErrorCode.JOB_FINISHED, f"Job {job.id} is {job.state}.")
    raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"Job {job.id} is already paused or pausing.")


def _direct(job: Job, directive: Directive, reason: str) -> tuple[DirectLease, ...]:
    """Return the write of a directive for the present attempt; empty for an elastic job, which has no lease."""
    if job.spec.nodes is not None:
        return ()
    return (DirectLease(job_id=job.id, epoch=job.epoch, directive=directive, reason=reason),)


def resume(job: Job, *, now: int) -> Transaction:
    """Make a paused job ready; withdraw a pause that is not complete."""
    if job.state is JobState.PAUSED:
        change = update_job(job, now, state=JobState.PENDING, reason=None, stale=job.epoch > 0)
    elif job.state is JobState.RUNNING and job.pause_requested:
        change = update_job(job, now, pause_requested=False, reason=None, ended_by=None)
        change = change.also(*_direct(job, Directive.CONTINUE, ""))
    elif job.state.terminal:
        raise Refusal(ErrorCode.JOB_FINISHED, f"Job {job.id} is {job.state}.")
    else:
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"Job {job.id} is {job.state}, not paused.")
    return change.with_event(EventType.RESUMED, now)


def retry(
    job: Job,
    *,
    chosen: CheckpointRecord | None,
    keep_checkpoint: bool,
    reset_counters: bool,
    now: int,
    rule_state: RuleStateRecord | None = None,
) -> Transaction:
    """Run an ended job again under the same id. `rule_state`: stored state of the rules of a watched job.

    With `keep_checkpoint` the job resumes from its newest checkpoint, otherwise from `chosen`, or from nothing.
    """
    if not job.state.terminal:
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"Job {job.id} is {job.state}; only an ended job can be retried.")
    deadline_at = job.spec.policy.deadline_at
    if deadline_at is not None and deadline_at <= now:
        raise Refusal(
            ErrorCode.ILLEGAL_TRANSITION,
            f"The deadline {deadline_at} of job {job.id} has passed; it is {now} now. Submit it anew with a later one.",
        )
    counters = JobCounters(attempts=job.counters.attempts) if reset_counters else job.counters
    spent = {"cost_usd": 0.0, "priced_s": 0} if reset_counters else {}
    current = job.checkpoint_step, job.checkpoint_epoch
    chosen_place = (chosen.step, chosen.epoch) if chosen else (None, None)
    resume_place = current if keep_checkpoint else chosen_place
    change = update_job(
        job,
        now,
        state=JobState.PENDING,
        counters=counters,
        branches=job.branches if resume_place == current else job.branches_from(chosen),
        first_step=job.first_step if resume_place == current or chosen is None else chosen.first_step,
        fruitless_interruptions=0,
        fruitless_failures=0,
        fruitless_node_faults=0,
        reason=None,
        not_before=None,
        avoid={} if reset_counters else job.avoid,
        artifacts=[],
        completed_at=None,
        failed_at=None,
        canceled_at=None,
        retention_at=None,
        pause_requested=False,
        leaving=False,
        commands_void=job.commands_seq,
        ended_by=None,
        checkpoint_step=resume_place[0],
        checkpoint_epoch=resume_place[1],
        generation=job.generation + (job.spec.nodes is not None),
        keeps_counters=not reset_counters,
        settled=False,
        **spent,
    )
    if job.watched:
        change = change.put(evaluate_soon(rule_state, now))
    exhausted = retry_policy.cap_reached(change.job)
    if exhausted:
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"A budget is used up ({exhausted.message}): reset the counters.")
    return change.with_event(EventType.RETRIED, now, from_step=change.job.checkpoint_step)


def readopt(job: Job, attempt: Attempt, lease: Lease, fence: Fence, *, now: int) -> Transaction:
    """Undo the revocation of `lease`: the attempt continues under its epoch, and no interruption is counted.

    Refuses unless the job still waits because of the revocation. A user may have retried or resumed the job since, and
    a retry chooses the checkpoint to resume from.
    """
    revoked = attempt.reason is not None and attempt.reason.code == ReasonCode.LEASE_EXPIRED
    untouched = job.state is JobState.PENDING and job.epoch == lease.epoch and job.reason == attempt.reason
    if not untouched or not revoked or not fence.recovers(lease):
        raise Refusal(ErrorCode.LEASE_LOST, f"Attempt {lease.epoch} of job {job.id} has ended.")
    # The revocation counted the time until the last accepted heartbeat.
    ran_s = max(lease.expires_at - lease.duration_s - attempt.started_at, 0)
    fruitless = job.fruitless_interruptions - (committed_step(job, attempt) is None)
    priced = attempt.price_usd_per_hour
    spent = {}
    if priced is not None:
        spent = {"cost_usd": job.cost_usd - cost_usd(ran_s, priced), "priced_s": job.priced_s - ran_s}
    change = update_job(
        job,
        now,
        state=JobState.RUNNING,
        reason=None,
        not_before=None,
        stale=False,
        counters=add_counts(job.counters, interruptions=-1, runtime_s=-ran_s),
        fruitless_interruptions=max(fruitless, 0),
        **spent,
    )
    continued = attempt.model_copy(update={"ended_at": None, "end": None, "reason": None})
    reopen = ReopenLease(
        fence=fence,
        duration_s=lease.duration_s,
        rules_revision=job.rules_revision,
        commands_seq=job.commands_seq,
        watched=job.watched,
    )
    return (
        change.put(continued).also(reopen).with_event(EventType.ATTEMPT_RECOVERED, now, machine_id=attempt.machine_id)
    )


def timer(job: Job, attempt: Attempt | None, *, now: int) -> Transaction | None:
    """Return the transition that is due at `now`, the end of a backoff or the deadline; None if nothing is due."""
    deadline_at = job.spec.policy.deadline_at
    if not job.state.terminal and deadline_at is not None and deadline_at <= now:
        return out_of_time(job, attempt, now=now)
    if job.state is JobState.PENDING and job.not_before is not None and job.not_before <= now:
        return update_job(job, now, not_before=None).with_event(EventType.BACKOFF_ENDED, now)
    return None


def out_of_time(job: Job, attempt: Attempt | None, *, now: int) -> Transaction:
    """Fail a job whose deadline has passed or whose runtime is used up; refuse any other job."""
    deadline_at, max_runtime_s = job.spec.policy.deadline_at, job.spec.policy.max_runtime_s
    running_s = now - attempt.started_at if job.state is JobState.RUNNING and attempt is not None else 0
    if job.state is JobState.CANCELED:
        raise Refusal(ErrorCode.JOB_CANCELED, f"Job {job.id} was canceled.")
    if job.state.terminal:
        raise Refusal(ErrorCode.JOB_FINISHED, f"Job {job.id} is {job.state}.")
    if deadline_at is not None and deadline_at <= now:
        reason = Reason(code=ReasonCode.DEADLINE, message=f"the deadline {deadline_at} has passed")
    elif max_runtime_s is not None and job.counters.runtime_s + running_s >= max_runtime_s:
        reason = Reason(code=ReasonCode.MAX_RUNTIME, message=f"ran for the {max_runtime_s} s that the policy allows")
    else:
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"Job {job.id} has time left.")
    updates: dict[str, Any] = {"state": JobState.FAILED, "failed_at": now, "not_before": None, "pause_requested": False}
    change = end_job(job, attempt, AttemptEnd.FAILED, now, reason=reason, **updates)
    return change.with_event(EventType.FAILED, now, **reason.model_dump())


def require_running(job: Job) -> None:
    """Refuse a job that is not running, with the reason."""
    if job.state is JobState.CANCELED:
        raise Refusal(ErrorCode.JOB_CANCELED, f"Job {job.id} was canceled.")
    if job.state.terminal:
        raise Refusal(ErrorCode.JOB_FINISHED, f"Job {job.id} is {job.state}.")
    if job.state is JobState.PENDING:
        # The sweeper may have revoked the lease of a live worker, whose next heartbeat then recovers the attempt.
        raise Refusal(ErrorCode.LEASE_EXPIRED, f"Job {job.id} is {job.state}; no attempt holds it.")
    if job.state is not JobState.RUNNING:
        raise Refusal(ErrorCode.LEASE_LOST, f"Job {job.id} is {job.state}; no attempt holds it.")
