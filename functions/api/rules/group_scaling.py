"""Groups that rules scale: read a group, and execute scale orders.

The job of the rule stores an order until the order is executed completely. After an interruption the next evaluation
of the job executes the order again. The repetition is idempotent: the ids of the copies follow from the order, and a
job with a pending removal stays unchanged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import JobState
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.domain.errors import FenceBroken, NotDoneError, Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Put, Transaction, update_job
from functions.domain.ports import JobStore
from functions.domain.records import Job, RulesRecord, RuleStateRecord, ScaleOrder
from functions.domain.rules import scaling as rules

logger = logging.getLogger("baton.scaling")

MAX_LIVE_JOBS = 2_000
"""Limit of a tenant's jobs that have not ended, among which a group is searched. An index by group would make every
job's writes more expensive, therefore no such index exists."""
PAGE = 500
JOBS_PER_CALL = 25
"""Jobs that a worker's or user's call writes for a rule, at some milliseconds each; the sweeper writes the rest."""
JOBS_PER_SWEEP = 200
"""Jobs that the sweeper writes for the rules of one job; the same function revokes expired leases afterwards."""
MAX_GROUPS = 10
"""Groups that one evaluation may read."""
_LIVE = (JobState.RUNNING, JobState.PENDING, JobState.PAUSED)


class GroupReader:
    """Reader of the groups that the rules of one evaluation scale. Lists the tenant's jobs at most once."""

    def __init__(self, jobs: JobStore, own: Job, now: int) -> None:
        """`own`: the rules' job as read by this evaluation."""
        self._jobs, self._own, self._now = jobs, own, now
        self._by_group: dict[str, list[str]] | None = None
        """Ids of the tenant's jobs that have not ended. The reader keeps no jobs, which could exceed the memory."""
        self._too_many = False
        self._asked: set[str] = set()
        self.cpu_s = 0.0
        """CPU seconds of this reader, which depend on the number of the tenant's jobs, not on the rules."""

    def __call__(self, name: str) -> rules.GroupJobs:
        """Read the present state of a group.

        Raises NotDoneError for too many groups, and for a tenant with so many jobs that the search takes too long.
        """
        began_s = time.thread_time()
        try:
            return self._read(name)
        finally:
            self.cpu_s += time.thread_time() - began_s

    def _read(self, name: str) -> rules.GroupJobs:
        self._asked.add(name)
        if len(self._asked) > MAX_GROUPS:
            raise NotDoneError(f"group {name!r} is not read: one evaluation may read {MAX_GROUPS} groups")
        tenant = self._own.tenant
        if self._by_group is None:
            self._by_group = self._list_by_group()
        if self._too_many:
            raise NotDoneError(f"group {name!r} cannot be counted: more than {MAX_LIVE_JOBS} jobs have not ended")
        # The jobs are read after the record, so that no job is older than the record.
        record = self._jobs.scaling(tenant, name)
        # The index may be behind, therefore the jobs of the rules' own decisions are read, too.
        named = [] if record is None else [*record.copies, *record.leaving]
        found = {job.id: job for job in self._jobs.get_many([*self._by_group.get(name, ()), *named])}
        # The index may not yet show the evaluated job's own transition either.
        found.setdefault(self._own.id, self._own)
        return rules.build_group(tenant, name, [self._refresh(job) for job in found.values()], record)

    def _refresh(self, job: Job) -> Job:
        if not rules.may_have_lost_stop(job):
            return job
        return rules.recount_leaving(job, self._jobs.commands(job.id), self._now)

    def _list_by_group(self) -> dict[str, list[str]]:
        """List the ids of the tenant's jobs that have not ended, by group."""
        found: dict[str, list[str]] = {}
        listed_jobs = 0
        for state in _LIVE:
            cursor = None
            while listed_jobs <= MAX_LIVE_JOBS:
                listed = self._jobs.list_jobs(
                    self._own.tenant, state=state, limit=PAGE, cursor=cursor, newest_first=True
                )
                listed_jobs += len(listed.items)
                for job in listed.items:
                    if group := job.spec.tags.get(rules.GROUP_TAG):
                        found.setdefault(group, []).append(job.id)
                cursor = listed.cursor
                if cursor is None:
                    break
        self._too_many = listed_jobs > MAX_LIVE_JOBS
        return found


@dataclass(frozen=True)
class ScaleOrderExecutor:
    """Executor of the scale orders that `job` stores."""

    jobs: JobStore
    job: Job
    now: int
    sources: dict[str, tuple[Job, RulesRecord | None]] = field(default_factory=dict)
    """Jobs to copy and their rules, as read by this executor."""

    def execute(self, rule_state: RuleStateRecord, *, limit: int) -> RuleStateRecord:
        """Execute the orders for up to `limit` jobs; return the state with the remaining orders.

        An order that fails stays in the state. Raises WriteConflict and StorageUnavailable; the caller may repeat the
        execution.
        """
        done: list[ScaleOrder] = []
        refused: dict[str, dict[str, str]] = {}
        left = limit
        for order in rule_state.orders:
            try:
                todo = self._list_pending(order)
                some = todo[:left]
                refused[order.number] = {one: why for one in some if (why := self._execute_one(order, one))}
            except StorageUnavailable:
                raise
            except Exception:  # the boundary between one order and the other orders and rules of the job
                logger.exception("a group is not scaled yet", extra={"job_id": self.job.id, "group": order.group})
                continue
            left -= len(some)
            if len(some) < len(todo):
                break
            done.append(order)
        return self._settle(rule_state, done, refused) if done else rule_state

    def _list_pending(self, order: ScaleOrder) -> list[str]:
        copies = order.copy_ids(self.job.id)
        found = {one.id: one for one in self.jobs.get_many([*copies, *order.leaving])}
        leaving = [
            one for one in order.leaving if one in found and not rules.is_removed(found[one], order, self.job.id)
        ]
        return [*leaving, *(one for one in copies if one not in found)]

    def _execute_one(self, order: ScaleOrder, one: str) -> str:
        """Take out or create one job; return the reason of a refusal, or "". Raises WriteConflict after all tries."""
        for tries in range(WRITE_TRIES):
            if tries and one not in order.leaving and self.jobs.get(one) is not None:
                return ""  # another evaluation has created the copy
            try:
                change = self._take_out(order, one) if one in order.leaving else self._copy(order, one)
                if change is not None:
                    self.jobs.apply(change)
            except Refusal as refusal:
                return refusal.detail
            except (WriteConflict, FenceBroken):
                continue
            return ""
        raise WriteConflict

    def _take_out(self, order: ScaleOrder, one: str) -> Transaction | None:
        found = self.jobs.get(one)
        if found is None:
            return None
        commands = self.jobs.commands(one) if found.state is JobState.RUNNING else []
        return rules.remove_job(found, commands, order, by_job=self.job.id, now=self.now)

    def _copy(self, order: ScaleOrder, one: str) -> Transaction:
        named = order.source or ""
        if named not in self.sources:
            source = self.jobs.get(named)
            if source is None:
                raise Refusal(ErrorCode.JOB_NOT_FOUND, f"Job {named} is lost.")
            text = self.jobs.read(RulesRecord, named, source.rules_revision) if source.rules_revision else None
            self.sources[named] = source, text
        source, text = self.sources[named]
        return rules.copy_job(source, text, order, job_id=one, by_job=self.job.id, now=self.now)

    def _settle(
        self, rule_state: RuleStateRecord, done: Sequence[ScaleOrder], refused: Mapping[str, Mapping[str, str]]
    ) -> RuleStateRecord:
        """Remove the executed orders, and record the refused jobs as events."""
        after = rule_state.model_copy(
            update={"version": rule_state.version + 1, "orders": [one for one in rule_state.orders if one not in done]}
        )
        # The group's record lists copies until their end, because the index may not show new copies yet.
        names = dict.fromkeys(one.group for one in done if one.leaving or refused[one.number])
        if not names:
            self.jobs.put(Put(owner=self.job.id, record=after))
            return after
        lost = [one for order in done for one in refused[order.number]]
        records = [record for name in names if (record := self.jobs.scaling(self.job.tenant, name)) is not None]
        job = self.jobs.get(self.job.id) or self.job
        # `updated_at` is the beginning of a job's wait, and this change is no transition.
        change = update_job(job, self.now).with_job(updated_at=job.updated_at)
        for order in done:
            if refused[order.number]:
                # A reason that a hundred copies share is recorded once.
                why = "; ".join(dict.fromkeys(refused[order.number].values()))
                change = rules.add_failure_event(change, order, why, now=self.now)
                logger.warning("a group was not scaled as decided", extra={"job_id": job.id, "why": why})
        scalings = (rules.settle_orders(record, done, lost) for record in records)
        self.jobs.apply(change.put(after).also(*(Put(owner=one.owner, record=one) for one in scalings)))
        return after
