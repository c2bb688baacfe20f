"""The fleet's store in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from functions.domain.errors import WriteConflict
from functions.fleet.ledger import Ledger
from functions.fleet.records import FleetEvent, Machine, OrphanMachine, Quarantine, StoredFleet
from functions.fleet.store import FenceLost


class MemoryFleetStore:
    """Twin of DynamoFleetStore. `now`: the clock that decides which failed machines are still watched."""

    def __init__(self) -> None:
        self.now = 0
        self._fence = 0
        self._lease_until = 0
        self._fleets: dict[tuple[str, str], StoredFleet] = {}
        self._machines: dict[str, Machine] = {}
        self._ledgers: dict[tuple[str, str], Ledger] = {}
        self._events: dict[tuple[str, str], list[FleetEvent]] = {}
        self._calls: dict[tuple[str, str], float] = {}
        self._quarantines: dict[str, Quarantine] = {}
        self._orphans: dict[str, OrphanMachine] = {}

    def deployment(self) -> str:
        return "dep10000"

    def acquire(self, holder: str, now: int, duration_s: int) -> int | None:
        self.now = now
        if now < self._lease_until:
            return None
        self._fence += 1
        self._lease_until = now + duration_s
        return self._fence

    def release(self, fence: int) -> None:
        if fence == self._fence:
            self._lease_until = 0

    def fleets(self) -> Sequence[StoredFleet]:
        return list(self._fleets.values())

    def put_fleet(self, fleet: StoredFleet) -> None:
        before = self._fleets.get((fleet.tenant, fleet.spec.name))
        if fleet.version != (before.version if before else 0) + 1:
            raise WriteConflict
        self._fleets[fleet.tenant, fleet.spec.name] = fleet

    def machines(self, tenant: str, fleet: str) -> Sequence[Machine]:
        return [one for one in self._of(tenant, fleet) if one.watched(self.now)]

    def machine(self, tenant: str, fleet: str, token: str) -> Machine | None:
        return self._machines.get(token)

    def ended(self, tenant: str, fleet: str, *, limit: int) -> Sequence[Machine]:
        over = [one for one in self._of(tenant, fleet) if not one.watched(self.now)]
        return sorted(over, key=lambda one: one.since, reverse=True)[:limit]

    def _of(self, tenant: str, fleet: str) -> list[Machine]:
        found = [one for one in self._machines.values() if (one.tenant, one.fleet) == (tenant, fleet)]
        return sorted(found, key=lambda one: one.id)

    def ledger(self, tenant: str, fleet: str) -> Ledger:
        return self._ledgers.get((tenant, fleet), Ledger())

    def write(
        self,
        fence: int,
        tenant: str,
        fleet: str,
        *,
        machine: Machine | None = None,
        ledger: Ledger | None = None,
        events: Sequence[FleetEvent] = (),
    ) -> None:
        if fence != self._fence:
            raise FenceLost
        if machine is not None:
            self._require_next(self._machines.get(machine.id), machine)
        if ledger is not None and ledger.version != self.ledger(tenant, fleet).version + 1:
            raise WriteConflict
        if machine is not None:
            self._machines[machine.id] = machine
        if ledger is not None:
            self._ledgers[tenant, fleet] = ledger
        self._events.setdefault((tenant, fleet), []).extend(events)

    def update_machine(self, tenant: str, machine: Machine) -> None:
        self._require_next(self._machines.get(machine.id), machine)
        self._machines[machine.id] = machine

    @staticmethod
    def _require_next(before: Machine | None, after: Machine) -> None:
        if after.version != (before.version if before else 0) + 1:
            raise WriteConflict

    def events(self, tenant: str, fleet: str, *, limit: int) -> Sequence[FleetEvent]:
        return self._events.get((tenant, fleet), [])[::-1][:limit]

    def allow(self, provider: str, call: str, now: int, interval_s: float) -> bool:
        if now < self._calls.get((provider, call), 0.0):
            return False
        self._calls[provider, call] = now + interval_s
        return True

    def quarantined(self, now: int) -> Mapping[str, Quarantine]:
        return {host: one for host, one in self._quarantines.items() if one.until > now}

    def put_quarantine(self, quarantine: Quarantine) -> None:
        self._quarantines[quarantine.host] = quarantine

    def orphans(self) -> Mapping[str, OrphanMachine]:
        return dict(self._orphans)

    def put_orphan(self, fence: int, orphan: OrphanMachine) -> None:
        if fence != self._fence:
            raise FenceLost
        self._orphans[orphan.handle] = orphan
