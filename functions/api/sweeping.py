"""Ending what ran out: leases of lost machines, backoffs, deadlines.

Called by the sweeper once a minute, and by a claim that finds nothing ready. Every step is conditional, so any number
of callers may do it at once; what another one did first is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import ParamSpec, TypeVar

from contract.jobs import JobState, ReasonCode
from functions.api.watching import LOOKED_AT, look_at_all, look_at_move
from functions.domain import jobs as rules
from functions.domain.change import Change
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.ports import JobStore, LeaseStore
from functions.domain.reclaiming import Watch, reclaimable, watched
from functions.domain.records import Attempt, Job, Lease

T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger("baton.sweeping")

SWEEP_LIMIT = 1000
"""Leases and timers ended in one sweep. What is due longest comes first."""

LEASES_LOOKED_AT = 20_000
"""In one sweep: the index of due leases shows nearly all live ones. Of more, a sweep sees those that have not moved in
the index for longest; a lost one comes among them within `keys.DUE_BUCKET_S`."""

TIDY_LIMIT = 25
"""The same for a claim that finds nothing ready: a worker waits for it."""

WAITING_LOOKED_AT = 200
"""Waiting jobs among which the longest wait is looked for, once a minute: some 50 read units. Where more wait than
that, those that are next of some queues are among them, and any of these is old if nobody comes for work."""

MAX_CONFLICTS = 5


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What one sweep did. `more` says that a limit was reached: sweep again soon."""

    reclaimed: int
    timers: int
    left: int
    """Due, but changed by somebody else at that moment, still within the time to prove the lease again, or broken."""
    more: bool
    watched: int = 0
    """Jobs whose rules the control plane has looked at."""
    decided: int = 0
    """Of how many of them something was decided."""
    heartbeat_lag_s: int = 0
    """For how long the oldest lease that ran out has not been taken away, before this sweep."""
    queue_age_s: int = 0
    """How long the job that waits longest could have been claimed; of many, the longest among WAITING_LOOKED_AT."""

    def as_dict(self) -> dict[str, int | bool]:
        """For a log line."""
        return asdict(self)


def sweep(jobs: JobStore, leases: LeaseStore, now: int, *, limit: int = SWEEP_LIMIT) -> Swept:
    """End the leases and run the timers that are due at `now`, at most `limit` of each."""
    watch = keep_watch(leases, now)
    # Before leases that ran out are taken away: a rule may be waiting for a heartbeat that does not come.
    watched, decided = look_at_all(jobs, leases, now)
    due = leases.due(now, limit=LEASES_LOOKED_AT)
    lost = [lease for lease in _leases(leases, due) if not lease.closed and lease.expires_at <= now]
    expired = sorted(lost, key=lambda lease: lease.expires_at)[:limit]
    reclaimed = sum(by_itself(lease.job_id, reclaim, jobs, leases, lease.job_id, now, watch) for lease in expired)
    timed = jobs.due_timers(now, limit=limit)
    timers = sum(by_itself(job_id, run_timer, jobs, job_id, now) for job_id in timed)
    return Swept(
        reclaimed=reclaimed,
        timers=timers,
        left=len(expired) - reclaimed + len(timed) - timers,
        more=len(due) == LEASES_LOOKED_AT or limit in (len(expired), len(timed)) or watched == LOOKED_AT,
        watched=watched,
        decided=decided,
        heartbeat_lag_s=max((now - lease.expires_at for lease in expired), default=0),
        queue_age_s=_queue_age_s(jobs, now),
    )


def tidy_queue(jobs: JobStore, leases: LeaseStore, *, tenant: str, queue: str, now: int) -> int:
    """The same for one queue, and little of it: how many jobs were changed."""
    done = 0
    due = _leases(leases, leases.due(now, limit=TIDY_LIMIT))
    expired = [lease for lease in due if lease.tenant == tenant and not lease.closed and lease.expires_at <= now]
    if expired:
        watch = keep_watch(leases, now)
        lost = [job for job in _jobs(jobs, [lease.job_id for lease in expired]) if job.queue == queue]
        done += sum(by_itself(job.id, reclaim, jobs, leases, job.id, now, watch) for job in lost)
    timed = _jobs(jobs, jobs.due_timers(now, limit=TIDY_LIMIT))
    waiting = [job for job in timed if (job.tenant, job.queue) == (tenant, queue)]
    return done + sum(by_itself(job.id, run_timer, jobs, job.id, now) for job in waiting)


def keep_watch(leases: LeaseStore, now: int) -> Watch:
    """Note that leases are looked after now, and learn since when they were without a gap."""
    seen = leases.watch()
    watch = watched(seen, now)
    if watch != seen and not leases.keep_watch(watch, seen=seen):
        # Somebody else noted it at the same moment, and saw the same gap.
        return watched(leases.watch(), now)
    return watch


def reclaim(jobs: JobStore, leases: LeaseStore, job_id: str, now: int, watch: Watch) -> bool:
    """Give a lost machine's job back to its queue; False if its lease lives, or somebody else changed it."""
    lease = leases.get(job_id)
    if lease is None or not reclaimable(lease, watch, now):
        return False
    job = jobs.get(job_id)
    attempt = None if job is None else _running_attempt(jobs, job)
    if job is None or attempt is None:
        return False
    change = _interrupted(jobs, job, attempt, lease, now)
    if change is not None:
        look_at_move(jobs, leases, change.job, now)
    return change is not None


def run_timer(jobs: JobStore, job_id: str, now: int) -> bool:
    """End a backoff, or a job whose deadline has passed; False if nothing is due or somebody else changed it."""
    job = jobs.get(job_id)
    if job is None:
        return False
    change = rules.timer(job, _running_attempt(jobs, job), now=now)
    if change is None:
        return False
    try:
        jobs.apply(change)
    except (WriteConflict, FenceBroken):
        return False
    return True


def end_overdue(jobs: JobStore, job_id: str, epoch: int, now: int) -> str:
    """End a job whose time is used up, found out by the heartbeat of attempt `epoch`: the code of the reason."""
    for _ in range(MAX_CONFLICTS):
        job = jobs.get(job_id)
        attempt = None if job is None else _running_attempt(jobs, job)
        if job is None or attempt is None or job.epoch != epoch:
            break
        change = rules.out_of_time(job, attempt, now=now)
        try:
            jobs.apply(change)
        except (WriteConflict, FenceBroken):
            continue
        job = change.job
        break
    return job.reason.code if job is not None and job.reason is not None else ReasonCode.MAX_RUNTIME


def _interrupted(jobs: JobStore, job: Job, attempt: Attempt, lease: Lease, now: int) -> Change | None:
    try:
        change = rules.interrupt(job, attempt, lease, now=now)
        jobs.apply(change)
    except (Refusal, WriteConflict, FenceBroken):
        # The worker proved its lease, or another sweep was faster: either way the job is looked after.
        return None
    return change


def _queue_age_s(jobs: JobStore, now: int) -> int:
    try:
        since = jobs.longest_waiting(limit=WAITING_LOOKED_AT)
    except (ValueError, KeyError):
        logger.exception("the age of the queue cannot be told: an item is damaged")
        since = None
    return 0 if since is None else max(now - since, 0)


def by_itself(job_id: str, look_after: Callable[P, bool], *args: P.args, **more: P.kwargs) -> bool:
    """Look after one job. Whatever is wrong with it is logged, and must not keep the others from their turn."""
    try:
        return look_after(*args, **more)
    except Exception:  # the boundary between jobs that have nothing to do with each other
        logger.exception("a job could not be looked after", extra={"job_id": job_id})
        return False


def _leases(leases: LeaseStore, job_ids: Sequence[str]) -> Sequence[Lease]:
    return _readable(job_ids, lambda ids: list(leases.get_many(ids).values()), leases.get)


def _jobs(jobs: JobStore, job_ids: Sequence[str]) -> Sequence[Job]:
    return _readable(job_ids, jobs.get_many, jobs.get)


def _readable(
    job_ids: Sequence[str], many: Callable[[Sequence[str]], Sequence[T]], one: Callable[[str], T | None]
) -> Sequence[T]:
    """All at once; where an item among them cannot be understood, one by one without it."""
    try:
        return many(job_ids)
    except (ValueError, KeyError):
        found: list[T] = []
        for job_id in job_ids:
            try:
                item = one(job_id)
            except (ValueError, KeyError):
                logger.exception("a job could not be looked after", extra={"job_id": job_id})
                continue
            found += [] if item is None else [item]
        return found


def _running_attempt(jobs: JobStore, job: Job) -> Attempt | None:
    return jobs.attempt(job.id, job.epoch) if job.state is JobState.RUNNING else None
