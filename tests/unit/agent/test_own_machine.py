"""A rented machine of Vast.ai or RunPod destroys itself with its own key, at the fakes of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.vast.instances import FakeInstance
from fakes.vast.provider import FakeVast
from functions.fleet.drivers.protocol import Created, CreateIntent
from functions.fleet.drivers.vast.driver import VastDriver
from gpu_client.agent.app.own_machine import PAUSE_S, TRIES, give_back
from tests.conformance.drivers.driven_runpod import RunpodDriven
from tests.conformance.drivers.driven_vast import vast_account
from tests.conformance.drivers.driver_kit import create
from tests.kits.clock import Clock
from tests.unit.fleet.test_vast_offers import spec

DESTROY = "DELETE /api/v0/instances/"


@pytest.fixture
def clock() -> Clock:
    return Clock(1_700_000_000)


@pytest.fixture
def fake(clock: Clock) -> Iterator[FakeVast]:
    with FakeVast(clock) as served:
        yield served  # type: ignore[misc]


def rented(fake: FakeVast, clock: Clock, token: str) -> FakeInstance:
    """Rent an instance as the control plane does."""
    driver = VastDriver(vast_account(fake), now=clock)
    intent = CreateIntent(
        token=token,
        offer=driver.quote(spec(market="on-demand"))[0],
        image="registry.example/agent:1",
        disk_gib=10,
        environment={"BATON_API_URL": "http://control.plane"},
        max_usd_per_hour=1,
    )
    result = driver.create(intent)
    assert isinstance(result, Created)
    clock.advance(10)
    return fake.instance(result.handle)


def test_a_pod_of_runpod_deletes_itself_and_cannot_delete_another(tmp_path: Path) -> None:
    runpod = RunpodDriven(tmp_path)
    for at in range(2):
        create(runpod, f"dep10000-nights-{at}")
    one, other = runpod.fake.exists()
    address = {"RUNPOD_API_BASE_URL": runpod.fake.url}
    foreign = {**one.environment, **address, "RUNPOD_POD_ID": other.id}
    assert not give_back(foreign, pause=runpod.clock.sleep)
    runpod.fake.inject("500", "DELETE")
    assert give_back({**one.environment, **address}, pause=runpod.clock.sleep)
    assert runpod.fake.meter.billing() == [other.id]
    runpod.close()


def environment(fake: FakeVast, instance: FakeInstance) -> dict[str, str]:
    return {**instance.environment, "VAST_URL": fake.url}


def test_a_machine_destroys_its_own_instance_and_nothing_is_billed_any_more(fake: FakeVast, clock: Clock) -> None:
    one, other = (rented(fake, clock, f"dep10000-nights-{at}") for at in range(2))
    assert give_back(environment(fake, one), pause=clock.sleep)
    assert fake.meter.billing() == [other.handle]
    assert give_back(environment(fake, other), pause=clock.sleep)
    assert fake.meter.billing() == []


@pytest.mark.parametrize("fault", ["429", "500", "reset", "slow", "lost"])
def test_a_failed_destroy_is_repeated_at_the_permitted_pace(fake: FakeVast, clock: Clock, fault: Any) -> None:
    one = rented(fake, clock, "dep10000-nights-1")
    fake.inject(fault, DESTROY)
    fake.inject("429", DESTROY)
    # Once destroyed, the instance's key is refused as well.
    given_back = give_back(environment(fake, one), pause=clock.sleep, timeout_s=1 if fault == "slow" else 5)
    assert given_back or fault in ("slow", "lost")
    assert fake.meter.billing() == []
    assert set(clock.slept) == {PAUSE_S}


def test_a_container_cannot_destroy_another_instance(fake: FakeVast, clock: Clock) -> None:
    one, other = (rented(fake, clock, f"dep10000-nights-{at}") for at in range(2))
    assert not give_back(environment(fake, one) | {"CONTAINER_ID": other.handle}, pause=clock.sleep)
    assert fake.meter.billing() == [one.handle, other.handle]
    assert len([call for call in fake.calls if call.method == "DELETE"]) == TRIES


def test_a_machine_without_the_variables_calls_nobody(fake: FakeVast) -> None:
    for environ in ({}, {"CONTAINER_ID": "7"}, {"CONTAINER_API_KEY": "k", "CONTAINER_ID": ""}):
        assert not give_back({**environ, "VAST_URL": fake.url}, pause=lambda _: pytest.fail("waits"))
    assert fake.calls == []
