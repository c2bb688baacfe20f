"""Store rules and commands of a job, select the commands for a worker, and apply the worker's reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import JobState
from baton.contract.worker.control import (
    MAX_COMMANDS,
    MAX_REVISION,
    MAX_SEQUENCE,
    Command,
    CommandKind,
    CommandRequest,
    ControlReport,
    Decision,
)
from functions.domain.errors import Refusal
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.transaction import Delete, NoteLease, SteerLease, Transaction, evaluate_soon, update_job
from functions.domain.records import CommandRecord, ControlRecord, Event, Job, Lease, RulesRecord, RuleStateRecord
from functions.domain.rules.elastic_rules import notify_seats

_AS_GIVEN = {"status": "waiting", "step": None, "message": ""}
_OF_RULES = {"rule", "command", "revision", "training_epoch", "dry_run", "operands", "actions"}
"""Fields of a decision that do not apply to the event of a damaged object."""


def require_steerable(job: Job) -> None:
    """Refuse a job that has ended, because no worker would receive the change."""
    if job.state.terminal:
        raise Refusal(ErrorCode.JOB_FINISHED, f"Job {job.id} is {job.state}.")


def put_rules(
    job: Job,
    newest: RulesRecord | None,
    *,
    text: str,
    if_revision: int | None,
    key_id: str | None,
    now: int,
    watched: bool = False,
    rule_state: RuleStateRecord | None = None,
) -> Transaction | None:
    """Store the next revision of a job's rules; None if the newest revision is equal. A running worker is notified.

    `newest`: the record of `job.rules_revision`. `watched`: the control plane evaluates some of the new rules.
    `rule_state`: the stored state, if the control plane evaluates some of the new or the old rules.
    """
    require_steerable(job)
    # A repeat whose answer was lost names the revision before its own.
    if text == (newest.text if newest is not None else ""):
        return None
    if if_revision is not None and if_revision != job.rules_revision:
        raise Refusal(
            ErrorCode.CONFLICT,
            f"The newest revision of the rules is {job.rules_revision}, not {if_revision}: look at it first.",
            field="if_revision",
        )
    if job.rules_revision == MAX_REVISION:
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"Job {job.id} has {MAX_REVISION} revisions of its rules.")
    record = RulesRecord(revision=job.rules_revision + 1, text=text, created_at=now, created_by=key_id)
    updates: dict[str, Any] = {"rules_revision": record.revision, "watched": watched}
    if watched and not job.watched:
        # The job waits since its last change or longer; an exact instant is not stored.
        updates["waiting_since"] = job.updated_at
    change = notify_lease(update_job(job, now, **updates)).put(record)
    return change.put(evaluate_soon(rule_state, now)) if watched or rule_state is not None else change


def add_command(
    job: Job,
    commands: Sequence[CommandRecord],
    request: CommandRequest,
    *,
    key_sha256: str | None,
    now: int,
    more: Mapping[str, Any] | None = None,
) -> Transaction:
    """Add a command. A running worker is notified, a later worker receives the command at its start.

    `commands`: the job's commands, oldest first. `more`: fields of the record of a rule's command.
    """
    require_steerable(job)
    if request.kind is CommandKind.PAUSE and job.state is not JobState.RUNNING:
        raise Refusal(
            ErrorCode.ILLEGAL_TRANSITION,
            f"Job {job.id} is {job.state}: POST /job/{job.id}/pause holds it.",
            field="kind",
        )
    if job.commands_seq == MAX_SEQUENCE:
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"Job {job.id} has been given {MAX_SEQUENCE} commands.")
    record = CommandRecord(
        seq=job.commands_seq + 1,
        kind=request.kind,
        arguments=request.arguments,
        issued_at=now,
        expires_at=now + request.expires_in_s,
        key_sha256=key_sha256,
    ).model_copy(update=dict(more or {}))
    going = _superfluous(job, commands, len(commands) + 1 - MAX_COMMANDS, now)
    change = notify_lease(update_job(job, now, commands_seq=record.seq)).put(record)
    return change.also(*(Delete(key=one.key(job.id, one.seq)) for one in going))


def _superfluous(job: Job, commands: Sequence[CommandRecord], surplus: int, now: int) -> list[CommandRecord]:
    """Return the commands to delete: the oldest executed commands, last the commands that a resume repeats."""
    if surplus <= 0:
        return []
    waiting = {one.seq for one in commands if _waits(job, one, now)}
    done = sorted((one for one in commands if one.seq not in waiting), key=lambda one: (_done_again(one), one.seq))
    if len(done) < surplus:
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"{len(waiting)} commands of job {job.id} wait already.")
    return done[:surplus]


def notify_lease(change: Transaction) -> Transaction:
    """Write the newest revision and command number into the lease of a running attempt, or of each running seat."""
    job = change.job
    if job.spec.nodes is not None:
        return notify_seats(change)
    if job.state is not JobState.RUNNING:
        return change
    steer = SteerLease(
        job_id=job.id,
        epoch=job.epoch,
        rules_revision=job.rules_revision,
        commands_seq=job.commands_seq,
        watched=job.watched,
    )
    return change.also(steer)


def _waits(job: Job, command: CommandRecord, now: int) -> bool:
    live = command.expires_at > now and command.seq > job.commands_void and not job.state.terminal
    return command.status == "waiting" and live


def has_pending_stop(job: Job, commands: Iterable[CommandRecord], now: int) -> bool:
    """Return True if a rule's stop waits for the present or the next training."""
    return any(one.kind is CommandKind.STOP and one.rule is not None and _waits(job, one, now) for one in commands)


def _done_again(command: CommandRecord) -> bool:
    return command.kind is CommandKind.SET and command.status == "applied"


def command_view(job: Job, command: CommandRecord, now: int) -> Command:
    """Return the view of a command; a waiting command that no worker can execute any more has expired."""
    expired = command.status == "waiting" and not _waits(job, command, now)
    values = command.model_dump(exclude={"key_sha256", "revision", "epoch"})
    return Command.model_validate({**values, "status": "expired"} if expired else values)


def pending_commands(job: Job, commands: Iterable[CommandRecord], seq: int, now: int) -> list[Command]:
    """Return the waiting commands after `seq`, oldest first."""
    return [command_view(job, one, now) for one in commands if one.seq > seq and _waits(job, one, now)]


def initial_commands(job: Job, commands: Iterable[CommandRecord], now: int) -> list[Command]:
    """Return the commands that an attempt begins with, oldest first.

    These are the waiting commands, each applied `set` that no rollback has undone, and each `save` and `evaluate` that
    was lost with its machine.
    """
    found = [one.model_copy(update=_AS_GIVEN) if _lost(job, one) else one for one in commands]
    again = [one for one in found if _waits(job, one, now) or (_done_again(one) and not _undone(job, one))]
    return [command_view(job, one, now) for one in again]


def _lost(job: Job, command: CommandRecord) -> bool:
    """Return True if the command's step is trained again, because no later checkpoint was committed."""
    repeated = command.kind in (CommandKind.SAVE, CommandKind.EVALUATE)
    if not repeated or command.status != "applied" or command.step is None:
        return False
    return (job.checkpoint_step is None or job.checkpoint_step < command.step) and not _undone(job, command)


def _undone(job: Job, command: CommandRecord) -> bool:
    """Return True if a rollback returned to a step before the command."""
    step = command.step or 0
    return any(command.seq <= back.commands_seq and step > back.to_step for back in job.rollbacks)


@dataclass(frozen=True, kw_only=True)
class ReportEffects:
    """Changes that a worker's report causes. `job` contains these changes and is not written yet."""

    job: Job
    events: tuple[Event, ...] = ()
    commands: tuple[CommandRecord, ...] = ()
    control: ControlRecord | None = None
    """None: unchanged."""

    def added_to(self, change: Transaction) -> Transaction:
        """Return a change that was decided on `job`, with the records of the report."""
        return change.put(*self.events, *self.commands, *([self.control] if self.control is not None else ()))


def apply_report(
    job: Job, report: ControlReport, *, commands: Sequence[CommandRecord], control: ControlRecord | None, now: int
) -> ReportEffects:
    """Return the effects of a report of the present attempt. Idempotent: a repeated report has no effects.

    `commands`: the commands whose results the report contains.
    """
    decisions = [one for one in report.decisions if one.number > job.decided]
    decisions = sorted({one.number: one for one in decisions}.values(), key=lambda one: one.number)
    first = job.event_seq + 1
    events = tuple(_event(job, first + place, one, now) for place, one in enumerate(decisions))
    results = {result.seq: result for result in reversed(report.results)}
    dealt_with = tuple(
        one.model_copy(update={**results[one.seq].model_dump(exclude={"seq"}), "epoch": job.epoch})
        for one in commands
        if one.seq in results and (one.status == "waiting" or (one.epoch < job.epoch and _lost(job, one)))
    )
    after = _control(job.epoch, report, control, now)
    updates = {"event_seq": job.event_seq + len(events), "decided": decisions[-1].number if decisions else job.decided}
    return ReportEffects(
        job=job.model_copy(update=updates),
        events=events,
        commands=dealt_with,
        control=after if after != control else None,
    )


def _event(job: Job, seq: int, decision: Decision, now: int) -> Event:
    left_out = {"type"} | (_OF_RULES if decision.type == "ring.quarantined" else set())
    data = {"place": "training", **decision.model_dump(mode="json", exclude=left_out, exclude_none=True)}
    return Event(seq=seq, type=EventType(decision.type), at=now, epoch=job.epoch, data=data)


def _control(epoch: int, report: ControlReport, before: ControlRecord | None, now: int) -> ControlRecord | None:
    """Return the control record after a report; `before` if the report contains nothing new."""
    silent = report.statuses is None and not report.rules_revision and report.rejected is None
    if before is None and silent:
        return None
    same = before is not None and (before.epoch, before.revision) == (epoch, report.rules_revision)
    step, statuses = report.step, report.statuses
    if before is not None and same and step is None:
        step = before.step
    if statuses is None:
        statuses = before.statuses if before is not None and before.epoch == epoch else []
    after = ControlRecord(
        revision=report.rules_revision,
        epoch=epoch,
        step=step,
        at=now,
        rejected=report.rejected,
        reason=report.reason if report.rejected is not None else "",
        statuses=statuses,
    )
    return before if before is not None and before == after.model_copy(update={"at": before.at}) else after


def has_unsaved_report(lease: Lease, report: ControlReport) -> bool:
    """Return True if a report contains unsaved values; the lease stores the reported revisions."""
    noted = lease.rules_in_force, lease.rules_rejected
    return report.has_records or noted != (report.rules_revision, report.rejected or 0)


def note_revisions(fence: Fence, report: ControlReport) -> NoteLease:
    """Return the write that proves the lease and stores the reported revisions."""
    return NoteLease(fence=fence, rules_in_force=report.rules_revision, rules_rejected=report.rejected or 0)


def persist_report(effects: ReportEffects, fence: Fence, report: ControlReport, *, now: int) -> Transaction:
    """Return the transaction that stores the effects of a heartbeat's report."""
    return effects.added_to(update_job(effects.job, now).also(note_revisions(fence, report)))
