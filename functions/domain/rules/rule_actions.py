"""Execute the actions of rules that the control plane evaluates.

Each decision becomes events of the job; its actions are writes of the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import AttemptEnd, FailureClass, JobState, Progress, Reason, ReasonCode
from baton.contract.rules.document.actions import (
    NAMES,
    Action,
    Alert,
    Evaluate,
    Log,
    Pause,
    Requeue,
    Save,
    Scale,
    Set,
    Stop,
)
from baton.contract.rules.engine.verdicts import State, Verdict
from baton.contract.rules.numbers import encode
from baton.contract.worker.control import CommandKind, CommandRequest, Directive, EndedBy
from functions.domain.errors import NotDoneError, Refusal
from functions.domain.jobs import retry as retry_policy
from functions.domain.jobs import transitions
from functions.domain.jobs.attempt_end import add_counts, cause_data, end_job, requeue
from functions.domain.jobs.rule_exit import describe_cause
from functions.domain.jobs.transaction import Delete, DirectLease, Put, Transaction, update_job
from functions.domain.records import Attempt, CommandRecord, Event, Job, Lease, ScaleOrder
from functions.domain.rules import steering
from functions.domain.rules.scaling import (
    MAX_MESSAGE_CHARS,
    MAX_ORDERS,
    STOP_COMMAND_LIFE_S,
    GroupJobs,
    ScaleDecision,
    decide_scaling,
)

PLACE = "control_plane"
MAX_OPERANDS = 32
MAX_COMMANDS_AT_ONCE = 10
"""Commands of one evaluation, which are written in one transaction."""
ALIVE_INTERVALS = 2
"""Heartbeat intervals within which a worker counts as live. A live worker receives a directive to release the job; a
silent worker loses the job."""

_EVENTS = {State.FIRED: "rule.fired", State.CLEARED: "rule.cleared", State.ERROR: "rule.error"}


def _no_groups(name: str) -> GroupJobs:
    raise NotDoneError(f"group {name!r} cannot be read here")


class RuleActionExecutor:
    """Executor of rule actions: collects the decisions of one evaluation of one job in a transaction."""

    def __init__(
        self,
        job: Job,
        attempt: Attempt | None,
        lease: Lease | None,
        *,
        step: int,
        now: int,
        read_commands: Callable[[], Sequence[CommandRecord]],
        groups: Callable[[str], GroupJobs] = _no_groups,
        evaluation: int = 0,
        pending: Sequence[ScaleOrder] = (),
    ) -> None:
        """Create an executor for one evaluation, which has the unique number `evaluation`.

        `attempt`, `lease`: those of the present attempt. `read_commands` reads the job's commands, `groups` reads a
        group. `pending`: orders that are not executed yet.
        """
        self._read = job
        self._job = job
        """Job with all decisions, not yet written."""
        self._running = job.state is JobState.RUNNING
        self._attempt = attempt if self._running else None
        self._lease = lease if self._running and lease is not None and lease.epoch == job.epoch else None
        self._step, self._now = step, now
        self._read_commands = read_commands
        self._commands: list[CommandRecord] | None = None
        self._records: list[Event | CommandRecord] = []
        self._dropped: list[Delete] = []
        self._given = 0
        """Number of new commands."""
        self._read_group, self._evaluation = groups, evaluation
        self._groups: dict[str, GroupJobs] = {}
        self._ordered: list[str] = []
        """Groups with a new order."""
        self._pending = len(pending)
        self.orders: list[ScaleOrder] = list(pending)
        """All orders to execute."""
        self._end: Transaction | None = None
        """Transition of the job; None unless an action causes a transition."""

    def add_event(self, type_: str, **more: Any) -> None:
        """Add an event with the revision, the step and the time of the evaluation."""
        data = {"place": PLACE, "revision": self._job.rules_revision, "step": self._step, "at": self._now, **more}
        if self._end is not None:
            self._end = self._end.with_event(EventType(type_), self._now, **data)
            return
        seq = self._job.event_seq + 1
        event = Event(seq=seq, type=EventType(type_), at=self._now, epoch=self._job.epoch, data=data)
        self._job = self._job.model_copy(update={"event_seq": seq})
        self._records.append(event)

    def execute(self, verdict: Verdict, values: Mapping[str, float | None]) -> None:
        """Add the event of a verdict and execute its actions. `values` fill the texts of actions."""
        dry_run = verdict.mode == "dry_run"
        operands = {one.text: encode(one.value) for one in verdict.operands[:MAX_OPERANDS]}
        common = {"rule": verdict.rule, "severity": verdict.severity, "dry_run": dry_run}
        names = [NAMES[type(action)] for action in verdict.actions]
        would = [self._would(action, verdict) for action in verdict.actions if isinstance(action, Scale) and dry_run]
        message = "; ".join(text for text in (verdict.reason, *would) if text)[:MAX_MESSAGE_CHARS]
        self.add_event(_EVENTS[verdict.state], **common, operands=operands, actions=names, message=message)
        if dry_run:
            return
        became: dict[str, list[tuple[str, str]]] = {"action.applied": [], "action.rejected": []}
        for name, action in zip(names, verdict.actions, strict=True):
            try:
                done = self._perform(action, verdict, values)
            except NotDoneError as error:
                became["action.rejected"].append((name, str(error)))
            except Refusal as refusal:
                became["action.rejected"].append((name, refusal.detail))
            else:
                became["action.applied"].append((name, done))
        for type_, actions in became.items():
            if actions:
                message = "; ".join(text for _, text in actions)[:MAX_MESSAGE_CHARS]
                self.add_event(type_, **common, actions=[name for name, _ in actions], message=message)

    def change(self) -> Transaction | None:
        """Return the transaction of all decisions; None if there are none."""
        if self._end is None:
            return self._records_change()
        change = self._with_records(self._end)
        direct = change.lease
        if isinstance(direct, DirectLease) and self._given:
            change = change.replacing(direct, replace(direct, commands_seq=change.job.commands_seq))
        return change

    def _records_change(self) -> Transaction | None:
        if not self._records:
            return None
        change = self._with_records(update_job(self._job, self._now))
        if not self._running:
            # `updated_at` is the instant since which a job waits; the waiting continues, so the instant stays.
            return change.with_job(updated_at=self._read.updated_at)
        return steering.notify_lease(change) if self._given else change

    def _with_records(self, change: Transaction) -> Transaction:
        scalings = (self._groups[name].record for name in self._ordered)
        change = change.put(*self._records).also(*self._dropped)
        return change.also(*(Put(owner=one.owner, record=one) for one in scalings))

    def _perform(self, action: Action, verdict: Verdict, values: Mapping[str, float | None]) -> str:
        """Execute an action and return its description. Raises NotDoneError or Refusal."""
        match action:
            case Alert(text) | Log(text):
                return text.render(values)
            case Stop(outcome="failed"):
                return self._move(self._fail, verdict)
            case Pause():
                return self._move(self._pause, verdict)
            case Requeue(exclude_host):
                return self._move(lambda by: self._requeue(by, exclude_host=exclude_host), verdict)
            case Stop(save=save):
                return self._command(verdict, kind=CommandKind.STOP, outcome="complete", save=save)
            case Save(tag):
                return self._command(verdict, kind=CommandKind.SAVE, tag=tag[:64] or None)
            case Evaluate():
                return self._command(verdict, kind=CommandKind.EVALUATE)
            case Set(knob, value, factor, least, most):
                bounds = {name: bound for name, bound in (("min", least), ("max", most)) if bound is not None}
                return self._command(verdict, bounds, kind=CommandKind.SET, knob=knob, value=value, factor=factor)
            case Scale():
                decision = self._scaled(action, verdict)
                self.orders.append(decision.order)
                self._groups[action.group] = decision.group
                if action.group not in self._ordered:
                    self._ordered.append(action.group)
                return decision.message
        raise NotDoneError("only a training can do this, between two of its steps")

    def _scaled(self, action: Scale, verdict: Verdict) -> ScaleDecision:
        """Decide a scaling of a group. Raises NotDoneError."""
        if self._job.copy_of is not None:
            raise NotDoneError(f"this job is a copy, made by a rule: its own rules do not scale {action.group!r}")
        if len(self.orders) >= MAX_ORDERS:
            raise NotDoneError(f"{MAX_ORDERS} others are to be carried out first")
        if action.group not in self._groups:
            self._groups[action.group] = self._read_group(action.group)
        order = ScaleOrder(
            number=f"{self._evaluation}.{len(self.orders) - self._pending}",
            rule=verdict.rule,
            revision=self._job.rules_revision,
            step=self._step,
            group=action.group,
        )
        return decide_scaling(self._groups[action.group], action, order, job_id=self._job.id, now=self._now)

    def _would(self, action: Scale, verdict: Verdict) -> str:
        try:
            return f"would be applied: {self._scaled(action, verdict).message}"
        except NotDoneError as error:
            return f"would be rejected: {error}"

    def _command(self, verdict: Verdict, bounds: Mapping[str, float] | None = None, **asked: Any) -> str:
        """Add a command for the training."""
        self._require_going_on()
        ends = asked["kind"] is CommandKind.STOP
        if not self._running and not (ends and self._job.epoch):
            raise NotDoneError(f"the job is {self._job.state}: no training is there to be told")
        if self._lease is not None and self._lease.token_sha256 is None:
            raise NotDoneError("its worker knows no commands")
        if self._given >= MAX_COMMANDS_AT_ONCE:
            raise NotDoneError(f"{MAX_COMMANDS_AT_ONCE} commands were given at this moment already")
        if self._commands is None:
            self._commands = list(self._read_commands())
        try:
            request = CommandRequest(**asked)
        except ValueError as error:
            raise NotDoneError("it cannot be asked of a training so") from error
        more: dict[str, Any] = {
            "rule": verdict.rule,
            "revision": self._job.rules_revision,
            "arguments": {**request.arguments, **(bounds or {})},
        }
        if ends:
            more["expires_at"] = self._now + STOP_COMMAND_LIFE_S
        change = steering.add_command(self._job, self._commands, request, key_sha256=None, now=self._now, more=more)
        (given,) = change.records(CommandRecord)
        gone = {one.key for one in change.deletes}
        self._commands = [*(one for one in self._commands if one.key(self._job.id, one.seq) not in gone), given]
        self._records.append(given)
        self._given += 1
        self._dropped += change.deletes
        self._job = self._job.model_copy(update={"commands_seq": given.seq})
        recipient = "the training is told" if self._running else "the next training will be told"
        return f"{recipient}: command {given.seq}, {given.kind}"

    def _require_going_on(self) -> None:
        if self._end is not None:
            raise NotDoneError("another action ends the attempt already")

    def _move(self, decide_scaling: Callable[[EndedBy], tuple[Transaction, str]], verdict: Verdict) -> str:
        self._require_going_on()
        why = verdict.reason or ", ".join(f"{one.text} = {_format_value(one.value)}" for one in verdict.operands)
        by = EndedBy(
            rule=verdict.rule, revision=self._job.rules_revision, step=self._step, message=why[:MAX_MESSAGE_CHARS]
        )
        self._end, done = decide_scaling(by)
        return done

    def _fail(self, by: EndedBy) -> tuple[Transaction, str]:
        """Fail the job even while a worker runs the job; the worker's next heartbeat receives a directive."""
        reason = Reason(code=FailureClass.STOPPED_BY_RULE.value, message=describe_cause(by))
        updates: dict[str, Any] = {
            "state": JobState.FAILED,
            "failed_at": self._now,
            "not_before": None,
            "pause_requested": False,
            "ended_by": by,
        }
        attempt = self._attempt
        if attempt is not None:
            attempt = attempt.model_copy(update={"failure_class": FailureClass.STOPPED_BY_RULE})
            updates |= self._of_attempt()
        change = end_job(self._job, attempt, AttemptEnd.FAILED, self._now, reason=reason, **updates)
        reason_data, cause = reason.model_dump(), cause_data(by)
        if attempt is not None:
            change = change.with_event(
                EventType.ATTEMPT_FAILED,
                self._now,
                reason=reason_data,
                machine_id=attempt.machine_id,
                not_before=None,
                **cause,
            )
        return change.with_event(EventType.FAILED, self._now, **reason_data, **cause), "the job has failed"

    def _pause(self, by: EndedBy) -> tuple[Transaction, str]:
        change = transitions.pause(self._job, message=describe_cause(by), now=self._now, code=ReasonCode.PAUSED_BY_RULE)
        asked = change.job.state is JobState.RUNNING
        done = "its worker is asked to hand the job back" if asked else "the job is paused"
        return change.with_job(ended_by=by), done

    def _requeue(self, by: EndedBy, *, exclude_host: bool) -> tuple[Transaction, str]:
        job, attempt, lease, now = self._job, self._attempt, self._lease, self._now
        if attempt is None or lease is None:
            raise NotDoneError(f"the job is {job.state}: no machine has it")
        avoid = job.avoid
        if exclude_host:
            avoid = retry_policy.avoided(avoid, attempt.machine_id, job.spec.policy, now)
        silent_s = now - (lease.expires_at - lease.duration_s)
        if silent_s <= ALIVE_INTERVALS * lease.heartbeat_interval_s:
            direct = DirectLease(
                job_id=job.id, epoch=job.epoch, directive=Directive.PAUSE, reason=ReasonCode.REQUEUED_BY_RULE
            )
            change = update_job(job, now, avoid=avoid, ended_by=by).also(direct)
            return change, "its worker is asked to hand the job back"
        reason = Reason(code=ReasonCode.REQUEUED_BY_RULE, message=describe_cause(by))
        change = requeue(
            job,
            attempt,
            AttemptEnd.RELEASED,
            reason,
            now,
            fence=None,
            counters=add_counts(job.counters, releases=1),
            event_data=cause_data(by),
            stale=True,
            ended_by=by,
            avoid=avoid,
            **self._of_attempt(),
        )
        return change, "the job is taken from a machine that is silent"

    def _of_attempt(self) -> dict[str, Any]:
        """Return the end of the attempt by its lease; the write requires that the lease is unchanged."""
        lease = self._lease
        if lease is None:
            return {"progress": None}
        progress: Progress | None = lease.progress
        return {
            "progress": progress,
            "expired_at": lease.expires_at,
            "seen_until": min(lease.expires_at - lease.duration_s, self._now),
        }


def _format_value(value: float | bool | None) -> str:
    if value is None:
        return "unknown"
    return str(value).lower() if isinstance(value, bool) else format(value, ".6g")
