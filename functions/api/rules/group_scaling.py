"""Groups that rules scale: reading one, and carrying out what was decided on it.

An order stands with the job whose rule gave it until everything that it names is done. Whoever looks at the job next
begins it anew: copies have ids of their own and are written once, and who is being taken out already is left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.contract.errors import ErrorCode
from baton.contract.jobs import JobState
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.domain.errors import FenceBroken, NotDoneError, Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Put, Transaction, update_job
from functions.domain.ports import JobStore
from functions.domain.records import Job, RulesRecord, RuleStateRecord, ScaleOrder
from functions.domain.rules import scaling as rules

logger = logging.getLogger("baton.scaling")

MAX_LIVE_JOBS = 2_000
"""Of a tenant, not ended: among so many a group is looked for. There is no index by group, whose writes every job
would have to pay for."""
PAGE = 500
AT_ONCE = 25
"""Jobs that a worker's or user's call writes for a rule, some milliseconds each; the sweeper goes on."""
IN_A_TURN = 200
"""The same for the sweeper's look at one job: behind it, in the same function, lost machines' jobs are taken back."""
MAX_GROUPS = 10
"""Read in one look."""
_LIVE = (JobState.RUNNING, JobState.PENDING, JobState.PAUSED)


class GroupReader:
    """Reads the groups that the rules of one look scale. The tenant's jobs are listed once, however many they are."""

    def __init__(self, jobs: JobStore, own: Job, now: int) -> None:
        """`own`: the rules' job, as it was just read."""
        self._jobs, self._own, self._now = jobs, own, now
        self._by_group: dict[str, list[str]] | None = None
        """Ids of the tenant's jobs that have not ended. Not the jobs: they may take more memory than a function has."""
        self._too_many = False
        self._asked: set[str] = set()
        self.took_s = 0.0
        """Of this thread's computing: it grows with the tenant's jobs, whatever the rules are."""

    def __call__(self, name: str) -> rules.GroupJobs:
        """A group as it is now.

        Raises NotDoneError for a tenant of so many jobs that it takes too long to find it, and for too many groups.
        """
        began_s = time.thread_time()
        try:
            return self._read(name)
        finally:
            self.took_s += time.thread_time() - began_s

    def _read(self, name: str) -> rules.GroupJobs:
        self._asked.add(name)
        if len(self._asked) > MAX_GROUPS:
            raise NotDoneError(f"group {name!r} is not looked at: one look may ask for {MAX_GROUPS} groups")
        tenant = self._own.tenant
        if self._by_group is None:
            self._by_group = self._listed()
        if self._too_many:
            raise NotDoneError(f"group {name!r} cannot be counted: more than {MAX_LIVE_JOBS} jobs have not ended")
        # The jobs behind the record: none of them is older than what it says.
        record = self._jobs.scaling(tenant, name)
        # An index may be behind. What rules themselves have decided is counted in any case.
        named = [] if record is None else [*record.copies, *record.leaving]
        found = {job.id: job for job in self._jobs.get_many([*self._by_group.get(name, ()), *named])}
        # And so is the job that has just been claimed, or has come back to its queue, and is looked at for that.
        found.setdefault(self._own.id, self._own)
        return rules.build_group(tenant, name, [self._seen(job) for job in found.values()], record)

    def _seen(self, job: Job) -> Job:
        if not rules.may_have_lost_stop(job):
            return job
        return rules.recount_leaving(job, self._jobs.commands(job.id), self._now)

    def _listed(self) -> dict[str, list[str]]:
        """The tenant's jobs that have not ended, by group."""
        found: dict[str, list[str]] = {}
        looked_at = 0
        for state in _LIVE:
            cursor = None
            while looked_at <= MAX_LIVE_JOBS:
                listed = self._jobs.list_jobs(
                    self._own.tenant, state=state, limit=PAGE, cursor=cursor, newest_first=True
                )
                looked_at += len(listed.items)
                for job in listed.items:
                    if group := job.spec.tags.get(rules.GROUP_TAG):
                        found.setdefault(group, []).append(job.id)
                cursor = listed.cursor
                if cursor is None:
                    break
        self._too_many = looked_at > MAX_LIVE_JOBS
        return found


@dataclass(frozen=True)
class Carrying:
    """Doing what stands with `job`."""

    jobs: JobStore
    job: Job
    now: int
    sources: dict[str, tuple[Job, RulesRecord | None]] = field(default_factory=dict)
    """What was read of jobs that are copied."""

    def out(self, rule_state: RuleStateRecord, *, limit: int) -> RuleStateRecord:
        """Up to `limit` jobs of it; what stands then. An order that cannot be carried out now keeps rule_state.

        Raises WriteConflict and StorageUnavailable, upon which the same can be begun anew.
        """
        done: list[ScaleOrder] = []
        refused: dict[str, dict[str, str]] = {}
        left = limit
        for order in rule_state.orders:
            try:
                todo = self._todo(order)
                some = todo[:left]
                refused[order.number] = {one: why for one in some if (why := self._done(order, one))}
            except StorageUnavailable:
                raise
            except Exception:  # the boundary between one order, and the others and all rules of the job
                logger.exception("a group is not scaled yet", extra={"job_id": self.job.id, "group": order.group})
                continue
            left -= len(some)
            if len(some) < len(todo):
                break
            done.append(order)
        return self._settled(rule_state, done, refused) if done else rule_state

    def _todo(self, order: ScaleOrder) -> list[str]:
        copies = order.copy_ids(self.job.id)
        found = {one.id: one for one in self.jobs.get_many([*copies, *order.leaving])}
        leaving = [
            one for one in order.leaving if one in found and not rules.is_removed(found[one], order, self.job.id)
        ]
        return [*leaving, *(one for one in copies if one not in found)]

    def _done(self, order: ScaleOrder, one: str) -> str:
        """Why it could not be done; "" if it is. Raises WriteConflict for a job that others write all the time."""
        for tries in range(WRITE_TRIES):
            if tries and one not in order.leaving and self.jobs.get(one) is not None:
                return ""  # somebody else was faster
            try:
                change = self._left(order, one) if one in order.leaving else self._copied(order, one)
                if change is not None:
                    self.jobs.apply(change)
            except Refusal as refusal:
                return refusal.detail
            except (WriteConflict, FenceBroken):
                continue
            return ""
        raise WriteConflict

    def _left(self, order: ScaleOrder, one: str) -> Transaction | None:
        found = self.jobs.get(one)
        if found is None:
            return None
        kept = self.jobs.commands(one) if found.state is JobState.RUNNING else []
        return rules.remove_job(found, kept, order, by_job=self.job.id, now=self.now)

    def _copied(self, order: ScaleOrder, one: str) -> Transaction:
        named = order.source or ""
        if named not in self.sources:
            source = self.jobs.get(named)
            if source is None:
                raise Refusal(ErrorCode.JOB_NOT_FOUND, f"Job {named} is lost.")
            text = self.jobs.read(RulesRecord, named, source.rules_revision) if source.rules_revision else None
            self.sources[named] = source, text
        source, text = self.sources[named]
        return rules.copy_job(source, text, order, job_id=one, by_job=self.job.id, now=self.now)

    def _settled(
        self, rule_state: RuleStateRecord, done: Sequence[ScaleOrder], refused: Mapping[str, Mapping[str, str]]
    ) -> RuleStateRecord:
        """Take the orders away, and tell what came to nothing."""
        after = rule_state.model_copy(
            update={"version": rule_state.version + 1, "orders": [one for one in rule_state.orders if one not in done]}
        )
        # What was copied stays with its group until it has ended: an index may not show it yet.
        names = dict.fromkeys(one.group for one in done if one.leaving or refused[one.number])
        if not names:
            self.jobs.put(Put(owner=self.job.id, record=after))
            return after
        lost = [one for order in done for one in refused[order.number]]
        records = [record for name in names if (record := self.jobs.scaling(self.job.tenant, name)) is not None]
        job = self.jobs.get(self.job.id) or self.job
        # `updated_at` says since when a job waits, and this job has not been moved.
        change = update_job(job, self.now).with_job(updated_at=job.updated_at)
        for order in done:
            if refused[order.number]:
                # The same reason for each of a hundred copies is one.
                why = "; ".join(dict.fromkeys(refused[order.number].values()))
                change = rules.add_failure_event(change, order, why, now=self.now)
                logger.warning("a group was not scaled as decided", extra={"job_id": job.id, "why": why})
        scalings = (rules.settle_orders(record, done, lost) for record in records)
        self.jobs.apply(change.put(after).also(*(Put(owner=one.owner, record=one) for one in scalings)))
        return after
