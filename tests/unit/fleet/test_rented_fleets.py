"""Fleets of jobs that rent their own machines: they end with their jobs; and the budget of a whole deployment."""

from __future__ import annotations

import pytest

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from functions.domain.errors import WriteConflict
from functions.fleet.ledger import Ledger
from functions.fleet.records import Machine, StoredFleet
from tests.twins.provider import Faults
from tests.unit.fleet.night import TENANT, Killed, Night, Training
from tests.unit.fleet.test_fleet_nights import make_night, spec

PRICE = 0.2
MIDNIGHT = 1_700_006_400


def rent(hours: float = 1, faults: Faults | None = None, *, total_usd: float = 10) -> tuple[Night, Training]:
    """Return a night whose fleet belongs to its only job."""
    night = make_night(faults, name="rent-0badcafe", max=1, budget={"total_usd": total_usd})
    training = night.submit(hours)
    (fleet,) = night.store.fleets()
    night.store.put_fleet(fleet.model_copy(update={"job_id": training.job.id, "version": 2}))
    return night, training


def ended(night: Night) -> list[Machine]:
    return list(night.store.ended(TENANT, "rent-0badcafe", limit=99))


def require_retired(night: Night) -> None:
    """Assert that a retired fleet bills nothing, is read by no tick, and keeps its receipts and its money."""
    assert (night.billing(), night.store.fleets()) == ([], [])
    fleet = night.store.fleet(TENANT, "rent-0badcafe")
    assert fleet is not None and fleet.stopped and fleet.retired
    assert all(one.receipt is not None and one.reserved_usd == 0 for one in ended(night))
    made = len(night.providers["loopback"].machines)
    assert night.spent_usd() == pytest.approx(night.billed_usd(), abs=made * PRICE * 4 / 60 + 1e-6)
    assert night.store.spending().spent_usd == pytest.approx(night.spent_usd())


def types(night: Night) -> list[str]:
    return [one.type for one in night.store.events(TENANT, night.spec.name, limit=1000)][::-1]


def test_the_machine_of_a_job_goes_back_when_the_job_is_complete() -> None:
    night, training = rent()
    night.step(75)
    assert training.left_s <= 0
    require_retired(night)
    (machine,) = ended(night)
    assert machine.reason == "the job has ended"
    # Boot 2 to 4 minutes, one hour of work, no idle minutes.
    assert PRICE * 61 / 60 <= night.billed_usd() <= PRICE * 67 / 60


@pytest.mark.parametrize("after_min", [0, 2, 10])
def test_the_machine_of_a_canceled_job_goes_back_at_once(after_min: int) -> None:
    """Canceled before the first tick, during the boot, during the training."""
    night, training = rent(hours=9)
    night.step(after_min)
    assert training.left_s > 0
    night.canceled.add(training.job.id)
    training.left_s, training.on = 0, None
    night.step(2)
    assert night.billing() == []
    night.step(5)
    require_retired(night)
    assert night.billed_usd() <= PRICE * (after_min + 2) / 60


def test_a_lost_answer_of_the_create_is_watched_for_a_day_and_then_the_fleet_retires() -> None:
    night, _ = rent(hours=0.5, faults=Faults(resets=1))
    night.step(60)
    assert night.billing() == []
    assert [one.state for one in night.store.machines(TENANT, "rent-0badcafe")] == [State.FAILED]
    assert [one.stopped for one in night.store.fleets()] == [True]
    night.step(24 * 60)
    require_retired(night)


def test_a_late_machine_of_a_retired_fleet_is_destroyed_as_an_orphan() -> None:
    night, _ = rent(hours=0.1)
    night.step(30)
    require_retired(night)
    provider = night.providers["loopback"]
    late = provider.machines[0].token
    provider.machines[0].ended_at = None
    assert night.billing() == [late]
    night.step(3)
    assert night.billing() == []
    assert [one.token for one in night.store.orphans().values()] == [late]
    night.step(24 * 60 + 3)
    assert night.reports[-1].finished is False, "nothing is watched any more"


@pytest.mark.parametrize("call", ["put_fleet", "retire", "write"])
def test_a_controller_that_dies_is_followed_by_one_that_ends_the_fleet(call: str) -> None:
    night, _ = rent(hours=0.1)
    calls: list[str] = []

    def die(name: str) -> None:
        calls.append(name)
        if name == call and calls.count(name) in (1, 3, 5):
            raise Killed

    night.interrupt = die
    night.step(90)
    assert calls.count(call) >= 2
    require_retired(night)


def test_a_retry_at_the_same_moment_keeps_the_fleet_open(monkeypatch: pytest.MonkeyPatch) -> None:
    night, _ = rent(hours=0.1)
    night.step(8)
    put = night.store.put_fleet

    def conflict(fleet: StoredFleet) -> None:
        raise WriteConflict

    with monkeypatch.context() as patch:
        patch.setattr(night.store, "put_fleet", conflict)
        patch.setattr(night.store, "retire", conflict)
        night.step(20)
    (fleet,) = night.store.fleets()
    assert not fleet.stopped
    put(fleet.model_copy(update={"stopped": True, "version": fleet.version + 1}))
    night.step(10)
    require_retired(night)


def test_a_job_never_costs_more_than_its_budget() -> None:
    night, training = rent(hours=20, total_usd=1.0)
    night.step(12 * 60)
    assert training.left_s > 0 and night.billing() == []
    assert 0.9 <= night.spent_usd() <= 1.0
    assert [one for one in types(night) if one.startswith("budget.")] == [
        *("budget.warning", "budget.drained", "budget.exhausted")
    ]
    drained, exhausted = (
        next(one for one in night.store.events(TENANT, night.spec.name, limit=99) if one.type == name)
        for name in ("budget.drained", "budget.exhausted")
    )
    assert (drained.reason, exhausted.reason, drained.machine) == ("total_usd 1", "total_usd 1", ended(night)[0].id)
    assert "total_usd has 0.0" in night.store.ledger(TENANT, night.spec.name).waits


def test_all_fleets_together_stay_within_the_budget_of_the_deployment() -> None:
    night = make_night(budget={"total_usd": 50})
    night.budget = Budget(per_day_usd=1)
    more = spec(name="more", budget={"total_usd": 50})
    night.store.put_fleet(StoredFleet(tenant="rival", spec=more, version=1, created_at=night.now, updated_at=night.now))
    for _ in range(6):
        night.submit(hours=30)

    def ledgers() -> list[Ledger]:
        return [night.store.ledger(one.tenant, one.spec.name) for one in night.store.fleets()]

    def reserved_usd() -> float:
        fleets = night.store.fleets()
        machines = [one for fleet in fleets for one in night.store.machines(fleet.tenant, fleet.spec.name)]
        return sum(one.reserved_usd for one in machines)

    for day in (1, 2):
        night.now = night.providers["loopback"].now = MIDNIGHT + day * 24 * 3600
        for _ in range(150):
            night.step()
            spending = night.store.spending().at(night.now)
            assert spending.spent_usd == pytest.approx(sum(one.spent_usd for one in ledgers()))
            assert spending.day_usd + reserved_usd() <= 1 + 1e-6
            assert spending.reserved_usd == pytest.approx(reserved_usd(), abs=1e-6)
        assert night.billing() == []
        assert 0.8 * day <= night.billed_usd() <= day
        assert all("per_day_usd of the deployment has" in one.waits for one in ledgers())
    told = [one for one in night.store.events("rival", "more", limit=999) if one.type == "budget.exhausted"]
    assert {one.reason.rpartition(" ")[0] for one in told} == {"per_day_usd of the deployment 1"}


def test_without_a_budget_of_the_deployment_the_spending_is_known_and_bounds_nothing() -> None:
    night = make_night()
    night.submit(hours=1)
    night.step(70)
    assert night.store.spending().spent_usd == pytest.approx(night.spent_usd())
    assert night.store.ledger(TENANT, "nights") != Ledger()
