"""Run one tick of the controller: reconcile all machines with their providers, then start what is missing.

The order follows from the promises: inventories first, deadlines and money before any new spending, destroys before
creates. Every write is conditional on the controller's fence and on the version of the record, and the intent of a
create is stored before the call. Therefore the next tick finishes whatever a tick that died at any instruction left.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import ValidationError

from baton.contract.fleet import MachineState as State
from functions.domain.errors import WriteConflict
from functions.domain.records import Job
from functions.fleet import lifecycle
from functions.fleet.accounts import no_account
from functions.fleet.breaker import FAILURES, last_begin
from functions.fleet.demand import missing_machines
from functions.fleet.drivers.protocol import (
    Ambiguous,
    Created,
    CreateIntent,
    Driver,
    ProviderRefused,
    ProviderUnavailable,
)
from functions.fleet.ledger import Ledger, extend, need_usd, new_warnings, release, tightest
from functions.fleet.machine_states import DEADLINES, MAYBE_EXISTING, ORPHAN_WATCH_S
from functions.fleet.offer_ranking import RankedOffer, Workload, rank
from functions.fleet.records import FleetEvent, Inventory, Machine, Offer, OrphanMachine, Quarantine, StoredFleet
from functions.fleet.store import FenceLost, FleetStore

logger = logging.getLogger("baton.fleet")

LEASE_S = 90
"""Lease of one tick. A function that is paused longer than its lease cannot write any more, because of the fence."""
LEAST_TIME_S = 20
"""Time of the function that must be left before a provider is called: a call ends within its time-out."""
DESTROY_EVERY_S = 30
ORPHAN_GRACE_S = 60
"""Time between the first and the last sighting after which an orphan is destroyed."""
ENROLS_WITHIN_S = 1800
"""Time after the intent of a create within which the machine's enrolment key is valid."""
QUARANTINE_S = {"boot": 6 * 3600, "loss": 24 * 3600}
LONGEST_QUARANTINE_S = 7 * 24 * 3600
OFFERS_PER_TICK = 8
"""Offers tried for one machine in one tick."""
DECISIONS = 5
"""Decisions about one machine in one tick whose writes may conflict with calls of the machine's worker."""
NO_ANSWER = (ProviderUnavailable, ProviderRefused, ValidationError)
"""Failures of a driver's read; ValidationError: the provider's answer has impossible values."""


class MachineKeys(Protocol):
    """The API keys of machines."""

    def issue(self, machine: Machine, expires_at: int) -> tuple[str, Mapping[str, str]]:
        """Store a new enrolment key; return its id and the environment of the machine, which contains the key."""

    def revoke(self, key_id: str) -> None:
        """Revoke a key; idempotent."""


@dataclass
class TickReport:
    """Counters of one tick, for metrics and the summary event."""

    skipped: bool = False
    """True if another controller held the fence."""
    finished: bool = False
    """True if the tick looked after every fleet; False also if there is no fleet."""
    machines: dict[str, int] = field(default_factory=dict)
    created: int = 0
    destroyed: int = 0
    orphans: int = 0
    usd_per_hour: float = 0.0
    failures: list[str] = field(default_factory=list)


class FleetController:
    """The controller of all fleets of a deployment.

    waiting: returns the claimable jobs of a fleet's queues. random_token: 256 random bits, URL-safe. time_left_s: time
    until the function is ended.
    """

    def __init__(
        self,
        store: FleetStore,
        drivers: Mapping[str, Driver],
        *,
        waiting: Callable[[StoredFleet], Sequence[Job]],
        keys: MachineKeys,
        now: Callable[[], int],
        random_token: Callable[[], str],
        time_left_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._drivers = drivers
        self._waiting = waiting
        self._keys = keys
        self._now = now
        self._random_token = random_token
        self._time_left_s = time_left_s
        self._fence = 0
        self._ledgers: dict[tuple[str, str], Ledger] = {}
        self._report = TickReport()

    def tick(self) -> TickReport:
        """Run one tick. Returns at once without fleets, and with `skipped` while another controller holds the fence."""
        self._report = TickReport()
        if not self._store.fleets():
            return self._report
        fence = self._store.acquire(self._random_token(), self._now(), LEASE_S)
        if fence is None:
            self._report.skipped = True
            return self._report
        self._fence = fence
        self._ledgers = {}
        try:
            self._report.finished = self._reconcile_all()
        except FenceLost:
            logger.warning("another controller has taken over; this tick ends")
            return self._report
        self._store.release(fence)
        return self._report

    def _reconcile_all(self) -> bool:
        """Look after all machines, then start the missing ones; return False if the time ended before the last machine.

        The tick looks first after the machines that have waited longest, so that a tick that is too short for all
        machines leaves each of them to the next tick at the latest.
        """
        fleets = list(self._store.fleets())
        machines = {
            (one.tenant, one.spec.name): list(self._store.machines(one.tenant, one.spec.name)) for one in fleets
        }
        providers = self._watched_providers(fleets, [machine for group in machines.values() for machine in group])
        inventories = {name: found for name in providers if (found := self._inventory(name)) is not None}
        places = [(fleet, at) for fleet in fleets for at in range(len(machines[fleet.tenant, fleet.spec.name]))]
        places.sort(key=lambda place: _turn(machines[place[0].tenant, place[0].spec.name][place[1]]))
        finished = True
        for fleet, at in places:
            finished = self._time_left_s() >= LEAST_TIME_S
            if not finished:
                self._fail("the time of the tick is over before its last machine")
                break
            group = machines[fleet.tenant, fleet.spec.name]
            self._reconcile(fleet, group, at, inventories.get(group[at].provider))
            group[at] = self._destroy(group[at])
        self._handle_orphans(inventories.values(), [machine for group in machines.values() for machine in group])
        for fleet in fleets if finished else ():
            self._start_missing(fleet, machines[fleet.tenant, fleet.spec.name])
        for group in machines.values():
            for machine in group:
                self._report.machines[machine.state] = self._report.machines.get(machine.state, 0) + 1
                self._report.usd_per_hour += machine.usd_per_hour if machine.billed else 0.0
        return finished

    def _watched_providers(self, fleets: Sequence[StoredFleet], machines: Sequence[Machine]) -> list[str]:
        """Return the providers whose lists the tick reads.

        A provider can list a machine late, after its fleet was stopped or names other providers.
        """
        renting = {name for one in fleets if not one.stopped for name in one.spec.providers}
        recent = renting or any(self._now() < one.updated_at + ORPHAN_WATCH_S for one in fleets)
        return sorted({one.provider for one in machines} | renting | (set(self._drivers) if recent else set()))

    def _inventory(self, provider: str) -> Inventory | None:
        """Return the provider's list of our machines; None if nothing could be read."""
        driver = self._drivers.get(provider)
        if driver is None:
            self._fail(no_account(provider))
            return None
        if not self._may_call(driver, "inventory"):
            return None
        try:
            return driver.inventory(f"{self._store.deployment()}-", self._now())
        except NO_ANSWER as error:
            self._fail(f"{provider}: the list of machines cannot be read: {error}")
            return None

    def _reconcile(self, fleet: StoredFleet, group: list[Machine], at: int, inventory: Inventory | None) -> None:
        """Advance one machine, move its money, store both.

        After a conflict with a call of the machine's worker, decide about the stored machine: a worker that writes in
        each tick between the tick's read and write would otherwise keep its machine for ever.
        """
        for _ in range(DECISIONS):
            before = group[at]
            after, spent = self._decide(fleet, before, group, inventory)
            group[at] = before if after == before else self._save(fleet, before, after, spent)
            if after == before or group[at] is not before:
                return
            group[at] = self._store.machine(before.tenant, before.fleet, before.id) or before

    def _decide(
        self, fleet: StoredFleet, machine: Machine, group: Sequence[Machine], inventory: Inventory | None
    ) -> tuple[Machine, Ledger]:
        """Return the machine and the ledger as the inventory, the document, the clock and the money leave them."""
        now = self._now()
        inventory = inventory or Inventory(provider=machine.provider, at=now, complete=False)
        kept = sum(one.state in (State.READY, State.BUSY) for one in group) <= fleet.spec.min and not fleet.stopped
        after = lifecycle.advance(machine, inventory, idle_timeout_s=None if kept else fleet.spec.idle_timeout_s)
        if fleet.stopped:
            after = lifecycle.stop(after, "the fleet is stopped", now)
        if after.state is State.GONE:
            after = after.model_copy(update={"charged_usd": self._charge(after)})
        others = [one for one in group if one.id != machine.id]
        spent = self._ledger(fleet).spend(after.spent_usd - machine.spent_usd, now)
        if after.state is State.GONE:
            breaker = spent.breaker.after([machine], last_begin(fleet, group))
            spent = spent.model_copy(update={"breaker": breaker})
        _, room = tightest(fleet.spec.budget, spent, [*others, after], now)
        return release(extend(after, room)), spent

    def _ledger(self, fleet: StoredFleet) -> Ledger:
        """Return the ledger, which only the holder of the fence writes."""
        place = fleet.tenant, fleet.spec.name
        if place not in self._ledgers:
            self._ledgers[place] = self._store.ledger(*place)
        return self._ledgers[place]

    def _write(
        self,
        fleet: StoredFleet,
        *,
        machine: Machine | None = None,
        ledger: Ledger | None = None,
        events: Sequence[FleetEvent] = (),
    ) -> None:
        """Store all values or none. Raises WriteConflict."""
        place = fleet.tenant, fleet.spec.name
        try:
            self._store.write(self._fence, *place, machine=machine, ledger=ledger, events=events)
        except WriteConflict:
            self._ledgers.pop(place, None)
            raise
        if ledger is not None:
            self._ledgers[place] = ledger

    def _charge(self, machine: Machine) -> float | None:
        """Return what the provider charges for an ended machine; None if the provider has no record now."""
        driver = self._drivers.get(machine.provider)
        if driver is None or machine.handle is None:
            return None
        try:
            return driver.charged_usd(machine.handle)
        except NO_ANSWER as error:
            self._fail(f"{machine.provider}: the charge of machine {machine.id} cannot be read: {error}")
            return None

    def _save(self, fleet: StoredFleet, before: Machine, after: Machine, spent: Ledger) -> Machine:
        """Store a machine with its money and its event; return the stored machine, or `before` after a conflict."""
        now, ledger = self._now(), self._ledger(fleet)
        spent, warnings = new_warnings(fleet.spec.budget, spent, now)
        events = [
            FleetEvent(
                at=now, type="budget.warning", reason=f"{one.name} {one.cap_usd:g} {one.period}", usd=one.spent_usd
            )
            for one in warnings
        ]
        if after.state is not before.state:
            events.append(_event(after, now))
        stored = after.model_copy(update={"version": before.version + 1})
        if after.state.ended and not before.state.ended and after.worker_key:
            # Before the write, because no later tick looks after an ended machine.
            self._keys.revoke(after.worker_key)
        try:
            self._write(
                fleet,
                machine=stored,
                ledger=None if spent == ledger else spent.model_copy(update={"version": ledger.version + 1}),
                events=events,
            )
        except WriteConflict:
            # The machine's worker has written in between.
            return before
        self._quarantine(before, stored)
        return stored

    def _quarantine(self, before: Machine, after: Machine) -> None:
        """Avoid a host that did not boot, or that vanished with a job."""
        if after.offer.machine_ref is None or before.state is after.state:
            return
        starting = before.state in (State.BOOTING, State.REGISTERED)
        # A machine that starts can also end with its fleet, its budget or its price.
        late = starting and after.reason == DEADLINES[before.state].reason
        if not late and after.state is not State.LOST:
            return
        kind = "boot" if starting else "loss"
        host, now = f"{after.provider}:{after.offer.machine_ref}", self._now()
        earlier = self._store.quarantined(0).get(host)
        failures = earlier.failures + 1 if earlier else 1
        until = now + min(QUARANTINE_S[kind] * 2 ** (failures - 1), LONGEST_QUARANTINE_S)
        self._store.put_quarantine(Quarantine(host=host, until=until, failures=failures, reason=after.reason))

    def _destroy(self, machine: Machine) -> Machine:
        """Ask the provider for the end of a machine and of its duplicates, again and again until absence is proved."""
        handles = list(machine.duplicates)
        if machine.state is State.TERMINATING and machine.handle:
            handles.append(machine.handle)
        if machine.destroy_at is not None and self._now() < machine.destroy_at + DESTROY_EVERY_S:
            return machine
        asked = [handle for handle in handles if self._ask_destroy(machine.provider, handle)]
        if not asked:
            return machine
        stored = machine.model_copy(update={"destroy_at": self._now(), "version": machine.version + 1})
        try:
            self._store.write(self._fence, machine.tenant, machine.fleet, machine=stored)
        except WriteConflict:
            return machine
        return stored

    def _ask_destroy(self, provider: str, handle: str) -> bool:
        driver = self._drivers.get(provider)
        if driver is None or not self._may_call(driver, "destroy"):
            return False
        try:
            accepted = driver.destroy(handle)
        except (ProviderUnavailable, ProviderRefused) as error:
            self._fail(f"{provider}: machine {handle} cannot be destroyed yet: {error}")
            return False
        self._report.destroyed += accepted
        return accepted

    def _handle_orphans(self, inventories: Iterable[Inventory], machines: Sequence[Machine]) -> None:
        """Destroy machines that carry a token of this deployment and that no live record explains."""
        explained = {machine.id for machine in machines}
        known = self._store.orphans()
        for inventory in inventories:
            for seen in inventory.sightings:
                if seen.token in explained:
                    continue
                before = known.get(seen.handle)
                orphan = OrphanMachine(
                    provider=inventory.provider,
                    handle=seen.handle,
                    token=seen.token,
                    first_seen_at=before.first_seen_at if before else inventory.at,
                    last_seen_at=inventory.at,
                    destroyed_at=before.destroyed_at if before else None,
                    usd_per_hour=seen.usd_per_hour or 0.0,
                )
                self._report.orphans += 1
                if inventory.at - orphan.first_seen_at >= ORPHAN_GRACE_S and self._ask_destroy(
                    inventory.provider, seen.handle
                ):
                    orphan = orphan.model_copy(update={"destroyed_at": inventory.at})
                # After a conflict on the fence the next tick stores the orphan.
                with suppress(WriteConflict):
                    self._store.put_orphan(self._fence, orphan)

    def _start_missing(self, fleet: StoredFleet, group: list[Machine]) -> None:
        """Start as many machines as the demand asks for and the budget permits; store why a machine is not started."""
        planned = [machine for machine in group if machine.state is State.PLANNED]
        for machine in planned:
            group[group.index(machine)] = self._create(fleet, machine)
        waits = "" if fleet.stopped else self._start(fleet, group)
        if waits:
            self._report.failures.append(f"fleet {fleet.spec.name}: {waits}")
        ledger = self._ledger(fleet)
        if waits == ledger.waits:
            return
        logger.info("fleet %s waits: %s", fleet.spec.name, waits or "no longer")
        told = ledger.model_copy(update={"waits": waits, "version": ledger.version + 1})
        # Only the controller writes the ledger; after a conflict on the fence the next tick stores the text.
        with suppress(WriteConflict):
            self._write(fleet, ledger=told)

    def _start(self, fleet: StoredFleet, group: list[Machine]) -> str:
        """Start the machines that the fleet lacks; return why one is not started, empty if the fleet lacks none."""
        if sum(not machine.state.ended for machine in group) >= fleet.spec.max:
            return ""
        missing = missing_machines(fleet.spec, group, self._waiting(fleet))
        if missing == 0:
            return ""
        breaker = self._ledger(fleet).breaker.after(group, last_begin(fleet, group))
        waits = breaker.waits(group, self._now())
        if waits:
            return waits
        if breaker.failures >= FAILURES:
            missing = 1
        ranked, problems = self._quotes(fleet)
        taken = {machine.offer.ref for machine in group if machine.state in MAYBE_EXISTING}
        for _ in range(missing):
            if self._time_left_s() < LEAST_TIME_S:
                return "; ".join([*problems, "the next tick goes on"])
            problem = self._start_one(fleet, group, [one for one in ranked if one.offer.ref not in taken], taken)
            if problem:
                return "; ".join([*problems, problem])
        return ""

    def _quotes(self, fleet: StoredFleet) -> tuple[list[RankedOffer], list[str]]:
        """Return the ranked offers of all providers of a fleet, and why a provider was not heard."""
        offers: list[Offer] = []
        problems: list[str] = []
        for name in fleet.spec.providers:
            driver = self._drivers.get(name)
            if driver is None:
                problems.append(no_account(name))
            elif not self._may_call(driver, "quote"):
                problems.append(f"{name}: the provider may be asked again only in a later tick")
            else:
                try:
                    offers += driver.quote(fleet.spec)
                except NO_ANSWER as error:
                    problems.append(f"{name}: no offers: {error}")
        return rank(offers, fleet.spec, Workload(), set(self._store.quarantined(self._now()))), problems

    def _start_one(
        self, fleet: StoredFleet, group: list[Machine], ranked: Sequence[RankedOffer], taken: set[str]
    ) -> str:
        """Start one machine on the first offer that its provider does not refuse; return why there is none."""
        problem = f"no offer fits, the nearest: {ranked[0].rejected}" if ranked else "no offer is left"
        for one in [one for one in ranked if not one.rejected][:OFFERS_PER_TICK]:
            machine, problem = self._plan(fleet, group, one)
            if machine is None:
                return problem
            taken.add(one.offer.ref)
            group.append(self._create(fleet, machine))
            if group[-1].state is not State.FAILED:
                return ""
            problem = group[-1].reason
        return problem

    def _plan(self, fleet: StoredFleet, group: Sequence[Machine], ranked: RankedOffer) -> tuple[Machine | None, str]:
        """Reserve the money of a new machine; or return why the budget or the store does not permit the reservation."""
        now, spec, offer = self._now(), fleet.spec, ranked.offer
        ledger = self._ledger(fleet)
        bound, room = tightest(spec.budget, ledger, group, now)
        need = need_usd(offer.usd_per_hour, offer.boot_s)
        if need > room:
            left = f"{bound.name} has {max(0.0, room):.2f} USD left"
            return None, f"{left}, boot and one hour of the cheapest offer need {need:.2f} USD"
        suffix = hashlib.sha256(self._random_token().encode()).hexdigest()[:12]
        machine = Machine(
            id=f"{self._store.deployment()}-{spec.name[:28]}-{suffix}",
            tenant=fleet.tenant,
            fleet=spec.name,
            version=1,
            since=now,
            offer=offer,
            cap_usd_per_hour=spec.max_usd_per_hour,
            ends_by=now + int(spec.max_hours * 3600),
            usd_per_hour=offer.usd_per_hour,
            reserved_usd=need,
        )
        # The ledger's version guards the reservation: no other controller can have reserved the same money.
        guard = ledger.model_copy(update={"version": ledger.version + 1})
        try:
            self._write(fleet, machine=machine, ledger=guard, events=[_event(machine, now)])
        except WriteConflict:
            return None, "another call changed the ledger at the same moment"
        return machine, ""

    def _create(self, fleet: StoredFleet, machine: Machine) -> Machine:
        """Store the intent, call the provider once, store the outcome."""
        driver = self._drivers.get(machine.provider)
        if driver is None or not self._may_call(driver, "create"):
            return machine
        now = self._now()
        key_id, environment = self._keys.issue(machine, now + ENROLS_WITHIN_S)
        intended = lifecycle.request(machine, now).model_copy(update={"worker_key": key_id})
        stored = self._save(fleet, machine, intended, self._ledger(fleet))
        if stored is machine:
            return machine
        result = driver.create(
            CreateIntent(
                token=machine.id,
                offer=machine.offer,
                image=fleet.spec.image,
                disk_gib=fleet.spec.disk_gib,
                environment=environment,
                max_usd_per_hour=machine.cap_usd_per_hour,
            )
        )
        if isinstance(result, Created):
            self._report.created += 1
            after = lifecycle.created(stored, result.handle, self._now(), usd_per_hour=result.usd_per_hour)
        elif isinstance(result, Ambiguous):
            after = lifecycle.doubt(stored, result.reason, self._now())
        elif result.handle:
            # A create that failed can leave a stopped machine, which is billed until it is destroyed.
            made = lifecycle.created(stored, result.handle, self._now())
            after = lifecycle.move(made, State.TERMINATING, self._now(), result.reason)
        else:
            after = lifecycle.refused(stored, result.reason, self._now())
        return self._save(fleet, stored, release(after), self._ledger(fleet))

    def _may_call(self, driver: Driver, call: str) -> bool:
        """Return True if time is left for a call and the provider's minimum interval has passed."""
        if self._time_left_s() < LEAST_TIME_S:
            return False
        interval_s = driver.min_interval_s.get(call, 0.0)
        return interval_s == 0.0 or self._store.allow(driver.name, call, self._now(), interval_s)

    def _fail(self, message: str) -> None:
        logger.warning("%s", message)
        self._report.failures.append(message)


def _turn(machine: Machine) -> tuple[bool, int]:
    """Return the place of a machine in the order of a tick: by the time up to which it is paid, failed ones last."""
    return machine.state is State.FAILED, machine.priced_until or 0


def _event(machine: Machine, now: int) -> FleetEvent:
    return FleetEvent(
        at=now, type=f"machine.{machine.state}", machine=machine.id, reason=machine.reason, usd=machine.spent_usd
    )
