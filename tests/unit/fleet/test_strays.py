"""The cost of machines that no record explains: a fleet or the deployment pays, until their absence is proved."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from functions.fleet.records import STRAYS_NAME, STRAYS_TENANT, Machine, StoredFleet
from tests.twins.provider import VirtualMachine, VirtualProvider
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import make_night, spec

DEPLOYMENT = "dep10000"
STRAY = f"{DEPLOYMENT}-nights-0123456789ab"


def appear(night: Night, token: str = STRAY, *, since_min: int = 0, price: float = 0.6) -> VirtualMachine:
    provider = next(iter(night.providers.values()))
    machine = VirtualMachine("stray", token, price, night.now - since_min * 60, "h")
    provider.machines.append(machine)
    return machine


def receipts(night: Night, tenant: str = TENANT, fleet: str = "nights") -> list[Machine]:
    return list(night.store.ended(tenant, fleet, limit=99))


def test_the_fleet_that_the_token_names_pays_for_a_stray_from_its_creation_to_its_end() -> None:
    night = make_night(budget={"total_usd": 0.5})
    appear(night, since_min=45)
    night.step(8)
    (machine,) = receipts(night)
    assert (machine.state, machine.reason) == (State.GONE, "no record explained the machine")
    assert machine.receipt is not None and len(machine.receipt.absent_at) == 2
    assert night.billed_usd() == pytest.approx(0.6 * 46 / 60)
    assert night.spent_usd() == pytest.approx(machine.spent_usd) == pytest.approx(0.6 * 47 / 60)
    assert night.store.spending().spent_usd == pytest.approx(night.spent_usd())
    assert machine.receipt.charged_usd == pytest.approx(night.billed_usd())
    told = [(one.type, one.reason) for one in night.store.events(TENANT, "nights", limit=9)][::-1]
    warning = ("budget.warning", "total_usd 0.5")
    assert told == [("machine.terminating", machine.reason), warning, ("machine.gone", machine.reason)]
    assert [one.tenant for one in night.store.fleets()] == [TENANT], "no fleet of strays is needed"


def test_a_stray_neither_opens_the_breaker_nor_changes_the_history_of_its_provider() -> None:
    night = make_night()
    for number in range(3):
        appear(night, f"{STRAY[:-1]}{number}").handle = f"stray-{number}"
    night.step(5)
    assert len(receipts(night)) == 3 and night.store.reputations() == {}
    training = night.submit(hours=0.1)
    night.step(12)
    assert training.left_s <= 0


@pytest.mark.parametrize(
    ("name", "rival", "named"),
    [
        ("nights", "nights", "nights"),
        ("nights", "days", "rent-0badcafe"),
        ("long-names-of-fleets-are-cut-1", "long-names-of-fleets-are-cut-2", "long-names-of-fleets-are-cut"),
        ("nights", "days", "nights-and-more"),
    ],
)
def test_the_deployment_pays_for_a_stray_whose_fleet_is_unknown(name: str, rival: str, named: str) -> None:
    """The token names fleets of two tenants, or none, or two long names that begin alike."""
    night = Night(spec(name=name), {"loopback": VirtualProvider()})
    night.store.put_fleet(StoredFleet(tenant="rival", spec=spec(name=rival), version=1, created_at=0, updated_at=0))
    token = f"{DEPLOYMENT}-{named}-0123456789ab"
    appear(night, token, since_min=30)
    night.step(8)
    (machine,) = receipts(night, STRAYS_TENANT, STRAYS_NAME)
    assert machine.state is State.GONE and machine.spent_usd == pytest.approx(0.6 * 32 / 60)
    assert night.store.spending().spent_usd == pytest.approx(machine.spent_usd)
    assert (night.spent_usd(), night.store.ledger("rival", rival).spent_usd) == (0, 0)
    assert {one.tenant for one in night.store.fleets()} == {TENANT, "rival"}, "the fleet of strays has retired"
    appear(night, token, since_min=1).handle = "second"
    night.step(8)
    assert len(receipts(night, STRAYS_TENANT, STRAYS_NAME)) == 2


def test_the_cost_of_a_stray_counts_against_the_budget_of_the_deployment() -> None:
    night = make_night()
    night.budget = Budget(total_usd=1)
    appear(night, f"{DEPLOYMENT}-lost-0123456789ab", since_min=60, price=0.9)
    night.step(4)
    night.submit(hours=1)
    night.step(4)
    assert night.store.ledger(TENANT, "nights").waits.startswith("total_usd of the deployment has 0.0")
    assert night.billing() == []


def test_a_stray_that_its_provider_keeps_for_two_days_is_paid_and_asked_to_end_although_no_fleet_is_left() -> None:
    night = make_night()
    (fleet,) = night.store.fleets()
    provider = night.providers["loopback"]
    appear(night, f"{DEPLOYMENT}-lost-0123456789ab")
    provider.faults.ignored_destroys = 10**6
    night.step(3)
    night.store.retire(night.store._fence, fleet.model_copy(update={"version": 2}), _spending(night))
    night.step(48 * 60)
    assert night.store.spending().spent_usd == pytest.approx(night.billed_usd(), rel=0.01)
    provider.faults.ignored_destroys = 0
    night.step(5)
    assert night.billing() == [] and night.store.fleets() == []
    assert len(receipts(night, STRAYS_TENANT, STRAYS_NAME)) == 1


def _spending(night: Night) -> Any:
    spending = night.store.spending()
    return spending.model_copy(update={"version": spending.version + 1})


def test_a_machine_that_returns_after_its_receipt_is_paid_from_there_and_charged_once() -> None:
    night = make_night()
    night.submit(hours=0.2)
    night.step(30)
    (first,) = receipts(night)
    provider = night.providers["loopback"]
    provider.machines[0].ended_at = None
    night.step(6)
    second, again = receipts(night)
    assert again == first and second.priced_until is not None and first.priced_until is not None
    assert night.spent_usd() == pytest.approx(first.spent_usd + second.spent_usd)
    assert second.spent_usd == pytest.approx(0.2 * (second.priced_until - first.priced_until) / 3600)
    assert first.charged_usd is not None and second.charged_usd is not None
    assert first.charged_usd + second.charged_usd == pytest.approx(night.billed_usd())


def test_a_time_of_creation_long_ago_uses_up_no_budget() -> None:
    night = make_night()
    appear(night, since_min=10 * 365 * 24 * 60, price=0.1)
    night.step(8)
    assert night.spent_usd() == pytest.approx(0.1 * 24, rel=0.01)


def test_two_strays_of_one_token_are_both_ended_and_paid() -> None:
    night = make_night()
    appear(night)
    appear(night).handle = "twin"
    night.step(8)
    assert night.billing() == []
    assert night.billed_usd() <= night.spent_usd() <= night.billed_usd() + 2 * 0.6 / 60
