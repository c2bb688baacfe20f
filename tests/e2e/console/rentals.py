"""Fleets with machines, receipts and events of a night, written in the controller's place: no machine runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

from baton.contract.fleets.fleet import FleetSpec, MachineMeasurements, MachineState
from functions.fleet.ledger import Ledger
from functions.fleet.records import FleetEvent, Machine, Offer
from functions.storage.dynamodb.fleet import DynamoFleetStore
from tests.kits.stack.control_plane import ControlPlane
from tests.kits.waiting import until

TENANT = "default"
HOUR_S = 3600
HOLD_S = 24 * HOUR_S
IMAGE = "registry.example/baton-agent:1"
MODELS = ("RTX 4090", "RTX 3090", "A100 SXM4")
PRICES = (0.41, 0.22, 1.35)


class Rentals:
    """Holds the controller's fence, so that no tick changes what a test has written."""

    def __init__(self, stack: ControlPlane) -> None:
        self.stack = stack
        self.store = DynamoFleetStore(stack.tables, stack.prefix)
        self.now = int(time.time())
        self._spending = self.store.spending()
        self._alive: list[Machine] = []
        self._fleets: list[str] = []

    def __enter__(self) -> Self:
        self.fence: int = until(lambda: self.store.acquire("a test", self.now, HOLD_S), what="the controller's fence")
        return self

    def __exit__(self, *_exception: object) -> None:
        for name in self._fleets:
            self.stack.client.stop_fleet(name)
        for one in list(self._alive):
            self.change(one, MachineState.GONE, absences=[self.now, self.now + 60])
        if self.store.spending() != self._spending:
            self.spend_all(self._spending.month_usd, self._spending.reserved_usd)
        self.store.release(self.fence)

    def apply(self, name: str, **changes: Any) -> None:
        """Store a fleet by the API."""
        document = {
            "name": name,
            "providers": ["vast", "runpod"],
            "image": IMAGE,
            "queues": [name],
            "min_vram_gib": 24,
            "max": 4,
            "max_usd_per_hour": 1.5,
            "budget": {"total_usd": 60, "per_day_usd": 15},
        }
        self.stack.client.put_fleet(FleetSpec.model_validate({**document, **changes}))
        self._fleets.append(name)

    def spend(self, fleet: str, usd: float, *, waits: str = "") -> None:
        """Count money, and say why the fleet waits."""
        before = self.store.ledger(TENANT, fleet)
        after = Ledger(version=before.version + 1, waits=waits).spend(before.spent_usd + usd, self.now)
        self.store.write(self.fence, TENANT, fleet, ledger=after)

    def spend_all(self, month_usd: float, reserved_usd: float) -> None:
        """Set what all fleets of the deployment have spent this month and reserved."""
        now = self.store.spending().at(self.now)
        sums = {"version": now.version + 1, "month_usd": month_usd, "reserved_usd": reserved_usd}
        self.store.write(self.fence, TENANT, self._fleets[0], spending=now.model_copy(update=sums))

    def machine(
        self, fleet: str, token: str, life: Sequence[tuple[int, str]], *, kind: int = 0, **more: Any
    ) -> Machine:
        """Store a machine with its life: each state with the minutes ago at which the machine entered the state."""
        offer = Offer(
            provider=("vast", "vast", "runpod")[kind],
            ref=f"{token}-offer",
            gpu_model=MODELS[kind],
            vram_gib=24,
            disk_gib=80,
            usd_per_hour=PRICES[kind],
        )
        at = [self.now - 60 * ago for ago, _ in life]
        states = [MachineState(state) for _, state in life]
        rented_h = ((at[-1] if states[-1].ended else self.now) - at[0]) / HOUR_S
        spent = round(rented_h * offer.usd_per_hour, 4)
        fields: dict[str, Any] = {
            "id": f"q7wk2m9x-{fleet}-{token}",
            "tenant": TENANT,
            "fleet": fleet,
            "version": 1,
            "state": states[-1],
            "since": at[-1],
            "offer": offer,
            "cap_usd_per_hour": 1.5,
            "handle": f"2947{token}",
            "requested_at": at[0],
            "created_at": at[0] + 4,
            "ends_by": self.now + HOLD_S,
            "usd_per_hour": offer.usd_per_hour,
            "spent_usd": spent,
            "reserved_usd": 0.0 if states[-1].ended else offer.usd_per_hour,
            **more,
        }
        if states[-1] is MachineState.GONE:
            proof = {"absences": [at[-1] - 61, at[-1]], "charged_usd": round(spent * 0.99, 4)}
            fields = {**proof, **fields}
        elif "ready" in states:
            measured = MachineMeasurements(driver="580.65.06", disk_write_mb_s=850, download_mbit_s=412)
            fields = {"measured": measured, **fields}
        machine = Machine(**fields)
        reasons = {states[-1]: machine.reason}
        events = [
            FleetEvent(at=then, type=f"machine.{state}", machine=machine.id, usd=0, reason=reasons.get(state, ""))
            for then, state in zip(at, states, strict=True)
        ]
        self.store.write(self.fence, TENANT, fleet, machine=machine, events=events)
        if not machine.state.ended:
            self._alive.append(machine)
        return machine

    def serve(self, fleet: str, number: int, kind: int = 0, **more: Any) -> Machine:
        """Store a busy machine that the controller could have rented, whose worker can claim jobs."""
        name = f"{self.store.deployment()}-{fleet}-{number:012x}"
        life = ((40, "planned"), (40, "requested"), (39, "booting"), (36, "ready"), (35, "busy"))
        return self.machine(fleet, f"{number:x}", life, kind=kind, id=name, **more)

    def change(self, machine: Machine, state: MachineState, **more: Any) -> Machine:
        """Let a machine enter another state now."""
        self._alive.remove(machine)
        update = {"state": state, "since": int(time.time()), "version": machine.version + 1, **more}
        after = machine.model_copy(update=update)
        self.store.write(self.fence, TENANT, machine.fleet, machine=after, events=[after.event])
        if not state.ended:
            self._alive.append(after)
        return after

    def night(self, fleet: str, job_id: str) -> list[Machine]:
        """Store machines of the last day: five that ended, one with the job, one without, one that boots."""
        boot = (("planned", 0), ("requested", 0), ("booting", 0), ("registered", 4), ("ready", 4), ("busy", 5))

        def life(began: int, *rest: tuple[int, str], until_state: str = "busy") -> list[tuple[int, str]]:
            names = [state for state, _ in boot]
            kept = boot[: names.index(until_state) + 1]
            return [*((began - after, state) for state, after in kept), *rest]

        end = "no job for idle_timeout_s"
        for number, (began, ended, kind) in enumerate(((1380, 1050, 0), (1320, 900, 1), (1000, 640, 2), (950, 420, 0))):
            last = ((ended + 12, "ready"), (ended + 2, "terminating"), (ended, "gone"))
            self.machine(fleet, f"e{number}a1", life(began, *last), kind=kind, reason=end)
        lost = ((500, "lost"), (498, "terminating"), (495, "gone"))
        self.machine(fleet, "lost9", life(700, *lost), kind=1, reason="vast does not list the machine any more")
        return [
            self.machine(fleet, "b1usy", life(380), job_id=job_id),
            self.machine(fleet, "r2eady", life(95, (6, "ready")), kind=1),
            self.machine(fleet, "b3oots", life(2, until_state="booting")),
        ]
