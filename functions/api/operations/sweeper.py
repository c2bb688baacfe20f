"""The sweep: revoke expired leases, end backoffs, enforce deadlines.

The sweeper runs once a minute; a claim without a ready job runs due timers, too. Every write is conditional, so
concurrent sweeps are safe: a job that another caller changed first stays as that caller left the job.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, ParamSpec, TypeVar

from baton.contract.jobs.job import JobState, ReasonCode
from baton.contract.worker.lease_grace import SWEEP_INTERVAL_S
from functions.api.rules.rule_evaluation_runs import evaluate_due_jobs, evaluate_on_transition
from functions.api.worlds.seat_settlement import settle, settle_job
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
"""Leases read, and timers run, for each query of the index."""

RESERVED_S = 5.0
"""The sweeper begins no job with less time left, because the current job and the function's answer take time."""

TIMERS_S = 10.0
"""Time reserved for due timers while the sweeper revokes leases."""

TIMERS_PER_CLAIM = 25
"""Limit of the timers that a claim runs: a worker waits for the claim's answer."""

WAITING_JOBS_READ = 200
"""Waiting jobs read once a minute to measure the longest wait, at about 50 read units. If more jobs wait, the read
covers the first jobs of some queues, and in a queue without workers these jobs are old."""

MAX_ELASTIC_JOBS = 500
"""Elastic jobs of one sweep, at some ten milliseconds each."""

MAX_LISTED = 10_000
"""Ids of elastic jobs that one sweep lists, at about 250 read units."""

GOLDEN = 0.618_033_988_749_895
"""Step from one sweep's first elastic job to the next sweep's, as a part of the list. Of all steps this one leaves the
smallest gaps: sweeps of k of n jobs reach each job within about 3 n / k sweeps, also if k varies with the time."""

OPEN_LEASE_WITHIN_S = 86_400
"""The index shows every open lease as due within this time, which exceeds the longest lease."""

MAX_CONFLICTS = 5


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Result of one sweep. `more`: the time was too short for all jobs, so sweep again soon."""

    reclaimed: int
    timers: int
    left: int
    """Due jobs that another writer changed concurrently, that are within their grace, or whose item is damaged."""
    more: bool
    watched: int = 0
    """Jobs whose rules the sweep has evaluated."""
    decided: int = 0
    """Evaluated jobs with a decision."""
    heartbeat_lag_s: int = 0
    """Seconds since the oldest expired lease of this sweep expired."""
    queue_age_s: int = 0
    """Seconds for which the longest waiting job has been claimable, among at most WAITING_JOBS_READ jobs."""

    def as_dict(self) -> dict[str, int | bool]:
        """Return the fields of a log line."""
        return asdict(self)


class _StageResult(NamedTuple):
    """Result of one stage of a sweep."""

    done: int = 0
    left: int = 0
    more: bool = False
    lag_s: int = 0


def _no_time_limit() -> float:
    return math.inf


def _assume_answering() -> bool:
    """Assume that the API answers."""
    return True


def _discard_metrics(_: Mapping[str, int]) -> None:
    """Discard the metrics."""


def sweep(
    jobs: JobStore,
    leases: LeaseStore,
    clock: Clock,
    *,
    sweep_interval_s: float = SWEEP_INTERVAL_S,
    api_answers: Callable[[], bool] = _assume_answering,
    page: int = PAGE,
    time_left_s: Callable[[], float] = _no_time_limit,
    report: Callable[[Mapping[str, int]], None] = _discard_metrics,
) -> SweepResult:
    """Revoke the due leases and run the due timers, as many as `time_left_s` allows.

    `sweep_interval_s`: seconds between two sweeps. `api_answers` tries to reach the API as workers do. `report`
    receives each metric as soon as its value is known, because the function may end before the sweep ends.
    """
    now = clock.now()
    queue_age_s = _measure_queue_age_s(jobs, now)
    report({"QueueAge": queue_age_s})
    watch = record_watermark(leases, clock, sweep_interval_s=sweep_interval_s, api_answers=api_answers)
    # Rules come before revocations: a rule may wait for a missing heartbeat.
    batch = evaluate_due_jobs(jobs, leases, now)

    def may_end(lease: Lease) -> bool:
        return is_reclaimable(lease, watch, now, sweep_interval_s=sweep_interval_s)

    def end_lease(job_id: str) -> bool:
        return reclaim(jobs, leases, job_id, now, may_end)

    lost = _end_leases(leases, now, may_end, end_lease, page=page, time_left_s=time_left_s, report=report)
    timed = _run_timers(jobs, now, page=page, time_left_s=time_left_s)
    settled = _settle_elastic_jobs(jobs, now, time_left_s=time_left_s)
    return SweepResult(
        reclaimed=lost.done,
        timers=timed.done,
        left=lost.left + timed.left,
        more=lost.more or timed.more or batch.more or settled.more,
        watched=batch.evaluated,
        decided=batch.decided,
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
) -> _StageResult:
    """Return lost machines' jobs to their queues, page by page of the index, which also shows live leases."""
    done = seen = lag_s = 0
    for job_ids in leases.due_pages(now, size=page):
        expired = sorted(
            (lease for lease in _read_leases(leases, job_ids) if not lease.closed and lease.expires_at <= now),
            key=lambda lease: lease.expires_at,
        )
        if expired:
            lag_s = max(lag_s, now - expired[0].expires_at)
            report({"HeartbeatLag": lag_s})
        # The index shows a lease until its revocation. Where many leases are within their grace, a read of each lease
        # would take the time for later leases.
        lost = [lease for lease in expired if may_end(lease)]
        seen += len(expired) - len(lost)
        for lease in lost:
            if time_left_s() < RESERVED_S + TIMERS_S:
                return _StageResult(done, seen - done, True, lag_s)
            seen += 1
            done += run_isolated(lease.job_id, end_lease, lease.job_id)
        if time_left_s() < RESERVED_S + TIMERS_S:
            return _StageResult(done, seen - done, True, lag_s)
    return _StageResult(done, seen - done, False, lag_s)


def _run_timers(jobs: JobStore, now: int, *, page: int, time_left_s: Callable[[], float]) -> _StageResult:
    """Run due timers. Failing timers stay first in the index, therefore a page without progress ends the stage."""
    done = 0
    while True:
        due, done_before = jobs.due_timers(now, limit=page), done
        for at, job_id in enumerate(due):
            if time_left_s() < RESERVED_S:
                return _StageResult(done, at - (done - done_before), True)
            done += run_isolated(job_id, run_timer, jobs, job_id, now)
        left = len(due) - (done - done_before)
        if len(due) < page or done == done_before:
            return _StageResult(done, left, len(due) == page)


def _settle_elastic_jobs(jobs: JobStore, now: int, *, time_left_s: Callable[[], float]) -> _StageResult:
    """Settle elastic jobs that have not ended, because a function may have died after the transition of a seat.

    Of more jobs than one sweep can settle, each sweep begins elsewhere in the list.
    """
    listed = jobs.unsettled(limit=MAX_LISTED)
    first = int(now // SWEEP_INTERVAL_S * GOLDEN % 1 * len(listed)) if len(listed) > MAX_ELASTIC_JOBS else 0
    found = [*listed[first:], *listed[:first]][:MAX_ELASTIC_JOBS]
    for at, job_id in enumerate(found):
        if time_left_s() < RESERVED_S:
            return _StageResult(at, len(found) - at, True)
        run_isolated(job_id, lambda one: settle_job(jobs, one, now) is not None, job_id)
    return _StageResult(len(found))


def run_due_timers(jobs: JobStore, *, tenant: str, queue: str, now: int) -> int:
    """Run the timers of one queue among the first TIMERS_PER_CLAIM due timers; return the number of changed jobs."""
    timed = _read_jobs(jobs, jobs.due_timers(now, limit=TIMERS_PER_CLAIM))
    waiting = [job for job in timed if (job.tenant, job.queue) == (tenant, queue)]
    return sum(run_isolated(job.id, run_timer, jobs, job.id, now) for job in waiting)


def record_watermark(
    leases: LeaseStore, clock: Clock, *, sweep_interval_s: float, api_answers: Callable[[], bool] = _assume_answering
) -> ReclaimWatermark:
    """Record that the sweeper runs and whether the API answers; return the new watermark.

    Without an open lease the sweeper sends no probe, so an idle deployment pays for no request.
    """
    is_open = next(leases.due_pages(clock.now() + OPEN_LEASE_WITHIN_S, size=1), None) is not None
    served = not is_open or api_answers()
    # During an outage `api_answers` waits for its timeout, and workers cannot renew their leases meanwhile.
    now = clock.now()
    if not served:
        logger.warning("the API does not answer: no lease is revoked until workers have had time to renew theirs")
    seen = leases.reclaim_watermark()
    watch = update_watermark(seen, now, sweep_interval_s=sweep_interval_s, served=served)
    if watch != seen and not leases.save_reclaim_watermark(watch, seen=seen):
        # A concurrent sweep recorded its watermark and found the same gap.
        return update_watermark(leases.reclaim_watermark(), now, sweep_interval_s=sweep_interval_s, served=served)
    return watch


def reclaim(jobs: JobStore, leases: LeaseStore, job_id: str, now: int, may_end: Callable[[Lease], bool]) -> bool:
    """Return a lost machine's job to its queue; False if the lease is live, or another caller changed the job."""
    lease = leases.get(job_id)
    if lease is None or not may_end(lease):
        return False
    job = jobs.get(job_id)
    attempt = None if job is None else _read_running_attempt(jobs, job)
    if job is None or attempt is None:
        return False
    change = _interrupt(jobs, job, attempt, lease, now)
    if change is not None:
        evaluate_on_transition(jobs, leases, change.job, now)
        settle(jobs, change.job, now)
    return change is not None


def run_timer(jobs: JobStore, job_id: str, now: int) -> bool:
    """End a backoff or an overdue job; False if nothing is due, or another caller changed the job."""
    job = jobs.get(job_id)
    if job is None:
        return False
    change = rules.timer(job, _read_running_attempt(jobs, job), now=now)
    if change is None:
        return False
    try:
        jobs.apply(change)
    except (WriteConflict, FenceBroken):
        return False
    settle(jobs, change.job, now)
    return True


def end_overdue_job(jobs: JobStore, job_id: str, epoch: int, now: int) -> str:
    """End a job whose run time is used up, for the heartbeat of attempt `epoch`; return the reason's code."""
    for _ in range(MAX_CONFLICTS):
        job = jobs.get(job_id)
        attempt = None if job is None else _read_running_attempt(jobs, job)
        if job is None or attempt is None or job.epoch != epoch:
            break
        change = rules.out_of_time(job, attempt, now=now)
        try:
            jobs.apply(change)
        except (WriteConflict, FenceBroken):
            continue
        job = settle(jobs, change.job, now)
        break
    return job.reason.code if job is not None and job.reason is not None else ReasonCode.MAX_RUNTIME


def _interrupt(jobs: JobStore, job: Job, attempt: Attempt, lease: Lease, now: int) -> Transaction | None:
    try:
        change = rules.interrupt(job, attempt, lease, now=now)
        jobs.apply(change)
    except (Refusal, WriteConflict, FenceBroken):
        # The worker renewed its lease, or another sweep was faster.
        return None
    return change


def _measure_queue_age_s(jobs: JobStore, now: int) -> int:
    try:
        since = jobs.longest_waiting(limit=WAITING_JOBS_READ)
    except (ValueError, KeyError):
        logger.exception("the age of the queue is unknown: an item is damaged")
        since = None
    except StorageUnavailable:
        # DynamoDB may throttle the index of waiting jobs while leases and timers can be read.
        logger.warning("the age of the queue is unknown: storage is unavailable", exc_info=True)
        since = None
    return 0 if since is None else max(now - since, 0)


def run_isolated(job_id: str, task: Callable[P, bool], *args: P.args, **more: P.kwargs) -> bool:
    """Run a task for one job; log any failure, so that one job cannot block the others."""
    try:
        return task(*args, **more)
    except Exception:  # the boundary between independent jobs
        logger.exception("a job could not be processed", extra={"job_id": job_id})
        return False


def _read_leases(leases: LeaseStore, job_ids: Sequence[str]) -> Sequence[Lease]:
    return _read_readable(job_ids, lambda ids: list(leases.get_many(ids).values()), leases.get)


def _read_jobs(jobs: JobStore, job_ids: Sequence[str]) -> Sequence[Job]:
    return _read_readable(job_ids, jobs.get_many, jobs.get)


def _read_readable(
    job_ids: Sequence[str], many: Callable[[Sequence[str]], Sequence[T]], one: Callable[[str], T | None]
) -> Sequence[T]:
    """Read all items at once; if an item is damaged, read each item alone and skip damaged items."""
    try:
        return many(job_ids)
    except (ValueError, KeyError):
        found: list[T] = []
        for job_id in job_ids:
            try:
                item = one(job_id)
            except (ValueError, KeyError):
                logger.exception("a job could not be processed", extra={"job_id": job_id})
                continue
            found += [] if item is None else [item]
        return found


def _read_running_attempt(jobs: JobStore, job: Job) -> Attempt | None:
    return jobs.read(Attempt, job.id, job.epoch) if job.state is JobState.RUNNING else None
