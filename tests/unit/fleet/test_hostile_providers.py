"""Providers whose answers are wrong in ways that no driver foresees: other providers and the money stay as they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from baton.contract.fleets.fleet import FleetSpec
from functions.fleet.drivers.ec2.calls import Ec2Refusal
from functions.fleet.drivers.protocol import ProviderUnavailable
from functions.fleet.drivers.runpod import Pod
from functions.fleet.drivers.vast.wire import Instance, PriceIncrease
from functions.fleet.records import Inventory, Offer, Sighting
from functions.fleet.ticks import tick
from functions.fleet.ticks.starting import LONGEST_WAITS
from tests.kits.waiting import expire_for
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import Night
from tests.unit.fleet.test_fleet_nights import spec
from tests.unit.fleet.test_fleet_providers import make_night, waits


class Broken(VirtualProvider):
    """Provider whose driver fails at a call in a way that the driver does not know."""

    broken: str = ""

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "broken"):
            raise TypeError("'int' object is not iterable")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("call", ["inventory", "quote", "create", "destroy", "charged_usd", "accept_price", "examine"])
def test_a_driver_that_fails_hits_its_own_provider_only(call: str) -> None:
    vast, ssh = Broken(name="vast"), VirtualProvider(name="ssh")
    night = make_night(vast, ssh, max=2)
    night.submit(hours=0.5)
    night.step(5)
    (kept,) = vast.alive()
    kept.announced_usd_per_hour = 0.3
    vast.broken = call
    night.submit(hours=0.5)
    night.step(100)
    assert [one.left_s > 0 for one in night.trainings] == [False, False]
    assert ssh.alive() == []
    assert all(one.finished for one in night.reports)
    vast.broken = ""
    night.step(20)
    assert night.billing() == [], "given back as soon as the driver works"
    assert night.spent_usd() >= night.billed_usd() - 0.02


def test_a_refusal_of_amazon_that_nobody_knows_is_no_answer() -> None:
    assert isinstance(Ec2Refusal("describe_instances", "InvalidNextToken", "", sure=True), ProviderUnavailable)


@pytest.mark.parametrize("field", ["vram_gib", "disk_gib", "interruptions_per_hour", "boot_s"])
def test_an_offer_holds_no_number_that_a_record_cannot_hold(field: str) -> None:
    """JSON has no NaN: the stored machine of such an offer could not be read again, and its fleet would be stuck."""
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            Offer.model_validate({"provider": "runpod", "ref": "x", "usd_per_hour": 1, field: value})


def test_an_id_that_comes_as_a_number_is_the_same_machine() -> None:
    """A pod that cannot be read is neither found after a lost answer nor proved gone."""
    row = {"id": 7, "name": "dep10000-n-1", "status": "RUNNING", "cost": "0.5", "disk": 10}
    found = Pod.model_validate({**row, "createdAt": "2026-11-25T10:00:00Z"}).sighting()
    assert (found.handle, found.running) == ("7", True)


class Hanging(VirtualProvider):
    """Provider whose list comes only when the test ends."""

    released: threading.Event
    hanging: list[str]

    def inventory(self, prefix: str, now: int) -> Inventory:
        self.hanging.append(self.name)
        self.released.wait(60)
        return super().inventory(prefix, now)


def test_providers_that_hang_leave_time_for_the_machines_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked one after another, two of them would use up each tick, and no machine would ever be given back."""
    hanging = {name: Hanging(name=name) for name in ("ec2", "runpod")}
    released, calls = threading.Event(), list[str]()
    for one in hanging.values():
        one.released, one.hanging = released, calls
    monkeypatch.setattr(tick, "wait", expire_for(lambda: len(calls), below_s=30))
    vast = VirtualProvider(name="vast")
    night = Night(spec(providers=["vast"], image="i", min=1), {**hanging, "vast": vast}, time_left_s=30.0)
    for _ in range(2):
        night.step()
    (made,) = vast.alive()
    night.store.put_fleet(night.store.fleets()[0].model_copy(update={"stopped": True, "version": 2}))
    night.step(2)
    assert made.ended_at is not None
    assert "ec2: the list of machines cannot be read: no answer in time" in night.reports[-1].failures
    released.set()


@pytest.mark.parametrize(("per_second", "told"), [(1e5, 1e6), (-1.0, 0.0)])
def test_a_host_that_asks_for_an_absurd_price_hides_no_machine(per_second: float, told: float) -> None:
    """The number is the host's own, and one machine that cannot be read makes the list of all unreadable."""
    row = {"pending_price_increase_id": 1, "contract_id": 2, "new_gpu_costpersec": max(per_second, 0)}
    wanted = PriceIncrease.model_validate({**row, "old_gpu_costpersec": max(-per_second, 0)}).usd_per_hour(0.4)
    assert Sighting(token="t", handle="h", announced_usd_per_hour=wanted).announced_usd_per_hour == told


def test_an_instance_without_a_price_keeps_the_price_before() -> None:
    """An instance without a price keeps its former price: at the price 0 the machine would run without a bound."""
    assert Instance(id=1, actual_status="loading", dph_total=0).sighting().usd_per_hour is None


def test_a_refusal_of_any_length_fits_the_ledger() -> None:
    class Verbose(VirtualProvider):
        def quote(self, spec: FleetSpec) -> Sequence[Offer]:
            raise ProviderUnavailable("x" * 10**6)

    night = make_night(Verbose(name="vast"), providers=["vast"], min=1)
    night.step()
    assert 100 < len(waits(night)) <= LONGEST_WAITS
