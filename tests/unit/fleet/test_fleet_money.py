"""Budgets, offers and demand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from baton.contract.jobs.policy import Requirements
from functions.domain.records import Spec
from functions.fleet.ledger import Ledger, bounds, extend, need_usd, new_warnings, tightest
from functions.fleet.offers.offer_ranking import Workload, expected_cost, rank
from functions.fleet.records import Offer
from functions.fleet.ticks.demand import missing_machines, unservable, without_fleet
from tests.kits.api.factories import make_job
from tests.unit.fleet.test_machine_states import NOW, make_machine


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def make_spec(**changes: Any) -> FleetSpec:
    return FleetSpec.model_validate(
        {"name": "n", "providers": ["loopback"], "max_usd_per_hour": 1, "budget": {"total_usd": 9}, **changes}
    )


def test_days_and_months_begin_anew() -> None:
    ledger = Ledger().spend(1, at("2026-01-30T23:59:00")).spend(2, at("2026-01-31T00:00:00"))
    assert (ledger.spent_usd, ledger.day_usd, ledger.month_usd) == (3, 2, 3)
    ledger = ledger.at(at("2026-02-01T00:00:00"))
    assert (ledger.spent_usd, ledger.day_usd, ledger.month_usd) == (3, 0, 0)


def test_the_tightest_bound_decides() -> None:
    budget = Budget(total_usd=10, per_day_usd=3, per_month_usd=8)
    ledger = Ledger().spend(6, at("2026-01-01T10:00:00")).spend(1, at("2026-01-02T10:00:00"))
    now = at("2026-01-02T11:00:00")
    bound, room = tightest(budget, ledger, [make_machine(State.BUSY, reserved_usd=0.5)], now)
    assert (bound.name, room) == ("per_month_usd", 0.5)
    assert [one.name for one in bounds(budget, ledger, now)] == ["total_usd", "per_day_usd", "per_month_usd"]


@given(st.floats(0.01, 10), st.lists(st.floats(0, 3), max_size=8), st.floats(0.01, 3))
def test_reservations_never_exceed_a_bound(cap: float, reserved: list[float], price: float) -> None:
    budget, ledger = Budget(total_usd=cap), Ledger()
    machines = [make_machine(State.BUSY, reserved_usd=0.0, usd_per_hour=price) for _ in reserved]
    for place, machine in enumerate(machines):
        _, room = tightest(budget, ledger, machines, NOW)
        machines[place] = extend(machine, room)
    assert sum(one.reserved_usd for one in machines) <= cap + 1e-9
    assert all(one.reserved_usd <= price + 1e-9 for one in machines)


def test_a_reservation_shrinks_while_the_spending_is_above_a_bound() -> None:
    ledger = Ledger().spend(9.95, NOW)
    machine = make_machine(State.BUSY, reserved_usd=0.2)
    _, room = tightest(Budget(total_usd=10), ledger, [machine], NOW)
    assert extend(machine, room).reserved_usd == pytest.approx(0.05)
    _, room = tightest(Budget(total_usd=1), ledger, [machine], NOW)
    assert extend(machine, room).reserved_usd == 0


@pytest.mark.parametrize("state", [State.TERMINATING, State.LOST, State.GONE, State.FAILED, State.PLANNED])
def test_a_machine_on_its_way_out_reserves_no_more(state: State) -> None:
    machine = make_machine(state, reserved_usd=0.0)
    assert extend(machine, 5.0) == machine


def test_a_bound_warns_once_in_its_period() -> None:
    budget = Budget(total_usd=100, per_day_usd=5)
    ledger = Ledger().spend(3.9, at("2026-01-01T10:00:00"))
    assert new_warnings(budget, ledger, at("2026-01-01T10:00:00"))[1] == []
    ledger, passed = new_warnings(budget, ledger.spend(0.2, at("2026-01-01T11:00:00")), at("2026-01-01T11:00:00"))
    assert [one.name for one in passed] == ["per_day_usd"]
    assert new_warnings(budget, ledger, at("2026-01-01T12:00:00"))[1] == []
    later = ledger.spend(4, at("2026-01-02T10:00:00"))
    assert [one.period for one in new_warnings(budget, later, at("2026-01-02T10:00:00"))[1]] == ["2026-01-02"]


def test_the_first_reservation_pays_boot_and_an_hour() -> None:
    assert need_usd(0.6, 600) == pytest.approx(0.7)


def test_a_cheap_host_that_is_far_slow_or_fragile_costs_more() -> None:
    work = Workload(hours=2, checkpoint_every_s=600, traffic_gb=50)
    plain = Offer(provider="a", ref="plain", usd_per_hour=0.30, boot_s=120)
    far = Offer(provider="a", ref="far", usd_per_hour=0.28, usd_per_gb=0.02, boot_s=120)
    slow = Offer(provider="a", ref="slow", usd_per_hour=0.28, boot_s=1800)
    fragile = Offer(provider="a", ref="fragile", usd_per_hour=0.28, boot_s=600, interruptions_per_hour=0.8)
    assert expected_cost(plain, work).total_usd < min(
        expected_cost(one, work).total_usd for one in (far, slow, fragile)
    )
    assert expected_cost(plain, work).total_usd == pytest.approx(0.3 * (2 + 120 / 3600))


def test_each_rejected_offer_has_its_reason_and_the_order_may_be_the_users() -> None:
    spec = make_spec(
        gpu_models=["RTX 4090"], min_vram_gib=20, disk_gib=50, min_driver=550, max_usd_per_hour=0.5, market="spot"
    )
    good: dict[str, Any] = {
        "gpu_model": "NVIDIA GeForce RTX 4090",
        "vram_gib": 24,
        "disk_gib": 60,
        "driver": "570.86.15",
        "download_mbit_s": 300,
        "spot": True,
        "usd_per_hour": 0.3,
    }
    offers = [
        Offer(provider="loopback", ref=name, **{**good, **changes})
        for name, changes in {
            "fits": dict[str, Any](),
            "dear": {"usd_per_hour": 0.6},
            "small": {"vram_gib": 16},
            "full": {"disk_gib": 10},
            "old": {"driver": "535.54.03"},
            "slow": {"download_mbit_s": 12.5},
            "other": {"gpu_model": "RTX 3090"},
            "firm": {"spot": False},
            "bad": {"machine_ref": "h"},
        }.items()
    ]
    ranked = rank(offers, spec, Workload(), {"loopback:h"})
    assert ranked[0].offer.ref == "fits"
    reasons = {one.offer.ref: one.rejected for one in ranked if one.rejected}
    assert reasons == {
        "dear": "0.6 USD/h exceeds max_usd_per_hour 0.5",
        "small": "16 GiB VRAM, min_vram_gib is 20",
        "full": "10 GiB disk, disk_gib is 50",
        "old": "driver 535.54.03, min_driver is 550",
        "slow": "12.5 Mbit/s download, min_download_mbit_s is 20",
        "other": "RTX 3090 is not among gpu_models",
        "firm": "is on-demand, market is spot",
        "bad": "the host is quarantined",
    }


@pytest.mark.parametrize(
    ("states", "waiting", "limits", "missing"),
    [
        ([], 0, (0, 3), 0),
        ([], 2, (0, 3), 2),
        ([], 9, (0, 3), 3),
        ([], 0, (2, 3), 2),
        ([State.BUSY], 1, (0, 3), 1),
        ([State.BUSY, State.READY], 1, (0, 3), 0),
        ([State.BOOTING], 1, (0, 3), 0),
        ([State.AMBIGUOUS], 1, (0, 3), 0),
        ([State.TERMINATING], 1, (0, 1), 0),
        ([State.DRAINING], 1, (0, 2), 1),
        ([State.GONE, State.FAILED], 1, (0, 1), 1),
        ([State.READY], 0, (1, 3), 0),
    ],
)
def test_machines_follow_from_waiting_jobs(
    states: list[State], waiting: int, limits: tuple[int, int], missing: int
) -> None:
    spec = make_spec(min=limits[0], max=limits[1])
    assert missing_machines(spec, [make_machine(state) for state in states], [make_job()] * waiting) == missing


@pytest.mark.parametrize(
    ("needs", "fleet", "why"),
    [
        ({"min_vram_gib": 24}, {"min_vram_gib": 24}, None),
        ({"min_vram_gib": 24}, {"min_vram_gib": 16}, "needs 24 GiB VRAM, fleet n guarantees 16 (min_vram_gib)"),
        ({"min_disk_gib": 80}, {}, "needs 80 GiB disk, fleet n rents 40 (disk_gib)"),
        ({"min_gpus": 1}, {"min_vram_gib": 16}, None),
        ({"min_gpus": 1}, {"gpu_models": ["A100"]}, None),
        ({"min_gpus": 1}, {}, "needs 1 GPU, fleet n guarantees 0 (min_vram_gib, gpu_models)"),
        ({"min_gpus": 2}, {"min_vram_gib": 16}, "needs 2 GPUs, fleet n guarantees 1"),
        ({"gpu_models": ["A100", "RTX 4090"]}, {"gpu_models": ["RTX 4090"]}, None),
        ({"gpu_models": ["A100"]}, {}, "needs one of A100, fleet n may rent other GPU models (gpu_models)"),
        ({"image": "me/x"}, {"image": "me/x"}, None),
        ({"image": "me/x"}, {"image": "me/x:1"}, None),
        ({"image": "me/x"}, {}, "needs the image me/x, fleet n starts the default image (image)"),
    ],
)
def test_a_fleet_rents_only_for_jobs_that_its_machines_can_run(
    needs: dict[str, Any], fleet: dict[str, Any], why: str | None
) -> None:
    job = make_job(spec=Spec(command=["true"], requirements=Requirements(**needs)))
    assert unservable(job, make_spec(**fleet)) == why


def test_a_fleet_with_tags_serves_only_jobs_that_have_them() -> None:
    document = make_spec(tags={"team": "vision", "stage": "final"})
    for tags, lacking in (
        ({"team": "vision", "stage": "final", "run": "7"}, None),
        ({"team": "vision"}, "stage=final"),
        ({"team": "audio", "stage": "final"}, "team=vision"),
    ):
        job = make_job(spec=Spec(command=["true"], tags=tags))
        why = f"lacks the tag {lacking}, fleet n serves only jobs with the tag (tags)"
        assert unservable(job, document) == (lacking and why)
        assert missing_machines(document, [], [job]) == (lacking is None)


def test_jobs_that_no_fleet_can_run_are_counted() -> None:
    small, large = make_spec(), make_spec(min_vram_gib=24)
    big = make_job(spec=Spec(command=["true"], requirements=Requirements(min_vram_gib=24)))
    assert without_fleet([make_job(), big], [small, large]) == ""
    why = "needs 24 GiB VRAM, fleet n guarantees 0 (min_vram_gib)"
    assert without_fleet([make_job(), big], [small]) == f"no fleet can run 1 waiting job, which {why}"
    assert without_fleet([big, big], [small]) == f"no fleet can run 2 waiting jobs, the first {why}"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"budget": {}}, "a budget needs total_usd"),
        ({"budget": {"total_usd": 0}}, "greater than 0"),
        ({"min": 4, "max": 3}, "is 3, less than min (4)"),
        ({"min": 3, "max": 3, "budget": {"total_usd": 2}}, "does not pay for an hour"),
        ({"providers": ["nebula"]}, "'loopback'"),
        ({"providers": []}, "at least 1"),
        ({"providers": ["loopback", "loopback"]}, "names a provider twice"),
        ({"name": "My Fleet"}, "pattern"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_a_contradictory_fleet_is_refused_with_the_contradiction(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make_spec(**changes)
    assert text in str(caught.value)


def test_free_machines_of_other_fleets_take_as_many_jobs_as_possible() -> None:
    """The other fleet can run only the first job, therefore the own machine is left for the second one."""
    own = make_spec(min_vram_gib=24, max=9)
    other = make_spec(name="m")
    light, heavy = make_job(), make_job(spec=Spec(command=["true"], requirements=Requirements(min_vram_gib=24)))
    ready = [make_machine(State.READY)]
    assert missing_machines(own, ready, [light, heavy], [(other, ready)]) == 0
    assert missing_machines(own, ready, [heavy, heavy], [(other, ready)]) == 1
    assert missing_machines(own, [], [light, light], [(other, [make_machine(State.BUSY)])]) == 2


def test_a_machine_is_not_free_for_a_job_that_avoids_it() -> None:
    """A machine that failed the job may not claim it again; the job waited until the machine's idle timeout."""
    spec = make_spec(max=3)
    first, second = (make_machine(State.READY).model_copy(update={"id": name}) for name in ("m1", "m2"))
    failed = make_job(avoid={"m1": 2**40})
    assert missing_machines(spec, [first], [failed]) == 1
    assert missing_machines(spec, [first, second], [failed]) == 0
    assert missing_machines(spec, [first, second], [make_job(), failed]) == 0, "each has one that it may use"
    assert missing_machines(spec, [first, second], [failed, failed]) == 1
