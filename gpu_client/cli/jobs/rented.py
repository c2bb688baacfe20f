"""Describe the fleets and rented machines of a job in sentences. Pure; all times are of the fleets' clock."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from baton.contract.fleets.fleet import FleetView, MachineState, MachineView
from baton.contract.fleets.job_machines import (
    FAILED_WAITING_JOBS,
    REPLACED_NODE,
    JobMachines,
    RentedAttempt,
    ServingFleet,
)
from baton.contract.fleets.plan import FleetPlan
from baton.contract.jobs.job import JobState
from baton.contract.names import OPERATOR_TENANT
from gpu_client.cli.core.formats import count, duration
from gpu_client.cli.fleet.view import usd

_WITHOUT_ACCOUNT = re.compile(
    r"(?:^|; )([a-z0-9]+): (?:no offers: )?"
    r"(?:no account is stored|provider_key_refused|provider_permission_missing)\b"
)
"""Providers in the reason for which a fleet waits whose account is missing, was revoked, or lacks a permission."""
_REPLACES = ", and gives this one back first, once no other job waits for it"
_STARTING = {
    MachineState.PLANNED: "is about to be rented",
    MachineState.REQUESTED: "is requested",
    MachineState.AMBIGUOUS: "may exist, because the provider's answer was lost",
    MachineState.BOOTING: "boots",
    MachineState.REGISTERED: "is checked",
}


def waiting_sentences(found: JobMachines, avoided: Collection[str] = ()) -> list[str]:
    """Say for each fleet that serves a waiting job which machine comes, or why none does.

    avoided: machines that failed the job and cannot claim it.
    """
    return [_fleet_sentence(one, found.at, avoided) for one in found.fleets]


def waiting_advice(found: JobMachines) -> list[str]:
    """Say what lets a fleet rent a machine for a waiting job; empty if one starts anyway."""
    able = [one.fleet for one in found.fleets if not one.cannot]
    if not able:
        return [
            "To permit such machines, change the document of a fleet (the field in brackets): baton fleet apply FILE"
        ]
    return list(dict.fromkeys(line for fleet in able for line in _advice(fleet)))


def _advice(fleet: FleetView) -> Iterator[str]:
    name = fleet.spec.name
    for provider in dict.fromkeys(_WITHOUT_ACCOUNT.findall(fleet.waits)):
        yield (
            f"To let fleet {name} rent at {provider}, an admin of the tenant {OPERATOR_TENANT} runs: "
            f"baton fleet login {provider}"
        )
    document = f"baton fleet show {name} --document > {name}.yaml"
    change = f"{document}, change the file, then: baton fleet apply {name}.yaml"
    if fleet.stopped and fleet.job_id is not None:
        yield "To let the job rent a machine again: baton stop ID, then baton retry ID"
    elif fleet.stopped:
        yield f"To let fleet {name} rent again: {document}, then: baton fleet apply {name}.yaml"
    elif "USD left" in fleet.waits or "the budget of" in fleet.waits:
        yield f"To raise the budget of fleet {name}: {change}"
    elif "no offer fits" in fleet.waits or "nodes can be rented" in fleet.waits:
        plan = f"{document}, then: baton fleet plan {name}.yaml"
        yield f"To see why each offer does not fit: {plan}"
        yield f"To permit more: {change}"
    elif "in a row ended before they began a job" in fleet.waits:
        yield f"To see why its machines ended: baton fleet events {name}"


def _fleet_sentence(serving: ServingFleet, now: int, avoided: Collection[str]) -> str:
    fleet, name = serving.fleet, serving.fleet.spec.name
    if serving.cannot:
        return f"Fleet {name} serves its queue and cannot run it: {serving.cannot}."
    coming = [one for one in fleet.machines if one.state in _STARTING]
    free = [one for one in fleet.machines if one.state is MachineState.READY]
    ready = [one for one in free if one.id not in avoided]
    busy = [one for one in fleet.machines if one.state is MachineState.BUSY]
    if fleet.stopped:
        return f"Fleet {name} serves its queue and is stopped."
    if ready:
        return f"The machine {ready[0].id} of fleet {name} is ready and asks for jobs."
    if coming:
        first = min(coming, key=lambda one: one.since)
        since = duration(now - first.since)
        return f"Fleet {name} rents: {machine_text(first)} {_STARTING[first.state]} ({since} so far)."
    if free:
        # The controller gives such a machine back at `max`; below, it rents another one beside.
        return (
            f"The machine {free[0].id} of fleet {name} is free, but failed the job, which avoids it; the fleet rents "
            f"another machine{_REPLACES if len(fleet.machines) >= fleet.spec.max else ''}."
        )
    if fleet.waits:
        return f"Fleet {name} rents no machine: {fleet.waits}."
    replaced = next((one for one in fleet.machines if one.reason == FAILED_WAITING_JOBS), None)
    if replaced is not None:
        why = f"because {FAILED_WAITING_JOBS}"
        return f"Fleet {name} gives the machine {replaced.id} back, {why}, and rents another one."
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
    return f"Fleet {now.fleet} rents {machine_text(now)}; {cost_text(found, ' so far')}."


def replaced_sentences(found: JobMachines) -> list[str]:
    """Say why machines of slow nodes are given back at the moment, and what that costs."""
    own = own_fleet(found)
    leaving = [one for one in own.machines if one.reason.startswith(REPLACED_NODE)] if own is not None else []
    return [f"Fleet {one.fleet} gives the machine {one.id} back: {one.reason}." for one in leaving]


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


def own_fleet(found: JobMachines) -> FleetView | None:
    """Return the fleet that a job rents for itself; None for a job that fleets of documents serve."""
    return next((one.fleet for one in found.fleets if one.fleet.job_id is not None), None)


def cost_usd(found: JobMachines) -> float:
    """Return the cost of a job in USD: all that its own fleet has spent, or its time on machines of other fleets."""
    own = own_fleet(found)
    # The stored spending of a fleet lags by up to five minutes, therefore a part can seem larger than the whole.
    return found.usd if own is None else max(own.spent_usd, found.usd)


def cost_text(found: JobMachines, so_far: str = "") -> str:
    """Return `the job has cost 0.31 USD`; for a job with a fleet of its own also the part while the job ran."""
    text = f"the job has cost {usd(cost_usd(found))} USD{so_far}"
    if own_fleet(found) is None:
        return text
    return f"{text}, boot and idle time included ({usd(found.usd)} USD while it ran)"


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


def rent_lines(plan: FleetPlan, fleet: FleetView) -> Iterator[str]:
    """Say what a submitted job rents and for how long the budget pays, or why nothing can be rented now.

    fleet: of the job; its machines are those that the controller has requested already.
    """
    taken = [one for one in plan.offers if one.taken]
    if taken:
        first, machines = taken[0], sum(one.taken for one in taken)
        price = f"{first.gpu_model or 'no GPU'}, {usd(first.usd_per_hour)} USD/h"
        total = sum(one.taken * one.usd_per_hour for one in taken)
        what = f"a machine of {first.provider} ({price})"
        if machines > 1:
            what = f"{machines} machines, the first one of {first.provider} ({price}), for {usd(total)} USD/h together"
        yield f"The job rents {what}{_paid_for(plan.room_usd, total)}."
        if machines + plan.alive < fleet.spec.max:
            yield f"The job may have {fleet.spec.max} machines; now {plan.why}."
    elif not plan.alive:
        yield f"No machine can be rented now: {plan.why}. The job waits; its budget must pay for boot and one hour."
    total = sum(one.usd_per_hour for one in fleet.machines)
    for one in fleet.machines:
        hours = _paid_for(fleet.spec.budget.total_usd or 0, total) if one is fleet.machines[-1] else ""
        yield f"The job rents {machine_text(one)}{hours}."
    yield from (f"{one.provider}: {one.reason}" for one in plan.silent)
    yield "When the budget ends, the work since the last checkpoint is lost; a job without checkpoints begins again."


def _paid_for(budget_usd: float, usd_per_hour: float) -> str:
    return f"; the budget pays for {budget_usd / usd_per_hour:.1f} h" if usd_per_hour else ""
