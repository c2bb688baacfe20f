"""A control plane without state gives its machines back at its end, and nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import MachineState
from functions.fleet.records import StoredFleet
from functions.local.machines import end_machines, list_machines
from tests.conformance.drivers.driven_vast import VastDriven
from tests.conformance.drivers.driver_kit import PREFIX, create
from tests.twins.fleet import MemoryFleetStore
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
    assert [one.id for one in list_machines(store)] == ["a0", "b0"]


def test_own_machines_end_at_the_pace_of_the_provider_and_others_stay(provider: VastDriven) -> None:
    provider.fake.intervals_s.update(destroy=3.0)
    provider.fake.inject("500", "GET /api/v1/instances/", count=3)
    provider.fake.ignored_destroys = 1
    end_machines({"vast": provider.driver}, PREFIX, pause=provider.clock.advance)
    assert provider.existing() == [FOREIGN]
    assert not [call for call in provider.fake.calls if call.method == "DELETE" and FOREIGN in call.path]
    provider.fake.intervals_s.clear()


def test_a_provider_that_refuses_is_left_after_some_rounds(
    provider: VastDriven, caplog: pytest.LogCaptureFixture
) -> None:
    keys, provider.fake.keys = provider.fake.keys, {}
    with caplog.at_level(logging.ERROR):
        end_machines({"vast": provider.driver}, PREFIX, pause=provider.clock.advance)
    provider.fake.keys = keys
    assert f"machines at vast may still run; `{PREFIX}...`" in caplog.text
    assert len(provider.existing()) == 3
