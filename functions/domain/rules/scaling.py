"""Scale a group of jobs: decide the number of copies and the jobs to remove, and build the writes.

A decision is an order, which is written with the firing of the rule and the record of the group. The execution follows
and is idempotent: the same order always names the same jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import JobState, Reason, ReasonCode
from baton.contract.rules.document.actions import Scale
from baton.contract.worker.control import CommandKind, CommandRequest, EndedBy
from functions.domain.errors import NotDoneError, Refusal
from functions.domain.jobs import transitions
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import CommandRecord, Job, RulesRecord, ScaleOrder, ScalingRecord
from functions.domain.rules import steering

GROUP_TAG = "group"
"""The tag that names a job's group."""
MAX_MESSAGE_CHARS = 1000
MAX_ORDERS = 5
"""Pending orders of one job: the rule state is one item, and each order adds a write to its transaction."""
RETENTION_S = 30 * 86_400
"""Time that a group's record outlives its last decision."""
STOP_COMMAND_LIFE_S = 366 * 86_400
"""Life of a stop command of a rule, which the rule does not repeat and without which the job never ends."""


@dataclass(frozen=True, kw_only=True)
class GroupJobs:
    """Present jobs of a group, with every decision about the group."""

    tenant: str
    name: str
    jobs: tuple[Job, ...]
    """Jobs that have not ended, newest first."""
    uncreated: frozenset[str]
    """Copies that are decided and not created yet."""
    leaving: frozenset[str]
    """Jobs that are being removed."""
    record: ScalingRecord

    @property
    def count(self) -> int:
        """Return the number of jobs that have not ended, including copies that are not created yet."""
        return len(self.jobs) + len(self.uncreated)


class ScaleDecision(NamedTuple):
    """Order of one rule, its text, and the group after the order."""

    order: ScaleOrder
    message: str
    group: GroupJobs


def build_group(tenant: str, name: str, found: Iterable[Job], record: ScalingRecord | None) -> GroupJobs:
    """Build a group from its jobs and its record. `found` must contain the existing jobs that the record names."""
    before = record or ScalingRecord(version=0, tenant=tenant, group=name)
    known = {job.id: job for job in found}
    live = [job for job in known.values() if not job.state.terminal and job.spec.tags.get(GROUP_TAG) == name]
    alive = {job.id for job in live}
    uncreated = [one for one in before.copies if one not in known]
    copies = [one for one in before.copies if one in alive or one not in known]
    leaving = [one for one in before.leaving if one in alive]
    return GroupJobs(
        tenant=tenant,
        name=name,
        jobs=tuple(sorted(live, key=lambda job: (job.created_at, job.id), reverse=True)),
        uncreated=frozenset(uncreated),
        leaving=frozenset((*leaving, *(job.id for job in live if job.leaving))),
        record=before.model_copy(update={"version": before.version + 1, "copies": copies, "leaving": leaving}),
    )


def decide_scaling(group: GroupJobs, action: Scale, order: ScaleOrder, *, job_id: str, now: int) -> ScaleDecision:
    """Complete an order that names its rule. `job_id`: the job of the rule.

    Raises NotDoneError, with the reason, if nothing can be done.
    """
    if not group.jobs:
        raise NotDoneError(f"group {group.name!r} has no job that has not ended")
    if not any(_goes_on(job) for job in group.jobs):
        raise NotDoneError(f"all jobs of group {group.name!r} that have not ended are paused")
    decided = _copied(group, action, order) if action.delta > 0 else _taken_out(group, action, order, job_id)
    born, leaving = decided.order.copy_ids(job_id), decided.order.leaving
    record = group.record.model_copy(
        update={
            "copies": [*group.record.copies, *born],
            "leaving": [*group.record.leaving, *leaving],
            "expires_at": now + RETENTION_S,
        }
    )
    after = replace(group, record=record, uncreated=group.uncreated.union(born), leaving=group.leaving.union(leaving))
    return decided._replace(group=after)


def _copied(group: GroupJobs, action: Scale, order: ScaleOrder) -> ScaleDecision:
    room = action.most - group.count
    if room <= 0:
        raise NotDoneError(f"group {group.name!r} has {_jobs(group.count)}, and the rule allows {action.most} at most")
    # A copy of a job that rents its own machine would wait in a queue whose machine ends with the job. An elastic job
    # has seats, which a copy would lack.
    going = [job for job in group.jobs if _goes_on(job) and job.spec.rent is None and job.spec.nodes is None]
    if not going:
        raise NotDoneError(
            f"all jobs of group {group.name!r} rent machines of their own or have nodes, and no rule copies such jobs; "
            "submit jobs without both to the queue of a fleet instead"
        )
    source = next((job for job in going if job.id not in group.leaving), going[0])
    number = min(action.delta, room)
    cut = f" of {action.delta}: the rule allows {action.most} jobs at most" if number < action.delta else ""
    copies = "1 copy" if number == 1 else f"{number} copies"
    message = f"group {group.name!r} has {_jobs(group.count)}: {copies} of job {source.id}{cut}"
    return ScaleDecision(order.model_copy(update={"source": source.id, "copies": number}), message, group)


def _taken_out(group: GroupJobs, action: Scale, order: ScaleOrder, job_id: str) -> ScaleDecision:
    staying = [job for job in group.jobs if _goes_on(job) and job.id not in group.leaving]
    # A copy that is not created yet may never be created, therefore only jobs that exist count for `least`.
    surplus = len(staying) - action.least
    if surplus <= 0:
        to_come = f"; {len(group.uncreated)} more are being submitted" if group.uncreated else ""
        raise NotDoneError(
            f"of group {group.name!r} {_jobs(len(staying))} would go on, and the rule wants {action.least} at least"
            f"{to_come}"
            if action.least or group.uncreated
            else f"all jobs of group {group.name!r} are being taken out already"
        )
    # The newest jobs come first: ending a waiting job costs nothing, and the rule's own job ends last.
    staying.sort(key=lambda job: (job.id == job_id, job.state is JobState.RUNNING))
    chosen = staying[: min(-action.delta, surplus)]
    bound = f": the rule wants {_jobs(action.least)} at least" if action.least else ""
    cut = f" of {-action.delta}{bound}" if len(chosen) < -action.delta else ""
    names = ", ".join(job.id for job in chosen)
    message = f"group {group.name!r} has {_jobs(group.count)}: {len(chosen)} taken out{cut}: {names}"
    return ScaleDecision(order.model_copy(update={"leaving": [job.id for job in chosen]}), message, group)


def _goes_on(job: Job) -> bool:
    """Return True if the job is not paused: the user who paused a job decides when the job continues."""
    return job.state is not JobState.PAUSED and not job.pause_requested


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def copy_job(
    source: Job, rules: RulesRecord | None, order: ScaleOrder, *, job_id: str, by_job: str, now: int
) -> Transaction:
    """Submit a copy of `source` under an id of the order. Refused if a user could not submit the job now."""
    first = None
    if rules is not None and rules.text.strip():
        first = RulesRecord(revision=1, text=rules.text, created_at=now, created_by=rules.created_by)
    change = transitions.submit(
        job_id=job_id,
        tenant=source.tenant,
        spec=source.spec,
        queue=source.queue,
        shard=source.shard,
        priority=source.priority,
        now=now,
        rules=first,
        watched=source.watched and first is not None,
    )
    return change.with_job(copy_of=source.id).with_event_data(copy_of=source.id, **_order_data(order, by_job))


def remove_job(
    job: Job, commands: Sequence[CommandRecord], order: ScaleOrder, *, by_job: str, now: int
) -> Transaction | None:
    """Cancel a waiting or elastic job, or give a running training the command `stop`; None for a removed job.

    Refused for a paused job. `commands`: the commands of a running job. Its worker knows commands, because original
    workers receive only jobs in the original's form, which have no tags.
    """
    if is_removed(job, order, by_job):
        return None
    if not _goes_on(job):
        # The job was paused after the decision; the job stays paused.
        raise Refusal(ErrorCode.ILLEGAL_TRANSITION, f"Job {job.id} is paused; scale leaves paused jobs unchanged.")
    message = f"rule {order.rule} of job {by_job} takes it out of group {order.group}"
    if job.state is not JobState.RUNNING or job.spec.nodes is not None:
        return _canceled(job, message, order, by_job=by_job, now=now)
    left = {"left_by": _name(order, by_job)}
    asked = CommandRequest(kind=CommandKind.STOP, outcome="complete", save=True)
    more = {"rule": order.rule, "expires_at": now + STOP_COMMAND_LIFE_S}
    change = steering.add_command(job, commands, asked, key_sha256=None, now=now, more=more)
    change = change.with_job(leaving=True, left_epoch=job.epoch, **left)
    event_message = f"{message}: command {change.job.commands_seq}, stop"
    return change.with_event(
        EventType.ACTION_APPLIED,
        now,
        **_place(job),
        actions=["scale"],
        message=event_message,
        **_order_data(order, by_job),
    )


def is_removed(job: Job, order: ScaleOrder, by_job: str) -> bool:
    """Return True if the job has ended or the order has removed the job already."""
    return job.state.terminal or job.left_by == _name(order, by_job)


def may_have_lost_stop(job: Job) -> bool:
    """Return True if the attempt that received the stop is over: only the commands show whether the job stops."""
    return job.leaving and not (job.state is JobState.RUNNING and job.epoch == job.left_epoch)


def recount_leaving(job: Job, commands: Sequence[CommandRecord], now: int) -> Job:
    """Return a job that `may_have_lost_stop` with `leaving` derived from its commands, `commands`.

    If the attempt was lost after its answer to the stop, no later attempt receives the stop, and the job counts again.
    """
    return job.model_copy(update={"leaving": steering.has_pending_stop(job, commands, now)})


def _name(order: ScaleOrder, by_job: str) -> str:
    return f"{by_job} {order.number}"


def _canceled(job: Job, message: str, order: ScaleOrder, *, by_job: str, now: int) -> Transaction:
    change = transitions.cancel(job, None, message=message, now=now)
    reason = Reason(code=ReasonCode.CANCELED_BY_RULE, message=message)
    ended_by = EndedBy(rule=order.rule, step=_place(job)["step"], message=message)
    change = change.with_job(reason=reason, ended_by=ended_by, left_by=_name(order, by_job))
    return change.with_event_data(**_order_data(order, by_job))


def _place(job: Job) -> dict[str, Any]:
    return {"place": "control_plane", "step": job.progress.step if job.progress is not None else 0}


def _order_data(order: ScaleOrder, by_job: str) -> dict[str, Any]:
    return {"rule": order.rule, "by_job": by_job, "group": order.group}


def settle_orders(record: ScalingRecord, orders: Iterable[ScaleOrder], lost: Iterable[str]) -> ScalingRecord:
    """Return the group's record after executed orders. `lost`: copies that will never be created."""
    gone = {one for order in orders if order.group == record.group for one in order.leaving}
    never = set(lost)
    return record.model_copy(
        update={
            "version": record.version + 1,
            "copies": [one for one in record.copies if one not in never],
            "leaving": [one for one in record.leaving if one not in gone],
        }
    )


def add_failure_event(change: Transaction, order: ScaleOrder, why: str, *, now: int) -> Transaction:
    """Return the change of the rule's job with the event of an order that failed completely or in part."""
    common = {"revision": order.revision, "at": now, "rule": order.rule, "severity": "error", "dry_run": False}
    message = f"group {order.group!r}: {why}"[:MAX_MESSAGE_CHARS]
    place = {"place": "control_plane", "step": order.step}
    return change.with_event(EventType.ACTION_FAILED, now, **place, **common, actions=["scale"], message=message)
