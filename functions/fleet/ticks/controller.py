"""Run one tick of the controller: reconcile all machines with their providers, then start what is missing.

The order follows from the promises: inventories first, deadlines and money before any new spending, destroys before
creates. A provider whose call hangs is asked last for the ends of its machines, and for nothing else. Every write is
conditional on the controller's fence and on the version of the record, and the intent of a create is stored before the
call. Therefore the next tick finishes whatever a tick that died at any instruction left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from functions.domain.errors import WriteConflict
from functions.domain.records import Job
from functions.fleet import lifecycle
from functions.fleet.breaker import count_failure
from functions.fleet.drivers.protocol import Driver, ProviderRefused
from functions.fleet.ledger import Ledger, extend, release, reserved_usd
from functions.fleet.machine_states import ORPHAN_WATCH_S
from functions.fleet.records import Inventory, Machine, OrphanMachine, Sighting, StoredFleet, token_prefix
from functions.fleet.store import DamagedRecord, FenceLost, FleetStore
from functions.fleet.ticks.balances import watch_balances
from functions.fleet.ticks.document_changes import EXCEEDS_MAX, outdated, surplus
from functions.fleet.ticks.rented import retire, stop_with_jobs
from functions.fleet.ticks.starting import LATER, FindLogin, MachineStarter
from functions.fleet.ticks.strays import adopt
from functions.fleet.ticks.tick import NO_ANSWER, MachineKeys, ReadJobs, Tick, TickReport
from functions.fleet.ticks.trainings import ReadProgress, ReadWorld, TrainingSupervisor

logger = logging.getLogger("baton.fleet")

T = TypeVar("T")

LEASE_S = 90
"""Lease of one tick. A function that is paused longer than its lease cannot write any more, because of the fence."""
NUDGE_PATIENCE_S = 20
"""Longest wait of a nudged tick for the fence. The scheduled tick replaces a nudge that waited in vain."""
ORPHAN_GRACE_S = 60
"""Time between the first and the last sighting after which the tick adopts an orphan."""
DECISIONS = 5
"""Decisions about one machine in one tick whose writes may conflict with calls of the machine's worker."""


class FleetController:
    """The controller of all fleets of a deployment.

    waiting: returns the claimable jobs of a fleet's queues. random_token: 256 random bits, URL-safe. time_left_s: time
    until the function is ended. pause: sleeps for a number of seconds. read_jobs: returns the jobs with these ids.
    completed: returns a tenant's newest completed jobs, for the running times of recipes. budget: of all fleets of the
    deployment together. find_login: returns the login at the registry of an image. read_world: returns the world of an
    elastic job. read_progress: returns an elastic job with its newest progress.
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
        pause: Callable[[float], object] = time.sleep,
        read_jobs: ReadJobs = lambda _: (),
        completed: Callable[[str], Sequence[Job]] = lambda _: (),
        budget: Budget | None = None,
        find_login: FindLogin = lambda tenant, image: None,
        read_world: ReadWorld = lambda job_id: None,
        read_progress: ReadProgress = lambda job: job,
    ) -> None:
        self._store = store
        self._drivers = drivers
        self._waiting = waiting
        self._completed = completed
        self._keys = keys
        self._now = now
        self._random_token = random_token
        self._time_left_s = time_left_s
        self._pause = pause
        self._read_jobs = read_jobs
        self._budget = budget
        self._find_login = find_login
        self._read_world = read_world
        self._read_progress = read_progress

    def nudge(self) -> TickReport:
        """Run one tick that begins after this call.

        Another controller that holds the fence may have read the waiting jobs before the cause of the nudge, therefore
        this call waits for the fence, but not for longer than NUDGE_PATIENCE_S.
        """
        for _ in range(NUDGE_PATIENCE_S):
            report = self.tick()
            if not report.skipped:
                break
            self._pause(1)
        return report

    def tick(self) -> TickReport:
        """Run one tick. Returns at once without fleets, and with `skipped` while another controller holds the fence."""
        report = TickReport()
        if not self._store.any_fleet() and self._now() >= self._store.spending().watch_until:
            return report
        fence = self._store.acquire(self._random_token(), self._now(), LEASE_S)
        if fence is None:
            report.skipped = True
            return report
        tick = Tick(
            self._store,
            self._drivers,
            fence,
            report,
            keys=self._keys,
            now=self._now,
            time_left_s=self._time_left_s,
            pause=self._pause,
            read_jobs=self._read_jobs,
            budget=self._budget,
        )
        starter = MachineStarter(
            tick,
            waiting=self._waiting,
            completed=self._completed,
            random_token=self._random_token,
            find_login=self._find_login,
            trains=self._trains,
        )
        supervisor = TrainingSupervisor(
            tick, self._read_world, self._read_progress, lambda *asked: starter.quote(*asked)[0]
        )
        try:
            report.finished = Reconciliation(tick, starter, supervisor).run()
        except FenceLost:
            logger.warning("another controller has taken over; this tick ends")
            return report
        self._store.release(fence, finished_at=tick.begun_at if report.finished else None)
        return report

    def _trains(self, job_id: str) -> bool:
        world = self._read_world(job_id)
        return world is not None and any(world.trains(job.seats) for job in self._read_jobs([job_id]))


class Reconciliation:
    """Steps of one tick over all fleets."""

    def __init__(self, tick: Tick, starter: MachineStarter, supervisor: TrainingSupervisor) -> None:
        self._tick = tick
        self._starter = starter
        self._supervisor = supervisor
        self._store = tick.store
        self._now = tick.now

    def run(self) -> bool:
        """Look after all machines, then start the missing ones; return False if the time ended before the last machine.

        The tick looks first after the machines that have waited longest, so that a tick that is too short for all
        machines leaves each of them to the next tick at the latest.
        """
        damaged: list[DamagedRecord] = []
        listed = self._store.fleets(damaged=damaged)
        self._tick.report.fleets = len(listed) + len(damaged)
        machines = self._tick.machines = self._read_machines(listed, damaged)
        readable = [one for one in listed if (one.tenant, one.spec.name) in machines]
        fleets = stop_with_jobs(self._tick, readable)
        providers = self._watched_providers(fleets, [machine for group in machines.values() for machine in group])
        inventories = self._inventories(providers)
        places = [(fleet, at) for fleet in fleets for at in range(len(machines[fleet.tenant, fleet.spec.name]))]
        places.sort(key=lambda place: _turn(machines[place[0].tenant, place[0].spec.name][place[1]]))
        finished = True
        for fleet, at in places:
            finished = self._tick.in_time
            if not finished:
                self._tick.fail("the time of the tick is over before its last machine")
                break
            group = machines[fleet.tenant, fleet.spec.name]
            inventory = inventories.get(group[at].provider)
            self._reconcile(fleet, group, at, inventory)
            if inventory is not None:
                self._accept_price(group[at], inventory)
            group[at] = self._tick.destroy(group[at])
        explained = {(machine.provider, machine.id) for group in machines.values() for machine in group}
        self._handle_orphans(fleets, inventories.values(), explained, damaged)
        for fleet in fleets if finished else ():
            self._supervisor.supervise(fleet)
        # Nodes beyond `min` of elastic jobs come after the first machine of every other job.
        more = [fleet for fleet in self._in_turn(fleets) if finished and self._start(fleet, fleets)]
        for fleet in more:
            self._start(fleet, fleets, later=True)
        watch_balances(self._tick, fleets)
        retire(self._tick, fleets, machines)
        self._tick.settle()
        self._destroy_late([*machines.values()])
        report = self._tick.report
        for group in machines.values():
            for machine in group:
                report.machines[machine.state] = report.machines.get(machine.state, 0) + 1
                report.usd_per_hour += machine.usd_per_hour if machine.billed else 0.0
        return finished and not damaged

    def _destroy_late(self, groups: Sequence[list[Machine]]) -> None:
        """Ask silent providers for the ends of their machines, now that a call which hangs delays nothing else.

        Such a provider may carry out a destroy although its list does not come.
        """
        silent = self._tick.take_silent()
        places = [(group, at) for group in groups for at, one in enumerate(group) if one.provider in silent]
        for group, at in _rotate(places, self._tick.fence):
            group[at] = self._tick.destroy(group[at])

    def _in_turn(self, fleets: Sequence[StoredFleet]) -> list[StoredFleet]:
        """Return the fleets in the order in which they rent: first those that the last tick did not reach, in turn.

        Otherwise a few fleets that find no offer would claim each search that a provider permits.
        """
        late = [one for one in _rotate(fleets, self._tick.fence) if LATER in self._tick.ledger(one).waits]
        return [*late, *(one for one in fleets if LATER not in self._tick.ledger(one).waits)]

    def _start(self, fleet: StoredFleet, fleets: Sequence[StoredFleet], *, later: bool = False) -> bool:
        """Start the missing machines of one fleet: `MachineStarter.start_missing`."""
        others = [
            (one.spec, self._tick.machines[one.tenant, one.spec.name])
            for one in fleets
            if one is not fleet and one.tenant == fleet.tenant
        ]
        group = self._tick.machines[fleet.tenant, fleet.spec.name]
        return self._starter.start_missing(fleet, group, others, later=later)

    def _read_machines(
        self, fleets: Sequence[StoredFleet], damaged: list[DamagedRecord]
    ) -> dict[tuple[str, str], list[Machine]]:
        """Return the machines of each fleet whose records can be read; append the others to `damaged`."""
        found: dict[tuple[str, str], list[Machine]] = {}
        for fleet in fleets:
            try:
                found[fleet.tenant, fleet.spec.name] = self._tick.read_machines(fleet)
            except DamagedRecord as error:
                damaged.append(error)
        if damaged:
            # The machines of these fleets may run on, and the money that they hold must not be spent a second time.
            read_usd = sum(map(reserved_usd, found.values()))
            self._tick.unread_usd = max(0.0, self._tick.spending.reserved_usd - read_usd)
        for one in damaged:
            # The spending of a fleet without readable records is unknown, therefore its machines stay.
            self._tick.fail(f"{one}; nobody looks after its machines until the record is mended")
        return found

    def _watched_providers(self, fleets: Sequence[StoredFleet], machines: Sequence[Machine]) -> list[str]:
        """Return the providers whose lists the tick reads.

        A provider can list a machine late, after its fleet was stopped or names other providers.
        """
        renting = {name for one in fleets if not one.stopped for name in one.spec.providers}
        recent = renting or any(self._now() < one.updated_at + ORPHAN_WATCH_S for one in fleets)
        recent = recent or self._now() < self._tick.spending.watch_until
        return sorted({one.provider for one in machines} | renting | (set(self._tick.drivers) if recent else set()))

    def _inventories(self, providers: Sequence[str]) -> dict[str, Inventory]:
        """Return the lists of our machines by provider, without those that could not be read.

        All providers are asked at once, because slow ones would leave no time for the machines of the others.
        """
        asked: dict[str, Driver] = {}
        for provider in providers:
            driver = self._tick.drivers.get(provider)
            if driver is None:
                self._tick.fail(self._tick.no_driver(provider))
            elif self._tick.in_time:
                asked[provider] = driver
        prefix, now = f"{self._store.deployment()}-", self._now()
        reads = {name: partial(_list_machines, driver, prefix, now) for name, driver in asked.items()}
        found: dict[str, Inventory] = {}
        for provider, answer in self._tick.ask_together(reads, self._tick.reading_s).items():
            try:
                found[provider] = answer.result()
            except NO_ANSWER as error:
                self._tick.fail(f"{provider}: the list of machines cannot be read: {error}")
                if isinstance(error, ProviderRefused):
                    self._tick.refuse(provider, error.kind, str(error))
                continue
            for seen in found[provider].sightings:
                if seen.unknown_status:
                    self._tick.report.unknown_statuses += 1
                    status = f"machine {seen.token} has the unknown status {seen.unknown_status}"
                    self._tick.fail(f"{provider}: {status}, and counts as running")
        return found

    def _reconcile(self, fleet: StoredFleet, group: list[Machine], at: int, inventory: Inventory | None) -> None:
        """Advance one machine, move its money, store both.

        After a conflict with a call of the machine's worker, decide about the stored machine: a worker that writes in
        each tick between the tick's read and write would otherwise keep its machine for ever.
        """
        for _ in range(DECISIONS):
            before = group[at]
            after, spent = self._decide(fleet, before, group, inventory)
            if after == before or lifecycle.only_cost_grew(before, after):
                return
            group[at] = self._tick.save(fleet, before, after, spent)
            if group[at] is not before:
                return
            group[at] = self._store.machine(before.tenant, before.fleet, before.id) or before

    def _decide(
        self, fleet: StoredFleet, machine: Machine, group: Sequence[Machine], inventory: Inventory | None
    ) -> tuple[Machine, Ledger]:
        """Return the machine and the ledger as the inventory, the document, the clock and the money leave them."""
        now = self._now()
        inventory = inventory or Inventory(provider=machine.provider, at=now, complete=False)
        kept = sum(one.state in (State.READY, State.BUSY) for one in group) <= fleet.spec.min and not fleet.stopped
        after = lifecycle.advance(
            lifecycle.follow(machine, fleet.spec),
            inventory,
            idle_timeout_s=None if kept else fleet.spec.idle_timeout_s,
        )
        unwanted = _find_unwanted(fleet, after, group)
        if unwanted:
            after = lifecycle.stop(after, unwanted, now)
        after = lifecycle.mark_overdue(after, now)
        if after.state is State.GONE:
            after = after.model_copy(update={"charged_usd": self._charge(after)})
        others = [one for one in group if one.id != machine.id]
        usd = after.spent_usd - machine.spent_usd
        spent = self._tick.ledger(fleet).spend(usd, now, since=machine.requested_at)
        if after.state is State.GONE:
            spent = spent.model_copy(update={"breakers": count_failure(spent.breakers, fleet, machine, group)})
        _, room = self._tick.tightest(fleet, spent, [*others, after])
        return release(extend(after, room)), spent

    def _accept_price(self, machine: Machine, inventory: Inventory) -> None:
        """Accept a price that the provider announced; `lifecycle.advance` has drained the machine if it is too high."""
        price = lifecycle.acceptable_price(machine, inventory.of(machine.id))
        driver = self._tick.drivers.get(machine.provider)
        if price is None or driver is None or machine.handle is None or not self._tick.may_call(driver, "accept"):
            return
        try:
            self._tick.ask(machine.provider, partial(driver.accept_price, machine.handle, price))
        except NO_ANSWER as error:
            self._tick.fail(f"{machine.provider}: the price of machine {machine.id} cannot be accepted: {error}")

    def _charge(self, machine: Machine) -> float | None:
        """Return what the provider charges for an ended machine; None if the provider has no record now."""
        driver = self._tick.drivers.get(machine.provider)
        if driver is None or machine.handle is None or not self._tick.may_call(driver, "charge"):
            return None
        try:
            charged_usd = self._tick.ask(machine.provider, partial(driver.charged_usd, machine.handle))
            return None if charged_usd is None else charged_usd - machine.charged_before_usd
        except NO_ANSWER as error:
            self._tick.fail(f"{machine.provider}: the charge of machine {machine.id} cannot be read: {error}")
            return None

    def _handle_orphans(
        self,
        fleets: list[StoredFleet],
        inventories: Iterable[Inventory],
        explained: set[tuple[str, str]],
        damaged: Sequence[DamagedRecord],
    ) -> None:
        """Adopt machines that carry a token of this deployment and that no live record explains.

        explained: providers and ids of the machines with a record. damaged: fleets whose machines may have an
        unreadable record.
        """
        unsure = tuple(token_prefix(self._store.deployment(), one.fleet) for one in damaged)
        found = [
            (inventory, seen)
            for inventory in inventories
            for seen in inventory.sightings
            if (inventory.provider, seen.token) not in explained and not seen.token.startswith(unsure)
        ]
        known = self._store.orphans() if found else {}
        for inventory, seen in found:
            if (inventory.provider, seen.token) in explained:
                continue  # The record of the first of two machines of one token has the second one as its duplicate.
            before = known.get((inventory.provider, seen.handle))
            orphan = OrphanMachine(
                provider=inventory.provider,
                handle=seen.handle,
                token=seen.token,
                first_seen_at=before.first_seen_at if before else inventory.at,
                last_seen_at=inventory.at,
            )
            self._tick.report.orphans += 1
            # After a conflict, on the fence or with the doctor, the next tick stores the orphan.
            with suppress(WriteConflict):
                self._store.put_orphan(self._tick.fence, orphan)
                if inventory.at - orphan.first_seen_at >= ORPHAN_GRACE_S:
                    self._adopt(fleets, inventory, orphan, seen)
                    explained.add((inventory.provider, seen.token))

    def _adopt(self, fleets: list[StoredFleet], inventory: Inventory, orphan: OrphanMachine, seen: Sighting) -> None:
        """Store a machine that no record explained, count its cost, and ask for its end."""
        fleet, machine = adopt(self._store, fleets, orphan, seen, self._now())
        self._tick.write(fleet, machine=machine, events=[machine.event])
        if fleet not in fleets:
            fleets.append(fleet)
        group = self._tick.machines.setdefault((fleet.tenant, fleet.spec.name), [])
        group.append(machine)
        self._reconcile(fleet, group, len(group) - 1, inventory)
        group[-1] = self._tick.destroy(group[-1])


def _list_machines(driver: Driver, prefix: str, now: int) -> Inventory:
    return driver.inventory(prefix, now)


def _rotate(values: Sequence[T], turn: int) -> list[T]:
    """Return the values from another one on in each turn, because the time of a tick may end before the last one."""
    at = turn % max(1, len(values))
    return [*values[at:], *values[:at]]


def _find_unwanted(fleet: StoredFleet, machine: Machine, group: Sequence[Machine]) -> str:
    """Return why the fleet gives the machine back, besides time and money; empty if the fleet keeps the machine."""
    if fleet.stopped:
        return fleet.stop_reason or "the fleet is stopped"
    if machine.id in surplus(group, fleet.spec.max):
        return EXCEEDS_MAX
    return outdated(machine, fleet.spec)


def _turn(machine: Machine) -> tuple[bool, int]:
    """Return the place of a machine in the order of a tick: by the time up to which it is paid, failed ones last."""
    return machine.state is State.FAILED, machine.priced_until or 0
