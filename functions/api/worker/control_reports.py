"""Rules and commands for a worker, and the worker's reports about rules and commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from baton.contract.jobs.job import Progress
from baton.contract.worker.calls import ReleaseRequest
from baton.contract.worker.control import Control, ControlReport, EndedBy, RulesInForce
from functions.api.checkpoints.checkpoint_calls import find_sound_checkpoints
from functions.api.http.context import ApiCall, Context, require_job
from functions.api.worker.lease_guard import WRITE_TRIES, apply_as_bearer
from functions.domain.errors import StorageUnavailable, WriteConflict
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.rule_exit import end_attempt_by_rule
from functions.domain.jobs.transaction import Put, Transaction
from functions.domain.records import Attempt, ControlRecord, Job, Lease, RulesRecord
from functions.domain.rules import steering as rules
from functions.domain.rules.steering import ReportEffects


def read_control(context: Context, job: Job, now: int) -> Control | None:
    """Return rules, commands and rollbacks for a new attempt; None, without a read, if the job has none of these."""
    if not (job.rules_revision or job.commands_seq or job.rollbacks):
        return None
    commands = context.jobs.commands(job.id) if job.commands_seq else []
    return Control(
        rules=_read_rules(context, job.id, job.rules_revision) if job.rules_revision else None,
        commands=rules.initial_commands(job, commands, now),
        commands_seq=job.commands_seq,
        rollbacks=job.rollbacks,
        ends=job.ends,
        ran_s=job.counters.runtime_s,
    )


def read_updates(context: Context, lease: Lease, report: ControlReport | None, now: int) -> dict[str, Any]:
    """Return new rules and commands for a heartbeat's answer; empty, without a read, for an up-to-date worker."""
    found: dict[str, Any] = {}
    if report is None:
        return found
    if lease.rules_revision > max(report.rules_revision, report.rejected or 0):
        found["rules"] = _read_rules(context, lease.job_id, lease.rules_revision)
    if lease.commands_seq > report.commands_seq:
        job = context.jobs.get(lease.job_id)
        if job is not None:
            commands = context.jobs.commands(lease.job_id, after=report.commands_seq)
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
        effects = report_effects(context, job, report, call.now)
        try:
            if effects.events or effects.commands:
                context.jobs.apply(rules.persist_report(effects, fence, report, now=call.now))
            elif effects.control is not None:
                writes = Put(owner=job.id, record=effects.control), rules.note_revisions(fence, report)
                context.jobs.apply(Transaction(writes))
        except WriteConflict:
            continue
        return
    # Not a refusal: the lease is proved, and the worker repeats the report.
    raise StorageUnavailable(f"other calls changed job {fence.job_id} during all {WRITE_TRIES} tries")


def report_effects(context: Context, job: Job, report: ControlReport | None, now: int) -> ReportEffects:
    """Return the effects of the news in a report of the job's attempt."""
    if report is None:
        return ReportEffects(job=job)
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
        effects = report_effects(context, job, report, call.now)
        return effects.added_to(decide(effects.job, attempt))

    return apply_as_bearer(context, call, fence, decision)


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
