"""One unreadable record stops its own fleet only, and its machines are not taken for strays."""

from __future__ import annotations

import pytest

from baton.contract.fleets.money import Budget
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import spec
from tests.unit.fleet.test_fleet_providers import add_fleet


@pytest.mark.parametrize("part", ["fleet", "machine"])
def test_a_damaged_fleet_is_left_alone_and_reported_while_the_others_go_on(part: str) -> None:
    vast = VirtualProvider(name="vast")
    night = Night(spec(providers=["vast"], image="me/trainer:1", min=1), {"vast": vast})
    night.step(10)
    (kept,) = vast.alive()
    add_fleet(night, name="second", providers=["vast"], min=1, queues=["other"])
    damaged = night.store.damaged_fleets if part == "fleet" else night.store.damaged_machines
    damaged.add((TENANT, "nights"))
    night.step(10)
    report = night.reports[-1]
    assert not report.finished and report.fleets == 2
    told = "a record of fleet nights of tenant acme cannot be read: ValidationError; nobody looks after its machines"
    assert any(one.startswith(told) for one in report.failures)
    assert kept.ended_at is None and len(vast.alive()) == 2, "its machine is no stray"
    assert [one.state for one in night.store.machines(TENANT, "second")] == ["ready"]
    damaged.clear()
    night.step()
    assert night.reports[-1].finished


def test_a_deployment_whose_only_fleet_is_damaged_reports_each_tick() -> None:
    night = Night(spec(), {"loopback": VirtualProvider()})
    night.store.damaged_fleets.add((TENANT, "nights"))
    night.step()
    assert not night.reports[-1].finished and night.reports[-1].failures


@pytest.mark.parametrize("part", ["fleet", "machine"])
def test_the_budget_of_the_deployment_keeps_the_money_of_a_damaged_fleet(part: str) -> None:
    """A damaged fleet's machine runs on, therefore another fleet must not spend the machine's reservation."""
    vast = VirtualProvider(name="vast", price=1.0)
    night = Night(
        spec(providers=["vast"], image="me/trainer:1", min=1, max_usd_per_hour=2),
        {"vast": vast},
        budget=Budget(total_usd=2),
    )
    night.step(2)
    damaged = night.store.damaged_fleets if part == "fleet" else night.store.damaged_machines
    damaged.add((TENANT, "nights"))
    add_fleet(night, name="second", providers=["vast"], min=1, max_usd_per_hour=2, queues=["other"])
    night.step(30)
    assert len(vast.alive()) == 1
    waits = night.store.ledger(TENANT, "second").waits
    assert waits.startswith("total_usd of the deployment has 0.9"), waits
    damaged.clear()
    night.step()
    held = sum(one.reserved_usd for one in night.machines())
    assert night.store.spending().reserved_usd == pytest.approx(held) and held < 1, "no more once it is mended"
