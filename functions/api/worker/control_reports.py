"""Rules and commands for a worker, and the worker's reports about rules and commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import JobState, Progress, Reason, ReasonCode
from baton.contract.worker.calls import ReleaseRequest
from baton.contract.worker.control import Control, ControlReport, EndedBy, RulesInForce
from functions.api.checkpoints.checkpoint_calls import find_sound_checkpoints
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.worker.lease_guard import WRITE_TRIES, apply_as_bearer
from functions.domain.errors import Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs import transitions
from functions.domain.jobs.lease_fence import REVOKED, Fence
from functions.domain.jobs.rule_exit import describe_cause, end_attempt_by_rule
from functions.domain.jobs.transaction import Put, Transaction, Write, update_job
from functions.domain.records import Attempt, ControlRecord, Job, Lease, RulesRecord
from functions.domain.rules import steering as rules
from functions.domain.rules.steering import ReportEffects
from functions.domain.worlds.seats import tell_of_node


def read_control(context: Context, job: Job, now: int) -> Control | None:
    """Return rules, commands and rollbacks for a new attempt; None, without a read, if the job has none of these.

    The attempts at all seats of an elastic job receive those of the elastic job.
    """
    if not (job.rules_revision or job.commands_seq or job.rollbacks):
        return None
    commands = context.jobs.commands(job.id) if job.commands_seq else []
    nodes_s = now - (job.started_at or now)
    return Control(
        rules=_read_rules(context, job.id, job.rules_revision) if job.rules_revision else None,
        commands=rules.initial_commands(job, commands, now),
        commands_seq=job.commands_seq,
        rollbacks=job.rollbacks,
        ends=job.ends,
        ran_s=job.counters.runtime_s if job.spec.nodes is None else nodes_s,
    )


def read_updates(context: Context, lease: Lease, report: ControlReport | None, now: int) -> dict[str, Any]:
    """Return new rules and commands for a heartbeat's answer; empty, without a read, for an up-to-date worker."""
    found: dict[str, Any] = {}
    if report is None:
        return found
    has_rules = lease.rules_revision > max(report.rules_revision, report.rejected or 0)
    has_commands = lease.commands_seq > report.commands_seq
    job = context.jobs.get(lease.job_id) if has_rules or has_commands else None
    if job is not None and job.spec.seat is not None:
        job = context.jobs.get(job.spec.seat.job)
    if job is not None:
        if has_rules:
            found["rules"] = _read_rules(context, job.id, lease.rules_revision)
        if has_commands:
            commands = context.jobs.commands(job.id, after=report.commands_seq)
            found["commands"] = rules.pending_commands(job, commands, report.commands_seq, now)
            found["commands_seq"] = max([lease.commands_seq, *(one.seq for one in commands)])
    return found


def _read_rules(context: Context, job_id: str, revision: int) -> RulesInForce | None:
    record = context.jobs.read(RulesRecord, job_id, revision)
    return RulesInForce(revision=record.revision, text=record.text) if record is not None else None


def persist_report(context: Context, call: ApiCall, fence: Fence, lease: Lease, report: ControlReport | None) -> None:
    """Write the news in the report of an accepted heartbeat. Raises FenceBroken.

    Decisions and results are written with the job in one transaction. The status of the rules, which is reported often,
    is written without the job.
    """
    if report is None or not rules.has_unsaved_report(lease, report):
        return
    fence = replace(fence, epoch=lease.epoch)
    for _ in range(WRITE_TRIES):
        job = require_job(context, call, fence.job_id)
        effects, told = _apply_report(context, job, report, call.now)
        try:
            if effects.job != job or effects.commands:
                context.jobs.apply(rules.persist_report(effects, fence, report, now=call.now).also(*told))
            elif effects.control is not None or job.spec.seat is not None:
                control = () if effects.control is None else (Put(owner=job.id, record=effects.control),)
                context.jobs.apply(Transaction((*control, *told, rules.note_revisions(fence, report))))
        except WriteConflict:
            continue
        return
    # Not a refusal: the lease is proved, and the worker repeats the report.
    raise StorageUnavailable(f"other calls changed job {fence.job_id} during all {WRITE_TRIES} tries")


def _apply_report(
    context: Context, job: Job, report: ControlReport | None, now: int
) -> tuple[ReportEffects, tuple[Write, ...]]:
    """Return the effects of a report on the job, and for a seat the writes of the effects on its elastic job.

    A seat keeps the number of its newest decision; events, results of commands and status belong to the elastic job.
    """
    seat = job.spec.seat
    if report is None:
        return ReportEffects(job=job), ()
    if seat is None:
        return _read_effects(context, job, report, now), ()
    own = rules.apply_report(job, report, commands=(), control=None, now=now)
    kept = replace(own, events=(), control=None)
    elastic = context.jobs.get(seat.job)
    if elastic is None or elastic.generation != job.generation:
        return kept, ()
    if elastic.state.terminal:
        # The job ends by one write and the seat by a later one. In between, the seat's last decisions arrive.
        return kept, tell_of_node(elastic, seat.seat, own.events, now=now).writes if own.events else ()
    effects = _read_effects(context, elastic, report.model_copy(update={"decisions": []}), now)
    records = [*effects.commands, *([effects.control] if effects.control is not None else ())]
    writes: tuple[Write, ...] = tuple(Put(owner=elastic.id, record=one) for one in records)
    if own.events or effects.commands:
        writes += tell_of_node(elastic, seat.seat, own.events, now=now).writes
    return kept, writes


def _read_effects(context: Context, job: Job, report: ControlReport, now: int) -> ReportEffects:
    seqs = [result.seq for result in report.results]
    commands = context.jobs.commands(job.id, after=min(seqs) - 1) if seqs else []
    return rules.apply_report(job, report, commands=commands, control=context.jobs.read(ControlRecord, job.id), now=now)


def end_as_bearer(
    context: Context,
    call: ApiCall,
    fence: Fence,
    report: ControlReport | None,
    decide: Callable[[Job, Attempt], Transaction],
) -> Job:
    """End the attempt and write the worker's last report in one transaction."""

    def decision(job: Job, attempt: Attempt) -> Transaction:
        effects, told = _apply_report(context, job, report, call.now)
        return effects.added_to(decide(effects.job, attempt)).also(*told)

    try:
        return apply_as_bearer(context, call, fence, decision)
    except Refusal:
        keep_last_decisions(context, fence, report, call.now)
        raise


def keep_last_decisions(context: Context, fence: Fence, report: ControlReport | None, now: int) -> None:
    """Record the decisions of a node whose attempt has ended with its world.

    The first member alone reports decisions, and the end of any other member may end the job before the report. A
    machine that was frozen meanwhile has lost its lease, too.
    """
    lease = context.leases.get(fence.job_id) if report is not None and report.decisions else None
    if report is None or lease is None or lease.closed not in ("canceled", REVOKED) or not fence.bears(lease):
        return
    for _ in range(WRITE_TRIES):
        seat = context.jobs.get(fence.job_id)
        place = None if seat is None or seat.epoch != lease.epoch else seat.spec.seat
        elastic = None if place is None else context.jobs.get(place.job)
        if seat is None or place is None or elastic is None or not elastic.state.terminal:
            return
        own = rules.apply_report(seat, report, commands=(), control=None, now=now)
        if seat.generation != elastic.generation or not own.events:
            return
        told = tell_of_node(elastic, place.seat, own.events, now=now)
        try:
            context.jobs.apply(update_job(own.job, now).also(*told.writes))
        except WriteConflict:
            continue
        return
    raise StorageUnavailable(f"other calls changed job {fence.job_id} during all {WRITE_TRIES} tries")


def attribute_end(context: Context, job: Job, reported: EndedBy | None) -> EndedBy | None:
    """Return the cause of a training's end as the worker reports it, with the control plane's rule behind a command."""
    if reported is None or reported.command is None or not job.watched:
        return reported
    found = context.jobs.commands(job.id, after=reported.command - 1)
    command = next((one for one in found if one.seq == reported.command), None)
    if command is None or command.rule is None:
        return reported
    return reported.model_copy(update={"rule": command.rule, "revision": command.revision})


def release_by_rule(
    context: Context,
    call: ApiCall,
    fence: Fence,
    body: ReleaseRequest,
    progress: Progress | None,
) -> Job:
    """Release the job for a rule of the worker, as `by_rule` of the body requests."""
    wish = body.by_rule
    assert wish is not None

    def decision(job: Job, attempt: Attempt) -> Transaction:
        if job.spec.seat is not None:
            if wish.kind != "pause":
                detail = f"A {wish.kind} of one node cannot be right for the other nodes of job {job.spec.seat.job}."
                remedy = "Release the seat without by_rule."
                raise Refusal(ErrorCode.NOT_FOR_ELASTIC, detail, field="by_rule.kind", remedy=remedy)
            reason = Reason(code=ReasonCode.PAUSED_BY_RULE, message=describe_cause(wish.ended_by))
            change = transitions.release(job, attempt, fence, reason=reason, progress=progress, now=call.now)
            return change.also(*_pause_by_rule(context.jobs.get(job.spec.seat.job), wish.ended_by, call.now))
        # Read after the job: every removal or damage report of a checkpoint raises the job's `rev`.
        found = [] if wish.rollback is None else find_sound_checkpoints(context, job, below=wish.rollback.before_step)
        needed = 1 if wish.rollback is not None and wish.rollback.to == "last" else None
        return end_attempt_by_rule(
            job,
            attempt,
            fence,
            wish,
            resumable=list(islice(found, needed)),
            checkpoints=find_sound_checkpoints(context, job),
            progress=progress,
            now=call.now,
        )

    return end_as_bearer(context, call, fence, body.control, decision)


def _pause_by_rule(elastic: Job | None, by: EndedBy, now: int) -> tuple[Write, ...]:
    """Return the writes that pause an elastic job for a rule of its nodes, unless another node has paused the job."""
    if elastic is None or elastic.state is not JobState.RUNNING or elastic.pause_requested:
        return ()
    change = transitions.pause(elastic, message=describe_cause(by), now=now, code=ReasonCode.PAUSED_BY_RULE)
    return change.with_job(ended_by=by).writes
