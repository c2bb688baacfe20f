"""The call that shows which fleets serve a job, which rented machines held the job, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton.contract.fleets.job_machines import JobMachines, RentedAttempt, ServingFleet
from baton.contract.jobs.rent import fleet_of
from functions.api.fleet.fleet_calls import revalidating, view_fleet, view_machine
from functions.api.fleet.store import fleet_clock, require_store
from functions.api.http.context import ApiCall, Context, WithHeaders, require_job
from functions.domain.records import Attempt, Job
from functions.domain.worlds.seat_ids import seat_id
from functions.fleet.clock import FleetClock
from functions.fleet.records import Machine, StoredFleet
from functions.fleet.store import FleetStore
from functions.fleet.ticks.demand import unservable

MAX_ATTEMPTS = 1000
"""Attempts at a job, or at one seat of an elastic job."""
MAX_ENDED = 1000
"""Ended machines of a fleet that are searched for those of the job, the newest first."""


def job_machines(context: Context, call: ApiCall) -> WithHeaders:
    """Show the fleets that serve a job's queue, and the cost of the attempts on rented machines."""
    job, store, clock = require_job(context, call, call.path["id"]), require_store(context), fleet_clock(context)
    fleets = list(store.fleets(call.tenant))
    own = store.fleet(call.tenant, fleet_of(job.id)) if job.spec.rent is not None else None
    if own is not None and own.retired:
        fleets.append(own)
    attempts = _read_attempts(context, job) if fleets else []
    rented = _rented(store, fleets, attempts, clock, call.now)
    found = JobMachines(
        fleets=[
            ServingFleet(fleet=view_fleet(context, call, fleet), cannot=unservable(job, fleet.spec) or "")
            for fleet in fleets
            if job.queue in fleet.spec.queues
        ],
        attempts=rented,
        usd=round(sum(one.usd for one in rented), 6),
        at=clock.at(call.now),
    )
    timeless = [one.model_copy(update={"fleet": one.fleet.model_copy(update={"at": 0})}) for one in found.fleets]
    return revalidating(found, [found.model_copy(update={"fleets": timeless})])


def _read_attempts(context: Context, job: Job) -> list[tuple[int | None, Attempt]]:
    """Read attempts at the job, or at all claimed seats of an elastic job, with their seats."""
    owners: list[tuple[int | None, str]] = [(None, job.id)]
    if job.spec.nodes is not None:
        owners = [(place, seat_id(job.id, place)) for place, mark in enumerate(job.seats) if mark.epoch]
    return [
        (place, attempt)
        for place, owner in owners
        for attempt in context.jobs.history(Attempt, owner, limit=MAX_ATTEMPTS).items
    ]


def _rented(
    store: FleetStore,
    fleets: Sequence[StoredFleet],
    attempts: Sequence[tuple[int | None, Attempt]],
    clock: FleetClock,
    now: int,
) -> list[RentedAttempt]:
    wanted: dict[str, int] = {}
    for _, one in attempts:
        if one.machine_id:
            began_at = clock.at(one.started_at)
            wanted[one.machine_id] = min(began_at, wanted.get(one.machine_id, began_at))
    machines = {one.id: one for fleet in fleets for one in _machines(store, fleet, wanted)}
    found = []
    for seat, attempt in attempts:
        machine = machines.get(attempt.machine_id or "")
        if machine is None:
            continue
        ended_at = now if attempt.ended_at is None else attempt.ended_at
        held_s = clock.at(ended_at) - clock.at(attempt.started_at)
        usd = round(held_s / 3600 * machine.usd_per_hour, 6)
        found.append(
            RentedAttempt(epoch=attempt.epoch, seat=seat, machine=view_machine(machine), held_s=held_s, usd=usd)
        )
    return found


def _machines(store: FleetStore, fleet: StoredFleet, wanted: Mapping[str, int]) -> Iterator[Machine]:
    """Yield the wanted machines of a fleet; read nothing if no wanted token names the fleet.

    wanted: tokens, with the beginning of the first attempt on the machine by the fleets' clock.
    """
    # A token is the id of the deployment, the beginning of the fleet's name, and a random part.
    prefix = f"{store.deployment()}-{fleet.spec.name[:28]}-"
    mine = {one: began_at for one, began_at in wanted.items() if one.startswith(prefix)}
    if not mine:
        return
    for machine in store.machines(fleet.tenant, fleet.spec.name):
        if machine.id in mine:
            del mine[machine.id]
            yield machine
    if mine:
        # A machine ends after its attempts began: the ends before cost no read.
        ended = store.ended(fleet.tenant, fleet.spec.name, limit=MAX_ENDED, since=min(mine.values()))
        yield from (machine for machine in ended if machine.id in mine)
