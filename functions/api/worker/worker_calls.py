"""The worker's calls: claim, heartbeat, complete, fail, release."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from baton.contract.checkpoints.calls import CheckpointRef
from baton.contract.elastic.world import WorldSeat
from baton.contract.errors import ErrorCode
from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.job import FailureClass, JobState, Progress, Reason, ReasonCode
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET, ring_secret
from baton.contract.worker.calls import (
    AGENT_CRASHED,
    CompleteRequest,
    FailRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    ReleaseRequest,
    TransitionAnswer,
    WorkItem,
)
from baton.contract.worker.control import ControlReport, Directive
from functions.api.checkpoints.checkpoint_calls import find_sound_checkpoints, refer_to
from functions.api.checkpoints.retention_runner import RetentionRunner
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.jobs import legacy_api
from functions.api.jobs.legacy_api import InputListTooLarge, list_input_keys
from functions.api.jobs.views import answer_transition
from functions.api.objects.artifacts import verify_artifacts, verify_original_model
from functions.api.objects.shared_outputs import publish
from functions.api.operations.sweeper import end_overdue_job
from functions.api.rules.rule_evaluation_runs import evaluate_on_heartbeat, evaluate_on_transition
from functions.api.worker.control_reports import (
    attribute_end,
    end_as_bearer,
    keep_last_decisions,
    persist_report,
    read_control,
    read_updates,
    release_by_rule,
)
from functions.api.worker.job_claim import ClaimedJob, claim_next, peek_next
from functions.api.worker.lease_guard import apply_as_bearer, renew_lease
from functions.api.worlds.seat_settlement import settle, settle_claim
from functions.domain.access.api_keys import token_digest
from functions.domain.checkpoints.object_keys import job_prefix
from functions.domain.errors import FenceBroken, Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.lease_fence import FIRST_PROGRESS_FACTOR, Fence, directive_for, fence_of
from functions.domain.records import Claimant, Job, Lease

logger = logging.getLogger("baton.work")

RESUME_CHOICES = 10
"""Committed checkpoints in the answer to a claim: the newest, and older checkpoints as fallbacks."""


def get_work(context: Context, call: ApiCall) -> list[WorkItem] | list[dict[str, Any]]:
    """Claim a job; answer with a list of one job, or an empty list without a suitable job."""
    _require_queue(call)
    token = context.random.token() if call.lease_aware else None
    claimed = claim_next(
        context.jobs,
        call.query,
        tenant=call.tenant,
        key_id=call.principal.key_id,
        token_sha256=token_digest(token) if token else None,
        tags=call.principal.tags,
        ring_token_sha256=token_digest(ring_secret(token)) if token else None,
        shards=context.settings.ready_shards,
        now=call.now,
        random=context.random,
        window=context.window,
        claimant=None if token else _identify_claimant(context, call),
    )
    if claimed is None:
        return []
    try:
        if evaluate_on_transition(context.jobs, context.leases, claimed.job, call.now).state is not JobState.RUNNING:
            return []
        seat: WorldSeat | None = None
        owner = claimed.job
        if claimed.job.spec.seat is not None:
            settled = settle_claim(context.jobs, claimed.job, claimed.job.spec.seat, call.now)
            if settled is None:
                return []
            seat, owner = settled
        if token is None:
            return [_build_original_work(context, call, claimed.job, claimed.lease)]
        return [_build_work_item(context, call, claimed, token, owner=owner, seat=seat)]
    except InputListTooLarge as reason:
        _fail_undeliverable(context, call, claimed, str(reason))
        return []
    except StorageUnavailable:
        _undo_claim(context, call, claimed)
        raise


def peek_work(context: Context, call: ApiCall) -> list[dict[str, Any]]:
    """Show the job that the next claim might take, without claiming the job."""
    _require_queue(call)
    job = peek_next(
        context.jobs,
        call.query,
        tenant=call.tenant,
        tags=call.principal.tags,
        shards=context.settings.ready_shards,
        now=call.now,
        original=not call.lease_aware,
    )
    if job is None:
        return []
    if call.lease_aware:
        return [{"id": job.id, "status": job.state.value, "queue": job.queue, "priority": job.priority}]
    try:
        return [_build_original_work(context, call, job, None)]
    except InputListTooLarge:
        return []  # a claim would not deliver the job either


def _require_queue(call: ApiCall) -> None:
    """Refuse a claim from a queue that the caller's key does not name."""
    queues = call.principal.queues
    if queues is not None and call.query.queue not in queues:
        detail = f"The key of a rented machine claims from the queues {', '.join(queues)} only."
        raise Refusal(ErrorCode.WRONG_SCOPE, detail, field="queue")


def heartbeat(context: Context, call: ApiCall) -> HeartbeatAnswer:
    """Renew the lease, record progress and answer with a directive, in one write."""
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
        persist_report(context, call, fence, lease, body.control)
    except FenceBroken as broken:
        keep_last_decisions(context, fence, body.control, call.now)
        return _answer_refused_heartbeat(call, fence, broken.lease)
    if lease.stop_at is not None and call.now >= lease.stop_at:
        reason = end_overdue_job(context.jobs, lease.job_id, lease.epoch, call.now)
        return _build_heartbeat_answer(lease, Directive.CANCEL, reason, call.now)
    if lease.watched:
        lease = evaluate_on_heartbeat(context.jobs, context.leases, lease, call.now)
        if lease.closed or lease.epoch != (fence.epoch or lease.epoch):
            return _answer_refused_heartbeat(call, fence, lease)
    if lease.token_sha256 is None and lease.directive is Directive.PAUSE:
        _release_for_pause(context, call, fence, lease)
        raise _build_not_running(fence)
    answer = _build_heartbeat_answer(lease, *directive_for(lease, call.now), call.now)
    news = read_updates(context, lease, body.control, call.now)
    return answer.model_copy(update=news) if news else answer


def complete(context: Context, call: ApiCall) -> TransitionAnswer:
    """Complete a job; refused until every declared artifact is verified in storage."""
    body: CompleteRequest = call.body
    fence = call.fence(body.job_id, body.machine_id, key=body.key)
    job, lease = _read_lease_to_end(context, call, fence, body.control, repeated=("complete",))
    if lease is None:
        publish(context, call, job)
        _run_retention_if_ended(context, call, job)
        return answer_transition(settle(context.jobs, job, call.now))
    if lease.token_sha256 is None:
        artifacts = verify_original_model(context, call, job, body)
    else:
        artifacts = verify_artifacts(context, call, job, body.artifacts)
    progress = _build_final_progress(job, lease, body, call.now)
    ended_by = attribute_end(context, job, body.ended_by)
    ended = end_as_bearer(
        context,
        call,
        fence,
        body.control,
        lambda job, attempt: rules.complete(
            job, attempt, fence, artifacts=artifacts, progress=progress, now=call.now, ended_by=ended_by
        ),
    )
    publish(context, call, ended)
    _run_retention_if_ended(context, call, ended)
    return answer_transition(settle(context.jobs, ended, call.now))


def fail(context: Context, call: ApiCall) -> TransitionAnswer:
    """End an attempt as failed; the job waits for another attempt, or fails."""
    body: FailRequest = call.body
    fence = call.fence(body.job_id, body.machine_id, key=body.key)
    job, lease = _read_lease_to_end(context, call, fence, body.control, repeated=("failed",))
    if lease is None:
        _run_retention_if_ended(context, call, job)
        return answer_transition(settle(context.jobs, job, call.now))
    progress = _merge_last_progress(job, lease, body.goodput, call.now)
    ended = end_as_bearer(
        context,
        call,
        fence,
        body.control,
        lambda job, attempt: rules.fail(job, attempt, fence, body, progress=progress, now=call.now),
    )
    _run_retention_if_ended(context, call, ended)
    return _follow_and_answer(context, call, ended)


def _follow_and_answer(context: Context, call: ApiCall, job: Job) -> TransitionAnswer:
    """Evaluate the job's rules after the end of an attempt, settle the elastic job of a seat, and answer."""
    job = evaluate_on_transition(context.jobs, context.leases, job, call.now)
    return answer_transition(settle(context.jobs, job, call.now))


def _run_retention_if_ended(context: Context, call: ApiCall, job: Job) -> None:
    """Run retention for an ended job. A waiting job keeps the packs of unfinished uploads for its next commit.

    A seat has no checkpoints.
    """
    if job.state.terminal and job.spec.seat is None:
        RetentionRunner(context, job, call.now).run_at_job_end()


def release(context: Context, call: ApiCall) -> TransitionAnswer:
    """Return a job to its queue, because the worker stops."""
    body: ReleaseRequest = call.body
    fence = call.fence(body.job_id, body.machine_id)
    crashed = body.reason == AGENT_CRASHED and body.by_rule is None
    repeated = ("interrupted",) if crashed else ("released", "paused")
    job, lease = _read_lease_to_end(context, call, fence, body.control, repeated=repeated)
    if lease is None:
        return answer_transition(settle(context.jobs, job, call.now))
    reason = Reason(code=body.reason, message=body.message)
    progress = _merge_last_progress(job, lease, body.goodput, call.now)
    if body.by_rule is not None:
        return _follow_and_answer(context, call, release_by_rule(context, call, fence, body, progress))
    ended = end_as_bearer(
        context,
        call,
        fence,
        body.control,
        lambda job, attempt: rules.release(job, attempt, fence, reason=reason, progress=progress, now=call.now),
    )
    return _follow_and_answer(context, call, ended)


def _read_lease_to_end(
    context: Context, call: ApiCall, fence: Fence, control: ControlReport | None, *, repeated: tuple[str, ...]
) -> tuple[Job, Lease | None]:
    """Return the job and the live lease; no lease if this bearer has already ended the attempt so (a lost answer)."""
    job = require_job(context, call, fence.job_id)
    lease = context.leases.get(fence.job_id)
    if lease is not None and fence.admits(lease):
        return job, lease
    if lease is not None and lease.closed in repeated and fence.bears(lease):
        return job, None
    keep_last_decisions(context, fence, control, call.now)
    if job.state is not JobState.RUNNING:
        rules.require_running(job)
    raise fence.refusal(lease)


def _merge_last_progress(job: Job, lease: Lease, goodput: Goodput | None, now: int) -> Progress | None:
    """Return the attempt's last progress with the goodput until its end.

    An attempt that ends before its first report takes the job's progress; None if no attempt ever reported.
    """
    last = lease.progress
    if last is None and job.progress is not None:
        last = Progress(step=job.progress.step, total_steps=job.progress.total_steps, reported_at=now)
    return last.model_copy(update={"goodput": goodput}) if last is not None and goodput is not None else lease.progress


def _build_final_progress(job: Job, lease: Lease, body: CompleteRequest, now: int) -> Progress | None:
    last = _merge_last_progress(job, lease, body.goodput, now)
    if body.step is None:
        return last
    return Progress(
        step=body.step,
        total_steps=(last.total_steps if last else None) or body.step,
        metrics=body.metrics or {},
        reported_at=now,
        goodput=body.goodput or (last.goodput if last else None),
    )


def _build_heartbeat_answer(lease: Lease, directive: Directive, reason: str, now: int) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        directive=directive,
        reason=reason,
        epoch=lease.epoch,
        lease_expires_at=lease.expires_at,
        lease_duration_s=lease.duration_s,
        heartbeat_interval_s=lease.heartbeat_interval_s,
        server_time=now,
    )


def _answer_refused_heartbeat(call: ApiCall, fence: Fence, lease: Lease | None) -> HeartbeatAnswer:
    """Answer a refused heartbeat: a directive after a user's command, a refusal otherwise."""
    directive = fence.ended_directive(lease)
    if lease is not None and directive is not None:
        return _build_heartbeat_answer(lease, directive, lease.directive_reason or lease.closed, call.now)
    if lease is not None and lease.tenant != call.tenant:
        lease = None
    if fence.token_sha256 is None:
        raise _build_not_running(fence)
    if lease is None:
        raise Refusal(ErrorCode.JOB_NOT_FOUND, f"No job {fence.job_id}.", field="id")
    raise fence.refusal(lease)


def _build_not_running(fence: Fence) -> Refusal:
    """Refuse with 400, which the original's worker obeys; after any other refusal this worker repeats the call."""
    return Refusal(ErrorCode.JOB_NOT_RUNNING, f"Job {fence.job_id} is not running for this worker.")


def _release_for_pause(context: Context, call: ApiCall, fence: Fence, lease: Lease) -> None:
    """Pause the job of an original client, which knows no directives: release the job for the client."""
    reason = Reason(code=lease.directive_reason or ReasonCode.PAUSED_BY_USER)
    apply_as_bearer(
        context,
        call,
        fence,
        lambda job, attempt: rules.release(job, attempt, fence, reason=reason, progress=lease.progress, now=call.now),
    )


def _undo_claim(context: Context, call: ApiCall, claimed: ClaimedJob) -> None:
    """Undo a claim without an answer, because the job would otherwise wait and count an interruption."""
    fence = fence_of(claimed.lease, call.now)
    reason = Reason(code=ReasonCode.NOT_HANDED_OUT, message="the storage failed while the claim was answered")
    try:
        context.jobs.apply(
            rules.release(claimed.job, claimed.attempt, fence, reason=reason, progress=None, now=call.now)
        )
    except (StorageUnavailable, WriteConflict, FenceBroken):
        logger.warning("a claim without an answer is left to the sweeper", extra={"job_id": fence.job_id})


def _fail_undeliverable(context: Context, call: ApiCall, claimed: ClaimedJob, message: str) -> None:
    """Fail an attempt that no answer can deliver to this worker; another worker may run the job."""
    fence = fence_of(claimed.lease, call.now)
    report = FailRequest(job_id=fence.job_id, failure_class=FailureClass.BAD_INPUT, message=message)
    try:
        change = rules.fail(claimed.job, claimed.attempt, fence, report, progress=None, now=call.now)
        context.jobs.apply(change)
    except (WriteConflict, FenceBroken):
        return  # a user's command has already ended the attempt
    _follow_and_answer(context, call, change.job)


def _identify_claimant(context: Context, call: ApiCall) -> Claimant:
    """Return the identity that an original client's later calls must match."""
    first_s = FIRST_PROGRESS_FACTOR * context.settings.original_progress_s
    return Claimant(key_id=call.principal.key_id, source_address=call.source_address, progress_by=call.now + first_s)


def _build_work_item(
    context: Context, call: ApiCall, claimed: ClaimedJob, token: str, *, owner: Job, seat: WorldSeat | None
) -> WorkItem:
    """Return the claimed job for the worker. `owner`: the job to which its checkpoints belong."""
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
        checkpoint_prefix=job_prefix(owner.id),
        resume=_list_resume_choices(context, call, owner),
        last_step=owner.progress.step if owner.progress else None,
        no_progress_timeout_s=policy.no_progress_timeout_s or None,
        restart_on_stall=policy.no_progress_timeout_s is None and call.principal.machine is not None,
        stop_grace_s=policy.stop_grace_s,
        checkpoint_every=policy.checkpoint_every,
        runtime_s=job.counters.runtime_s,
        interruptions=job.counters.interruptions,
        control=read_control(context, owner, call.now),
        quarantines=True,
        rings=job.spec.rings,
        world=seat,
    )


def _list_resume_choices(context: Context, call: ApiCall, job: Job) -> list[CheckpointRef]:
    """List sound checkpoints with URLs, from the current checkpoint downwards."""
    return [refer_to(context, call, record) for record in islice(find_sound_checkpoints(context, job), RESUME_CHOICES)]


def _build_original_work(context: Context, call: ApiCall, job: Job, lease: Lease | None) -> dict[str, Any]:
    """Return the answer of `GET /work` for an original client. Raises InputListTooLarge."""
    zips = (record.legacy_key for record in find_sound_checkpoints(context, job) if record.legacy_key)
    return legacy_api.build_work_item(job, lease, list_input_keys(context, call, job), next(zips, None))
