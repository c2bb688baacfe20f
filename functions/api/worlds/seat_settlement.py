"""Settle elastic jobs with their seats: read both, decide, write, until nothing is left to do.

Runs after each transition of an elastic job or a seat, and once a minute for all elastic jobs that are not settled.
Writers that run at once repeat each other's decisions, and the store accepts each once.
"""

from __future__ import annotations

import logging

from baton.contract.elastic.world import WorldSeat
from baton.contract.jobs.job import JobState
from functions.api.http.context import Context
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.domain.errors import FenceBroken, StorageUnavailable, WriteConflict
from functions.domain.jobs.attempt_end import newest_progress
from functions.domain.ports import JobStore
from functions.domain.records import Attempt, Job
from functions.domain.seat_records import Seat, SeatMark
from functions.domain.worlds import seats as rules
from functions.domain.worlds.seat_ids import seat_id, seat_ids

logger = logging.getLogger("baton.worlds")


def settle(jobs: JobStore, job: Job, now: int) -> Job:
    """Settle the elastic job of `job`, an elastic job or a seat, after a transition; return `job` afterwards.

    An ordinary job costs no read. A failure of the storage is left to the next sweep.
    """
    if job.spec.nodes is None and job.spec.seat is None:
        return job
    try:
        after = settle_job(jobs, job.id if job.spec.seat is None else job.spec.seat.job, now)
    except StorageUnavailable:
        logger.warning("an elastic job is settled later", extra={"job_id": job.id}, exc_info=True)
        return job
    return job if after is None or job.spec.seat is not None else after


def settle_job(jobs: JobStore, job_id: str, now: int) -> Job | None:
    """Settle an elastic job; return the job afterwards, None for a missing job. Raises StorageUnavailable."""
    for _ in range(WRITE_TRIES):
        job = jobs.get(job_id)
        if job is None or job.spec.nodes is None or job.settled:
            return job
        seats = read_seats(jobs, job)
        attempts = {
            (place, epoch): attempt
            for place, epoch in rules.list_needed_attempts(job, seats)
            if (attempt := jobs.read(Attempt, seat_id(job_id, place), epoch)) is not None
        }
        changes = rules.reconcile(job, seats, attempts, now=now)
        if not changes:
            return job
        for change in changes:
            try:
                jobs.apply(change)
            except (WriteConflict, FenceBroken):
                break
    logger.warning("other calls changed an elastic job during all tries", extra={"job_id": job_id})
    return jobs.get(job_id)


def settle_claim(jobs: JobStore, job: Job, seat: Seat, now: int) -> tuple[WorldSeat, Job] | None:
    """Settle the elastic job of a claimed seat; return the worker's seat and the elastic job.

    Returns None if the attempt has ended again.

    The elastic job numbers the attempt, therefore no worker receives a seat before. Raises StorageUnavailable.
    """
    elastic = settle_job(jobs, seat.job, now)
    mark = SeatMark() if elastic is None else elastic.seats[seat.seat]
    if elastic is not None and (mark.epoch, mark.running) == (job.epoch, True):
        named = WorldSeat(job=seat.job, seat=seat.seat, epoch=mark.world_epoch, min=seat.min, max=seat.max)
        return named, elastic
    present = jobs.get(job.id)
    if present is not None and (present.epoch, present.state) == (job.epoch, JobState.RUNNING):
        raise StorageUnavailable(f"the elastic job {seat.job} could not be settled")
    return None


def with_newest_progress(context: Context, job: Job) -> Job:
    """Return an elastic job with the newest progress that the leases of its running seats show."""
    if job.state is not JobState.RUNNING or job.spec.nodes is None:
        return job
    leases = context.leases.get_many(seat_ids(job.id, job.spec.nodes.max))
    progress = job.progress
    for lease in leases.values():
        progress = newest_progress(progress, lease.progress)
    return job.model_copy(update={"progress": progress})


def read_seats(jobs: JobStore, job: Job) -> dict[int, Job]:
    """Read the existing seats of an elastic job, by seat."""
    assert job.spec.nodes is not None
    ids = seat_ids(job.id, job.spec.nodes.max)
    found = {one.id: one for one in jobs.get_many(ids)}
    return {place: found[one] for place, one in enumerate(ids) if one in found}
