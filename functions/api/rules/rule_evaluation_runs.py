"""Evaluations of the control plane's rules: with heartbeats, on transitions, and once a minute.

A job without such rules costs no read and does not load the rule language. A failure in this module is logged, or
becomes an event of the job; a failure never fails the call.
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from baton.contract.jobs.job import JobState
from functions.api.rules.group_cache import GroupCache, Members
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.api.worlds.seat_settlement import settle_job
from functions.domain.errors import FenceBroken, StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Put
from functions.domain.ports import JobStore, LeaseStore
from functions.domain.records import Attempt, Job, Lease, MemberRecord, RulesRecord, RuleStateRecord
from functions.domain.worlds.seat_ids import seat_id

if TYPE_CHECKING:
    from baton.contract.rules.document.rule import RuleSet
    from functions.domain.rules.rule_evaluation import EvaluationResult, JobSnapshot

logger = logging.getLogger("baton.watching")

MAX_JOBS_PER_BATCH = 500
"""Jobs whose rules a sweep evaluates, the longest due first."""
BATCH_S = 20.0
"""Time limit of a sweep's evaluations; the same function revokes expired leases afterwards."""
SLOW_S = 1.0
"""CPU time above which an evaluation counts as failed; three failures disable the rules. The time excludes waiting for
storage and reading the tenant's jobs for a group, which do not depend on the rules."""

GROUP_TAG = "group"
"""The tag that names a job's group."""

_groups = GroupCache()

Occasion = Literal["heartbeat", "timer", "state"]


def evaluate_on_heartbeat(jobs: JobStore, leases: LeaseStore, lease: Lease, now: int) -> Lease:
    """Evaluate the job's rules; return the lease afterwards: a rule may have ended the attempt or issued a command."""
    if not lease.watched or not evaluate_job(jobs, leases, lease.job_id, "heartbeat", now, lease=lease):
        return lease
    try:
        return leases.get(lease.job_id) or lease
    except StorageUnavailable:
        # The heartbeat is accepted; the next heartbeat reads the lease again.
        return lease


def evaluate_on_transition(jobs: JobStore, leases: LeaseStore, job: Job, now: int) -> Job:
    """Evaluate the rules of a job after its transition; return the job afterwards."""
    if not job.watched or job.state.terminal or not evaluate_job(jobs, leases, job.id, "state", now):
        return job
    try:
        return jobs.get(job.id) or job
    except StorageUnavailable:
        return job


class EvaluationBatch(NamedTuple):
    """Result of a sweep's evaluations."""

    evaluated: int = 0
    decided: int = 0
    """Evaluated jobs with a decision."""
    more: bool = False
    """True if other jobs may be due and wait for the next sweep."""


def evaluate_due_jobs(
    jobs: JobStore, leases: LeaseStore, now: int, *, limit: int = MAX_JOBS_PER_BATCH
) -> EvaluationBatch:
    """Evaluate the rules of due jobs for the sweeper. Never raises; takes at most `BATCH_S` and one evaluation."""
    ends_at_s = time.monotonic() + BATCH_S
    try:
        due = jobs.due_rules(now, limit=limit)
    except StorageUnavailable:
        logger.warning("the jobs with due rules are unknown: storage is unavailable", exc_info=True)
        return EvaluationBatch()
    evaluated = decided = 0
    for job_id in due:
        if time.monotonic() > ends_at_s:
            logger.warning("rules are late: the sweep had no time for all", extra={"due": len(due), "seen": evaluated})
            break
        decided += evaluate_job(jobs, leases, job_id, "timer", now)
        evaluated += 1
    return EvaluationBatch(evaluated, decided, more=evaluated < len(due) or len(due) == limit)


def evaluate_job(
    jobs: JobStore, leases: LeaseStore, job_id: str, occasion: Occasion, now: int, *, lease: Lease | None = None
) -> bool:
    """Evaluate a job's rules; return True after a decision. Never raises. `lease`: the lease after a heartbeat."""
    try:
        for _ in range(WRITE_TRIES):
            try:
                return _evaluate_once(jobs, leases, job_id, occasion, now, lease=lease)
            except (WriteConflict, FenceBroken):
                # Another evaluation or call changed the job at the same moment, therefore evaluate the new state.
                lease = None
        logger.warning("other calls changed a job during all tries", extra={"job_id": job_id})
    except StorageUnavailable:
        logger.warning("rules are not evaluated: storage is unavailable", extra={"job_id": job_id}, exc_info=True)
    except Exception:  # the boundary between a job's rules and the call
        logger.exception("rules are not evaluated", extra={"job_id": job_id})
    return False


def _evaluate_once(
    jobs: JobStore, leases: LeaseStore, job_id: str, occasion: Occasion, now: int, *, lease: Lease | None
) -> bool:
    job = _settled(jobs, jobs.get(job_id), now)
    if job is None:
        return False
    rule_state = jobs.read(RuleStateRecord, job_id)
    # Imported here, so that a cold start does not load the rule language.
    from functions.domain.rules import rule_evaluation

    executed_orders = False
    if rule_state is not None and rule_state.orders:
        before, rule_state = rule_state, _execute_scale_orders(jobs, job, rule_state, occasion=occasion, now=now)
        executed_orders = rule_state is not before
        job = jobs.get(job_id) or job
    if rule_evaluation.has_nothing_to_evaluate(job, rule_state):
        if rule_state is not None and rule_state.next_at is not None and not rule_state.orders:
            jobs.put(Put(owner=job_id, record=rule_evaluation.without_next_evaluation(rule_state)))
        return executed_orders
    seen = _read_snapshot(jobs, leases, job, rule_state, lease)
    result, members = _decide(jobs, seen, occasion, now)
    if result.change is not None:
        jobs.apply(result.change)
        _settled(jobs, job, now)
    else:
        jobs.put(Put(owner=job_id, record=result.rule_state))
    member = result.rule_state.member
    if members is not None and member.values and members.get(job_id) != member:
        _publish_member(jobs, job, member)
    if result.change is not None and result.rule_state.orders:
        try:
            _execute_scale_orders(jobs, result.change.job, result.rule_state, occasion=occasion, now=now)
        except WriteConflict:
            logger.info("the next evaluation scales the group", extra={"job_id": job_id})
    return result.change is not None or executed_orders


def _settled(jobs: JobStore, job: Job | None, now: int) -> Job | None:
    """Settle an elastic job with its seats, because a decision notifies the leases of the attempts that it knows."""
    return job if job is None or job.spec.nodes is None else settle_job(jobs, job.id, now)


def _read_snapshot(
    jobs: JobStore, leases: LeaseStore, job: Job, rule_state: RuleStateRecord | None, lease: Lease | None
) -> JobSnapshot:
    """Read the present attempt and its lease, or those of all seats. `lease`: the lease after a heartbeat."""
    from functions.domain.rules.rule_evaluation import JobSnapshot, merge_leases

    if job.state is not JobState.RUNNING:
        return JobSnapshot(job=job, rule_state=rule_state)
    if job.spec.nodes is None:
        attempt = jobs.read(Attempt, job.id, job.epoch)
        return JobSnapshot(job=job, rule_state=rule_state, attempt=attempt, lease=lease or leases.get(job.id))
    running = {seat_id(job.id, place): mark.epoch for place, mark in enumerate(job.seats) if mark.running}
    found = [jobs.read(Attempt, seat, epoch) for seat, epoch in running.items()]
    newest = merge_leases(job, list(leases.get_many(list(running)).values()))
    return JobSnapshot(job=job, rule_state=rule_state, lease=newest, nodes=[one for one in found if one is not None])


def _execute_scale_orders(
    jobs: JobStore, job: Job, rule_state: RuleStateRecord, *, occasion: Occasion, now: int
) -> RuleStateRecord:
    """Execute scale orders; return the remaining state. A call of a user or worker executes fewer orders."""
    from functions.api.rules.group_scaling import JOBS_PER_CALL, JOBS_PER_SWEEP, ScaleOrderExecutor

    try:
        return ScaleOrderExecutor(jobs, job, now).execute(
            rule_state, limit=JOBS_PER_SWEEP if occasion == "timer" else JOBS_PER_CALL
        )
    except WriteConflict:
        raise
    except Exception:  # the boundary between one rule's effect on other jobs and all rules of the job
        # The state keeps the orders for the next evaluation, at the latest the sweeper's.
        logger.exception("a group is not scaled yet", extra={"job_id": job.id})
        return rule_state


def _publish_member(jobs: JobStore, job: Job, member: MemberRecord) -> None:
    """Publish the job's values to its group. The rule state has the values, too, so the next evaluation repairs a
    failed write."""
    try:
        _groups.join(jobs, job.tenant, job.spec.tags[GROUP_TAG], job.id, member)
    except StorageUnavailable:
        # The decision is already written, therefore the call must succeed.
        logger.warning("a job's values were not published to its group", extra={"job_id": job.id}, exc_info=True)


def read_members(jobs: JobStore, job: Job, rules: RuleSet, now: int) -> Members | None:
    """Return the members of the job's group; None, without a read, if the job has no group or no rule reads it."""
    from functions.domain.rules.rule_evaluation import asks_for_group

    group = job.spec.tags.get(GROUP_TAG)
    if not group or not asks_for_group(rules):
        return None
    return _groups.members(jobs, job.tenant, group, now)


def _decide(jobs: JobStore, seen: JobSnapshot, occasion: Occasion, now: int) -> tuple[EvaluationResult, Members | None]:
    """Return the result of an evaluation, or the failure, and the members of the job's group."""
    from functions.api.rules.group_scaling import GroupReader
    from functions.domain.rules import rule_evaluation

    job = seen.job
    groups = GroupReader(jobs, job, now)
    try:
        rules = _load_rules(jobs, job.id, job.rules_revision)
        members = read_members(jobs, job, rules, now)
        began_s = time.thread_time()
        result = rule_evaluation.evaluate_rules(
            seen,
            rules,
            event=occasion,
            now=now,
            read_commands=lambda: jobs.commands(job.id),
            members=members,
            groups=groups,
        )
        cpu_s = time.thread_time() - began_s - groups.cpu_s
    except StorageUnavailable:
        raise
    except Exception as error:  # the boundary between a job's rules and the control plane
        logger.exception("rules cannot be evaluated", extra={"job_id": job.id})
        return rule_evaluation.record_failure(seen, f"{type(error).__name__}: {error}", now=now), None
    if cpu_s > SLOW_S:
        logger.warning("rules take long", extra={"job_id": job.id, "seconds": cpu_s})
        return rule_evaluation.record_failure(
            seen, f"an evaluation took {cpu_s:.1f} s; the limit is {SLOW_S:g} s", now=now
        ), None
    return result, members


def read_rule_state(jobs: JobStore, job: Job) -> tuple[RuleStateRecord, RuleSet] | None:
    """Return the state of the control plane's rules and the rules; None without such rules."""
    rule_state = jobs.read(RuleStateRecord, job.id) if job.watched else None
    if rule_state is None:
        return None
    return rule_state, _load_rules(jobs, job.id, rule_state.revision or job.rules_revision)


def _load_rules(jobs: JobStore, job_id: str, revision: int) -> RuleSet:
    """Return the control plane's rules of a revision. Raises ValueError for an unreadable revision."""
    store: Any = jobs
    return _load_revision(store, job_id, revision)


@lru_cache(maxsize=128)
def _load_revision(jobs: Any, job_id: str, revision: int) -> RuleSet:
    """Read and parse a revision once: a revision never changes."""
    from functions.domain.rules.rule_evaluation import control_plane_rules

    record = jobs.read(RulesRecord, job_id, revision)
    if record is None:
        raise ValueError(f"revision {revision} is lost")
    return control_plane_rules(record.text)
