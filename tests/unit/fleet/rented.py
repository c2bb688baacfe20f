"""Nights of the real controller at the real drivers, over fakes that bill; and what holds at the end of each night.

A scenario ends with `RentedNight.finish`, which asserts state, events, money, and that nothing of ours is left. Each
account also holds a machine of another deployment, which no scenario may touch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.records import Machine
from tests.conformance.drivers.driven_ec2 import Ec2Driven
from tests.conformance.drivers.driven_runpod import RunpodDriven
from tests.conformance.drivers.driven_salad import SaladDriven
from tests.conformance.drivers.driven_vast import VastDriven
from tests.conformance.drivers.driver_kit import IMAGE, create
from tests.unit.fleet.night import TENANT, Killed, Night

FOREIGN = "dep20000-nights-1"
HAPPY = "planned requested booting registered ready busy ready draining terminating gone"
OVERDUE = HAPPY.replace(" gone", " overdue gone")
"""Path of a machine whose provider does not end it for more than ten minutes."""
LOST = "planned requested booting registered ready busy lost terminating gone"
ABSENT = "planned requested ambiguous failed"
FOUND = HAPPY.replace("requested", "requested ambiguous")
CREATES = {
    "vast": "PUT /api/v0/asks/",
    "salad": "POST /api/public/organizations/acme/projects/training/containers",
    "runpod": "POST /v2/pods",
    "ec2": "POST /RunInstances",
}
COUNTERS = {
    "snatched": {"vast": "snatched", "salad": "withdrawn_classes", "runpod": "unplaceable"},
    "incomplete": {"vast": "unreadable_rows", "runpod": "unreadable_entries"},
    "ignored_destroys": {"vast": "ignored_destroys", "runpod": "ignored_deletes"},
}
"""Counters of the fakes by fault and provider, for faults of several calls."""
HTTP_PROVIDERS: dict[str, Callable[[Path], Any]] = {"vast": VastDriven, "salad": SaladDriven, "runpod": RunpodDriven}
ALL_PROVIDERS: dict[str, Callable[[Path], Any]] = {**HTTP_PROVIDERS, "ec2": Ec2Driven}


class Seen:
    """Machine, as the workers of a night need it."""

    def __init__(self, token: str, created_at: int) -> None:
        self.token, self.created_at, self.running = token, created_at, True


class Rented:
    """A driven provider in the place of a night's virtual one. dead: tokens of machines whose workers have ended."""

    def __init__(self, driven: Any) -> None:
        self.driven = driven
        self.dead: set[str] = set()
        self._now = 0
        self._since: dict[str, int] = {}

    @property
    def now(self) -> int:
        return self._now

    @now.setter
    def now(self, now: int) -> None:
        if self._now:
            self.driven.advance(now - self._now)
        self._now = now

    def alive(self) -> list[Seen]:
        tokens = set(self.driven.existing()) - self.dead
        return [Seen(token, self._since.setdefault(token, self._now)) for token in tokens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driven.driver, name)


class RentedNight:
    """Night of one fleet at one provider."""

    def __init__(self, driven: Any, **changes: Any) -> None:
        self.driven, self.fake, self.name = driven, driven.fake, driven.driver.name
        create(driven, FOREIGN)
        (self.foreign,) = self.fake.meter.billing() or self.billing()
        document = {
            "name": "nights",
            "providers": [self.name],
            "image": IMAGE,
            "disk_gib": 10,
            "min_vram_gib": 20,
            "max": 1,
            "max_usd_per_hour": 1,
            "idle_timeout_s": 120,
            "budget": {"total_usd": 20},
            **changes,
        }
        self.market = Rented(driven)
        self.night = Night(FleetSpec.model_validate(document), {self.name: self.market})  # type: ignore[dict-item]

    def usd(self) -> float:
        """Return the bill of the account without the foreign machine."""
        total = self.fake.usd() if self.name == "salad" else self.fake.meter.usd()
        return float(total - self.fake.meter.usd(self.foreign))

    def billing(self) -> list[str]:
        found: list[str] = self.fake.billing() if self.name == "salad" else self.fake.meter.billing()
        return found

    def count_fault(self, fault: str, count: int) -> None:
        """Let the next `count` suitable calls meet a fault; 0 ends the fault."""
        if (fault, self.name) == ("ignored_destroys", "salad"):
            self.fake.cloud.ignored_deletes = count
        elif (fault, self.name) == ("incomplete", "salad"):
            self.fake.unreadable_groups = [{}] * count
        else:
            setattr(self.fake, COUNTERS[fault][self.name], count)

    def creates(self) -> int:
        """Return the number of creates of this fleet that reached the provider."""
        method, _, path = CREATES[self.name].partition(" ")
        calls = [one for one in self.fake.calls if one.method == method]
        if self.name == "ec2":
            return sum(b"Action=RunInstances" in one.raw and b"DryRun=true" not in one.raw for one in calls) - 1
        return sum(one.path.startswith(path) for one in calls) - 1

    def step(self, minutes: int = 1) -> None:
        for _ in range(minutes):
            self.night.time_left_s = 60
            self.night.step()

    def skip(self, seconds: int) -> None:
        """Let time pass without ticks, and without work."""
        self.night.now += seconds
        self.market.now = self.night.now

    def step_until(self, state: State, minutes: int = 60) -> Machine:
        """Run until the newest machine has the state; return the machine."""
        for _ in range(minutes):
            self.step()
            found = [one for one in self.machines() if one.state is state]
            if found:
                return found[-1]
        raise AssertionError(f"no machine is {state}: {[(one.state, one.reason) for one in self.machines()]}")

    def machines(self) -> list[Machine]:
        """Return all machines, the oldest first."""
        first = [one.machine for one in self.events() if one.type == "machine.planned"]
        return sorted(self.night.machines(), key=lambda one: first.index(one.id))

    def machine(self, token: str) -> Machine:
        return next(one for one in self.machines() if one.id == token)

    def events(self) -> list[Any]:
        """Return the history of the fleet, the oldest first."""
        return list(self.night.store.events(TENANT, "nights", limit=10_000))[::-1]

    def path(self, token: str) -> str:
        """Return the states of a machine in their order."""
        ours = [one.type for one in self.events() if one.machine == token and one.type.startswith("machine.")]
        return " ".join(ours).replace("machine.", "")

    def waits(self) -> str:
        return self.night.store.ledger(TENANT, "nights").waits

    def kill_at(self, call: str, after: str = "") -> None:
        """Let the controller die before the first such call, or before the first one after another call."""
        seen: list[str] = []

        def die(name: str) -> None:
            due = name == call and (not after or after in seen) and "" not in seen
            seen.append("" if due else name)
            if due:
                raise Killed

        self.night.interrupt = die

    def stop(self) -> None:
        """Stop the fleet."""
        fleet = self.night.store.fleets()[0]
        self.night.store.put_fleet(fleet.model_copy(update={"stopped": True, "version": fleet.version + 1}))

    def change(self, **changes: Any) -> None:
        """Store a changed document."""
        fleet = self.night.store.fleets()[0]
        spec = FleetSpec.model_validate({**fleet.spec.model_dump(), **changes})
        updates = {"spec": spec, "version": fleet.version + 1, "updated_at": self.night.now}
        self.night.store.put_fleet(fleet.model_copy(update=updates))

    def finish(self, *paths: str, over_usd: float = 0.0, orphans: int = 0, minutes: int = 120) -> list[Machine]:
        """Run until all work is done and all machines have ended; assert the end of the night.

        paths: the states of each machine, in the order of their creates. over_usd: what the ledger may count above the
        bill besides five minutes of each machine, for machines whose end the controller learned late.
        """
        for _ in range(minutes):
            work = any(one.left_s > 0 for one in self.night.trainings)
            if not (work or self.driven.existing() != [FOREIGN] or self._unended()):
                break
            self.step()
        machines = self.machines()
        # State: every job is done, every machine has ended with a receipt, no key is left.
        assert [one.left_s > 0 for one in self.night.trainings] == [False] * len(self.night.trainings)
        assert self._unended() == [], [(one.state, one.reason) for one in machines]
        for one in machines:
            assert one.receipt is not None and one.reserved_usd == 0
            assert one.worker_key is None or one.worker_key in self.night.revoked
            assert one.state is not State.GONE or len(one.receipt.absent_at) == 2
        # Events.
        found = [self.path(one.id) for one in machines]
        assert found == list(paths), found
        # Money.
        billed, observed = self.usd(), sum(one.spent_usd for one in machines)
        slack = sum(one.usd_per_hour or one.offer.usd_per_hour for one in machines if one.state is State.GONE) / 12
        assert self.night.spent_usd() == pytest.approx(observed)
        # Amazon bills the address apart from the machine, and counts in real time.
        assert billed - 0.001 <= observed <= billed * (1.25 if self.name == "ec2" else 1) + slack + over_usd, (
            billed,
            observed,
        )
        if self.driven.charges and not orphans:
            charged = sum(one.receipt.charged_usd or 0 for one in machines if one.receipt)
            assert charged == pytest.approx(billed, abs=1e-6)
        total = self.night.spec.budget.total_usd
        assert total is not None and billed <= total
        # No orphan, and nothing of others was touched.
        assert self.driven.existing() == [FOREIGN]
        assert set(self.billing()) <= {self.foreign}
        assert not [one for one in self.fake.calls if one.method == "DELETE" and one.path.endswith(self.foreign)]
        assert len(self.night.store.orphans()) == orphans
        return machines

    def _unended(self) -> list[str]:
        return [one.id for one in self.machines() if not one.state.ended]
