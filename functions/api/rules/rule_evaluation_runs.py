"""Looking at the rules that the control plane evaluates: with heartbeats, when a job moves, and once a minute.

A job without such rules is not read for it, and the rule language is not loaded. Whatever goes wrong in here is logged
and becomes an event of the job; it fails no call.
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from baton.contract.jobs import JobState
from functions.api.rules.group_cache import GroupReads, Members
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.domain.errors import FenceBroken, StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Put
from functions.domain.ports import JobStore, LeaseStore
from functions.domain.records import Attempt, Job, Lease, MemberRecord, RulesRecord, RuleStateRecord

if TYPE_CHECKING:
    from baton.contract.rules.document.rule import RuleSet
    from functions.domain.rules.rule_evaluation import EvaluationResult, JobSnapshot

logger = logging.getLogger("baton.watching")

LOOKED_AT = 500
"""Jobs whose rules are looked at in one turn of the sweeper, the longest due first."""
TURN_S = 20.0
"""How long such a turn may take: taking lost machines' jobs back comes behind it, in the same function."""
SLOW_S = 1.0
"""A look that computes for longer counts as one in vain: three of them, and the rules are switched off. Waiting for
storage is not counted, nor is what it takes to read the tenant's jobs for a group: that is no rule's fault."""

GROUP_TAG = "group"
"""The tag that names a job's group."""

_groups = GroupReads()

Occasion = Literal["heartbeat", "timer", "state"]


def look_at_heartbeat(jobs: JobStore, leases: LeaseStore, lease: Lease, now: int) -> Lease:
    """Look, and tell how the lease is afterwards: a rule may have ended the attempt, or have something for it."""
    if not lease.watched or not look(jobs, leases, lease.job_id, "heartbeat", now, lease=lease):
        return lease
    try:
        return leases.get(lease.job_id) or lease
    except StorageUnavailable:
        # The heartbeat is accepted; the next one says the same.
        return lease


def look_at_move(jobs: JobStore, leases: LeaseStore, job: Job, now: int) -> Job:
    """Look at a job that has just been moved, and tell how it is afterwards."""
    if not job.watched or job.state.terminal or not look(jobs, leases, job.id, "state", now):
        return job
    try:
        return jobs.get(job.id) or job
    except StorageUnavailable:
        return job


class Turn(NamedTuple):
    """What the sweeper did about rules."""

    looked_at: int = 0
    decided: int = 0
    """Of how many of these jobs something was decided."""
    more: bool = False
    """Whether others may be due, and have to wait for the next turn."""


def look_at_all(jobs: JobStore, leases: LeaseStore, now: int, *, limit: int = LOOKED_AT) -> Turn:
    """The sweeper's turn. Never raises, and takes `TURN_S` and one look at most."""
    ends_at_s = time.monotonic() + TURN_S
    try:
        due = jobs.due_rules(now, limit=limit)
    except StorageUnavailable:
        logger.warning("nobody can say whose rules are due: storage is away", exc_info=True)
        return Turn()
    looked_at = decided = 0
    for job_id in due:
        if time.monotonic() > ends_at_s:
            logger.warning("rules are late: a turn was too short for all", extra={"due": len(due), "seen": looked_at})
            break
        decided += look(jobs, leases, job_id, "timer", now)
        looked_at += 1
    return Turn(looked_at, decided, more=looked_at < len(due) or len(due) == limit)


def look(
    jobs: JobStore, leases: LeaseStore, job_id: str, occasion: Occasion, now: int, *, lease: Lease | None = None
) -> bool:
    """Whether something was decided. Never raises. `lease`: as a heartbeat has just left it."""
    try:
        for _ in range(WRITE_TRIES):
            try:
                return _looked(jobs, leases, job_id, occasion, now, lease=lease)
            except (WriteConflict, FenceBroken):
                # Somebody else looked, or moved the job, at the same moment: decide anew, on what is there now.
                lease = None
        logger.warning("a job is being changed by others all the time", extra={"job_id": job_id})
    except StorageUnavailable:
        logger.warning("rules could not be looked at: storage is away", extra={"job_id": job_id}, exc_info=True)
    except Exception:  # the boundary between a job's rules and the call that they must not fail
        logger.exception("rules could not be looked at", extra={"job_id": job_id})
    return False


def _looked(
    jobs: JobStore, leases: LeaseStore, job_id: str, occasion: Occasion, now: int, *, lease: Lease | None
) -> bool:
    job = jobs.get(job_id)
    if job is None:
        return False
    rule_state = jobs.read(RuleStateRecord, job_id)
    # Here: a function that starts cold and looks at no rules does without the language.
    from functions.domain.rules import rule_evaluation

    carried_out = False
    if rule_state is not None and rule_state.orders:
        before, rule_state = rule_state, _scaled(jobs, job, rule_state, occasion=occasion, now=now)
        carried_out = rule_state is not before
        job = jobs.get(job_id) or job
    if rule_evaluation.has_nothing_to_evaluate(job, rule_state):
        if rule_state is not None and rule_state.next_at is not None and not rule_state.orders:
            jobs.put(Put(owner=job_id, record=rule_evaluation.without_next_evaluation(rule_state)))
        return carried_out
    attempt = None
    if job.state is JobState.RUNNING:
        attempt = jobs.read(Attempt, job_id, job.epoch)
        lease = lease or leases.get(job_id)
    seen = rule_evaluation.JobSnapshot(job=job, rule_state=rule_state, attempt=attempt, lease=lease)
    looked, members = _decided(jobs, seen, occasion, now)
    if looked.change is not None:
        jobs.apply(looked.change)
    else:
        jobs.put(Put(owner=job_id, record=looked.rule_state))
    member = looked.rule_state.member
    if members is not None and member.values and members.get(job_id) != member:
        _join(jobs, job, member)
    if looked.change is not None and looked.rule_state.orders:
        try:
            _scaled(jobs, looked.change.job, looked.rule_state, occasion=occasion, now=now)
        except WriteConflict:
            logger.info("a group is scaled by the next look", extra={"job_id": job_id})
    return looked.change is not None or carried_out


def _scaled(jobs: JobStore, job: Job, rule_state: RuleStateRecord, *, occasion: Occasion, now: int) -> RuleStateRecord:
    """Do what rules have decided on groups, less of it where somebody waits for an answer."""
    from functions.api.rules.group_scaling import AT_ONCE, IN_A_TURN, Carrying

    try:
        return Carrying(jobs, job, now).out(rule_state, limit=IN_A_TURN if occasion == "timer" else AT_ONCE)
    except WriteConflict:
        raise
    except Exception:  # the boundary between what one rule wants of other jobs, and all the job's rules
        # It stands there: the next look, of the sweeper at the latest, goes on.
        logger.exception("a group is not scaled yet", extra={"job_id": job.id})
        return rule_state


def _join(jobs: JobStore, job: Job, member: MemberRecord) -> None:
    """Tell the group. Behind the rule_state, which has it too: whoever looks next writes it if this comes to nothing."""
    try:
        _groups.join(jobs, job.tenant, job.spec.tags[GROUP_TAG], job.id, member)
    except StorageUnavailable:
        # What was decided is written: it must be heard of now.
        logger.warning("a job's group was not told", extra={"job_id": job.id}, exc_info=True)


def members_of(jobs: JobStore, job: Job, rules: RuleSet, now: int) -> Members | None:
    """What is known of the job's group; None, and no read, if its rules do not ask or it is in none."""
    from functions.domain.rules.rule_evaluation import asks_for_group

    group = job.spec.tags.get(GROUP_TAG)
    if not group or not asks_for_group(rules):
        return None
    return _groups.members(jobs, job.tenant, group, now)


def _decided(
    jobs: JobStore, seen: JobSnapshot, occasion: Occasion, now: int
) -> tuple[EvaluationResult, Members | None]:
    """What a look decides, or that it came to nothing; and what was read of the job's group."""
    from functions.api.rules.group_scaling import GroupReader
    from functions.domain.rules import rule_evaluation

    job = seen.job
    groups = GroupReader(jobs, job, now)
    try:
        rules = _rules(jobs, job.id, job.rules_revision)
        members = members_of(jobs, job, rules, now)
        began_s = time.thread_time()
        looked = rule_evaluation.evaluate_rules(
            seen,
            rules,
            event=occasion,
            now=now,
            kept=lambda: jobs.commands(job.id),
            members=members,
            groups=groups,
        )
        took_s = time.thread_time() - began_s - groups.took_s
    except StorageUnavailable:
        raise
    except Exception as error:  # the boundary between a job's rules and everything else
        logger.exception("rules cannot be checked", extra={"job_id": job.id})
        return rule_evaluation.record_failure(seen, f"{type(error).__name__}: {error}", now=now), None
    if took_s > SLOW_S:
        logger.warning("rules take long", extra={"job_id": job.id, "seconds": took_s})
        return rule_evaluation.record_failure(
            seen, f"a look took {took_s:.1f} s; it may take {SLOW_S:g} s", now=now
        ), None
    return looked, members


def standing_of(jobs: JobStore, job: Job) -> tuple[RuleStateRecord, RuleSet] | None:
    """How the rules stand that are evaluated here, and which they are; None if there are none."""
    rule_state = jobs.read(RuleStateRecord, job.id) if job.watched else None
    if rule_state is None:
        return None
    return rule_state, _rules(jobs, job.id, rule_state.revision or job.rules_revision)


def _rules(jobs: JobStore, job_id: str, revision: int) -> RuleSet:
    """Those of a revision that are evaluated here. Raises ValueError for one that cannot be read here."""
    store: Any = jobs
    return _read_rules(store, job_id, revision)


@lru_cache(maxsize=128)
def _read_rules(jobs: Any, job_id: str, revision: int) -> RuleSet:
    """A revision never changes: it is read and checked once."""
    from functions.domain.rules.rule_evaluation import control_plane_rules

    record = jobs.read(RulesRecord, job_id, revision)
    if record is None:
        raise ValueError(f"revision {revision} is lost")
    return control_plane_rules(record.text)
