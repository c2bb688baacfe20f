"""Test a fleet for whole nights in virtual time: faults of providers, hosts and controllers, then state and money."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from functions.fleet.drivers.protocol import ProviderUnavailable
from functions.fleet.store import FenceLost
from tests.twins.fleet import MemoryFleetStore
from tests.twins.provider import Faults, VirtualMachine, VirtualProvider
from tests.unit.fleet.night import TENANT, Killed, Night


def spec(**changes: Any) -> FleetSpec:
    document = {
        "name": "nights",
        "providers": ["loopback"],
        "max_usd_per_hour": 1,
        "budget": {"total_usd": 10},
        "max": 3,
        **changes,
    }
    return FleetSpec.model_validate(document)


def make_night(faults: Faults | None = None, **changes: Any) -> Night:
    return Night(spec(**changes), {"loopback": VirtualProvider(faults=faults or Faults())})


def require_clean_end(night: Night, *, overrun_usd: float = 0.0) -> None:
    """Assert that no machine bills, each has a receipt, and the ledger equals the meter to a minute a machine."""
    assert night.billing() == []
    assert {one.state for one in night.machines()} <= {State.GONE, State.FAILED}
    price = night.providers["loopback"].price
    made = len(night.providers["loopback"].machines)
    assert night.spent_usd() == pytest.approx(night.billed_usd(), abs=made * price * 4 / 60 + 1e-6)
    total = night.spec.budget.total_usd
    assert total is not None
    assert night.billed_usd() <= total + overrun_usd
    for machine in night.machines():
        assert machine.worker_key is None or machine.worker_key in night.revoked
        assert machine.reserved_usd == 0
        assert machine.receipt is not None
        if machine.state is State.GONE:
            assert len(machine.absences) == 2
            assert machine.handle is not None
            assert machine.receipt.charged_usd == night.providers["loopback"].charged_usd(machine.handle)


def test_a_job_gets_a_machine_and_the_machine_goes_back() -> None:
    night = make_night()
    training = night.submit(hours=1)
    night.step(90)
    assert training.left_s <= 0
    assert [one.state for one in night.machines()] == [State.GONE]
    require_clean_end(night)
    # Boot 2 to 4 minutes, one hour of work, 5 minutes idle, one minute to be seen.
    assert 0.2 * 66 / 60 <= night.billed_usd() <= 0.2 * 75 / 60


def test_a_fleet_without_jobs_rents_nothing() -> None:
    night = make_night()
    night.step(30)
    assert night.providers["loopback"].creates == []


def test_a_lost_answer_is_resolved_by_the_list() -> None:
    night = make_night(Faults(lost_answers=1, hidden=1))
    night.submit(hours=0.5)
    night.step(60)
    assert len(night.providers["loopback"].creates) == 1
    require_clean_end(night)


def test_a_create_without_effect_fails_after_two_looks_and_the_next_offer_is_taken() -> None:
    night = make_night(Faults(resets=1))
    training = night.submit(hours=0.5)
    night.step(70)
    assert training.left_s <= 0
    assert [one.state for one in night.machines()].count(State.FAILED) == 1
    require_clean_end(night)


def test_a_machine_that_appears_after_its_absence_seemed_proved_is_destroyed() -> None:
    night = make_night(Faults(resets=1))
    night.submit(hours=0.2)
    night.step(6)
    (failed,) = [one for one in night.machines() if one.state is State.FAILED]
    provider = night.providers["loopback"]
    provider.machines.append(VirtualMachine("late", failed.id, 0.2, night.now, "host-0"))
    night.step(60)
    require_clean_end(night)


def test_a_failed_create_is_watched_for_a_day_and_then_is_history() -> None:
    night = make_night(Faults(resets=1))
    night.submit(hours=0.2)
    night.step(60)
    store = night.store
    (failed,) = store.machines(TENANT, "nights")
    assert failed.state is State.FAILED and failed.requested_at is not None
    night.step(5)
    assert store.machines(TENANT, "nights") == [failed], "watching writes nothing"
    night.now = failed.requested_at + 86_400
    night.step(1)
    assert store.machines(TENANT, "nights") == []
    assert failed.id in {one.id for one in store.ended(TENANT, "nights", limit=9)}


@pytest.mark.parametrize(
    ("changes", "faults", "waits"),
    [
        ({"max_usd_per_hour": 0.1}, {}, "no offer fits, the nearest: 0.2 USD/h exceeds max_usd_per_hour 0.1"),
        ({"budget": {"total_usd": 0.1}}, {}, "total_usd has 0.10 USD left, boot and one hour"),
        ({}, {"snatched": 8}, "the offer is gone"),
    ],
)
def test_a_fleet_says_why_it_waits_until_it_waits_no_longer(
    changes: dict[str, Any], faults: dict[str, int], waits: str
) -> None:
    night = make_night(Faults(**faults), **changes)
    night.submit(hours=0.2)
    night.step(1)
    assert night.store.ledger(TENANT, "nights").waits.startswith(waits)
    night.trainings.clear()
    night.step(1)
    assert night.store.ledger(TENANT, "nights").waits == ""


def test_a_fleet_of_a_provider_without_a_driver_waits() -> None:
    night = Night(spec(), {})
    night.submit(hours=0.2)
    night.step(1)
    assert night.reports[-1].finished
    waits = "loopback: this deployment has no driver for the provider"
    assert night.store.ledger(TENANT, "nights").waits == waits


def test_a_fleet_names_the_jobs_that_it_cannot_run() -> None:
    night = make_night(queues=["others"])
    night.submit(hours=0.2)
    night.step(1)
    assert night.store.ledger(TENANT, "nights").waits.startswith(
        "no fleet can run 1 waiting job, which the job's queue"
    )


def test_a_tick_without_fleets_acquires_nothing() -> None:
    night = make_night()
    night.store = MemoryFleetStore()
    night.step(1)
    assert (night.reports[-1].finished, night.reports[-1].skipped) == (False, False)
    assert night.store.acquire("first", night.now, 90) == 1


def test_eight_snatched_offers_cost_one_tick() -> None:
    night = make_night(Faults(snatched=8))
    training = night.submit(hours=0.5)
    night.step(2)
    assert len(night.providers["loopback"].creates) == 9
    night.step(60)
    assert training.left_s <= 0
    require_clean_end(night)


def test_a_kind_of_machine_is_rented_as_often_as_the_fleet_needs() -> None:
    night = make_night()
    night.providers["loopback"].repeatable, night.providers["loopback"].slots = True, 1
    for _ in range(3):
        night.submit(hours=0.1)
    night.step()
    assert len(night.billing()) == 3
    night.step(60)
    require_clean_end(night)


def test_a_refused_kind_of_machine_is_not_tried_again_in_the_same_tick() -> None:
    night = make_night(Faults(snatched=8))
    night.providers["loopback"].repeatable, night.providers["loopback"].slots = True, 1
    night.submit(hours=0.1)
    night.step()
    assert len(night.providers["loopback"].creates) == 1


def test_a_machine_that_never_enrols_is_given_back_and_its_host_avoided() -> None:
    night = make_night()
    night.submit(hours=0.2)
    night.step(1)
    (first,) = night.machines()
    night.silent.add(first.id)
    night.step(90)
    assert first.offer.machine_ref not in {
        one.offer.machine_ref for one in night.machines() if one.created_at and one.created_at > night.now - 60 * 70
    }
    require_clean_end(night)


def test_a_host_that_vanishes_is_lost_and_the_job_goes_on_elsewhere() -> None:
    night = make_night()
    training = night.submit(hours=1)
    night.step(30)
    provider = night.providers["loopback"]
    provider.vanish(provider.alive()[0])
    night.step(90)
    assert training.left_s <= 0
    assert len(provider.machines) == 2
    assert f"loopback:{provider.machines[0].host}" in night.store.quarantined(night.now)
    require_clean_end(night)


def test_a_host_that_freezes_is_given_back_and_the_job_goes_on_elsewhere() -> None:
    night = make_night()
    training = night.submit(hours=1)
    night.step(30)
    frozen = night.machines()[0].id
    night.silent.add(frozen)
    training.on = None  # The sweeper has taken the job back, because its lease has ended.
    night.step(150)
    assert training.left_s <= 0
    assert next(one for one in night.machines() if one.id == frozen).reason == "the worker is silent"
    require_clean_end(night)


def test_unknown_is_never_taken_for_gone() -> None:
    night = make_night()
    night.submit(hours=1)
    night.step(20)
    night.providers["loopback"].faults = Faults(incomplete=5, unreadable=5)
    night.step(10)
    assert [one.state for one in night.machines()] == [State.BUSY]
    night.step(80)
    require_clean_end(night)


def test_a_destroy_that_is_ignored_is_repeated_and_billed() -> None:
    night = make_night(Faults(ignored_destroys=15))
    night.submit(hours=0.2)
    night.step(60)
    require_clean_end(night)
    assert night.billed_usd() > 0.2 * (12 + 15) / 60


def test_the_budget_ends_the_work_with_a_checkpoint() -> None:
    night = make_night(budget={"total_usd": 0.5})
    training = night.submit(hours=24)
    night.step(60 * 6)
    assert training.left_s > 0
    assert {one.reason for one in night.machines()} >= {"the budget is spent"}
    require_clean_end(night)
    assert "need " in night.store.ledger(TENANT, "nights").waits
    assert [one.type for one in night.store.events(TENANT, "nights", limit=100)].count("budget.warning") == 1


def test_a_price_that_rises_above_the_cap_drains() -> None:
    night = make_night(max_usd_per_hour=0.25)
    night.submit(hours=1)
    night.step(30)
    provider = night.providers["loopback"]
    provider.alive()[0].usd_per_hour = 0.4
    night.step(3)
    assert [one.usd_per_hour for one in provider.alive()] == [0.2]


def test_a_stopped_fleet_gives_everything_back() -> None:
    night = make_night()
    for _ in range(3):
        night.submit(hours=5)
    night.step(20)
    assert len(night.billing()) == 3
    fleet = night.store.fleets()[0]
    night.store.put_fleet(fleet.model_copy(update={"stopped": True, "version": fleet.version + 1}))
    night.step(10)
    require_clean_end(night)
    # Every worker had time for a checkpoint before its machine ended.
    assert all(one.since_checkpoint_s == 0 and one.on is None for one in night.trainings)


def stop(night: Night) -> None:
    fleet = night.store.fleets()[0]
    stopped = {"stopped": True, "version": fleet.version + 1, "updated_at": night.now}
    night.store.put_fleet(fleet.model_copy(update=stopped))


def test_hosts_that_boot_while_their_fleet_stops_are_not_to_blame() -> None:
    night = make_night()
    night.submit(hours=1)
    night.step(1)
    stop(night)
    night.step(3)
    assert night.store.quarantined(night.now) == {}
    require_clean_end(night)


def test_a_machine_that_appears_after_the_end_of_its_fleet_is_destroyed() -> None:
    night = make_night()
    night.submit(hours=0.1)
    night.step(5)
    stop(night)
    night.step(20)
    (gone,) = night.machines()
    night.providers["loopback"].machines.append(VirtualMachine("late", gone.id, 0.2, night.now, "host-9"))
    night.step(3)
    assert night.billing() == []


def test_a_budget_below_the_spending_drains_at_once() -> None:
    night = make_night()
    night.submit(hours=20)
    night.step(60)
    fleet = night.store.fleets()[0]
    poorer = fleet.spec.model_copy(update={"budget": Budget(total_usd=0.1)})
    night.store.put_fleet(fleet.model_copy(update={"spec": poorer, "version": fleet.version + 1}))
    night.step(5)
    assert night.billing() == []
    assert {one.reason for one in night.machines()} == {"the budget is spent"}


def test_a_worker_that_writes_in_each_tick_does_not_keep_its_machine() -> None:
    night = make_night(budget={"total_usd": 0.5})
    night.submit(hours=24)
    night.step(6)
    beaten: set[int] = set()

    def beat(call: str) -> None:
        if call == "write" and night.now not in beaten:
            beaten.add(night.now)
            for one in night.store.machines(TENANT, "nights"):
                if one.state in (State.BUSY, State.DRAINING):
                    seen = {"seen_at": night.now, "version": one.version + 1}
                    night.store.update_machine(one.model_copy(update=seen))

    night.interrupt = beat
    night.step(60 * 6)
    require_clean_end(night)


def test_a_tick_without_time_for_all_machines_begins_with_the_others_next_time() -> None:
    """A tick of 55 s with writes of 5 s serves 10 machines in two turns: 20 s stay reserved for provider calls."""
    night = make_night(max=10)
    for _ in range(10):
        night.submit(hours=5)
    night.step(10)
    assert len(night.billing()) == 10

    def work(call: str) -> None:
        night.time_left_s -= 5 * (call == "write")

    night.interrupt = work
    for number in range(3):
        for one in night.providers["loopback"].machines:
            one.usd_per_hour = 0.2 + number / 100
        night.time_left_s = 55
        night.step()
    assert not night.reports[-1].finished and sum(night.reports[-1].machines.values()) == 10
    stop(night)
    for _ in range(20):
        night.time_left_s = 55
        night.step()
    assert night.billing() == []


def test_a_tick_reads_a_fleet_once_and_stores_the_running_cost_each_fifth_minute() -> None:
    night = make_night(max=8)
    for _ in range(8):
        night.submit(hours=5)
    night.step(10)
    calls: list[str] = []
    night.interrupt = calls.append
    night.step(5)
    assert (calls.count("holdings"), calls.count("write")) == (5, 8)
    calls.clear()
    for one in night.providers["loopback"].machines:
        one.usd_per_hour = 0.3
    night.step()
    assert (calls.count("holdings"), calls.count("write")) == (1, 8), "a price is stored at once"


def test_a_price_counts_from_the_tick_before_the_one_that_sees_the_price() -> None:
    night = make_night(max=1)
    night.submit(hours=5)
    night.step(14)
    (machine,) = night.machines()
    before_usd, until = machine.spent_usd, machine.priced_until
    assert until is not None and night.now - until > 60, "the running cost is not stored in each tick"
    night.providers["loopback"].machines[0].usd_per_hour = 0.9
    night.step()
    (machine,) = night.machines()
    earlier_s = (machine.priced_until or 0) - until - 60
    assert machine.spent_usd - before_usd == pytest.approx((earlier_s * 0.2 + 60 * 0.9) / 3600)


def test_a_reservation_that_ends_soon_is_extended_as_soon_as_there_is_room() -> None:
    night = make_night(max=1, budget={"total_usd": 0.3})
    night.submit(hours=5)
    night.step(70)
    while night.now - (night.machines()[0].priced_until or 0) > 60:
        night.step()
    (machine,) = night.machines()
    assert 600 < (machine.budget_until or 0) - night.now < 1800 and machine.state is State.BUSY
    (fleet,) = night.store.fleets()
    spec = fleet.spec.model_copy(update={"budget": Budget(total_usd=9)})
    night.store.put_fleet(fleet.model_copy(update={"spec": spec, "version": fleet.version + 1}))
    night.step()
    (machine,) = night.machines()
    assert (machine.budget_until or 0) - night.now >= 3500


def test_machines_of_other_deployments_are_never_touched() -> None:
    night = make_night()
    provider = night.providers["loopback"]
    provider.machines.append(VirtualMachine("foreign", "otherdep-nights-1", 9.0, night.now, "h"))
    night.submit(hours=0.2)
    night.step(60)
    assert [one.token for one in provider.alive()] == ["otherdep-nights-1"]


def test_an_orphan_is_destroyed_after_two_sightings() -> None:
    night = make_night()
    provider = night.providers["loopback"]
    provider.machines.append(VirtualMachine("stray", "dep10000-nights-0", 9.0, night.now, "h"))
    night.step(1)
    assert len(provider.alive()) == 1
    night.step(2)
    assert provider.alive() == []
    assert [one.handle for one in night.store.orphans().values()] == ["stray"]


def test_a_record_explains_no_machine_of_another_provider() -> None:
    night = Night(
        spec(providers=["loopback", "ssh"]), {name: VirtualProvider(name=name) for name in ("loopback", "ssh")}
    )
    night.submit(hours=1)
    night.step(5)
    ((busy, provider),) = [(one, night.providers[one.provider]) for one in night.machines()]
    (other,) = [one for one in night.providers.values() if one is not provider]
    other.machines.append(VirtualMachine("stray", busy.id, 9.0, night.now, "h"))
    night.step(3)
    assert (other.alive(), [one.token for one in provider.alive()]) == ([], [busy.id])


def test_a_failure_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    night = make_night()

    def fail(*_: object) -> None:
        raise ProviderUnavailable("first line\nsecond line")

    monkeypatch.setattr(night.providers["loopback"], "inventory", fail)
    night.step()
    assert [one.count("\n") for one in night.reports[-1].failures] == [0]


def test_a_tick_without_time_starts_nothing() -> None:
    night = make_night()
    night.submit(hours=1)
    night.time_left_s = 10.0
    night.step(3)
    assert night.providers["loopback"].creates == []


def test_only_one_controller_at_a_time_writes() -> None:
    night = make_night()
    night.submit(hours=1)
    first = night.store.acquire("paused", night.now, 90)
    assert night.controller().tick().skipped
    night.now += 100
    assert not night.controller().tick().skipped
    (machine,) = night.store.machines(TENANT, "nights")
    with pytest.raises(FenceLost):
        night.store.write(first or 0, TENANT, "nights", machine=machine.model_copy(update={"version": 9}))


def calls_of_a_night() -> int:
    calls = 0

    def count(call: str) -> None:
        nonlocal calls
        calls += 1

    night = make_night(Faults(lost_answers=1))
    night.interrupt = count
    night.submit(hours=0.2)
    night.step(40)
    return calls


@pytest.mark.parametrize("part", range(4))
def test_a_controller_killed_at_any_call_leaves_nothing_behind(part: int) -> None:
    total = calls_of_a_night()
    assert total > 60
    for victim in range(part, total, 4):
        left = victim

        def kill(call: str) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise Killed

        night = make_night(Faults(lost_answers=1))
        night.interrupt = kill
        training = night.submit(hours=0.2)
        night.step(90)
        assert training.left_s <= 0, victim
        assert len(night.providers["loopback"].creates) <= 2, victim
        require_clean_end(night)
