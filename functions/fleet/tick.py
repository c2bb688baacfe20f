"""Hold what all steps of one tick share: the fence, the money, the providers' calls, the report.

Every write is conditional on the controller's fence and on the version of the record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import ValidationError

from baton.contract.fleet import MachineState as State
from functions.domain.errors import WriteConflict
from functions.fleet.drivers.protocol import Driver, ProviderRefused, ProviderUnavailable, RefusalKind
from functions.fleet.ledger import Ledger, new_warnings
from functions.fleet.machine_states import DEADLINES
from functions.fleet.records import FleetEvent, Machine, Quarantine, StoredFleet
from functions.fleet.store import FleetStore

logger = logging.getLogger("baton.fleet")

LEAST_TIME_S = 20
"""Time of the function that must be left before a provider is called: a call ends within its time-out."""
LONGEST_PAUSE_S = 15
"""Longest interval between two calls that a tick waits for instead of leaving the call to the next tick."""
QUARANTINE_S = {"boot": 6 * 3600, "loss": 24 * 3600}
LONGEST_QUARANTINE_S = 7 * 24 * 3600
NO_ANSWER = (ProviderUnavailable, ProviderRefused, ValidationError)
"""Failures of a driver's call; ValidationError: the provider's answer has impossible values."""
OF_ONE_FLEET = frozenset({RefusalKind.IMAGE, RefusalKind.INVALID})
"""Refusals that follow from the document of a fleet; any other refusal hits every fleet."""


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
    fleets: int = 0
    machines: dict[str, int] = field(default_factory=dict)
    created: int = 0
    destroyed: int = 0
    orphans: int = 0
    usd_per_hour: float = 0.0
    failures: list[str] = field(default_factory=list)


class Tick:
    """One tick under one fence.

    time_left_s: time until the function is ended. pause: sleeps for a number of seconds.
    """

    def __init__(
        self,
        store: FleetStore,
        drivers: Mapping[str, Driver],
        fence: int,
        report: TickReport,
        *,
        keys: MachineKeys,
        now: Callable[[], int],
        time_left_s: Callable[[], float],
        pause: Callable[[float], object],
    ) -> None:
        self.store = store
        self.drivers = drivers
        self.fence = fence
        self.report = report
        self.keys = keys
        self.now = now
        self._time_left_s = time_left_s
        self._pause = pause
        self._ledgers: dict[tuple[str, str], Ledger] = {}
        self._refused: dict[tuple[str, tuple[str, str] | None], str] = {}

    @property
    def in_time(self) -> bool:
        """True if time is left for a call of a provider."""
        return self._time_left_s() >= LEAST_TIME_S

    def may_call(self, driver: Driver, call: str) -> bool:
        """Return True if time is left for a call and the provider's minimum interval has passed.

        A short interval passes here, because machines that wait for their destroy call cost money for each tick.
        """
        interval_s = driver.min_interval_s.get(call, 0.0)
        if not self.in_time:
            return False
        if interval_s == 0.0 or self.store.allow(driver.name, call, self.now(), interval_s):
            return True
        pause_s = math.ceil(interval_s)
        if pause_s > LONGEST_PAUSE_S or self._time_left_s() < LEAST_TIME_S + pause_s:
            return False
        self._pause(pause_s)
        return self.store.allow(driver.name, call, self.now(), interval_s)

    def refuse(self, provider: str, kind: RefusalKind, reason: str, fleet: StoredFleet | None = None) -> str:
        """Ask a provider for no more machines in this tick, after a refusal of the account; return the reason.

        fleet: the fleet whose request was refused; None for a call that concerns no fleet.
        """
        told = reason if reason.startswith(kind) else f"{kind}: {reason}"
        place = _place(fleet) if fleet is not None and kind in OF_ONE_FLEET else None
        self._refused[provider, place] = told
        return told

    def refusal(self, provider: str, fleet: StoredFleet) -> str:
        """Return why the provider is asked no more in this tick for machines of the fleet; empty if it may be asked."""
        return self._refused.get((provider, None)) or self._refused.get((provider, _place(fleet)), "")

    def ledger(self, fleet: StoredFleet) -> Ledger:
        """Return the ledger, which only the holder of the fence writes."""
        place = _place(fleet)
        if place not in self._ledgers:
            self._ledgers[place] = self.store.ledger(*place)
        return self._ledgers[place]

    def write(
        self,
        fleet: StoredFleet,
        *,
        machine: Machine | None = None,
        ledger: Ledger | None = None,
        events: Sequence[FleetEvent] = (),
    ) -> None:
        """Store all values or none. Raises WriteConflict."""
        place = _place(fleet)
        try:
            self.store.write(self.fence, *place, machine=machine, ledger=ledger, events=events)
        except WriteConflict:
            self._ledgers.pop(place, None)
            raise
        if ledger is not None:
            self._ledgers[place] = ledger

    def save(self, fleet: StoredFleet, before: Machine, after: Machine, spent: Ledger) -> Machine:
        """Store a machine with its money and its event; return the stored machine, or `before` after a conflict."""
        now, ledger = self.now(), self.ledger(fleet)
        spent, warnings = new_warnings(fleet.spec.budget, spent, now)
        events = [
            FleetEvent(
                at=now, type="budget.warning", reason=f"{one.name} {one.cap_usd:g} {one.period}", usd=one.spent_usd
            )
            for one in warnings
        ]
        if after.state is not before.state:
            events.append(after.event)
        stored = after.model_copy(update={"version": before.version + 1})
        if after.state.ended and not before.state.ended:
            # Before the write, because no later tick looks after an ended machine.
            self._revoke_keys(after)
        try:
            self.write(
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

    def _revoke_keys(self, machine: Machine) -> None:
        if machine.worker_key:
            self.keys.revoke(machine.worker_key)

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
        host, now = f"{after.provider}:{after.offer.machine_ref}", self.now()
        earlier = self.store.quarantined(0).get(host)
        failures = earlier.failures + 1 if earlier else 1
        until = now + min(QUARANTINE_S[kind] * 2 ** (failures - 1), LONGEST_QUARANTINE_S)
        self.store.put_quarantine(Quarantine(host=host, until=until, failures=failures, reason=after.reason))

    def fail(self, message: str) -> None:
        """Report a failure, which does not end the tick."""
        logger.warning("%s", message)
        self.report.failures.append(message)


def _place(fleet: StoredFleet) -> tuple[str, str]:
    return fleet.tenant, fleet.spec.name
