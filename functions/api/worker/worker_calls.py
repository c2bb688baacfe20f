"""The worker's calls: claim, heartbeat, complete, fail, release."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from baton.contract.checkpoints import CheckpointRef
from baton.contract.errors import ErrorCode
from baton.contract.goodput import Goodput
from baton.contract.jobs import FailureClass, JobState, Progress, Reason, ReasonCode
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET, ring_secret
from baton.contract.work import (
    AGENT_CRASHED,
    CompleteRequest,
    Directive,
    FailRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    ReleaseRequest,
    TransitionAnswer,
    WorkItem,
)
from functions.api.checkpoints.checkpoint_calls import sound_checkpoints
from functions.api.checkpoints.retention import Retention
from functions.api.http.context import Call, Context, job_of
from functions.api.jobs import legacy_api
from functions.api.jobs.legacy_api import TooManyNames, input_keys
from functions.api.jobs.views import transition_answer
from functions.api.objects.artifacts import verified_artifacts, verified_original_model
from functions.api.objects.shared_outputs import offer
from functions.api.operations.sweeper import end_overdue
from functions.api.rules.rule_evaluation_runs import look_at_heartbeat, look_at_move
from functions.api.worker.control_reports import by_whom, control_of, end_as_bearer, leave_by_rule, news_for, write_down
from functions.api.worker.job_claim import Claimed, claim_next, peek_next
from functions.api.worker.lease_guard import apply_as_bearer, renew_lease
from functions.domain.access.api_keys import token_digest
from functions.domain.checkpoints.object_keys import job_prefix
from functions.domain.errors import FenceBroken, Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.leases import FIRST_PROGRESS_FACTOR, Fence, directive_for, fence_of
from functions.domain.records import Claimant, Job, Lease

logger = logging.getLogger("baton.work")

RESUME_CHOICES = 10
"""How many committed checkpoints a claim names: the newest and what to fall back on."""


def get_work(context: Context, call: Call) -> list[WorkItem] | list[dict[str, Any]]:
    """Claim a job: a list of one, or of none when there is nothing for this worker."""
    token = context.random.token() if call.lease_aware else None
    claimed = claim_next(
        context.jobs,
        call.query,
        tenant=call.tenant,
        key_id=call.principal.key_id,
        token_sha256=token_digest(token) if token else None,
        ring_token_sha256=token_digest(ring_secret(token)) if token else None,
        shards=context.settings.ready_shards,
        now=call.now,
        random=context.random,
        window=context.window,
        claimant=None if token else _claimant(context, call),
    )
    if claimed is None:
        return []
    try:
        if look_at_move(context.jobs, context.leases, claimed.job, call.now).state is not JobState.RUNNING:
            return []
        if token is None:
            return [_original_work(context, call, claimed.job, claimed.lease)]
        return [_work_item(context, call, claimed, token)]
    except TooManyNames as reason:
        _fail_unheard(context, call, claimed, str(reason))
        return []
    except StorageUnavailable:
        _hand_back(context, call, claimed)
        raise


def peek_work(context: Context, call: Call) -> list[dict[str, Any]]:
    """What the next claim would get, without claiming it."""
    job = peek_next(
        context.jobs,
        call.query,
        tenant=call.tenant,
        shards=context.settings.ready_shards,
        now=call.now,
        original=not call.lease_aware,
    )
    if job is None:
        return []
    if call.lease_aware:
        return [{"id": job.id, "status": job.state.value, "queue": job.queue, "priority": job.priority}]
    try:
        return [_original_work(context, call, job, None)]
    except TooManyNames:
        return []  # neither would the claim give it


def heartbeat(context: Context, call: Call) -> HeartbeatAnswer:
    """Prolong the lease, report progress, hear what to do: one write."""
    body: HeartbeatRequest = call.body or HeartbeatRequest()
    fence = call.fence(call.path["id"], body.machine_id, heartbeat=True)
    progress = None
    if body.step is not None:
        progress = Progress(
            step=body.step,
            total_steps=body.total_steps,
            metrics=body.metrics or {},
            nonfinite=(body.control.nonfinite if body.control else None) or {},
            reported_at=call.now,
            goodput=body.goodput,
        )
    try:
        lease = renew_lease(context, fence, progress, body.phase)
        write_down(context, call, fence, lease, body.control)
    except FenceBroken as broken:
        return _refused_heartbeat(call, fence, broken.lease)
    if lease.stop_at is not None and call.now >= lease.stop_at:
        reason = end_overdue(context.jobs, lease.job_id, lease.epoch, call.now)
        return _heartbeat_answer(lease, Directive.CANCEL, reason, call.now)
    if lease.watched:
        lease = look_at_heartbeat(context.jobs, context.leases, lease, call.now)
        if lease.closed or lease.epoch != (fence.epoch or lease.epoch):
            return _refused_heartbeat(call, fence, lease)
    if lease.token_sha256 is None and lease.directive is Directive.PAUSE:
        _release_for_pause(context, call, fence, lease)
        raise _not_running(fence)
    answer = _heartbeat_answer(lease, *directive_for(lease, call.now), call.now)
    news = news_for(context, lease, body.control, call.now)
    return answer.model_copy(update=news) if news else answer


def complete(context: Context, call: Call) -> TransitionAnswer:
    """Finish a job: refused until every declared artifact is seen in storage."""
    body: CompleteRequest = call.body
    fence = call.fence(body.job_id, body.machine_id, key=body.key)
    job, lease = _held(context, call, fence, repeated=("complete",))
    if lease is None:
        offer(context, call, job)
        Retention(context, job, call.now).run_at_end()
        return transition_answer(job)
    if lease.token_sha256 is None:
        artifacts = verified_original_model(context, call, job, body)
    else:
        artifacts = verified_artifacts(context, call, job, body.artifacts)
    progress = _final_progress(job, lease, body, call.now)
    ended_by = by_whom(context, job, body.ended_by)
    ended = end_as_bearer(
        context,
        call,
        fence,
        body.control,
        lambda job, attempt: rules.complete(
            job, attempt, fence, artifacts=artifacts, progress=progress, now=call.now, ended_by=ended_by
        ),
    )
    offer(context, call, ended)
    Retention(context, ended, call.now).run_at_end()
    return transition_answer(ended)


def fail(context: Context, call: Call) -> TransitionAnswer:
    """Give a job up, saying why: it waits and is handed out again, or has failed for good."""
    body: FailRequest = call.body
    fence = call.fence(body.job_id, body.machine_id, key=body.key)
    job, lease = _held(context, call, fence, repeated=("failed",))
    if lease is None:
        _let_go_if_ended(context, call, job)
        return transition_answer(job)
    progress = _last_progress(job, lease, body.goodput, call.now)
    ended = end_as_bearer(
        context,
        call,
        fence,
        body.control,
        lambda job, attempt: rules.fail(job, attempt, fence, body, progress=progress, now=call.now),
    )
    _let_go_if_ended(context, call, ended)
    return _moved(context, call, ended)


def _moved(context: Context, call: Call, job: Job) -> TransitionAnswer:
    return transition_answer(look_at_move(context.jobs, context.leases, job, call.now))


def _let_go_if_ended(context: Context, call: Call, job: Job) -> None:
    """A job that waits for another attempt keeps what an unfinished upload left: its next commit looks at that."""
    if job.state.terminal:
        Retention(context, job, call.now).run_at_end()


def release(context: Context, call: Call) -> TransitionAnswer:
    """Hand a job back now, because this worker is going away."""
    body: ReleaseRequest = call.body
    fence = call.fence(body.job_id, body.machine_id)
    crashed = body.reason == AGENT_CRASHED and body.by_rule is None
    repeated = ("interrupted",) if crashed else ("released", "paused")
    job, lease = _held(context, call, fence, repeated=repeated)
    if lease is None:
        return transition_answer(job)
    reason = Reason(code=body.reason, message=body.message)
    progress = _last_progress(job, lease, body.goodput, call.now)
    if body.by_rule is not None:
        return _moved(context, call, leave_by_rule(context, call, fence, body, progress))
    ended = end_as_bearer(
        context,
        call,
        fence,
        body.control,
        lambda job, attempt: rules.release(job, attempt, fence, reason=reason, progress=progress, now=call.now),
    )
    return _moved(context, call, ended)


def _held(context: Context, call: Call, fence: Fence, *, repeated: tuple[str, ...]) -> tuple[Job, Lease | None]:
    """The job and the live lease; no lease if this very bearer already ended it that way (a lost answer)."""
    job = job_of(context, call, fence.job_id)
    lease = context.leases.get(fence.job_id)
    if lease is not None and fence.admits(lease):
        return job, lease
    if lease is not None and lease.closed in repeated and fence.bears(lease):
        return job, None
    if job.state is not JobState.RUNNING:
        rules.require_running(job)
    raise fence.refusal(lease)


def _last_progress(job: Job, lease: Lease, goodput: Goodput | None, now: int) -> Progress | None:
    """What the attempt reported last, with where its time went until its end.

    One that ended before its first report is as far as its job was: nowhere, if nothing was ever reported.
    """
    last = lease.progress
    if last is None and job.progress is not None:
        last = Progress(step=job.progress.step, total_steps=job.progress.total_steps, reported_at=now)
    return last.model_copy(update={"goodput": goodput}) if last is not None and goodput is not None else lease.progress


def _final_progress(job: Job, lease: Lease, body: CompleteRequest, now: int) -> Progress | None:
    last = _last_progress(job, lease, body.goodput, now)
    if body.step is None:
        return last
    return Progress(
        step=body.step,
        total_steps=(last.total_steps if last else None) or body.step,
        metrics=body.metrics or {},
        reported_at=now,
        goodput=body.goodput or (last.goodput if last else None),
    )


def _heartbeat_answer(lease: Lease, directive: Directive, reason: str, now: int) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        directive=directive,
        reason=reason,
        epoch=lease.epoch,
        lease_expires_at=lease.expires_at,
        lease_duration_s=lease.duration_s,
        heartbeat_interval_s=lease.heartbeat_interval_s,
        server_time=now,
    )


def _refused_heartbeat(call: Call, fence: Fence, lease: Lease | None) -> HeartbeatAnswer:
    """A user's command reaches the bearer as a directive; everything else is a refusal."""
    directive = fence.ended_directive(lease)
    if lease is not None and directive is not None:
        return _heartbeat_answer(lease, directive, lease.directive_reason or lease.closed, call.now)
    if lease is not None and lease.tenant != call.tenant:
        lease = None
    if fence.token_sha256 is None:
        raise _not_running(fence)
    if lease is None:
        raise Refusal(ErrorCode.JOB_NOT_FOUND, f"No job {fence.job_id}.", field="id")
    raise fence.refusal(lease)


def _not_running(fence: Fence) -> Refusal:
    """Refuse with 400, which the original's worker obeys; it repeats the call at once after any other refusal."""
    return Refusal(ErrorCode.JOB_NOT_RUNNING, f"Job {fence.job_id} is not running for this worker.")


def _release_for_pause(context: Context, call: Call, fence: Fence, lease: Lease) -> None:
    """Pause under a client of the original: it knows no directives, so the job is taken from it."""
    reason = Reason(code=lease.directive_reason or ReasonCode.PAUSED_BY_USER)
    apply_as_bearer(
        context,
        call,
        fence,
        lambda job, attempt: rules.release(job, attempt, fence, reason=reason, progress=lease.progress, now=call.now),
    )


def _hand_back(context: Context, call: Call, claimed: Claimed) -> None:
    """Undo a claim whose answer cannot be given: nobody would train, and a lost machine would be counted."""
    fence = fence_of(claimed.lease, call.now)
    reason = Reason(code=ReasonCode.NOT_HANDED_OUT, message="the storage failed while the claim was answered")
    try:
        context.jobs.apply(
            rules.release(claimed.job, claimed.attempt, fence, reason=reason, progress=None, now=call.now)
        )
    except (StorageUnavailable, WriteConflict, FenceBroken):
        logger.warning("a claim without an answer is left to the sweeper", extra={"job_id": fence.job_id})


def _fail_unheard(context: Context, call: Call, claimed: Claimed, message: str) -> None:
    """End an attempt that this worker cannot be given; another one may be able to."""
    fence = fence_of(claimed.lease, call.now)
    report = FailRequest(job_id=fence.job_id, failure_class=FailureClass.BAD_INPUT, message=message)
    try:
        change = rules.fail(claimed.job, claimed.attempt, fence, report, progress=None, now=call.now)
        context.jobs.apply(change)
    except (WriteConflict, FenceBroken):
        return  # somebody has ended the attempt already: a user's command
    _moved(context, call, change.job)


def _claimant(context: Context, call: Call) -> Claimant:
    """Return what an original client's later calls are compared with."""
    first_s = FIRST_PROGRESS_FACTOR * context.settings.original_progress_s
    return Claimant(key_id=call.principal.key_id, source_address=call.source_address, progress_by=call.now + first_s)


def _work_item(context: Context, call: Call, claimed: Claimed, token: str) -> WorkItem:
    job, lease = claimed.job, claimed.lease
    policy = job.spec.policy
    return WorkItem(
        id=job.id,
        epoch=job.epoch,
        lease_token=token,
        lease_duration_s=lease.duration_s,
        lease_expires_at=lease.expires_at,
        heartbeat_interval_s=lease.heartbeat_interval_s,
        server_time=call.now,
        recipe=job.spec.recipe,
        command=job.spec.command,
        plan=job.spec.plan,
        parameters=job.spec.parameters,
        environment=job.spec.environment,
        inputs=job.spec.inputs,
        outputs=job.spec.outputs,
        data_bucket=DATA_BUCKET,
        checkpoint_bucket=CHECKPOINTS_BUCKET,
        checkpoint_prefix=job_prefix(job.id),
        resume=_resume_choices(context, call, job),
        last_step=job.progress.step if job.progress else None,
        no_progress_timeout_s=policy.no_progress_timeout_s,
        stop_grace_s=policy.stop_grace_s,
        checkpoint_every=policy.checkpoint_every,
        runtime_s=job.counters.runtime_s,
        interruptions=job.counters.interruptions,
        control=control_of(context, job, call.now),
        quarantines=True,
        rings=job.spec.rings,
    )


def _resume_choices(context: Context, call: Call, job: Job) -> list[CheckpointRef]:
    """Sound checkpoints from the current one downwards."""
    return [
        CheckpointRef(
            step=record.step,
            epoch=record.epoch,
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
        for record in islice(sound_checkpoints(context, job), RESUME_CHOICES)
    ]


def _original_work(context: Context, call: Call, job: Job, lease: Lease | None) -> dict[str, Any]:
    """Raises TooManyNames."""
    zips = (record.legacy_key for record in sound_checkpoints(context, job) if record.legacy_key)
    return legacy_api.work_item(job, lease, input_keys(context, call, job), next(zips, None))
