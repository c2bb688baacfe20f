"""Describe the fleets and rented machines of a job in sentences. Pure; all times are of the fleets' clock."""

from __future__ import annotations

from collections.abc import Iterator

from baton.contract.fleets.fleet import FleetView, MachineState, MachineView
from baton.contract.fleets.job_machines import JobMachines, RentedAttempt, ServingFleet
from baton.contract.jobs.job import JobState
from gpu_client.cli.core.formats import count, duration
from gpu_client.cli.fleet.view import usd

_STARTING = {
    MachineState.PLANNED: "is about to be rented",
    MachineState.REQUESTED: "is requested",
    MachineState.AMBIGUOUS: "may exist, because the provider's answer was lost",
    MachineState.BOOTING: "boots",
    MachineState.REGISTERED: "is checked",
}


def waiting_sentences(found: JobMachines) -> list[str]:
    """Say for each fleet that serves a waiting job which machine comes, or why none does."""
    return [_fleet_sentence(one, found.at) for one in found.fleets]


def waiting_advice(found: JobMachines) -> list[str]:
    """Say what lets a fleet rent a machine for a waiting job; empty if one starts anyway."""
    able = [one.fleet for one in found.fleets if not one.cannot]
    if not able:
        return [
            "To permit such machines, change the document of a fleet (the field in brackets): baton fleet apply FILE"
        ]
    return list(dict.fromkeys(line for fleet in able for line in _advice(fleet)))


def _advice(fleet: FleetView) -> Iterator[str]:
    name, change = fleet.spec.name, "change its document, then: baton fleet apply FILE"
    if fleet.job_id is not None:
        change = f"change the spec that 'baton fleet show {name} --json' prints, then: baton fleet apply FILE"
    if fleet.stopped and fleet.job_id is not None:
        yield "To let the job rent a machine again: baton stop ID, then baton retry ID"
    elif fleet.stopped:
        yield f"To let fleet {name} rent again: baton fleet apply FILE"
    elif "USD left" in fleet.waits:
        yield f"To raise the budget of fleet {name}: {change}"
    elif "no offer fits" in fleet.waits:
        yield f"To see why each offer does not fit: baton fleet plan FILE. To permit more: {change}"
    elif "in a row ended before they began a job" in fleet.waits:
        yield f"To see why its machines ended: baton fleet events {name}"


def _fleet_sentence(serving: ServingFleet, now: int) -> str:
    fleet, name = serving.fleet, serving.fleet.spec.name
    if serving.cannot:
        return f"Fleet {name} serves its queue and cannot run it: {serving.cannot}."
    coming = [one for one in fleet.machines if one.state in _STARTING]
    ready = [one for one in fleet.machines if one.state is MachineState.READY]
    busy = [one for one in fleet.machines if one.state is MachineState.BUSY]
    if fleet.stopped:
        return f"Fleet {name} serves its queue and is stopped."
    if ready:
        return f"The machine {ready[0].id} of fleet {name} is ready and asks for jobs."
    if coming:
        first = min(coming, key=lambda one: one.since)
        since = duration(now - first.since)
        return f"Fleet {name} rents: {machine_text(first)} {_STARTING[first.state]} since {since}."
    if fleet.waits:
        return f"Fleet {name} rents no machine: {fleet.waits}."
    if len(fleet.machines) >= fleet.spec.max:
        ending = len(fleet.machines) - len(busy)
        also = f", {ending} on the way out" if ending else ""
        return f"Fleet {name} has its maximum of {count(fleet.spec.max, 'machine')}: {len(busy)} busy{also}."
    return f"Fleet {name} serves its queue; its controller looks for waiting jobs once a minute."


def running_sentence(found: JobMachines, epoch: int) -> str:
    """Say which rented machine runs the job and what the job has cost; empty for a machine that was not rented."""
    now = next((one.machine for one in found.attempts if one.epoch == epoch), None)
    if now is None:
        return ""
    return f"Fleet {now.fleet} rents {machine_text(now)}; {cost_text(found)} so far."


def watch_text(found: JobMachines, state: JobState, epoch: int) -> str:
    """Return what a waiting job waits for, or which rented machine runs the job, without times, for `baton watch`."""
    if state is JobState.RUNNING:
        return next((f"on {machine_text(one.machine)}" for one in found.attempts if one.epoch == epoch), "")
    if state is not JobState.PENDING:
        return ""
    for fleet in (one.fleet for one in found.fleets if not one.cannot):
        coming = next((one for one in fleet.machines if one.state in _STARTING), None)
        if coming is not None:
            return f"{machine_text(coming)} {_STARTING[coming.state]}"
        if fleet.waits or fleet.stopped:
            return f"fleet {fleet.spec.name} {'is stopped' if fleet.stopped else f'waits: {fleet.waits}'}"
    return next((one.cannot for one in found.fleets if one.cannot), "")


def cost_text(found: JobMachines) -> str:
    """Return `the job has cost 0.31 USD`."""
    return f"the job has cost {usd(found.usd)} USD"


def machine_text(machine: MachineView) -> str:
    """Return `the machine a1b2c3d4-nights-9f8e7d of vast (RTX 4090, 0.40 USD/h)`."""
    gpu = f"{machine.gpu_model}, " if machine.gpu_model else ""
    return f"the machine {machine.id} of {machine.provider} ({gpu}{usd(machine.usd_per_hour)} USD/h)"


def attempt_note(attempt: RentedAttempt | None) -> str:
    """Return what an attempt cost, as an addition to its line; empty for a machine that was not rented."""
    if attempt is None:
        return ""
    machine = attempt.machine
    kind = " ".join(part for part in (machine.provider, machine.gpu_model) if part)
    return f" ({kind}, {usd(machine.usd_per_hour)} USD/h, {usd(attempt.usd)} USD)"
