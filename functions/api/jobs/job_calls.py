"""The submitter's calls for jobs: submit, list, get, stop, pause, resume, retry."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from baton.contract.base import Cursor, PageLimit, QueueName, WireModel
from baton.contract.checkpoints.calls import CheckpointPage
from baton.contract.elastic.nodes import MAX_NODES
from baton.contract.errors import ErrorCode
from baton.contract.jobs.dreambooth import DreamboothSubmit, OriginalEvent, OriginalJob
from baton.contract.jobs.history import AttemptPage, AttemptView, EventPage, EventView
from baton.contract.jobs.job import (
    BatchSubmit,
    JobChecked,
    JobPage,
    JobState,
    JobSubmit,
    JobView,
    RetryRequest,
    StopRequest,
)
from baton.contract.jobs.rent import fleet_of
from baton.contract.names import RENT_FLEET_PATTERN, Scope
from baton.contract.worker.calls import TransitionAnswer
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.http.paging import MAX_ANSWER_BYTES, count_answer_bytes, read_fitting_page
from functions.api.jobs import legacy_api, renting
from functions.api.jobs.recipes import RecipeResolver
from functions.api.jobs.views import (
    answer_transition,
    view_attempt,
    view_checkpoint,
    view_event,
    view_job,
    view_original_event,
    view_original_job,
)
from functions.api.rules.rule_calls import (
    has_control_plane_rules,
    list_warnings,
    require_checkable,
    require_sound_rules,
)
from functions.api.rules.rule_evaluation_runs import evaluate_on_transition
from functions.api.worker.lease_guard import WRITE_TRIES, apply_decision
from functions.api.worlds.seat_attempts import read_seat_attempts
from functions.api.worlds.seat_settlement import settle, with_newest_progress
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.attempt_end import newest_progress
from functions.domain.jobs.transaction import Transaction
from functions.domain.ports import ResultPage
from functions.domain.records import Attempt, CheckpointRecord, Event, Job, Lease, RulesRecord, RuleStateRecord, Spec
from functions.domain.rules.elastic_rules import require_for_nodes
from functions.domain.worlds.seat_ids import seat_id
from functions.domain.worlds.seats import with_seats

_IDEMPOTENCY_NAMESPACE = uuid.UUID("6ba7b812-9dad-11d1-80b4-00c04fd430c8")
_BARE_LIST_LIMIT = 1000
_PAGE_LIMIT = 100
COUNTED_UP_TO = 100
"""Most jobs of one state that a page counts: 2 read units of the index."""
_SEATS_PER_BATCH = 4 * MAX_NODES
"""Limit of the nodes of all jobs of a batch, each of which is stored as a job."""
_RETENTION_ENDS_WITHIN_S = 60
"""A retention that a commit began ends within this time, because no call lasts longer."""


class JobsQuery(WireModel):
    """Query of `GET /jobs`. Example: `?status=running&queue=default&order=desc&limit=100`"""

    status: JobState | None = None
    queue: QueueName | None = None
    order: Literal["asc", "desc"] = "asc"
    limit: PageLimit | None = None
    cursor: Cursor | None = None
    counts: bool = False
    """Count all jobs of the tenant by state, too; a bare list has no counts."""


class PageQuery(WireModel):
    """Query of paged lists. Example: `?limit=100`"""

    limit: PageLimit | None = None
    cursor: Cursor | None = None


def submit(context: Context, call: ApiCall) -> JobView | OriginalJob:
    """Submit a job; a repeat with the same Idempotency-Key answers with the same job."""
    key = call.headers.get("idempotency-key")
    job = _store(context, call, _plan_one(context, call, call.body, key))
    return view_original_job(job) if call.original else view_job(job)


def check(context: Context, call: ApiCall) -> JobChecked:
    """Check a job as a submission does, and store nothing."""
    body: JobSubmit = call.body
    spec = _plan_one(context, call, body, None).job.spec
    warnings = list_warnings(body.rules or "", body.policy.max_silence_s)
    return JobChecked(requirements=spec.requirements, outputs=spec.outputs, warnings=warnings)


def submit_batch(context: Context, call: ApiCall) -> list[JobView]:
    """Submit up to 1,000 jobs: check all, then store each; a repeat with the same Idempotency-Key is idempotent."""
    body: BatchSubmit = call.body
    key = call.headers.get("idempotency-key")
    specs = []
    require_checkable(job.rules for job in body.jobs)
    resolver = RecipeResolver(context, call)
    seats = 0
    for index, job in enumerate(body.jobs):
        with _prefix_fields(f"jobs.{index}"):
            specs.append(resolver.build_spec(job))
            _require_rules(job)
        seats += job.nodes.max if job.nodes is not None else 0
    if seats > _SEATS_PER_BATCH:
        detail = f"The jobs have {seats} nodes; at most {_SEATS_PER_BATCH} are allowed in one batch."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="jobs", remedy="Submit the jobs in several batches.")
    # Each job carries the digest of the whole batch, so that the first job reveals a changed batch.
    digest = _compute_digest([_request_identity(job, spec) for job, spec in zip(body.jobs, specs, strict=True)])
    repeated = key is not None and context.jobs.get(_choose_job_id(context, call, f"{key}\n0")) is not None
    if not repeated and any(job.rent is not None for job in body.jobs):
        renting.require_rentable(context, call, body.jobs)
    changes = []
    known: set[str] = set()
    for index, (job, spec) in enumerate(zip(body.jobs, specs, strict=True)):
        # No header contains a line break, therefore the key of a batch's job is never the key of another call.
        job_id = _choose_job_id(context, call, f"{key}\n{index}" if key else None)
        with _prefix_fields(f"jobs.{index}"):
            _require_webhook(context, call, job.webhook, known)
            changes.append(_plan_job(context, call, job, spec, job_id=job_id, digest=digest if key else None))
    size_bytes = count_answer_bytes([view_job(change.job) for change in changes])
    if size_bytes > MAX_ANSWER_BYTES:
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"The jobs take {size_bytes} bytes to show; at most {MAX_ANSWER_BYTES} are allowed in one batch.",
            field="jobs",
        )
    # Writing a batch takes long, therefore a repeat reads the stored jobs instead of writing the jobs again.
    there = {job.id: job for job in context.jobs.get_many([c.job.id for c in changes])} if repeated else {}
    return [view_job(_store(context, call, change, there.get(change.job.id))) for change in changes]


@contextmanager
def _prefix_fields(place: str) -> Iterator[None]:
    """Prefix the fields of a refusal with their place in the body."""
    try:
        yield
    except Refusal as refusal:
        field = f"{place}.{refusal.field}" if refusal.field else place
        problems = [fault._replace(field=f"{place}.{fault.field}") for fault in refusal.problems]
        raise Refusal(refusal.code, refusal.detail, field=field, problems=problems, remedy=refusal.remedy) from None


def list_jobs(context: Context, call: ApiCall) -> JobPage | list[JobView] | list[OriginalJob]:
    """List a tenant's jobs, oldest first (`order=desc`: newest first); a bare list without `limit` and `cursor`."""
    query: JobsQuery = call.query
    bare = query.limit is None and query.cursor is None

    def page(limit: int) -> ResultPage[Job]:
        return context.jobs.list_jobs(
            call.tenant,
            state=query.status,
            limit=limit,
            cursor=query.cursor,
            newest_first=query.order == "desc",
            # The index of the list lags, too, and the list is what consoles poll.
            consistent=False,
        )

    def seen(items: Sequence[Job]) -> list[tuple[Job, Lease | None]]:
        jobs = [job for job in items if query.queue is None or job.queue == query.queue]
        leases = context.leases.get_many([_lease_of(job) for job in jobs if job.state is JobState.RUNNING])
        return [_with_report(job, leases.get(_lease_of(job))) for job in jobs]

    if bare and call.original:
        return read_fitting_page(
            page, lambda items: [view_original_job(*one) for one in seen(items)], _BARE_LIST_LIMIT
        )[0]
    limit = query.limit or (_BARE_LIST_LIMIT if bare else _PAGE_LIMIT)
    jobs, cursor = read_fitting_page(page, lambda items: [view_job(*one) for one in seen(items)], limit)
    return jobs if bare else JobPage(jobs=jobs, next_cursor=cursor, counts=_count_jobs(context, call))


def _lease_of(job: Job) -> str:
    """Return the id of the lease with the reports of a running job.

    An elastic job has no lease of its own. The node that runs for the longest time has certainly trained; one lease for
    each job keeps the price of the list.
    """
    running = [(mark.world_epoch, place) for place, mark in enumerate(job.seats) if mark.running]
    return seat_id(job.id, min(running)[1]) if running else job.id


def _with_report(job: Job, lease: Lease | None) -> tuple[Job, Lease | None]:
    """Return an elastic job with the progress of a node, whose lease is not the job's own; another job as given."""
    if job.spec.nodes is None or lease is None:
        return job, lease
    return job.model_copy(update={"progress": newest_progress(lease.progress, job.progress)}), None


def _count_jobs(context: Context, call: ApiCall) -> dict[JobState, int] | None:
    query: JobsQuery = call.query
    if not query.counts:
        return None
    return {state: context.jobs.count_jobs(call.tenant, state, up_to=COUNTED_UP_TO) for state in JobState}


def get_job(context: Context, call: ApiCall) -> JobView | OriginalJob:
    """Show one job with its newest progress."""
    job = require_job(context, call, call.path["id"])
    if job.spec.nodes is not None:
        view = view_job(with_newest_progress(context, job))
    else:
        lease = context.leases.get(job.id) if job.state is JobState.RUNNING else None
        if call.original:
            return view_original_job(job, lease)
        view = view_job(job, lease)
    if Scope.VIEW not in call.principal.scopes:
        return view
    # Environment variables often hold keys, which the readers of a shared link must not learn.
    return view.model_copy(update={"environment": dict.fromkeys(view.environment, "")})


def list_events(context: Context, call: ApiCall) -> EventPage | list[EventView] | list[OriginalEvent]:
    """List a job's history, oldest first; a bare list without `limit` and `cursor`."""
    query: PageQuery = call.query
    bare = query.limit is None and query.cursor is None
    try:
        job = require_job(context, call, call.path["id"])
    except Refusal:
        if bare and call.original:
            return []
        raise

    def page(limit: int) -> ResultPage[Event]:
        return context.jobs.history(Event, job.id, limit=limit, cursor=query.cursor)

    if bare and call.original:
        return read_fitting_page(
            page, lambda items: [view_original_event(job, item) for item in items], _BARE_LIST_LIMIT
        )[0]
    limit = query.limit or (_BARE_LIST_LIMIT if bare else _PAGE_LIMIT)
    events, cursor = read_fitting_page(page, lambda items: [view_event(item) for item in items], limit)
    return events if bare else EventPage(events=events, next_cursor=cursor)


def list_attempts(context: Context, call: ApiCall) -> AttemptPage:
    """List every attempt at a job, oldest first."""
    query: PageQuery = call.query
    job = require_job(context, call, call.path["id"])
    if job.spec.nodes is not None:
        return _list_seat_attempts(context, job, query)
    lease = context.leases.get(job.id) if job.state is JobState.RUNNING else None
    attempts, cursor = read_fitting_page(
        lambda limit: context.jobs.history(Attempt, job.id, limit=limit, cursor=query.cursor),
        lambda items: [view_attempt(job, item, lease) for item in items],
        query.limit or _PAGE_LIMIT,
    )
    return AttemptPage(attempts=attempts, next_cursor=cursor)


def _list_seat_attempts(context: Context, job: Job, query: PageQuery) -> AttemptPage:
    def view(items: Sequence[tuple[int, Attempt]]) -> list[AttemptView]:
        live = {place: seat_id(job.id, place) for place, attempt in items if attempt.ended_at is None}
        leases = context.leases.get_many(list(live.values()))
        return [view_attempt(job, attempt, leases.get(live.get(place, "")), seat=place) for place, attempt in items]

    attempts, cursor = read_fitting_page(
        lambda limit: read_seat_attempts(context, job, limit, query.cursor), view, query.limit or _PAGE_LIMIT
    )
    return AttemptPage(attempts=attempts, next_cursor=cursor)


def list_checkpoints(context: Context, call: ApiCall) -> CheckpointPage:
    """List every committed checkpoint that retention kept, newest first."""
    query: PageQuery = call.query
    job = require_job(context, call, call.path["id"])
    checkpoints, cursor = read_fitting_page(
        lambda limit: context.jobs.history(CheckpointRecord, job.id, limit=limit, cursor=query.cursor),
        lambda items: [view_checkpoint(job, item) for item in items],
        query.limit or _PAGE_LIMIT,
    )
    return CheckpointPage(checkpoints=checkpoints, next_cursor=cursor)


def stop(context: Context, call: ApiCall) -> TransitionAnswer:
    """Cancel a job in any state except an ended one."""
    message = (call.body or StopRequest()).message
    try:
        return _apply_transition(
            context, call, lambda job, attempt: rules.cancel(job, attempt, message=message, now=call.now)
        )
    except Refusal as refusal:
        if call.original and refusal.code in (ErrorCode.JOB_FINISHED, ErrorCode.JOB_CANCELED):
            # The original answers every stop with 200; the job does not change.
            return answer_transition(require_job(context, call, call.path["id"]))
        raise


def pause(context: Context, call: ApiCall) -> TransitionAnswer:
    """Pause a job; a running job commits a checkpoint first."""
    message = (call.body or StopRequest()).message
    return _apply_transition(context, call, lambda job, _: rules.pause(job, message=message, now=call.now))


def resume(context: Context, call: ApiCall) -> TransitionAnswer:
    """Return a paused job to its queue."""
    return _apply_transition(context, call, lambda job, _: rules.resume(job, now=call.now))


def retry(context: Context, call: ApiCall) -> TransitionAnswer:
    """Run an ended job again under the same id, from the newest or a chosen checkpoint."""
    body: RetryRequest = call.body or RetryRequest()

    def decision(job: Job, _: Attempt | None) -> Transaction:
        # Read after the job: another retry of the job may have committed another checkpoint of this step.
        chosen = _choose_checkpoint(context, call, job, body.from_step) if body.from_step else None
        change = rules.retry(
            job,
            chosen=chosen,
            keep_checkpoint=body.from_step is None,
            reset_counters=body.reset_counters,
            now=call.now,
            rule_state=context.jobs.read(RuleStateRecord, job.id) if job.watched else None,
        )
        return change if job.spec.rent is None else change.also(renting.reopen_fleet(context, call, job))

    return _apply_transition(context, call, decision)


def _choose_checkpoint(context: Context, call: ApiCall, job: Job, step: int) -> CheckpointRecord:
    record = context.jobs.read(CheckpointRecord, job.id, step)
    if record is not None and not record.damaged and job.state.terminal:
        # The retention of the last commit may still delete the checkpoint, therefore the read protects the checkpoint.
        record = context.jobs.protect_checkpoint(job.id, step, call.now + _RETENTION_ENDS_WITHIN_S)
    if record is None or record.damaged:
        raise Refusal(ErrorCode.CHECKPOINT_NOT_FOUND, f"No sound checkpoint at step {step}.", field="from_step")
    return record


def _apply_transition(
    context: Context, call: ApiCall, decide: Callable[[Job, Attempt | None], Transaction]
) -> TransitionAnswer:
    def decision() -> Transaction:
        job = require_job(context, call, call.path["id"])
        attempt = context.jobs.read(Attempt, job.id, job.epoch) if job.state is JobState.RUNNING else None
        return decide(job, attempt)

    try:
        job = apply_decision(context, decision)
    except FenceBroken as broken:
        raise Refusal(ErrorCode.CONFLICT, "The attempt ended during this call.") from broken
    job = evaluate_on_transition(context.jobs, context.leases, job, call.now)
    return answer_transition(settle(context.jobs, job, call.now))


def _plan_one(context: Context, call: ApiCall, body: JobSubmit | DreamboothSubmit, key: str | None) -> Transaction:
    job_id = _choose_job_id(context, call, key)
    if isinstance(body, DreamboothSubmit):
        job, columns = legacy_api.convert_job(body, job_id)
        spec = RecipeResolver(context, call).build_spec(job, flat=True).model_copy(update={"dreambooth": columns})
    else:
        job, spec = body, RecipeResolver(context, call).build_spec(body)
        _require_rules(job)
    digest = _compute_digest(_request_identity(job, spec)) if key else None
    _require_webhook(context, call, job.webhook, set())
    if job.rent is not None and not (key and context.jobs.get(job_id)):
        renting.require_rentable(context, call, [job])
    return _plan_job(context, call, job, spec, job_id=job_id, digest=digest)


def _require_rules(body: JobSubmit) -> None:
    """Refuse faulty rules, and rules that cannot be right for the nodes of an elastic job."""
    text = require_sound_rules(body.rules or "", "rules")
    if body.nodes is not None:
        require_for_nodes(text, "rules")


def _choose_job_id(context: Context, call: ApiCall, key: str | None) -> str:
    """Return a random job id; with an Idempotency-Key the id derived from the key, so that a repeat finds the job."""
    if key is None:
        return context.random.job_id()
    return str(uuid.uuid5(_IDEMPOTENCY_NAMESPACE, f"{call.tenant}\n{key}"))


def _request_identity(body: JobSubmit, spec: Spec) -> list[Any]:
    """Return the values that two submissions must share to be the same submission."""
    # Stored digests of jobs without rules, rings, rent and nodes do not include these fields.
    absent = {"seat", *(name for name in ("rings", "rent", "nodes") if not getattr(spec, name))}
    stored_spec = spec.model_dump(mode="json", exclude=absent)
    identity = [stored_spec, body.queue, body.priority]
    return [*identity, body.rules] if body.rules else identity


def _compute_digest(asked: list[Any]) -> str:
    """Return a digest of the values, independent of the order of keys in the JSON."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _require_webhook(context: Context, call: ApiCall, webhook_id: str | None, known: set[str]) -> None:
    """Refuse a job that names an unknown webhook or another tenant's. `known`: webhooks that this call has read."""
    if webhook_id is None or webhook_id in known:
        return
    if context.webhooks.get(call.tenant, webhook_id) is None:
        raise Refusal(ErrorCode.WEBHOOK_NOT_FOUND, f"No webhook {webhook_id}.", field="webhook")
    known.add(webhook_id)


def _plan_job(
    context: Context, call: ApiCall, body: JobSubmit, spec: Spec, *, job_id: str, digest: str | None
) -> Transaction:
    if body.rent is None and re.fullmatch(RENT_FLEET_PATTERN, body.queue):
        detail = f"The queue {body.queue} belongs to a job that rents its own machine, which ends with that job."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="queue")
    change = rules.submit(
        job_id=job_id,
        tenant=call.tenant,
        spec=spec,
        queue=body.queue if body.rent is None else fleet_of(job_id),
        shard=context.random.below(context.settings.ready_shards),
        priority=body.priority,
        now=call.now,
        idempotency_digest=digest,
        rules=_build_first_rules(call, body),
        watched=has_control_plane_rules(body.rules or ""),
    )
    if body.nodes is not None:
        change = with_seats(change)
    return change if body.rent is None else change.also(renting.plan_fleet(context, call, change.job, body.rent))


def _build_first_rules(call: ApiCall, body: JobSubmit) -> RulesRecord | None:
    if not (body.rules or "").strip():
        return None
    return RulesRecord(revision=1, text=body.rules or "", created_at=call.now, created_by=call.principal.key_id)


def _store(context: Context, call: ApiCall, change: Transaction, existing: Job | None = None) -> Job:
    """Write the job, or return the same job of an earlier submission. `existing`: the stored job, if known."""
    digest = change.job.idempotency_digest
    for _ in range(WRITE_TRIES):
        if existing is not None:
            if digest and existing.tenant == call.tenant and existing.idempotency_digest == digest:
                return existing
            raise Refusal(ErrorCode.IDEMPOTENCY_MISMATCH, field="idempotency-key")
        try:
            context.jobs.apply(change)
        except WriteConflict:
            # A concurrent copy of this submission may be about to write the job, which no read shows yet.
            existing = context.jobs.get(change.job.id)
            continue
        return change.job
    raise Refusal(ErrorCode.CONFLICT, f"Other calls wrote the same job during all {WRITE_TRIES} tries.")
