"""Define the port of the fleet's store; `functions/storage/dynamodb/fleet.py` implements the port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.fleet.clock import ClockAnchor
from functions.fleet.ledger import DeploymentLedger, Ledger
from functions.fleet.records import FleetEvent, Machine, OrphanMachine, Quarantine, Reputation, StoredFleet


class FleetStore(Protocol):
    """Fleets, machines and money. Any call may raise StorageUnavailable. Reads but `any_fleet` are strongly consistent.

    Writes of the controller carry its fencing token and raise FenceLost once another controller has acquired the fence.
    """

    def deployment(self) -> str:
        """Return the id of this deployment: eight letters and digits, made once. Every token begins with the id."""

    def clock_anchor(self) -> ClockAnchor | None:
        """Return the anchor of the fleets' clock; None before the first one."""

    def put_clock_anchor(self, anchor: ClockAnchor) -> None:
        """Store the anchor of the fleets' clock in place of an earlier one."""

    def acquire(self, holder: str, now: int, duration_s: int) -> int | None:
        """Return a new fencing token, higher than all before; None while another holder's lease lasts."""

    def release(self, fence: int, *, finished_at: int | None = None) -> None:
        """End the controller's lease early, if `fence` is still the newest.

        finished_at: time at which a tick began that has looked after every fleet; None for a tick that has not.
        """

    def last_tick(self) -> int | None:
        """Return the last `finished_at`; None if no tick has finished yet."""

    def any_fleet(self) -> bool:
        """Return True if a tenant has a fleet that `fleets` lists, as the store was moments ago."""

    def fleets(self, tenant: str | None = None, *, damaged: list[DamagedRecord] | None = None) -> Sequence[StoredFleet]:
        """Return the fleets of a tenant by name; None: the fleets of all tenants.

        A fleet whose record cannot be read is logged, left out, and appended to `damaged`.
        """

    def fleet(self, tenant: str, name: str) -> StoredFleet | None:
        """Return a fleet, retired ones included. Raises DamagedRecord."""

    def put_fleet(self, fleet: StoredFleet) -> None:
        """Store a fleet in place of its version before. Raises WriteConflict."""

    def retire(self, fence: int, fleet: StoredFleet, spending: DeploymentLedger) -> None:
        """Take a fleet out of the list of fleets, in place of its version before, and store the spending.

        Raises FenceLost, or WriteConflict.
        """

    def spending(self) -> DeploymentLedger:
        """Return the money that all fleets of all tenants spent; version 0 for none."""

    def machines(self, tenant: str, fleet: str) -> Sequence[Machine]:
        """Return the machines that the tick still watches (`Machine.watched`), in order of their ids.

        Raises DamagedRecord.
        """

    def holdings(self, tenant: str, fleet: str) -> tuple[Ledger, Sequence[Machine]]:
        """Return `ledger` and `machines` of a fleet, by one request. Raises DamagedRecord."""

    def machine(self, tenant: str, fleet: str, token: str) -> Machine | None:
        """Return a machine that the tick still watches; None for any other."""

    def ended(self, tenant: str, fleet: str, *, limit: int, since: int = 0) -> Sequence[Machine]:
        """Return machines that the tick no longer watches and that ended from `since` on, the newest first."""

    def ledger(self, tenant: str, fleet: str) -> Ledger:
        """Return the ledger of a fleet; version 0 for none. Raises DamagedRecord."""

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
        """Store all values or none. Raises FenceLost, or WriteConflict if a value is not of the version before."""

    def update_machine(self, machine: Machine, events: Sequence[FleetEvent] = ()) -> None:
        """Store a machine and its events for its worker's call, without a fence. Raises WriteConflict."""

    def events(self, tenant: str, fleet: str, *, limit: int) -> Sequence[FleetEvent]:
        """Return the newest events of a fleet, the newest first."""

    def history(self, tenant: str, fleet: str, *, since: int, limit: int) -> Sequence[tuple[int, FleetEvent]]:
        """Return the events of a fleet from a time on, the oldest first, with their numbers (`table_keys`)."""

    def allow(self, provider: str, call: str, now: int, interval_s: float) -> bool:
        """Claim the right to one call; False within `interval_s` of the last claim, by any controller."""

    def quarantined(self, now: int) -> Mapping[str, Quarantine]:
        """Return the hosts that may not be rented at `now`, by `provider:machine_ref`."""

    def put_quarantine(self, quarantine: Quarantine) -> None:
        """Store a quarantine in place of an earlier one of the same host."""

    def reputations(self) -> Mapping[str, Reputation]:
        """Return the history of machines by `Reputation.kind`."""

    def put_reputation(self, fence: int, reputation: Reputation) -> None:
        """Store a history in place of an earlier one of the same kind. Raises FenceLost."""

    def orphans(self) -> Mapping[tuple[str, str], OrphanMachine]:
        """Return machines that no record explains, by provider and handle."""

    def put_orphan(self, fence: int, orphan: OrphanMachine) -> None:
        """Store an orphan in place of an earlier sighting. Raises FenceLost."""


class DamagedRecord(Refusal):
    """A stored record of a fleet cannot be read: a fault of a version, or of a person with access to the table.

    A call of the API that needs the record is refused, and names the record.
    """

    def __init__(self, tenant: str, fleet: str, problem: str) -> None:
        self.tenant = tenant
        self.fleet = fleet
        self._told = f"a record of fleet {fleet} of tenant {tenant} cannot be read: {problem}"
        detail = f"A{self._told[1:]}; nobody looks after its machines until the record is mended."
        super().__init__(ErrorCode.CONFLICT, detail, remedy="`baton fleet doctor` lists such records.")

    def __str__(self) -> str:
        return self._told


class FenceLost(Exception):  # noqa: N818 - a normal outcome: another controller has taken over
    """Another controller has acquired the fence; nothing was written."""
