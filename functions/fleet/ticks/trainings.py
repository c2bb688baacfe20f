"""Supervise trainings whose nodes have rented machines: give back a machine that trains nothing, or too little."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.job_machines import REPLACED_NODE
from baton.contract.jobs.job import JobState
from functions.domain.records import Job
from functions.domain.worlds.world_record import WorldRecord
from functions.fleet import lifecycle
from functions.fleet.offers.offer_ranking import RankedOffer
from functions.fleet.offers.replacement import SlowNode, find_better, find_slowest, hours_left
from functions.fleet.offers.reputation import quarantine
from functions.fleet.records import Machine, StoredFleet
from functions.fleet.ticks.tick import Tick

FORMING_PATIENCE_S = 1800
"""Time for which machines wait for the missing nodes of a training that has not begun."""
SEARCH_INTERVAL_S = 600
"""Time between two searches for a better machine: a search asks the providers for their offers."""
REPLACEMENT_INTERVAL_S = 3600
"""Time between two replacements in one training."""

ReadWorld = Callable[[str], WorldRecord | None]
"""Returns the world of an elastic job."""
Quote = Callable[[StoredFleet, Sequence[Job], Sequence[Machine]], Sequence[RankedOffer]]
"""Returns the offers of a fleet's providers for waiting jobs, ranked."""


def supervise_training(tick: Tick, fleet: StoredFleet, read_world: ReadWorld, quote: Quote) -> None:
    """Give back the machines of a training that cannot begin, or the machine of the slowest node if that pays."""
    job = tick.jobs.get(fleet.job_id or "")
    if fleet.stopped or job is None or job.spec.nodes is None or job.state is not JobState.RUNNING:
        return
    group = tick.machines[fleet.tenant, fleet.spec.name]
    alive = [one for one in group if not one.state.ended]
    if job.pause_requested or not alive or any(one.state is not State.BUSY for one in alive):
        return  # One change at a time: what starts or ends now changes the training.
    world = read_world(job.id)
    if world is None or not world.trains(job.seats):
        _give_up(tick, fleet, job, group)
        return
    slow = find_slowest(world.members, {one.id: one for one in alive})
    if slow is not None:
        _replace(tick, fleet, job, slow, quote)


def _give_up(tick: Tick, fleet: StoredFleet, job: Job, group: list[Machine]) -> None:
    """Give all machines back if they have waited long enough for nodes that cannot be rented."""
    assert job.spec.nodes is not None
    running, least = sum(mark.running for mark in job.seats), job.spec.nodes.min
    since = min(one.claimed_at or one.since for one in group if one.state is State.BUSY)
    if running >= least or tick.now() < since + FORMING_PATIENCE_S:
        return
    reason = f"only {running} of {least} nodes could be rented within {FORMING_PATIENCE_S // 60} minutes"
    for at, machine in enumerate(group):
        if machine.state is State.BUSY:
            group[at] = tick.save(fleet, machine, lifecycle.stop(machine, reason, tick.now()), tick.ledger(fleet))


def _replace(tick: Tick, fleet: StoredFleet, job: Job, slow: SlowNode, quote: Quote) -> None:
    """Give the machine of a slow node back if an offer pays in its place; the seat then waits for that offer."""
    now, place = tick.now(), f"{fleet.tenant}/{fleet.spec.name}"
    if not tick.store.allow(place, "search", now, SEARCH_INTERVAL_S):
        return
    group, progress = tick.machines[fleet.tenant, fleet.spec.name], job.progress
    done = progress.step / progress.total_steps if progress is not None and progress.total_steps else 0.0
    found = find_better(slow, quote(fleet, [], group), hours_left(done, (now - fleet.created_at) / 3600))
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
