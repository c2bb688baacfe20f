"""Supervise trainings whose nodes have rented machines: give back a machine that trains nothing, or too little."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.job_machines import REPLACED_NODE
from baton.contract.jobs.job import JobState
from functions.domain.records import Job
from functions.domain.worlds.world_record import WorldRecord
from functions.fleet import lifecycle
from functions.fleet.breaker import pause_forming
from functions.fleet.ledger import need_usd
from functions.fleet.machine_states import STARTING
from functions.fleet.offers.offer_ranking import RankedOffer
from functions.fleet.offers.replacement import (
    HOST_CHANGE_S,
    SlowNode,
    find_better,
    find_slowest,
    hours_left,
    hours_trained,
)
from functions.fleet.offers.reputation import quarantine
from functions.fleet.records import Machine, StoredFleet
from functions.fleet.ticks.tick import Tick

FORMING_PATIENCE_S = 1800
"""Time for which machines wait for the missing nodes of a training that has not begun; twice the time while another
machine starts."""
SHARED_INTERVAL_S = 600
"""Time between two looks at the trainings that wait for nodes on machines of fleets for all jobs."""
SEARCH_INTERVAL_S = 600
"""Time between two searches for a better machine: a search asks the providers for their offers."""
REPLACEMENT_INTERVAL_S = 3600
"""Time between two replacements in one training."""

ReadWorld = Callable[[str], WorldRecord | None]
"""Returns the world of an elastic job."""
ReadProgress = Callable[[Job], Job]
"""Returns an elastic job with the newest progress of its present attempts."""
Quote = Callable[[StoredFleet, Sequence[Job], Sequence[Machine]], Sequence[RankedOffer]]
"""Returns the offers of a fleet's providers for waiting jobs, ranked."""


class TrainingSupervisor:
    """Supervisor of the trainings whose nodes have machines of the tick's fleets."""

    def __init__(self, tick: Tick, read_world: ReadWorld, read_progress: ReadProgress, quote: Quote) -> None:
        self._tick = tick
        self._read_world = read_world
        self._read_progress = read_progress
        self._quote = quote

    def supervise(self, fleet: StoredFleet) -> None:
        """Give back the machines of a training that cannot begin, or the machine of the slowest node if that pays.

        Only the job's own fleet replaces a slow node.
        """
        if fleet.stopped:
            return
        if fleet.job_id is None:
            self._supervise_shared(fleet)
            return
        job = self._tick.jobs.get(fleet.job_id)
        if job is None or job.spec.nodes is None or job.state is not JobState.RUNNING or job.pause_requested:
            return
        alive = [one for one in self._tick.machines[fleet.tenant, fleet.spec.name] if not one.state.ended]
        busy = [one for one in alive if one.state is State.BUSY]
        changes = len(busy) < len(alive)
        if not busy or (changes and self._waited_s(busy) < FORMING_PATIENCE_S):
            return
        world = self._read_world(job.id)
        if world is None or not world.trains(job.seats):
            self._give_up(fleet, job, busy)
        # One change at a time: what starts or ends now changes the training.
        elif not changes and (slow := find_slowest(world.members, {one.id: one for one in alive})) is not None:
            self._replace(fleet, job, world, slow)

    def _supervise_shared(self, fleet: StoredFleet) -> None:
        """Give back the machines of a fleet for all jobs that wait for nodes.

        The first tick of each period looks, because the jobs of the machines are read.
        """
        if self._tick.now() % SHARED_INTERVAL_S >= lifecycle.TICK_S:
            return
        group = self._tick.machines[fleet.tenant, fleet.spec.name]
        busy = {one.job_id: one for one in group if one.state is State.BUSY and one.job_id is not None}
        if not busy or self._waited_s([*busy.values()]) < FORMING_PATIENCE_S:
            return
        nodes: dict[str, list[Machine]] = {}
        for held in self._tick.read_jobs(sorted(busy)):
            if held.spec.seat is not None:
                nodes.setdefault(held.spec.seat.job, []).append(busy[held.id])
        for job in self._tick.read_jobs(sorted(nodes)) if nodes else ():
            world = self._read_world(job.id)
            if job.state is JobState.RUNNING and (world is None or not world.trains(job.seats)):
                self._give_up(fleet, job, nodes[job.id])

    def _waited_s(self, busy: Sequence[Machine]) -> int:
        return self._tick.now() - min(one.claimed_at or one.since for one in busy)

    def _give_up(self, fleet: StoredFleet, job: Job, busy: Sequence[Machine]) -> None:
        """Give the machines back if they have waited long enough for nodes that cannot be rented."""
        assert job.spec.nodes is not None
        group = self._tick.machines[fleet.tenant, fleet.spec.name]
        running, least = sum(mark.running for mark in job.seats), job.spec.nodes.min
        # A machine that starts may be the missing one. The end of a machine, which may last, brings no node.
        patience_s = FORMING_PATIENCE_S * (2 if any(one.state in STARTING for one in group) else 1)
        waited_s = self._waited_s(busy)
        if running >= least or waited_s < patience_s:
            return
        reason = f"only {running} of {least} nodes could be rented within {patience_s // 60} minutes"
        now = self._tick.now()
        for machine in busy:
            ledger = self._tick.ledger(fleet)
            paused = ledger.forming.get(job.id)
            if paused is None or paused.since < now:
                forming = pause_forming(ledger.forming, fleet, job.id, reason, now)
                ledger = ledger.model_copy(update={"forming": forming})
            group[group.index(machine)] = self._tick.save(fleet, machine, lifecycle.stop(machine, reason, now), ledger)

    def _replace(self, fleet: StoredFleet, job: Job, world: WorldRecord, slow: SlowNode) -> None:
        """Give the machine of a slow node back if an offer pays in its place; the seat then waits for that offer."""
        tick = self._tick
        now, place = tick.now(), f"{fleet.tenant}/{fleet.spec.name}"
        if not tick.store.allow(place, "search", now, SEARCH_INTERVAL_S):
            return
        group, progress = tick.machines[fleet.tenant, fleet.spec.name], self._read_progress(job).progress
        done = progress.step / progress.total_steps if progress is not None and progress.total_steps else 0.0
        offers = self._find_affordable(fleet, slow.machine, self._quote(fleet, [], group))
        found = find_better(slow, offers, hours_left(done, hours_trained(world)))
        if found is None or not tick.store.allow(place, "replace", now, REPLACEMENT_INTERVAL_S):
            return
        offer, cost_usd = found
        at, machine = group.index(slow.machine), slow.machine
        reason = (
            f"{REPLACED_NODE}: its node trains {slow.share:.0%} of the median, an offer of {offer.provider} for "
            f"{offer.usd_per_hour:g} USD/h takes its place, the change costs about {cost_usd:.2f} USD"
        )
        group[at] = tick.save(fleet, machine, lifecycle.stop(machine, reason, now), tick.ledger(fleet))
        # The host may be slow for the next training as well, and the same host must not come back.
        quarantined = quarantine(group[at], "slow", tick.store.quarantined(0), now)
        if group[at] is not machine and quarantined is not None:
            tick.store.put_quarantine(quarantined)

    def _find_affordable(
        self, fleet: StoredFleet, machine: Machine, ranked: Sequence[RankedOffer]
    ) -> list[RankedOffer]:
        """Return the offers that the budget pays for in place of a machine; otherwise its node would be lost."""
        others = [one for one in self._tick.machines[fleet.tenant, fleet.spec.name] if one.id != machine.id]
        _, room_usd = self._tick.tightest(fleet, self._tick.ledger(fleet), others)
        room_usd -= machine.usd_per_hour * HOST_CHANGE_S / 3600
        return [one for one in ranked if need_usd(one.offer.usd_per_hour, one.offer.boot_s) <= room_usd]
