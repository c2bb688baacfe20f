"""End an attempt as a rule orders: by rollback, pause or requeue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import AttemptEnd, Progress, Reason, ReasonCode
from baton.contract.jobs.policy import Retention
from baton.contract.worker.control import MAX_ROLLBACKS, EndedBy, LeaveByRule, Rollback, RolledBack
from functions.domain.errors import Refusal
from functions.domain.jobs import retry as retry_policy
from functions.domain.jobs.attempt_end import add_counts, cause_data, requeue
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.transaction import Transaction
from functions.domain.jobs.transitions import require_running
from functions.domain.records import Attempt, CheckpointRecord, Job

BEST_BY = ("eval.loss", "eval_loss", "loss")
"""Metrics for `best` in order of preference, after the metric of retention; the lowest value is best."""

_REASONS = {
    "rollback": ReasonCode.ROLLED_BACK_BY_RULE,
    "pause": ReasonCode.PAUSED_BY_RULE,
    "requeue": ReasonCode.REQUEUED_BY_RULE,
}


def end_attempt_by_rule(
    job: Job,
    attempt: Attempt,
    fence: Fence,
    wish: LeaveByRule,
    *,
    resumable: Sequence[CheckpointRecord],
    checkpoints: Iterable[CheckpointRecord] = (),
    progress: Progress | None,
    now: int,
) -> Transaction:
    """End the attempt as the rule orders, without a failure and without a backoff.

    `resumable`: checkpoints to resume from, among which a rollback chooses. `checkpoints`: all kept ones, newest first;
    read only for the text of a refusal.
    """
    require_running(job)
    by = wish.ended_by
    reason = Reason(code=_REASONS[wish.kind], message=describe_cause(by))
    updates: dict[str, Any] = {"ended_by": by, "ends": job.ends + 1}
    done = None
    if wish.rollback is not None:
        chosen = choose_checkpoint(resumable, wish.rollback, job.spec.policy.retention)
        done = _rolled_back(job, wish.rollback, by, chosen)
        if chosen is None:
            _require_nothing_lost(job, wish.rollback, by, checkpoints)
        place = (chosen.step, chosen.epoch) if chosen else (None, None)
        updates |= {"rollbacks": [*job.rollbacks, done], "checkpoint_step": place[0], "checkpoint_epoch": place[1]}
        if place != (job.checkpoint_step, job.checkpoint_epoch):
            updates["branches"] = job.branches_from(chosen)
    elif wish.kind == "pause" and not job.pause_requested:
        job = job.model_copy(update={"pause_requested": True, "reason": reason})
    elif wish.exclude_host:
        updates["avoid"] = retry_policy.avoided(job.avoid, attempt.machine_id, job.spec.policy, now)
    change = requeue(
        job,
        attempt,
        AttemptEnd.RELEASED,
        reason,
        now,
        fence=fence,
        progress=progress,
        counters=add_counts(job.counters, releases=1),
        event_data=cause_data(by),
        **{"stale": True, **updates},
    )
    return change if done is None else change.with_event(EventType.ROLLED_BACK, now, **done.model_dump())


def describe_cause(by: EndedBy) -> str:
    """Return the rule or command that ended the attempt, and the step, as text."""
    cause = (
        f"rule {by.rule}" if by.rule is not None else f"command {by.command}" if by.command is not None else "a rule"
    )
    return f"{cause} at step {by.step}{': ' if by.message else ''}{by.message}"


def _rolled_back(job: Job, wish: Rollback, by: EndedBy, chosen: CheckpointRecord | None) -> RolledBack:
    rule = by.rule or ""
    used = sum(one.rule == rule for one in job.rollbacks)
    if used >= wish.budget or len(job.rollbacks) >= MAX_ROLLBACKS:
        allowed = f"its budget is {wish.budget}" if used >= wish.budget else f"a job may be {MAX_ROLLBACKS} times"
        raise Refusal(
            ErrorCode.ROLLBACK_BUDGET_SPENT,
            f"Rule {rule} has rolled job {job.id} back {used} times, all rules {len(job.rollbacks)} times; {allowed}.",
            field="by_rule.rollback.budget",
        )
    return RolledBack(
        number=len(job.rollbacks) + 1,
        rule=rule,
        step=by.step,
        to_step=chosen.step if chosen else 0,
        skip=wish.skip,
        lr_factor=wish.lr_factor,
        commands_seq=job.commands_seq,
    )


def _require_nothing_lost(job: Job, wish: Rollback, by: EndedBy, checkpoints: Iterable[CheckpointRecord]) -> None:
    """Refuse to begin at step 0 a job that had a checkpoint before the step to which the rule rolls back.

    Without a first step the job may have had such a checkpoint, therefore the rollback is refused.
    """
    if job.checkpoint_step is None or (job.first_step is not None and job.first_step >= wish.before_step):
        return
    steps = [one.step for one in checkpoints]
    oldest = f"the oldest kept checkpoint is of step {steps[-1]}" if steps else "no checkpoint is kept"
    raise Refusal(
        ErrorCode.ROLLBACK_NOT_KEPT,
        f"Rule {by.rule} wants job {job.id} back before step {wish.before_step}; {oldest}, and older ones are gone. "
        "A greater keep_last of the retention keeps them, a shorter 'for' of the rule needs less.",
        field="by_rule.rollback.before_step",
    )


def choose_checkpoint(
    resumable: Sequence[CheckpointRecord], wish: Rollback, retention: Retention
) -> CheckpointRecord | None:
    """Return the checkpoint to which a rollback returns; None for the beginning."""
    before = sorted((one for one in resumable if one.step < wish.before_step), key=lambda one: one.step, reverse=True)
    if wish.to == "best":
        measures = [(name, 1.0) for name in BEST_BY]
        if retention.keep_best_metric is not None:
            measures.insert(0, (retention.keep_best_metric, 1.0 if retention.keep_best_mode == "min" else -1.0))
        for name, sign in measures:
            measured = [one for one in before if name in one.metrics]
            if measured:
                return min(measured, key=lambda one: sign * one.metrics[name])
    return before[0] if before else None
