"""Decide for which waiting seats of elastic jobs a fleet rents now. Pure.

The training of an elastic job begins with `min` nodes. Therefore machines for the first `min` seats are rented together
or not at all: fewer machines would cost money and train nothing. Seats above `min` come after all other jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.contract.fleets.fleet import FleetSpec
from functions.domain.records import Job
from functions.fleet.breaker import FormingPause
from functions.fleet.records import Machine, StoredFleet
from functions.fleet.ticks.demand import FleetMachines, unservable, unserved

Trains = Callable[[str], bool]
"""Tells whether an elastic job trains: then each machine helps at once, also below `min`."""


@dataclass
class Demand:
    """Waiting jobs for which a fleet rents, in two parts."""

    first: list[Job] = field(default_factory=list)
    """Ordinary jobs, and the seats that an elastic job needs to begin."""
    later: list[Job] = field(default_factory=list)
    """Seats above `min`."""
    held: str = ""
    """Why no machine is rented for an elastic job; empty if no elastic job is left out."""

    @property
    def jobs(self) -> list[Job]:
        """Return all jobs, those that come first before the others."""
        return [*self.first, *self.later]


def select(
    waiting: Sequence[Job],
    spec: FleetSpec,
    machines: Sequence[Machine],
    others: Sequence[FleetMachines] = (),
    *,
    startable: int | None = None,
    trains: Trains = lambda _: False,
) -> Demand:
    """Return the jobs for which the fleet rents, without the elastic jobs that could not begin.

    startable: machines that offers and money permit now; None: as many as `max` permits.
    """
    room = spec.max - sum(not machine.state.ended for machine in machines)
    room = room if startable is None else min(room, startable)
    jobs = [job for job in waiting if unservable(job, spec) is None]
    gangs: dict[str, list[Job]] = {}
    for job in jobs:
        if job.spec.seat is not None:
            gangs.setdefault(job.spec.seat.job, []).append(job)
    found = Demand()
    for job in jobs:
        seat = job.spec.seat
        if seat is None:
            found.first.append(job)
            continue
        gang = gangs.pop(seat.job, [])
        running = seat.max - len(gang)
        needed = max(0, seat.min - running) if gang else 0
        short = unserved([*found.first, *gang[:needed]], spec, machines, others) - room if needed else 0
        if short > 0 and not (running and trains(seat.job)):
            rentable = max(0, seat.min - short)
            found.held = found.held or f"{rentable} of {seat.min} nodes can be rented"
        else:
            found.first += gang[:needed]
            found.later += gang[needed:]
    return found


def leave_paused_out(
    waiting: Sequence[Job], pauses: Mapping[str, FormingPause], fleet: StoredFleet, now: int, *, trains: Trains
) -> tuple[list[Job], str]:
    """Return the jobs without the nodes of trainings for which the fleet rents nothing for a while, and why for the
    first of them; empty for none.

    pauses: of the fleet's ledger.
    """
    told = {key: one.waits(fleet, now) for key, one in pauses.items()}
    paused = {key: why for key, why in told.items() if why and not trains(key)}
    left = [job for job in waiting if job.spec.seat is None or job.spec.seat.job not in paused]
    return left, next(iter(paused.values()), "") if len(left) < len(waiting) else ""
