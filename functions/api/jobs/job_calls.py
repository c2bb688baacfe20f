"""The submitter's calls: submit, look, steer."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from baton.contract.base import Cursor, PageLimit, QueueName, WireModel
from baton.contract.checkpoints import CheckpointPage
from baton.contract.dreambooth import DreamboothSubmit, OriginalEvent, OriginalJob
from baton.contract.errors import ErrorCode
from baton.contract.history import AttemptPage, EventPage, EventView
from baton.contract.jobs import (
    BatchSubmit,
    JobPage,
    JobState,
    JobSubmit,
    JobView,
    RetryRequest,
    StopRequest,
)
from baton.contract.work import TransitionAnswer
from functions.api.http.context import Call, Context, job_of
from functions.api.http.paging import MAX_ANSWER_BYTES, fitting, size_of
from functions.api.jobs import legacy_api
from functions.api.jobs.recipes import Resolver
from functions.api.jobs.views import (
    attempt_view,
    checkpoint_view,
    event_view,
    job_view,
    original_event_view,
    original_job_view,
    transition_answer,
)
from functions.api.rules.rule_calls import is_watched, require_quick, sound_rules
from functions.api.rules.rule_evaluation_runs import look_at_move
from functions.api.worker.lease_guard import WRITE_TRIES, apply_decision
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.transaction import Transaction
from functions.domain.ports import ResultPage
from functions.domain.records import Attempt, CheckpointRecord, Event, Job, Lease, RulesRecord, RuleStateRecord, Spec

_IDEMPOTENCY_NAMESPACE = uuid.UUID("6ba7b812-9dad-11d1-80b4-00c04fd430c8")
_BARE_LIST_LIMIT = 1000
_PAGE_LIMIT = 100
_RETENTION_S = 60
"""The retention that a commit began has ended by then: no call lasts longer."""


class JobsQuery(WireModel):
    """Query of `GET /jobs`. Example: `?status=running&queue=default&order=desc&limit=100`"""

    status: JobState | None = None
    queue: QueueName | None = None
    order: Literal["asc", "desc"] = "asc"
    limit: PageLimit | None = None
    cursor: Cursor | None = None


class PageQuery(WireModel):
    """Query of paged lists. Example: `?limit=100`"""

    limit: PageLimit | None = None
    cursor: Cursor | None = None


def submit(context: Context, call: Call) -> JobView | OriginalJob:
    """Submit a job; with an Idempotency-Key a repeat answers with the same job."""
    key = call.headers.get("idempotency-key")
    job = _submit_one(context, call, call.body, key)
    return original_job_view(job) if call.original else job_view(job)


def submit_batch(context: Context, call: Call) -> list[JobView]:
    """Submit up to 1,000 jobs: all are checked first, then each is stored; a repeat with the same key is safe."""
    body: BatchSubmit = call.body
    key = call.headers.get("idempotency-key")
    specs = []
    require_quick(job.rules for job in body.jobs)
    resolver = Resolver(context, call)
    for index, job in enumerate(body.jobs):
        with _named(f"jobs.{index}"):
            specs.append(resolver.spec(job))
            sound_rules(job.rules or "", "rules")
    # Each job carries the digest of them all, so that the first one meets a changed batch.
    digest = _digest([_asked(job, spec) for job, spec in zip(body.jobs, specs, strict=True)])
    changes = []
    known: set[str] = set()
    for index, (job, spec) in enumerate(zip(body.jobs, specs, strict=True)):
        # No header has a line break: the key of one job is never that of another call.
        job_id = _job_id(context, call, f"{key}\n{index}" if key else None)
        with _named(f"jobs.{index}"):
            _require_webhook(context, call, job.webhook, known)
            changes.append(_planned(context, call, job, spec, job_id=job_id, digest=digest if key else None))
    size_bytes = size_of([job_view(change.job) for change in changes])
    if size_bytes > MAX_ANSWER_BYTES:
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"The jobs take {size_bytes} bytes to show; at most {MAX_ANSWER_BYTES} are allowed in one batch.",
            field="jobs",
        )
    # A batch whose answer was lost took long: its repeat reads what is there instead of trying to write it again.
    repeated = key is not None and context.jobs.get(changes[0].job.id) is not None
    there = {job.id: job for job in context.jobs.get_many([c.job.id for c in changes])} if repeated else {}
    return [job_view(_stored(context, call, change, there.get(change.job.id))) for change in changes]


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Say where in the body a refusal belongs."""
    try:
        yield
    except Refusal as refusal:
        field = f"{place}.{refusal.field}" if refusal.field else place
        problems = [fault._replace(field=f"{place}.{fault.field}") for fault in refusal.problems]
        raise Refusal(refusal.code, refusal.detail, field=field, problems=problems) from None


def list_jobs(context: Context, call: Call) -> JobPage | list[JobView] | list[OriginalJob]:
    """A tenant's jobs, oldest first, or newest first with `order=desc`; a bare list for clients that do not page."""
    query: JobsQuery = call.query
    bare = query.limit is None and query.cursor is None

    def page(limit: int) -> ResultPage[Job]:
        return context.jobs.list_jobs(
            call.tenant, state=query.status, limit=limit, cursor=query.cursor, newest_first=query.order == "desc"
        )

    def seen(items: Sequence[Job]) -> list[tuple[Job, Lease | None]]:
        jobs = [job for job in items if query.queue is None or job.queue == query.queue]
        leases = context.leases.get_many([job.id for job in jobs if job.state is JobState.RUNNING])
        return [(job, leases.get(job.id)) for job in jobs]

    if bare and call.original:
        return fitting(page, lambda items: [original_job_view(*one) for one in seen(items)], _BARE_LIST_LIMIT)[0]
    limit = query.limit or (_BARE_LIST_LIMIT if bare else _PAGE_LIMIT)
    jobs, cursor = fitting(page, lambda items: [job_view(*one) for one in seen(items)], limit)
    return jobs if bare else JobPage(jobs=jobs, next_cursor=cursor)


def get_job(context: Context, call: Call) -> JobView | OriginalJob:
    """One job with its newest progress."""
    job = job_of(context, call, call.path["id"])
    lease = context.leases.get(job.id) if job.state is JobState.RUNNING else None
    return original_job_view(job, lease) if call.original else job_view(job, lease)


def list_events(context: Context, call: Call) -> EventPage | list[EventView] | list[OriginalEvent]:
    """A job's history, oldest first; a bare list for clients that do not page."""
    query: PageQuery = call.query
    bare = query.limit is None and query.cursor is None
    try:
        job = job_of(context, call, call.path["id"])
    except Refusal:
        if bare and call.original:
            return []
        raise

    def page(limit: int) -> ResultPage[Event]:
        return context.jobs.history(Event, job.id, limit=limit, cursor=query.cursor)

    if bare and call.original:
        return fitting(page, lambda items: [original_event_view(job, item) for item in items], _BARE_LIST_LIMIT)[0]
    limit = query.limit or (_BARE_LIST_LIMIT if bare else _PAGE_LIMIT)
    events, cursor = fitting(page, lambda items: [event_view(item) for item in items], limit)
    return events if bare else EventPage(events=events, next_cursor=cursor)


def list_attempts(context: Context, call: Call) -> AttemptPage:
    """Every attempt at a job, oldest first."""
    query: PageQuery = call.query
    job = job_of(context, call, call.path["id"])
    lease = context.leases.get(job.id) if job.state is JobState.RUNNING else None
    attempts, cursor = fitting(
        lambda limit: context.jobs.history(Attempt, job.id, limit=limit, cursor=query.cursor),
        lambda items: [attempt_view(job, item, lease) for item in items],
        query.limit or _PAGE_LIMIT,
    )
    return AttemptPage(attempts=attempts, next_cursor=cursor)


def list_checkpoints(context: Context, call: Call) -> CheckpointPage:
    """Every committed checkpoint that retention kept, newest first."""
    query: PageQuery = call.query
    job = job_of(context, call, call.path["id"])
    checkpoints, cursor = fitting(
        lambda limit: context.jobs.history(CheckpointRecord, job.id, limit=limit, cursor=query.cursor),
        lambda items: [checkpoint_view(job, item) for item in items],
        query.limit or _PAGE_LIMIT,
    )
    return CheckpointPage(checkpoints=checkpoints, next_cursor=cursor)


def stop(context: Context, call: Call) -> TransitionAnswer:
    """Cancel a job, wherever it stands."""
    message = (call.body or StopRequest()).message
    try:
        return _steered(context, call, lambda job, attempt: rules.cancel(job, attempt, message=message, now=call.now))
    except Refusal as refusal:
        if call.original and refusal.code in (ErrorCode.JOB_FINISHED, ErrorCode.JOB_CANCELED):
            # The original answers every stop with 200. The job stays what it is.
            return transition_answer(job_of(context, call, call.path["id"]))
        raise


def pause(context: Context, call: Call) -> TransitionAnswer:
    """Hold a job; a running one commits a checkpoint first."""
    message = (call.body or StopRequest()).message
    return _steered(context, call, lambda job, _: rules.pause(job, message=message, now=call.now))


def resume(context: Context, call: Call) -> TransitionAnswer:
    """Let a paused job run again."""
    return _steered(context, call, lambda job, _: rules.resume(job, now=call.now))


def retry(context: Context, call: Call) -> TransitionAnswer:
    """Run an ended job again, same id, from the newest or a chosen checkpoint."""
    body: RetryRequest = call.body or RetryRequest()

    def decision(job: Job, _: Attempt | None) -> Transaction:
        # Behind the job: another retry of it may have led to another checkpoint of that step.
        chosen = _chosen(context, call, job, body.from_step) if body.from_step else None
        return rules.retry(
            job,
            chosen=chosen,
            keep_checkpoint=body.from_step is None,
            reset_counters=body.reset_counters,
            now=call.now,
            rule_state=context.jobs.read(RuleStateRecord, job.id) if job.watched else None,
        )

    return _steered(context, call, decision)


def _chosen(context: Context, call: Call, job: Job, step: int) -> CheckpointRecord:
    record = context.jobs.read(CheckpointRecord, job.id, step)
    if record is not None and not record.damaged and job.state.terminal:
        # Protected, or gone: the retention of the last commit may still be under way.
        record = context.jobs.protect_checkpoint(job.id, step, call.now + _RETENTION_S)
    if record is None or record.damaged:
        raise Refusal(ErrorCode.CHECKPOINT_NOT_FOUND, f"No sound checkpoint at step {step}.", field="from_step")
    return record


def _steered(context: Context, call: Call, decide: Callable[[Job, Attempt | None], Transaction]) -> TransitionAnswer:
    def decision() -> Transaction:
        job = job_of(context, call, call.path["id"])
        attempt = context.jobs.read(Attempt, job.id, job.epoch) if job.state is JobState.RUNNING else None
        return decide(job, attempt)

    try:
        job = apply_decision(context, decision)
    except FenceBroken as broken:
        raise Refusal(ErrorCode.CONFLICT, "The attempt ended at the same moment.") from broken
    return transition_answer(look_at_move(context.jobs, context.leases, job, call.now))


def _submit_one(context: Context, call: Call, body: JobSubmit | DreamboothSubmit, key: str | None) -> Job:
    job_id = _job_id(context, call, key)
    if isinstance(body, DreamboothSubmit):
        job, columns = legacy_api.as_job(body, job_id)
        spec = Resolver(context, call).spec(job, flat=True).model_copy(update={"dreambooth": columns})
    else:
        job, spec = body, Resolver(context, call).spec(body)
        sound_rules(job.rules or "", "rules")
    digest = _digest(_asked(job, spec)) if key else None
    _require_webhook(context, call, job.webhook, set())
    return _stored(context, call, _planned(context, call, job, spec, job_id=job_id, digest=digest))


def _job_id(context: Context, call: Call, key: str | None) -> str:
    """By chance; with an Idempotency-Key always the same one, so that a repeat meets the first job."""
    if key is None:
        return context.random.job_id()
    return str(uuid.uuid5(_IDEMPOTENCY_NAMESPACE, f"{call.tenant}\n{key}"))


def _asked(body: JobSubmit, spec: Spec) -> list[Any]:
    """What two submissions must have in common to be the same."""
    # Without rules and rings as it was before there were any: jobs of that time are still asked for.
    said = spec.model_dump(mode="json", exclude=None if spec.rings else {"rings"})
    asked = [said, body.queue, body.priority]
    return [*asked, body.rules] if body.rules else asked


def _digest(asked: list[Any]) -> str:
    """Compared by value, so that the order of keys in the JSON does not matter."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _require_webhook(context: Context, call: Call, webhook_id: str | None, known: set[str]) -> None:
    """Refuse a job that names a webhook which is none of the tenant's. `known`: those that were looked up already."""
    if webhook_id is None or webhook_id in known:
        return
    if context.webhooks.get(call.tenant, webhook_id) is None:
        raise Refusal(ErrorCode.WEBHOOK_NOT_FOUND, f"No webhook {webhook_id}.", field="webhook")
    known.add(webhook_id)


def _planned(
    context: Context, call: Call, body: JobSubmit, spec: Spec, *, job_id: str, digest: str | None
) -> Transaction:
    return rules.submit(
        job_id=job_id,
        tenant=call.tenant,
        spec=spec,
        queue=body.queue,
        shard=context.random.below(context.settings.ready_shards),
        priority=body.priority,
        now=call.now,
        idempotency_digest=digest,
        rules=_first_rules(call, body),
        watched=is_watched(body.rules or ""),
    )


def _first_rules(call: Call, body: JobSubmit) -> RulesRecord | None:
    if not (body.rules or "").strip():
        return None
    return RulesRecord(revision=1, text=body.rules or "", created_at=call.now, created_by=call.principal.key_id)


def _stored(context: Context, call: Call, change: Transaction, existing: Job | None = None) -> Job:
    """The job, written or found. `existing`: what is known to be there already."""
    digest = change.job.idempotency_digest
    for _ in range(WRITE_TRIES):
        if existing is not None:
            if digest and existing.tenant == call.tenant and existing.idempotency_digest == digest:
                return existing
            raise Refusal(ErrorCode.IDEMPOTENCY_MISMATCH, field="idempotency-key")
        try:
            context.jobs.apply(change)
        except WriteConflict:
            # Nothing to be read yet: the same submission, sent twice, is just being written.
            existing = context.jobs.get(change.job.id)
            continue
        return change.job
    raise Refusal(ErrorCode.CONFLICT, "The same job is being submitted by others all the time.")
