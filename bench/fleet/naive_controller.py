"""A controller of fleets without Baton's precautions, as common orchestrators are written.

It creates again after a lost answer, books a machine as ended when the destroy call returns, and remembers a machine
only after the answer to its create; therefore it never ends a machine that it does not remember. In everything else it
does its best: only complete lists count, and its own spending bounds new machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.contract.fleets.fleet import MachineState as State
from functions.domain.records import Job
from functions.fleet import lifecycle
from functions.fleet.drivers.protocol import Created, CreateIntent, ProviderUnavailable
from functions.fleet.records import Machine, Offer, StoredFleet
from functions.fleet.ticks.demand import missing_machines
from tests.twins.fleet import MemoryFleetStore
from tests.twins.provider import VirtualProvider

CREATE_TRIES = 3
BOOTS_WITHIN_S = 900


class NaiveController:
    """Controller of one fleet at one provider. interrupt: called before every call; may end the process."""

    def __init__(
        self,
        store: MemoryFleetStore,
        provider: VirtualProvider,
        *,
        waiting: Callable[[], Sequence[Job]],
        now: Callable[[], int],
        interrupt: Callable[[str], None],
        random_token: Callable[[], str],
    ) -> None:
        self._store = store
        self._provider = provider
        self._waiting = waiting
        self._now = now
        self._interrupt = interrupt
        self._random_token = random_token

    def tick(self) -> None:
        """Give back what is over, then start what is missing."""
        (fleet,) = self._store.fleets()
        listed = self._listed()
        machines = [self._look(fleet, one, listed) for one in self._store.machines(fleet.tenant, fleet.spec.name)]
        if fleet.stopped or self._spent_usd(fleet) >= (fleet.spec.budget.total_usd or 0):
            return
        for _ in range(missing_machines(fleet.spec, machines, self._waiting())):
            self._create(fleet)

    def _listed(self) -> set[str] | None:
        """Return the handles that the provider lists; None if the list is missing or incomplete."""
        self._interrupt("inventory")
        try:
            inventory = self._provider.inventory("", self._now())
        except ProviderUnavailable:
            return None
        return {one.handle for one in inventory.sightings} if inventory.complete else None

    def _look(self, fleet: StoredFleet, machine: Machine, listed: set[str] | None) -> Machine:
        now = self._now()
        paid_s = now - (machine.priced_until or now)
        machine = machine.model_copy(
            update={"spent_usd": machine.spent_usd + paid_s / 3600 * machine.usd_per_hour, "priced_until": now}
        )
        # A provider lists a machine late; two minutes are the usual allowance.
        young = now - machine.since < 120 and machine.state is State.BOOTING
        if listed is not None and machine.handle not in listed and not young:
            return self._save(machine.model_copy(update={"state": State.GONE}))
        over = self._spent_usd(fleet) >= (fleet.spec.budget.total_usd or 0)
        late = machine.state is State.BOOTING and now - machine.since > BOOTS_WITHIN_S
        idle = machine.state is State.READY and now - machine.since > fleet.spec.idle_timeout_s
        if fleet.stopped or over or late or idle:
            self._interrupt("destroy")
            self._provider.destroy(machine.handle or "")
            return self._save(machine.model_copy(update={"state": State.GONE}))
        return self._save(machine)

    def _create(self, fleet: StoredFleet) -> None:
        now, spec = self._now(), fleet.spec
        offers: Sequence[Offer] = self._provider.quote(spec)
        token = self._random_token()
        for offer in offers[:CREATE_TRIES]:
            self._interrupt("create")
            intent = CreateIntent(
                token=token,
                offer=offer,
                image=None,
                disk_gib=spec.disk_gib,
                environment={},
                max_usd_per_hour=spec.max_usd_per_hour,
            )
            result = self._provider.create(intent)
            if isinstance(result, Created):
                machine = Machine(
                    id=token,
                    tenant=fleet.tenant,
                    fleet=spec.name,
                    version=0,
                    since=now,
                    offer=offer,
                    cap_usd_per_hour=spec.max_usd_per_hour,
                    ends_by=now + 86_400,
                    usd_per_hour=offer.usd_per_hour,
                    priced_until=now,
                )
                self._save(lifecycle.created(machine.model_copy(update={"state": State.REQUESTED}), result.handle, now))
                return

    def _save(self, machine: Machine) -> Machine:
        self._interrupt("write")
        stored = machine.model_copy(update={"version": machine.version + 1})
        self._store.update_machine(stored)
        return stored

    def _spent_usd(self, fleet: StoredFleet) -> float:
        place = fleet.tenant, fleet.spec.name
        known = [*self._store.machines(*place), *self._store.ended(*place, limit=10_000)]
        return sum(one.spent_usd for one in known)
