"""A control plane without state gives its machines back at its end, and nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import MachineState
from functions.fleet.drivers.protocol import ProviderUnavailable
from functions.fleet.records import Inventory, StoredFleet
from functions.fleet.store import DamagedRecord
from functions.local.machines import describe_machines, end_machines, list_machines
from tests.conformance.drivers.driven_vast import VastDriven
from tests.conformance.drivers.driver_kit import PREFIX, create
from tests.kits.clock import Clock
from tests.twins.fleet import MemoryFleetStore
from tests.twins.provider import VirtualMachine, VirtualProvider
from tests.unit.fleet.test_fleet_nights import spec
from tests.unit.fleet.test_machine_states import NOW, make_machine

FOREIGN = "dep20000-nights-1"


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[VastDriven]:
    made = VastDriven(tmp_path)
    for token in (f"{PREFIX}nights-1", f"{PREFIX}nights-2", FOREIGN):
        create(made, token)
    yield made
    made.close()


def test_machines_that_a_provider_may_bill_are_listed_for_all_tenants() -> None:
    store = MemoryFleetStore()
    fence = store.acquire("test", NOW, 90)
    assert fence is not None
    for tenant, state in (("a", MachineState.BUSY), ("b", MachineState.TERMINATING)):
        store.put_fleet(StoredFleet(tenant=tenant, spec=spec(), version=1, created_at=NOW, updated_at=NOW))
        for number, one in enumerate((state, MachineState.PLANNED, MachineState.GONE)):
            machine = make_machine(one, id=f"{tenant}{number}", tenant=tenant)
            store.write(fence, tenant, "nights", machine=machine)
    damaged: list[DamagedRecord] = []
    assert [one.id for one in list_machines(store, damaged)] == ["a0", "b0"]
    store.damaged_machines.add(("a", "nights"))
    left = list_machines(store, damaged)
    assert [one.id for one in left] == ["b0"], "the machines of the other fleets are named all the same"
    told = describe_machines(left, damaged).splitlines()
    assert told[0].startswith("1 machine is still rented")
    assert told[-1] == "a record of fleet nights of tenant a cannot be read: ValidationError; its machines go on"


def test_own_machines_end_at_the_pace_of_the_provider_and_others_stay(provider: VastDriven) -> None:
    provider.fake.intervals_s.update(destroy=3.0)
    provider.fake.inject("500", "GET /api/v1/instances/", count=3)
    provider.fake.ignored_destroys = 1
    end_machines({"vast": provider.driver}, PREFIX, pause=provider.clock.advance, now=provider.clock)
    assert provider.existing() == [FOREIGN]
    assert not [call for call in provider.fake.calls if call.method == "DELETE" and FOREIGN in call.path]
    provider.fake.intervals_s.clear()


def test_a_provider_that_refuses_is_left_after_some_time(
    provider: VastDriven, caplog: pytest.LogCaptureFixture
) -> None:
    keys, provider.fake.keys = provider.fake.keys, {}
    with caplog.at_level(logging.ERROR):
        end_machines({"vast": provider.driver}, PREFIX, pause=provider.clock.advance, now=provider.clock)
    provider.fake.keys = keys
    assert "machines at vast may still run and cost money, unknown ones: end them at the provider" in caplog.text
    assert PREFIX in caplog.text
    assert len(provider.existing()) == 3


class Market(VirtualProvider):
    """Provider without minimum intervals, which ends no `stuck` machine and lists an ended one for `lists_s`."""

    def __init__(self, clock: Clock, machines: int = 2) -> None:
        super().__init__()
        self.clock = clock
        self.stuck: set[str] = set()
        self.lists_s = 0
        self.asked_at: dict[str, int] = {}
        self.machines = [VirtualMachine(f"h-{at}", f"{PREFIX}n-{at}", 0.2, NOW, "") for at in range(machines)]

    def destroy(self, handle: str) -> bool:
        if handle in self.stuck:
            raise ProviderUnavailable("500")
        self.asked_at.setdefault(handle, int(self.clock()))
        return True

    def inventory(self, prefix: str, now: int) -> Inventory:
        for handle, asked_at in self.asked_at.items():
            if self.clock() >= asked_at + self.lists_s:
                super().destroy(handle)
        return super().inventory(prefix, now)


def end(market: Market) -> None:
    end_machines({"loopback": market}, PREFIX, pause=market.clock.advance, now=market.clock)


def test_a_machine_that_cannot_be_destroyed_is_named_and_keeps_no_other_alive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    market = Market(Clock(NOW))
    market.stuck = {"h-0"}
    end(market)
    assert [one.handle for one in market.alive()] == ["h-0"]
    (told,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert "cost money, h-0: end them at the provider" in told


def test_a_provider_without_intervals_is_asked_again_for_as_long(caplog: pytest.LogCaptureFixture) -> None:
    market = Market(Clock(NOW))
    market.faults.unreadable = 20
    with caplog.at_level(logging.ERROR):
        end(market)
    assert market.alive() == [] and not caplog.records
    assert market.clock() - NOW >= 60, "a short outage must not use up all tries"


def test_a_machine_that_is_listed_while_it_ends_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    market = Market(Clock(NOW))
    market.lists_s = 110
    with caplog.at_level(logging.WARNING):
        end(market)
    assert market.alive() == [] and not caplog.records


def test_a_driver_that_fails_keeps_no_machine_of_another_provider_alive() -> None:
    market, broken = Market(Clock(NOW)), VirtualProvider(name="vast")
    broken.inventory = {}.__getitem__  # type: ignore[assignment]
    end_machines({"vast": broken, "loopback": market}, PREFIX, pause=market.clock.advance, now=market.clock)
    assert market.alive() == []
