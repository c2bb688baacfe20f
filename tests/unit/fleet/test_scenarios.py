"""The scenarios of a rented machine at real drivers, over HTTP, in virtual time; README.md numbers them.

`RentedNight.finish` asserts for each scenario: all work is done, the states of each machine in their order, the ledger
against the provider's meter, nothing of ours is left and billed, the machine of another deployment was not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from fakes.salad.api import FakeSalad
from fakes.vast.instances import NEVER
from functions.fleet.breaker import CONTRACT_ENDS
from functions.fleet.machine_states import CHECKPOINT_MARGIN_S
from gpu_client.agent.app.own_machine import give_back
from tests.unit.fleet.rented import (
    ABSENT,
    ALL_PROVIDERS,
    CREATES,
    FOUND,
    HAPPY,
    HTTP_PROVIDERS,
    LOST,
    OVERDUE,
    RentedNight,
)

DRAINED = "planned requested booting registered ready busy draining terminating gone"
NEVER_STARTED = "planned requested booting terminating gone"


@pytest.fixture(params=HTTP_PROVIDERS)
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    yield from _driven(request.param, tmp_path)


@pytest.fixture(params=ALL_PROVIDERS)
def any_provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    yield from _driven(request.param, tmp_path)


@pytest.fixture
def vast(tmp_path: Path) -> Iterator[Any]:
    yield from _driven("vast", tmp_path)


@pytest.fixture
def salad(tmp_path: Path) -> Iterator[Any]:
    yield from _driven("salad", tmp_path)


def _driven(name: str, directory: Path) -> Iterator[Any]:
    driven = ALL_PROVIDERS[name](directory)
    yield driven
    driven.close()


def test_1_a_job_gets_a_machine_and_the_machine_goes_back(any_provider: Any) -> None:
    night = RentedNight(any_provider)
    night.night.submit(hours=0.2)
    (machine,) = night.finish(HAPPY)
    assert machine.reason == "no job for idle_timeout_s"
    assert not any(report.failures for report in night.night.reports)


def test_2_a_lost_answer_is_resolved_by_the_list(any_provider: Any) -> None:
    night = RentedNight(any_provider)
    night.night.submit(hours=0.2)
    any_provider.inject("lost_answers")
    night.finish(FOUND)
    assert night.creates() == 1


def test_3_a_create_without_effect_fails_after_two_looks(provider: Any) -> None:
    night = RentedNight(provider)
    night.night.submit(hours=0.2)
    night.fake.inject("reset", CREATES[night.name])
    failed, _ = night.finish(ABSENT, HAPPY)
    assert failed.reason == "the provider did not make the machine" and failed.spent_usd == 0


def test_4_a_controller_that_dies_before_the_call_leaves_a_doubt(provider: Any) -> None:
    night = RentedNight(provider)
    night.night.submit(hours=0.2)
    night.kill_at("create")
    night.finish(ABSENT, HAPPY)
    assert night.creates() == 1


def test_5_a_controller_that_dies_after_the_call_has_made_one_machine(provider: Any) -> None:
    night = RentedNight(provider)
    night.night.submit(hours=0.2)
    night.kill_at("write", after="create")
    night.finish(HAPPY)
    assert night.creates() == 1


def test_6_eight_snatched_offers_leave_nothing(provider: Any) -> None:
    night = RentedNight(provider)
    night.night.submit(hours=0.2)
    night.count_fault("snatched", 8)
    machines = night.finish(*["planned requested failed"] * 8, HAPPY)
    assert {one.spent_usd for one in machines[:8]} == {0}
    assert night.creates() == 9


@pytest.mark.parametrize("name", ["vast", "salad"])
def test_7_a_machine_that_is_stuck_in_its_boot_is_given_back(name: str, tmp_path: Path) -> None:
    (driven,) = [ALL_PROVIDERS[name](tmp_path)]
    night = RentedNight(driven)
    stuck: Any = driven.fake if name == "vast" else driven.fake.cloud
    knob = "boot_s" if name == "vast" else "allocate_s"
    setattr(stuck, knob, NEVER)
    night.night.submit(hours=0.2)
    first = night.step_until(State.BOOTING)
    setattr(stuck, knob, 0.0)
    night.night.silent.add(first.id)
    # The ledger counts the full price, of which Vast.ai bills the disk alone.
    first, second = night.finish(NEVER_STARTED, HAPPY, over_usd=0.2 if name == "vast" else 0)
    assert first.reason == "the machine did not start its worker in time"
    assert name == "salad" or first.offer.machine_ref != second.offer.machine_ref
    driven.close()


def test_8_a_machine_whose_worker_never_enrols_is_given_back(provider: Any) -> None:
    night = RentedNight(provider)
    night.night.submit(hours=0.1)
    night.night.silent.add(night.step_until(State.BOOTING).id)
    first, _ = night.finish(NEVER_STARTED, HAPPY)
    assert first.reason == "the machine did not start its worker in time"


def test_10_a_host_that_vanishes_in_mid_job_is_lost_and_another_one_finishes(any_provider: Any) -> None:
    night = RentedNight(any_provider)
    night.night.submit(hours=0.3)
    token = night.step_until(State.BUSY).id
    any_provider.end(token)
    night.market.dead.add(token)
    # The ledger counts the price that the list names last.
    first, _ = night.finish(LOST, HAPPY, over_usd=0.3)
    assert first.worker_key in night.night.revoked


def test_11_an_outbid_machine_that_the_market_resumes_keeps_its_job(vast: Any) -> None:
    night = RentedNight(vast, market="spot")
    night.night.submit(hours=0.5)
    busy = night.step_until(State.BUSY)
    assert busy.offer.spot and busy.handle
    vast.fake.outbid(busy.handle)
    night.step(5)
    outbid = night.machine(busy.id)
    assert (outbid.state, outbid.usd_per_hour < busy.usd_per_hour / 10) == (State.BUSY, True)
    vast.fake.win_back(busy.handle)
    night.finish(HAPPY)


def test_12_destroys_without_effect_for_a_quarter_of_an_hour_are_repeated_and_paid(provider: Any) -> None:
    night = RentedNight(provider)
    night.night.submit(hours=0.1)
    night.step_until(State.BUSY)
    night.count_fault("ignored_destroys", 15)
    (machine,) = night.finish(OVERDUE)
    deletes = [one.path for one in night.fake.calls if one.method == "DELETE"]
    # Twice an hour RunPod's driver asks for the end of no pod, to learn whether the key may end one.
    assert sum("probe" not in one for one in deletes) == 17
    assert night.usd() > machine.usd_per_hour * (6 + 15) / 60


def test_13_an_incomplete_list_books_nothing_as_gone(provider: Any) -> None:
    """Ten ticks in mid-job, ten ticks after the destroy."""
    night = RentedNight(provider)
    night.night.submit(hours=0.5)
    busy = night.step_until(State.BUSY)
    night.count_fault("incomplete", 10)
    night.step(10)
    assert [one.state for one in night.machines()] == [State.BUSY]
    night.count_fault("incomplete", 0)
    night.step_until(State.TERMINATING)
    night.count_fault("incomplete", 10)
    night.step(10)
    found = night.machine(busy.id)
    assert (found.state, found.absences) == (State.TERMINATING, [])
    # Until a complete list, the machine counts as billed.
    night.finish(OVERDUE, over_usd=busy.usd_per_hour * 11 / 60)


def test_14_a_key_that_is_revoked_in_mid_run_ends_no_machine(provider: Any) -> None:
    night = RentedNight(provider)
    night.night.submit(hours=0.4)
    night.step_until(State.BUSY)
    told = len(night.night.reports)
    night.fake.inject("401", count=10_000)
    night.step(10)
    assert [one.state for one in night.machines()] == [State.BUSY]
    assert all("provider_key_refused" in one.failures[0] for one in night.night.reports[told:])
    night.fake.faults.clear()
    night.finish(HAPPY)


def test_15_a_budget_that_ends_in_mid_epoch_drains_and_is_kept(provider: Any) -> None:
    night = RentedNight(provider, budget={"total_usd": 0.8})
    training = night.night.submit(hours=30)
    night.step_until(State.GONE, minutes=600)
    assert training.left_s > 0 and training.since_checkpoint_s == 0
    night.step(5)
    assert "total_usd has 0." in night.waits()
    night.night.trainings.clear()
    (machine,) = night.finish(DRAINED)
    assert machine.reason == "the budget is spent"
    assert [one.type for one in night.events() if one.type.startswith("budget.")] == [
        *("budget.warning", "budget.drained", "budget.exhausted")
    ]


@pytest.mark.parametrize(("usd", "path"), [(0.45, HAPPY), (1.9, DRAINED)])
def test_16_an_announced_price_is_accepted_below_the_cap_and_drains_above(vast: Any, usd: float, path: str) -> None:
    night = RentedNight(vast, market="on-demand")
    vast.fake.asks[1].end_date = night.night.now + 2 * 3600
    training = night.night.submit(hours=1.2)
    busy = night.step_until(State.BUSY)
    assert busy.handle
    vast.fake.raise_price(busy.handle, usd)
    if path == DRAINED:
        night.step_until(State.GONE, minutes=90)
        assert training.left_s > 0
    first, *_ = night.finish(*[path, HAPPY][: 1 + (path == DRAINED)])
    assert ("above the cap" in first.reason) == (path == DRAINED)


@pytest.mark.parametrize("name", ["vast", "runpod"])
def test_17_a_machine_ends_its_own_bill_while_no_controller_runs(name: str, tmp_path: Path) -> None:
    """Four hours without a tick; the dead man of the agent ends the machine, whose work the next machine repeats."""
    driven = ALL_PROVIDERS[name](tmp_path)
    night = RentedNight(driven)
    night.night.submit(hours=0.3)
    busy = night.step_until(State.BUSY)
    owner = next(
        one for one in (driven.fake.instances if name == "vast" else driven.fake.exists()) if busy.id in str(one)
    )
    address = {"vast": "VAST_URL", "runpod": "RUNPOD_API_BASE_URL"}[name]
    night.skip(45 * 60)
    assert give_back({**owner.environment, address: driven.fake.url})
    billed = night.usd()
    night.skip(4 * 3600)
    assert (night.usd(), night.billing()) == (pytest.approx(billed), [night.foreign])
    first, _ = night.finish(LOST, HAPPY, over_usd=busy.usd_per_hour * 4.1)
    assert first.reason == "the worker is silent"
    driven.close()


def test_18_a_controller_that_was_paused_in_its_create_writes_nothing_afterwards(provider: Any) -> None:
    """A second controller is refused while the first one works, and takes over when the lease has ended."""
    night = RentedNight(provider)
    night.night.submit(hours=0.2)
    skipped: list[bool] = []

    def overtake(call: str) -> None:
        if call != "create" or skipped:
            return
        skipped.append(night.night.controller().tick().skipped)
        night.skip(100)
        skipped.append(night.night.controller().tick().skipped)

    night.night.interrupt = overtake
    night.finish(FOUND)
    assert (skipped, night.creates()) == ([True, False], 1)


@pytest.mark.parametrize("shrink", [False, True])
def test_19_a_scale_down_ends_the_idle_machine_and_never_the_busy_one(salad: Any, shrink: bool) -> None:
    """A smaller fleet deletes the idle machine's container group as a whole; the busy machine is never touched."""
    night = RentedNight(salad, max=2)
    short, long = night.night.submit(hours=0.1), night.night.submit(hours=0.6)
    while short.left_s > 0:
        night.step()
    if shrink:
        night.change(max=1)
    night.step(15)
    (left,) = [one for one in night.machines() if not one.state.ended]
    assert (left.state, left.id) == (State.BUSY, long.on)
    touched = [one.path for one in night.fake.calls if one.method in ("PATCH", "DELETE") or "/stop" in one.path]
    assert len(set(touched)) == 1 and not touched[0].endswith(left.id)
    night.finish(HAPPY, HAPPY)


def test_20_a_group_of_the_same_name_and_another_form_is_not_adopted(salad: Any) -> None:
    night = RentedNight(salad)
    night.night.submit(hours=0.2)
    fake: FakeSalad = salad.fake
    taken: list[str] = []

    def take(call: str) -> None:
        if call == "create" and not taken:
            (machine,) = night.machines()
            taken.append(machine.id)
            body = fake.cloud.groups[night.foreign].body
            other = {**body["container"], "image": "somebody/elses:1"}
            fake.cloud.create({**body, "name": machine.id, "display_name": machine.id, "container": other})

    night.night.interrupt = take
    adopted = "planned requested failed terminating gone"
    failed, other, _ = sorted(night.finish(adopted, adopted, HAPPY, orphans=1), key=lambda one: one.since)
    assert failed.id == other.id == taken[0] and "differs in container.image" in failed.reason
    assert "\n" not in failed.reason and "delete the group" in failed.reason


def test_21_a_machine_is_drained_before_its_contract_ends(vast: Any) -> None:
    night = RentedNight(vast, market="on-demand")
    ends_at = night.night.now + 5400
    vast.fake.asks[1].end_date = ends_at
    night.night.submit(hours=2)
    first = night.step_until(State.BUSY)
    assert first.offer.ends_at == ends_at
    night.step_until(State.GONE, minutes=90)
    assert night.night.now < ends_at
    first, _ = night.finish(DRAINED, HAPPY)
    assert first.reason == CONTRACT_ENDS and first.ends_by == ends_at - CHECKPOINT_MARGIN_S


@pytest.mark.parametrize("skew_s", [-300, 300])
def test_25_clocks_five_minutes_apart_change_neither_machines_nor_money(provider: Any, skew_s: int) -> None:
    clock, fake = provider.clock, provider.fake
    if isinstance(fake, FakeSalad):
        fake.cloud._now = lambda: clock() + skew_s
    else:
        fake.meter.now = lambda: clock() + skew_s
    fake.now = lambda: clock() + skew_s
    night = RentedNight(provider)
    night.night.submit(hours=0.2)
    provider.inject("lost_answers")
    night.step_until(State.BUSY)
    night.finish(FOUND)
    assert night.creates() == 1
