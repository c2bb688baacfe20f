"""Decide the next state of one machine, from the clock, the provider's inventory and the worker's reports.

All functions are pure: records and times in, a new record out. `advance` is the whole of the controller's judgement
about one machine; the tick writes the returned record before it calls the provider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.breaker import CONTRACT_ENDS
from functions.fleet.machine_states import (
    CHECKPOINT_GRACE_S,
    CHECKPOINT_MARGIN_S,
    DEADLINES,
    EXISTING,
    ORPHAN_WATCH_S,
    OVERDUE,
    OVERDUE_S,
    TRANSITIONS,
    USABLE,
)
from functions.fleet.records import Inventory, Machine, Offer, Sighting

LISTED_WITHIN_S = 120
"""Shortest time after a create until an absence counts, because providers list a new machine late."""
PRICE_TOLERANCE = 1.02
"""Factor by which the observed price may exceed the cap, because providers round prices."""
BOOT_PATIENCE = 1.5
"""Factor by which a boot may exceed the time that the offer names, if that is longer than the deadline of all boots."""
BUDGET_SPENT = "the budget is spent"
"""Reason of a machine whose reservation ends and cannot be extended."""
TICK_S = 60
"""Interval of the ticks."""
COST_STORED_EVERY_S = 300
"""Time after which the running cost of a machine is stored if nothing else changes."""
RESERVED_AT_LEAST_S = 1800
"""Remaining time of a reservation below which each tick stores the machine, so that an extension comes in time."""
SMALLEST_USD = 1e-6
"""Smallest difference in USD that a comparison of amounts counts."""
LONGEST_REASON = 500
"""Characters of a reason; a provider's text of any length would make the record too large to store."""
SILENCE_S = 900
"""Time without a sign of the worker after which a machine that has ended at its provider counts as lost."""


DEAD_WORKER_S = 3600
"""Silence after which a worker counts as dead although its machine runs. A worker without an answer ends itself at the
latest 15 minutes after its lease, which lasts 30 minutes at most; therefore no outage takes a live worker's machine."""


STAYING = frozenset({State.BOOTING, State.REGISTERED}) | USABLE
"""States of a machine that exists and is not on its way out."""


class InvalidTransition(Exception):  # noqa: N818 - a fault of the caller, never of input
    """The table of transitions does not permit the step."""


def move(machine: Machine, to: State, now: int, reason: str = "", **updates: Any) -> Machine:
    """Return the machine in state `to`. Raises InvalidTransition for a step that the table does not permit."""
    if to not in TRANSITIONS[machine.state]:
        raise InvalidTransition(f"{machine.id}: {machine.state} -> {to}")
    lost = {"lost_at": now} if to is State.LOST else {}
    cut = reason[:LONGEST_REASON]
    return machine.model_copy(update={"state": to, "since": now, "reason": cut, **lost, **updates})


def end_of(offer: Offer, spec: FleetSpec, start: int) -> int:
    """Return the time at which a machine that started at `start` drains, whatever the machine does."""
    ends = start + int(spec.max_hours * 3600)
    return ends if offer.ends_at is None else min(ends, offer.ends_at - CHECKPOINT_MARGIN_S)


def follow(machine: Machine, spec: FleetSpec) -> Machine:
    """Return the machine with the cap and the latest end of the present document.

    A longer `max_hours` is for new machines only, because the worker's key ends with the end as of the enrolment.
    """
    ends_by = min(machine.ends_by, end_of(machine.offer, spec, machine.requested_at or machine.since))
    updates = {"ends_by": ends_by, "cap_usd_per_hour": spec.max_usd_per_hour}
    if machine.state.ended or all(getattr(machine, name) == value for name, value in updates.items()):
        return machine
    return machine.model_copy(update=updates)


def request(machine: Machine, now: int) -> Machine:
    """Return the machine with the intent of a create: from now on the provider may bill the machine."""
    return move(machine, State.REQUESTED, now, requested_at=now, priced_until=now)


def created(machine: Machine, handle: str, now: int, *, usd_per_hour: float | None = None) -> Machine:
    """Return the machine after its provider confirmed the create; on its way out if its price exceeds the cap."""
    price = machine.usd_per_hour if usd_per_hour is None else usd_per_hour
    made = machine.model_copy(update={"handle": handle, "created_at": now, "usd_per_hour": price, "absences": []})
    dear = excess(made)
    return move(made, State.TERMINATING if dear else State.BOOTING, now, dear)


def excess(machine: Machine) -> str:
    """Return how the price of the machine exceeds the cap; empty for a price within the cap."""
    if machine.usd_per_hour <= machine.cap_usd_per_hour * PRICE_TOLERANCE:
        return ""
    return f"the price {machine.usd_per_hour:g} USD/h exceeds the cap {machine.cap_usd_per_hour:g} USD/h"


def refused(machine: Machine, reason: str, now: int) -> Machine:
    """Return the machine after a definitive refusal: the provider says that no machine was made."""
    return move(machine, State.FAILED, now, reason, spent_usd=0.0, requested_at=None)


def doubt(machine: Machine, reason: str, now: int) -> Machine:
    """Return the machine after a create without a usable answer."""
    return move(machine, State.AMBIGUOUS, now, reason)


def enrolled(machine: Machine, now: int) -> Machine:
    """Return the machine after its worker proved its identity; the enrolment token is used up."""
    return move(machine, State.REGISTERED, now, enrolled_at=now, seen_at=now, usd_per_hour=running_price(machine))


def running_price(machine: Machine) -> float:
    """Return the price in USD per hour of a machine whose worker calls, or whose provider names no price now.

    The last list may be from before the start, when a provider that bills running machines only named the price 0.
    """
    return machine.usd_per_hour or machine.offer.usd_per_hour


def checked(machine: Machine, problem: str, now: int) -> Machine:
    """Return the machine after its preflight check. `problem`: the difference from the offer; empty for none."""
    if problem:
        return move(machine, State.TERMINATING, now, f"the preflight check failed: {problem}", seen_at=now)
    return move(machine, State.READY, now, seen_at=now)


def claimed(machine: Machine, job_id: str, now: int) -> Machine:
    """Return the machine that has claimed a job."""
    return move(machine, State.BUSY, now, job_id=job_id, seen_at=now, claimed_at=now)


def released(machine: Machine, now: int) -> Machine:
    """Return the machine that holds its job no longer: free for the next job, or at its end if the machine drains."""
    to = State.TERMINATING if machine.state is State.DRAINING else State.READY
    return move(machine, to, now, machine.reason, job_id=None, seen_at=now)


def reallocated(machine: Machine, now: int) -> Machine:
    """Return the machine that its provider is asked to move away from its present host; a boot begins anew."""
    since = {"since": now} if machine.state is State.BOOTING else {}
    hosts = [*machine.reallocated, machine.offer.machine_ref]
    return machine.model_copy(update={"reallocated": hosts, "seen_at": now, **since})


def advance(machine: Machine, inventory: Inventory, *, idle_timeout_s: int | None) -> Machine:
    """Return the machine as the inventory and the clock (`inventory.at`) leave it; the same object if nothing changes.

    idle_timeout_s: time without a job after which a ready machine is given back; None keeps the machine.
    """
    now = inventory.at
    sightings = inventory.of(machine.id)
    machine = _accrue(_note(machine, sightings, inventory), machine.usd_per_hour, now)
    state = machine.state
    if state in (State.REQUESTED, State.AMBIGUOUS, State.FAILED):
        return _settle_create(machine, sightings, now)
    if state is State.TERMINATING:
        return move(machine, State.GONE, now, machine.reason) if _has_ended(machine) else machine
    if state is State.LOST:
        return move(machine, State.TERMINATING, now, machine.reason)
    if state in EXISTING:
        problem = _loss(machine, sightings, now)
        if problem:
            return move(machine, State.LOST, now, problem)
        limit = _limit(machine, sightings, idle_timeout_s, now)
        if limit:
            return _drain(machine, limit, now)
    deadline = DEADLINES.get(state)
    if deadline and now >= machine.since + max(deadline.after_s, _boot_patience_s(machine)):
        return move(machine, deadline.then, now, machine.reason or deadline.reason)
    return machine


def _has_ended(machine: Machine) -> bool:
    """Return True if the machine is not listed and its provider has accepted its end.

    The absence alone is no proof: a person may have renamed the machine, which its provider bills as before.
    """
    asked = machine.destroy_at is not None and machine.destroy_at >= machine.since
    return machine.absence_proved and (asked or machine.handle is None)


def _boot_patience_s(machine: Machine) -> float:
    """Return how long a machine may boot in seconds; 0 for a machine that does not boot."""
    return BOOT_PATIENCE * machine.offer.boot_s if machine.state is State.BOOTING else 0.0


def _note(machine: Machine, sightings: list[Sighting], inventory: Inventory) -> Machine:
    """Record sightings and absences. Only an inventory that covers the machine is evidence of its absence."""
    if not sightings:
        if not inventory.covers(machine.offer) or machine.state is State.PLANNED:
            return machine
        if machine.state is State.FAILED and machine.absence_proved:
            return machine
        if machine.handle and machine.requested_at and inventory.at < machine.requested_at + LISTED_WITHIN_S:
            return machine
        absences = [*machine.absences[:1], inventory.at]
        return machine if absences == machine.absences else machine.model_copy(update={"absences": absences})
    first = _own(machine, sightings)
    known = machine.handle or first.handle
    updates: dict[str, Any] = {
        "absences": [],
        "duplicates": [one.handle for one in sightings if one.handle != known],
        "usd_per_hour": running_price(machine) if first.usd_per_hour is None else first.usd_per_hour,
    }
    if first.machine_ref and first.machine_ref != machine.offer.machine_ref:
        updates["offer"] = machine.offer.model_copy(update={"machine_ref": first.machine_ref})
    if all(getattr(machine, name) == value for name, value in updates.items()):
        return machine
    return machine.model_copy(update=updates)


def _own(machine: Machine, sightings: Sequence[Sighting]) -> Sighting:
    """Return the entry of the machine itself; the oldest of its duplicates if the machine is not listed."""
    return next((one for one in sightings if one.handle == machine.handle), sightings[0])


def _accrue(machine: Machine, earlier_price: float, now: int) -> Machine:
    """Add the cost since the last stored cost. A machine that vanished is billed until its first proved absence.

    earlier_price: price in USD per hour before this tick; a new price counts from the tick before.
    """
    if machine.priced_until is None or not machine.billed:
        return machine
    until = machine.absences[0] if machine.absences else now
    elapsed_s = until - machine.priced_until
    if elapsed_s <= 0:
        return machine
    if elapsed_s > COST_STORED_EVERY_S + TICK_S:
        # Ticks are missing, therefore the start of the new price is unknown.
        earlier_price = max(earlier_price, machine.usd_per_hour)
    recent_s = min(elapsed_s, TICK_S)
    usd = (recent_s * machine.usd_per_hour + (elapsed_s - recent_s) * earlier_price) / 3600
    cost = usd * (1 + len(machine.duplicates))
    return machine.model_copy(
        update={
            "spent_usd": machine.spent_usd + cost,
            "reserved_usd": max(0.0, machine.reserved_usd - cost),
            "priced_until": until,
        }
    )


def only_cost_grew(before: Machine, after: Machine) -> bool:
    """Return True if the running cost alone differs and can be stored later, with the cost of the next minutes.

    A write for each machine and minute would be the largest part of the control plane's own cost. The reservation of
    the stored machine pays for the minutes until then; therefore a reservation that is cut, or that ends soon, is
    stored at once.
    """
    if before.priced_until is None or after.priced_until is None or before.budget_until is None:
        return False
    if after.priced_until - before.priced_until >= COST_STORED_EVERY_S:
        return False
    if before.budget_until - after.priced_until < RESERVED_AT_LEAST_S:
        return False
    if after.spent_usd + after.reserved_usd < before.spent_usd + before.reserved_usd - SMALLEST_USD:
        return False
    cost = {name: getattr(before, name) for name in ("spent_usd", "reserved_usd", "priced_until")}
    return after.model_copy(update=cost) == before


def _settle_create(machine: Machine, sightings: list[Sighting], now: int) -> Machine:
    """Resolve a create whose answer is missing: by the provider's list, never by a second create."""
    if sightings:
        found = machine.model_copy(update={"handle": sightings[0].handle})
        if machine.state is State.FAILED:
            reason = "the provider made the machine after its absence seemed proved"
            return move(found, State.TERMINATING, now, reason, created_at=now, priced_until=machine.requested_at)
        return created(found, sightings[0].handle, now)
    if machine.state is State.REQUESTED:
        return doubt(machine, "the controller stopped between the intent and the answer", now)
    asked_at = machine.requested_at or machine.since
    if machine.state is State.FAILED and now >= asked_at + ORPHAN_WATCH_S:
        return machine.model_copy(update={"watch_over": True})
    if (
        machine.state is State.AMBIGUOUS
        and machine.absence_proved
        and machine.absences[1] >= asked_at + LISTED_WITHIN_S
    ):
        return move(machine, State.FAILED, now, "the provider did not make the machine", spent_usd=0.0)
    return machine


def _loss(machine: Machine, sightings: list[Sighting], now: int) -> str | None:
    """Return why the machine counts as lost; None while the machine may be alive.

    Short silence proves nothing, because the network between worker and control plane can fail.
    """
    if machine.absence_proved:
        return "the machine vanished from its provider's list"
    silent_s = now - max(machine.seen_at or 0, machine.created_at or 0)
    if machine.state in USABLE and silent_s >= DEAD_WORKER_S:
        return "the worker is silent"
    ended = sightings and not _own(machine, sightings).running
    if ended and (machine.state is State.BOOTING or silent_s >= SILENCE_S):
        return _own(machine, sightings).message or "the provider ended the machine"
    return None


def acceptable_price(machine: Machine, sightings: Sequence[Sighting]) -> float | None:
    """Return the price that the provider announced for the machine, if it is within the cap; None for no such price."""
    announced = _own(machine, sightings).announced_usd_per_hour if sightings else None
    if machine.state not in STAYING or announced is None or announced > machine.cap_usd_per_hour:
        return None
    return announced


def _limit(machine: Machine, sightings: Sequence[Sighting], idle_timeout_s: int | None, now: int) -> str | None:
    """Return which limit the machine has reached; None for none."""
    until = machine.budget_until
    if machine.state is State.DRAINING:
        # The money bounds a hanging worker also where the deadline of the state does not.
        spent = until is not None and now >= max(until - TICK_S, machine.since + CHECKPOINT_GRACE_S)
        return machine.reason or BUDGET_SPENT if spent else None
    if dear := excess(machine):
        return dear
    announced = _own(machine, sightings).announced_usd_per_hour if sightings else None
    if announced is not None and announced > machine.cap_usd_per_hour:
        return f"the provider raises the price to {announced:g} USD/h, above the cap {machine.cap_usd_per_hour:g} USD/h"
    if now >= machine.ends_by:
        ends_at = machine.offer.ends_at
        return CONTRACT_ENDS if ends_at and machine.ends_by == ends_at - CHECKPOINT_MARGIN_S else "max_hours is over"
    if until is not None and now >= until - CHECKPOINT_MARGIN_S:
        return BUDGET_SPENT
    if machine.state is State.READY and idle_timeout_s is not None and now - machine.since >= idle_timeout_s:
        return "no job for idle_timeout_s"
    return None


def mark_overdue(machine: Machine, now: int) -> Machine:
    """Mark a machine as reported overdue; return a machine that is not overdue unchanged."""
    if machine.state not in OVERDUE or now < machine.since + OVERDUE_S or machine.told_since == machine.since:
        return machine
    return machine.model_copy(update={"told_since": machine.since})


def stop(machine: Machine, reason: str, now: int) -> Machine:
    """Return the machine on its way out because its fleet gives it back; unchanged if the machine leaves already."""
    if machine.state is State.PLANNED:
        return move(machine, State.FAILED, now, reason)
    return _drain(machine, reason, now) if machine.state in STAYING else machine


def _drain(machine: Machine, reason: str, now: int) -> Machine:
    """Return the machine on its way out: at once before its worker can hold a job, otherwise after a checkpoint.

    A ready machine drains too, because its worker may have claimed a job since its last heartbeat.
    """
    to = State.DRAINING if machine.state in USABLE else State.TERMINATING
    return move(machine, to, now, reason)
