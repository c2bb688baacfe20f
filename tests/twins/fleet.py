"""The fleet's store in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from functions.domain.errors import WriteConflict
from functions.fleet.clock import ClockAnchor
from functions.fleet.ledger import DeploymentLedger, Ledger
from functions.fleet.records import FleetEvent, Machine, OrphanMachine, Quarantine, Reputation, StoredFleet
from functions.fleet.store import DamagedRecord, FenceLost
from tests.twins.state import MemoryState


class MemoryFleetStore:
    """Twin of DynamoFleetStore."""

    def __init__(self, state: MemoryState | None = None) -> None:
        """`state`: of the jobs, whose transactions also store fleets."""
        self._clock_anchor: ClockAnchor | None = None
        self._fence = 0
        self._holder = ""
        self._lease_until = 0
        self._finished_at: int | None = None
        self._fleets = (state or MemoryState()).fleets
        self._retired: dict[tuple[str, str], StoredFleet] = {}
        self._spending = DeploymentLedger()
        self._machines: dict[tuple[str, str, str], Machine] = {}
        self._ended: list[Machine] = []
        self._ledgers: dict[tuple[str, str], Ledger] = {}
        self._events: dict[tuple[str, str], list[FleetEvent]] = {}
        self._calls: dict[tuple[str, str], float] = {}
        self._quarantines: dict[str, Quarantine] = {}
        self._reputations: dict[str, Reputation] = {}
        self.damaged_fleets: set[tuple[str, str]] = set()
        """Fleets whose own records cannot be read."""
        self.damaged_machines: set[tuple[str, str]] = set()
        """Fleets of which the record of a machine cannot be read."""
        self._orphans: dict[tuple[str, str], OrphanMachine] = {}

    def deployment(self) -> str:
        return "dep10000"

    def clock_anchor(self) -> ClockAnchor | None:
        return self._clock_anchor

    def put_clock_anchor(self, anchor: ClockAnchor) -> None:
        self._clock_anchor = anchor

    def acquire(self, holder: str, now: int, duration_s: int) -> int | None:
        if now < self._lease_until and holder != self._holder:
            return None
        self._fence += 1
        self._holder = holder
        self._lease_until = now + duration_s
        return self._fence

    def release(self, fence: int, *, finished_at: int | None = None) -> None:
        if fence == self._fence:
            self._lease_until = 0
            self._finished_at = self._finished_at if finished_at is None else finished_at

    def last_tick(self) -> int | None:
        return self._finished_at

    def any_fleet(self) -> bool:
        return bool(self.damaged_fleets or self.fleets())

    def fleets(self, tenant: str | None = None, *, damaged: list[DamagedRecord] | None = None) -> Sequence[StoredFleet]:
        if damaged is not None:
            unread = [place for place in sorted(self.damaged_fleets) if tenant in (None, place[0])]
            damaged += [DamagedRecord(*place, "ValidationError") for place in unread]
        places = sorted(place for place in self._fleets if tenant in (None, place[0]))
        places = [place for place in places if place not in self.damaged_fleets]
        return [fleet for place in places if (fleet := self._live(*place)) is not None]

    def fleet(self, tenant: str, name: str) -> StoredFleet | None:
        if (tenant, name) in self.damaged_fleets:
            raise DamagedRecord(tenant, name, "ValidationError")
        return self._live(tenant, name) or self._retired.get((tenant, name))

    def _live(self, tenant: str, name: str) -> StoredFleet | None:
        _, found = self._fleets.get((tenant, name), (0, None))
        assert found is None or isinstance(found, StoredFleet)
        return found

    def put_fleet(self, fleet: StoredFleet) -> None:
        self._require_next_fleet(fleet)
        self._fleets[fleet.tenant, fleet.spec.name] = (fleet.version, fleet)

    def _require_next_fleet(self, fleet: StoredFleet) -> None:
        before = self._live(fleet.tenant, fleet.spec.name)
        if fleet.version != (before.version if before else 0) + 1:
            raise WriteConflict

    def retire(self, fence: int, fleet: StoredFleet, spending: DeploymentLedger) -> None:
        if fence != self._fence:
            raise FenceLost
        self._require_next_fleet(fleet)
        if spending.version != self._spending.version + 1:
            raise WriteConflict
        place = fleet.tenant, fleet.spec.name
        del self._fleets[place]
        self._retired[place] = fleet
        self._spending = spending

    def spending(self) -> DeploymentLedger:
        return self._spending

    def machines(self, tenant: str, fleet: str) -> Sequence[Machine]:
        if (tenant, fleet) in self.damaged_machines:
            raise DamagedRecord(tenant, fleet, "ValidationError")
        found = [one for one in self._machines.values() if (one.tenant, one.fleet) == (tenant, fleet)]
        return sorted(found, key=lambda one: one.id)

    def holdings(self, tenant: str, fleet: str) -> tuple[Ledger, Sequence[Machine]]:
        return self.ledger(tenant, fleet), self.machines(tenant, fleet)

    def machine(self, tenant: str, fleet: str, token: str) -> Machine | None:
        return self._machines.get((tenant, fleet, token))

    def ended(self, tenant: str, fleet: str, *, limit: int, since: int = 0) -> Sequence[Machine]:
        over = [one for one in self._ended if (one.tenant, one.fleet) == (tenant, fleet) and one.since >= since]
        return sorted(over, key=lambda one: (one.since, one.id), reverse=True)[:limit]

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
        spending: DeploymentLedger | None = None,
        events: Sequence[FleetEvent] = (),
    ) -> None:
        if fence != self._fence:
            raise FenceLost
        if machine is not None:
            self._require_next(machine)
        if ledger is not None and ledger.version != self.ledger(tenant, fleet).version + 1:
            raise WriteConflict
        if spending is not None:
            if spending.version != self._spending.version + 1:
                raise WriteConflict
            self._spending = spending
        if machine is not None:
            self._put(machine)
        if ledger is not None:
            self._ledgers[tenant, fleet] = ledger
        self._events.setdefault((tenant, fleet), []).extend(events)

    def update_machine(self, machine: Machine, events: Sequence[FleetEvent] = ()) -> None:
        self._require_next(machine)
        self._put(machine)
        self._events.setdefault((machine.tenant, machine.fleet), []).extend(events)

    def _put(self, machine: Machine) -> None:
        place = machine.tenant, machine.fleet, machine.id
        if machine.watched:
            self._machines[place] = machine
            return
        self._machines.pop(place, None)
        self._ended.append(machine)

    def _require_next(self, after: Machine) -> None:
        before = self.machine(after.tenant, after.fleet, after.id)
        if after.version != (before.version if before else 0) + 1:
            raise WriteConflict

    def events(self, tenant: str, fleet: str, *, limit: int) -> Sequence[FleetEvent]:
        return sorted(self._events.get((tenant, fleet), []), key=lambda one: one.at)[::-1][:limit]

    def history(self, tenant: str, fleet: str, *, since: int, limit: int) -> Sequence[tuple[int, FleetEvent]]:
        found = [(number, one) for number, one in enumerate(self._events.get((tenant, fleet), ())) if one.at >= since]
        return sorted(found, key=lambda each: each[1].at)[:limit]

    def allow(self, provider: str, call: str, now: int, interval_s: float) -> bool:
        if now < self._calls.get((provider, call), 0.0):
            return False
        self._calls[provider, call] = now + interval_s
        return True

    def quarantined(self, now: int) -> Mapping[str, Quarantine]:
        return {host: one for host, one in self._quarantines.items() if one.until > now}

    def put_quarantine(self, quarantine: Quarantine) -> None:
        self._quarantines[quarantine.host] = quarantine

    def reputations(self) -> Mapping[str, Reputation]:
        return dict(self._reputations)

    def put_reputation(self, fence: int, reputation: Reputation) -> None:
        if fence != self._fence:
            raise FenceLost
        self._reputations[reputation.kind] = reputation

    def orphans(self) -> Mapping[tuple[str, str], OrphanMachine]:
        return dict(self._orphans)

    def put_orphan(self, fence: int, orphan: OrphanMachine) -> None:
        if fence != self._fence:
            raise FenceLost
        self._orphans[orphan.provider, orphan.handle] = orphan
