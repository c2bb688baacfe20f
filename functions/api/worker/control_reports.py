"""Rules and commands on their way to a worker, and what it says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from baton.contract.jobs import Progress
from baton.contract.steering import Control, ControlReport, EndedBy, RulesInForce
from baton.contract.work import ReleaseRequest
from functions.api.checkpoints.checkpoint_calls import sound_checkpoints
from functions.api.http.context import Call, Context, job_of
from functions.api.worker.lease_guard import WRITE_TRIES, apply_as_bearer
from functions.domain.errors import StorageUnavailable, WriteConflict
from functions.domain.jobs.leases import Fence
from functions.domain.jobs.rule_exit import end_attempt_by_rule
from functions.domain.jobs.transaction import Put, Transaction
from functions.domain.records import Attempt, ControlRecord, Job, Lease, RulesRecord
from functions.domain.rules import steering as rules
from functions.domain.rules.steering import ReportEffects


def control_of(context: Context, job: Job, now: int) -> Control | None:
    """What an attempt needs at its beginning; None, and no read, for a job that nobody has steered."""
    if not (job.rules_revision or job.commands_seq or job.rollbacks):
        return None
    commands = context.jobs.commands(job.id) if job.commands_seq else []
    return Control(
        rules=_rules(context, job.id, job.rules_revision) if job.rules_revision else None,
        commands=rules.initial_commands(job, commands, now),
        commands_seq=job.commands_seq,
        rollbacks=job.rollbacks,
        ends=job.ends,
        ran_s=job.counters.runtime_s,
    )


def news_for(context: Context, lease: Lease, report: ControlReport | None, now: int) -> dict[str, Any]:
    """What a heartbeat's answer has beside the directive: nothing, and no read, for a worker that has it all."""
    found: dict[str, Any] = {}
    if report is None:
        return found
    if lease.rules_revision > max(report.rules_revision, report.rejected or 0):
        found["rules"] = _rules(context, lease.job_id, lease.rules_revision)
    if lease.commands_seq > report.commands_seq:
        job = context.jobs.get(lease.job_id)
        if job is not None:
            commands = context.jobs.commands(lease.job_id, after=report.commands_seq)
            found["commands"] = rules.pending_commands(job, commands, report.commands_seq, now)
            found["commands_seq"] = max([lease.commands_seq, *(one.seq for one in commands)])
    return found


def _rules(context: Context, job_id: str, revision: int) -> RulesInForce | None:
    record = context.jobs.read(RulesRecord, job_id, revision)
    return RulesInForce(revision=record.revision, text=record.text) if record is not None else None


def write_down(context: Context, call: Call, fence: Fence, lease: Lease, report: ControlReport | None) -> None:
    """Write down what the report of an accepted heartbeat says, if anything is new. Raises FenceBroken.

    Decisions and results go with the job, in one transaction; how the rules stand goes alone, since it is said often.
    """
    if report is None or not rules.has_unsaved_report(lease, report):
        return
    fence = replace(fence, epoch=lease.epoch)
    for _ in range(WRITE_TRIES):
        job = job_of(context, call, fence.job_id)
        told = told_by(context, job, report, call.now)
        try:
            if told.events or told.commands:
                context.jobs.apply(rules.persist_report(told, fence, report, now=call.now))
            elif told.control is not None:
                writes = Put(owner=job.id, record=told.control), rules.note_revisions(fence, report)
                context.jobs.apply(Transaction(writes))
        except WriteConflict:
            continue
        return
    # Not a refusal: the lease is proved, and who sends the same again will be heard.
    raise StorageUnavailable(f"job {fence.job_id} is being changed by others all the time")


def told_by(context: Context, job: Job, report: ControlReport | None, now: int) -> ReportEffects:
    """What is new in the report of the attempt that holds the job."""
    if report is None:
        return ReportEffects(job=job)
    seqs = [result.seq for result in report.results]
    commands = context.jobs.commands(job.id, after=min(seqs) - 1) if seqs else []
    return rules.apply_report(job, report, commands=commands, control=context.jobs.read(ControlRecord, job.id), now=now)


def end_as_bearer(
    context: Context,
    call: Call,
    fence: Fence,
    report: ControlReport | None,
    decide: Callable[[Job, Attempt], Transaction],
) -> Job:
    """End the attempt, with the last that the worker says of rules and commands before it: all of it or nothing."""

    def decision(job: Job, attempt: Attempt) -> Transaction:
        told = told_by(context, job, report, call.now)
        return told.added_to(decide(told.job, attempt))

    return apply_as_bearer(context, call, fence, decision)


def by_whom(context: Context, job: Job, said: EndedBy | None) -> EndedBy | None:
    """Who ended a training, as its worker says; of a command that a rule of the control plane gave, that rule."""
    if said is None or said.command is None or not job.watched:
        return said
    found = context.jobs.commands(job.id, after=said.command - 1)
    given = next((one for one in found if one.seq == said.command), None)
    if given is None or given.rule is None:
        return said
    return said.model_copy(update={"rule": given.rule, "revision": given.revision})


def leave_by_rule(
    context: Context,
    call: Call,
    fence: Fence,
    body: ReleaseRequest,
    progress: Progress | None,
) -> Job:
    """Hand the job back as a rule wants it. `body` says how, `by_rule`."""
    wish = body.by_rule
    assert wish is not None

    def decision(job: Job, attempt: Attempt) -> Transaction:
        # Read behind the job: whatever forgets a checkpoint, or finds it damaged, raises the job's `rev`.
        found = [] if wish.rollback is None else sound_checkpoints(context, job, below=wish.rollback.before_step)
        needed = 1 if wish.rollback is not None and wish.rollback.to == "last" else None
        return end_attempt_by_rule(
            job,
            attempt,
            fence,
            wish,
            resumable=list(islice(found, needed)),
            kept=sound_checkpoints(context, job),
            progress=progress,
            now=call.now,
        )

    return end_as_bearer(context, call, fence, body.control, decision)
