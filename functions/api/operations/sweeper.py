"""Ending what ran out: leases of lost machines, backoffs, deadlines.

Called by the sweeper once a minute; a claim that finds nothing ready runs due timers, too. Every step is conditional,
so any number of callers may do it at once; what another one did first is left alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, ParamSpec, TypeVar

from baton.contract.jobs import JobState, ReasonCode
from baton.contract.leases import SWEEP_INTERVAL_S
from functions.api.rules.rule_evaluation_runs import look_at_all, look_at_move
from functions.domain.errors import FenceBroken, Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.lease_expiry import ReclaimWatermark, is_reclaimable, update_watermark
from functions.domain.jobs.transaction import Transaction
from functions.domain.ports import Clock, JobStore, LeaseStore
from functions.domain.records import Attempt, Job, Lease

T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger("baton.sweeping")

PAGE = 1000
"""Leases that are read, and timers that are run, before the sweeper asks the index for more."""

RESERVED_S = 5.0
"""The sweeper begins nothing with less time left: the job under way and the function's answer take some."""

TIMERS_S = 10.0
"""Kept for due timers while leases are ended."""

TIDY_LIMIT = 25
"""Timers for a claim that finds nothing ready: a worker waits for it."""

WAITING_LOOKED_AT = 200
"""Waiting jobs among which the longest wait is looked for, once a minute: some 50 read units. Where more wait than
that, those that are next of some queues are among them, and any of these is old if nobody comes for work."""

OPEN_WITHIN_S = 86_400
"""Every open lease is due in the index within this time: more than the longest lease lasts."""

MAX_CONFLICTS = 5


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What one sweep did. `more` says that the time was too short for all: sweep again soon."""

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
    """For how long the oldest lease that ran out had not been taken away, of those that this sweep has seen."""
    queue_age_s: int = 0
    """How long the job that waits longest could have been claimed; of many, the longest among WAITING_LOOKED_AT."""

    def as_dict(self) -> dict[str, int | bool]:
        """For a log line."""
        return asdict(self)


class _Part(NamedTuple):
    """Result of one part of a sweep."""

    done: int = 0
    left: int = 0
    more: bool = False
    lag_s: int = 0


def _unlimited() -> float:
    return math.inf


def _answering() -> bool:
    """Take for granted that the API answers."""
    return True


def _unreported(_: Mapping[str, int]) -> None:
    """Drop the metrics."""


def sweep(
    jobs: JobStore,
    leases: LeaseStore,
    clock: Clock,
    *,
    sweep_interval_s: float = SWEEP_INTERVAL_S,
    api_answers: Callable[[], bool] = _answering,
    page: int = PAGE,
    time_left_s: Callable[[], float] = _unlimited,
    report: Callable[[Mapping[str, int]], None] = _unreported,
) -> Swept:
    """End the leases and run the timers that are due, as many as `time_left_s` allows.

    `sweep_interval_s`: seconds between two calls of this function. `api_answers` tries to reach the API as workers do.
    `report` receives each metric as soon as its value is known: the function may be ended before the sweep is.
    """
    now = clock.now()
    queue_age_s = _queue_age_s(jobs, now)
    report({"QueueAge": queue_age_s})
    watch = save_reclaim_watermark(leases, clock, sweep_interval_s=sweep_interval_s, api_answers=api_answers)
    # Before leases that ran out are taken away: a rule may be waiting for a heartbeat that does not come.
    turn = look_at_all(jobs, leases, now)

    def may_end(lease: Lease) -> bool:
        return is_reclaimable(lease, watch, now, sweep_interval_s=sweep_interval_s)

    def end_lease(job_id: str) -> bool:
        return reclaim(jobs, leases, job_id, now, may_end)

    lost = _end_leases(leases, now, may_end, end_lease, page=page, time_left_s=time_left_s, report=report)
    timed = _run_timers(jobs, now, page=page, time_left_s=time_left_s)
    return Swept(
        reclaimed=lost.done,
        timers=timed.done,
        left=lost.left + timed.left,
        more=lost.more or timed.more or turn.more,
        watched=turn.looked_at,
        decided=turn.decided,
        heartbeat_lag_s=lost.lag_s,
        queue_age_s=queue_age_s,
    )


def _end_leases(
    leases: LeaseStore,
    now: int,
    may_end: Callable[[Lease], bool],
    end_lease: Callable[[str], bool],
    *,
    page: int,
    time_left_s: Callable[[], float],
    report: Callable[[Mapping[str, int]], None],
) -> _Part:
    """Give lost machines' jobs back, page by page of the index, which shows nearly all live leases as well."""
    done = seen = lag_s = 0
    for job_ids in leases.due_pages(now, size=page):
        expired = sorted(
            (lease for lease in _leases(leases, job_ids) if not lease.closed and lease.expires_at <= now),
            key=lambda lease: lease.expires_at,
        )
        if expired:
            lag_s = max(lag_s, now - expired[0].expires_at)
            report({"HeartbeatLag": lag_s})
        # The index shows a lease until it is ended. Where many leases wait for their grace to end, a read of each would
        # take the time for those behind them.
        lost = [lease for lease in expired if may_end(lease)]
        seen += len(expired) - len(lost)
        for lease in lost:
            if time_left_s() < RESERVED_S + TIMERS_S:
                return _Part(done, seen - done, True, lag_s)
            seen += 1
            done += by_itself(lease.job_id, end_lease, lease.job_id)
        if time_left_s() < RESERVED_S + TIMERS_S:
            return _Part(done, seen - done, True, lag_s)
    return _Part(done, seen - done, False, lag_s)


def _run_timers(jobs: JobStore, now: int, *, page: int, time_left_s: Callable[[], float]) -> _Part:
    """Run due timers. Those that cannot be run stay first in the index, so a page without progress is the last one."""
    done = 0
    while True:
        due, done_before = jobs.due_timers(now, limit=page), done
        for at, job_id in enumerate(due):
            if time_left_s() < RESERVED_S:
                return _Part(done, at - (done - done_before), True)
            done += by_itself(job_id, run_timer, jobs, job_id, now)
        left = len(due) - (done - done_before)
        if len(due) < page or done == done_before:
            return _Part(done, left, len(due) == page)


def run_due_timers(jobs: JobStore, *, tenant: str, queue: str, now: int) -> int:
    """Run due timers of one queue, among few that are due longest; return how many jobs were changed."""
    timed = _jobs(jobs, jobs.due_timers(now, limit=TIDY_LIMIT))
    waiting = [job for job in timed if (job.tenant, job.queue) == (tenant, queue)]
    return sum(by_itself(job.id, run_timer, jobs, job.id, now) for job in waiting)


def save_reclaim_watermark(
    leases: LeaseStore, clock: Clock, *, sweep_interval_s: float, api_answers: Callable[[], bool] = _answering
) -> ReclaimWatermark:
    """Record that the sweeper runs and whether the API answers; return since when both hold without a noticed gap.

    While no lease is open the API is not asked: an idle deployment pays for no request.
    """
    is_open = next(leases.due_pages(clock.now() + OPEN_WITHIN_S, size=1), None) is not None
    served = not is_open or api_answers()
    # An API that is away lets `api_answers` wait, and workers cannot renew their leases before it returns.
    now = clock.now()
    if not served:
        logger.warning("the API does not answer: no lease is revoked until workers have had time to renew theirs")
    seen = leases.reclaim_watermark()
    watch = update_watermark(seen, now, sweep_interval_s=sweep_interval_s, served=served)
    if watch != seen and not leases.save_reclaim_watermark(watch, seen=seen):
        # Another sweep recorded its watch at the same moment, and found the same gap.
        return update_watermark(leases.reclaim_watermark(), now, sweep_interval_s=sweep_interval_s, served=served)
    return watch


def reclaim(jobs: JobStore, leases: LeaseStore, job_id: str, now: int, may_end: Callable[[Lease], bool]) -> bool:
    """Give a lost machine's job back to its queue; False if its lease lives, or somebody else changed it."""
    lease = leases.get(job_id)
    if lease is None or not may_end(lease):
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


def _interrupted(jobs: JobStore, job: Job, attempt: Attempt, lease: Lease, now: int) -> Transaction | None:
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
    except StorageUnavailable:
        # The index of waiting jobs may be throttled while leases and timers can be read.
        logger.warning("the age of the queue cannot be told: storage is away", exc_info=True)
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
    return jobs.read(Attempt, job.id, job.epoch) if job.state is JobState.RUNNING else None
