"""End the fleets of jobs that rent their own machines: stop them with their jobs, and retire them after.

The transaction of a job stores its fleet, and a retry replaces the version of the fleet. Therefore the write of a tick
that has read the job before the retry fails, and the fleet stays open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from functions.domain.errors import WriteConflict
from functions.fleet.machine_states import ORPHAN_WATCH_S
from functions.fleet.records import STRAYS_TENANT, Machine, StoredFleet
from functions.fleet.ticks.tick import Tick


def stop_with_jobs(tick: Tick, fleets: Sequence[StoredFleet]) -> list[StoredFleet]:
    """Stop the fleets whose jobs have ended; return all fleets."""
    renting = [fleet.job_id for fleet in fleets if fleet.job_id is not None and not fleet.stopped]
    tick.jobs = {job.id: job for job in tick.read_jobs(renting)} if renting else {}
    ended = {job.id for job in tick.jobs.values() if job.state.terminal}
    return [_stop(tick, fleet) if fleet.job_id in ended and not fleet.stopped else fleet for fleet in fleets]


def _stop(tick: Tick, fleet: StoredFleet) -> StoredFleet:
    updates = {"stopped": True, "stop_reason": "the job has ended", "version": fleet.version + 1}
    stopped = fleet.model_copy(update={**updates, "updated_at": tick.now()})
    try:
        tick.store.put_fleet(stopped)
    except WriteConflict:
        return fleet
    return stopped


def retire(tick: Tick, fleets: Sequence[StoredFleet], machines: Mapping[tuple[str, str], Sequence[Machine]]) -> None:
    """Take the stopped fleets of jobs and of strays without a watched machine out of the list that each tick reads."""
    for fleet in fleets:
        watched = any(one.watched for one in machines[fleet.tenant, fleet.spec.name])
        lasts = fleet.job_id is None and fleet.tenant != STRAYS_TENANT
        if lasts or not fleet.stopped or watched:
            continue
        retired = fleet.model_copy(update={"retired": True, "version": fleet.version + 1})
        spending = tick.spending
        later = {"watch_until": tick.now() + ORPHAN_WATCH_S, "version": spending.version + 1}
        # After a conflict, with a retry of the job or on the fence, a later tick retires the fleet.
        with suppress(WriteConflict):
            tick.retire(retired, spending.model_copy(update=later))
