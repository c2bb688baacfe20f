"""Attacks on the money of a fleet: midnight, clocks that go back, prices of nothing, duplicates, renamed machines."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from functions.fleet import lifecycle
from functions.fleet.ledger import DeploymentLedger, Ledger
from functions.fleet.records import Sighting
from tests.twins.provider import Faults, VirtualProvider
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import spec
from tests.unit.fleet.test_machine_states import NOW, SEEN, inventory, make_machine

EVENING = int(datetime(2026, 1, 31, 23, 0, tzinfo=UTC).timestamp())
HOUR_S = 3600


def test_a_machine_that_never_existed_frees_no_money_of_a_later_day() -> None:
    """A refund of money counted before midnight leaves the new day's sum: the day would spend the money again."""
    ledger = Ledger().spend(3, EVENING).spend(1, EVENING + 2 * HOUR_S)
    refunded = ledger.spend(-3, EVENING + 2 * HOUR_S, since=EVENING)
    assert (refunded.spent_usd, refunded.day_usd, refunded.month_usd) == (1, 1, 1)
    same_day = ledger.spend(-1, EVENING + 3 * HOUR_S, since=EVENING + 2 * HOUR_S)
    assert (same_day.spent_usd, same_day.day_usd, same_day.month_usd) == (3, 0, 0)
    whole = DeploymentLedger().spend(5, EVENING + 2 * HOUR_S).follow(ledger, refunded, EVENING + 2 * HOUR_S)
    assert (whole.spent_usd, whole.day_usd, whole.month_usd) == (2, 5, 5)


def test_the_day_of_the_deployment_is_not_freed_either() -> None:
    night = Night(
        spec(min=1, max=1),
        {"loopback": VirtualProvider(faults=Faults(resets=1, unreadable=150))},
        now=EVENING,
        budget=Budget(per_day_usd=9),
    )
    night.step(170)
    own, whole = night.store.ledger(TENANT, "nights"), night.store.spending()
    assert {one.state for one in night.machines()} >= {State.FAILED}
    since_midnight = 100 / 60 * 0.2
    for one in (own, whole):
        assert one.day == "2026-02-01" and one.day_usd >= since_midnight * 0.9, "the new day keeps what it counted"
    assert own.spent_usd == pytest.approx(night.billed_usd(), abs=0.02)


@pytest.mark.parametrize("back_s", [1, 300, 3500])
def test_a_clock_that_goes_back_over_midnight_frees_no_money(back_s: int) -> None:
    midnight = EVENING + HOUR_S
    ledger = Ledger().spend(2, midnight).spend(1, midnight - back_s)
    assert (ledger.day, ledger.day_usd, ledger.month_usd) == ("2026-02-01", 3, 3)
    assert ledger.at(midnight - 2 * HOUR_S).day == "2026-01-31", "a clock that was wrong by more is set right"


def test_a_machine_whose_worker_calls_has_a_price() -> None:
    """Salad names no price until a list shows a running instance; jobs are counted from the worker's first call."""
    booting = make_machine(State.BOOTING, usd_per_hour=0.0)
    assert lifecycle.enrolled(booting, NOW).usd_per_hour == 0.2
    unnamed = SEEN.model_copy(update={"usd_per_hour": None})
    assert lifecycle.advance(booting, inventory(unnamed), idle_timeout_s=None).usd_per_hour == 0.2


def test_a_price_that_is_new_after_missed_ticks_counts_for_all_of_them() -> None:
    machine = make_machine(State.BUSY, usd_per_hour=0.0, priced_until=NOW - HOUR_S, seen_at=NOW)
    seen = SEEN.model_copy(update={"usd_per_hour": 0.2})
    assert lifecycle.advance(machine, inventory(seen), idle_timeout_s=None).spent_usd == pytest.approx(0.2)


def test_a_machine_is_judged_by_its_own_entry_not_by_that_of_a_duplicate() -> None:
    machine = make_machine(State.BOOTING)
    older = Sighting(
        token=SEEN.token, handle="a", running=False, announced_usd_per_hour=0.1, created_at=NOW - 9, message="ended"
    )
    own = SEEN.model_copy(update={"created_at": NOW, "announced_usd_per_hour": 9.0})
    assert lifecycle.acceptable_price(machine, [older, own]) is None
    after = lifecycle.advance(
        machine, inventory(older, own.model_copy(update={"announced_usd_per_hour": None})), idle_timeout_s=None
    )
    assert (after.state, after.duplicates) == (State.BOOTING, ["a"])


@pytest.mark.parametrize("refused", [0, 3])
def test_a_renamed_machine_is_destroyed_by_its_handle_before_it_counts_as_gone(refused: int) -> None:
    class Busy(VirtualProvider):
        left = refused

        def destroy(self, handle: str) -> bool:
            if self.left:
                self.left -= 1
                raise TimeoutError
            return super().destroy(handle)

    provider = Busy()
    night = Night(spec(min=1), {"loopback": provider})
    night.step(10)
    (machine,) = provider.alive()
    machine.token = "renamed-by-a-person"
    night.store.put_fleet(night.store.fleets()[0].model_copy(update={"stopped": True, "version": 2}))
    night.step(20)
    assert night.billing() == []
    assert [one.state for one in night.machines()] == [State.GONE]


def test_a_text_of_any_length_fits_a_record() -> None:
    ended = SEEN.model_copy(update={"running": False, "message": "x" * 10**6})
    after = lifecycle.advance(make_machine(State.BOOTING), inventory(ended), idle_timeout_s=None)
    assert after.state is State.LOST and len(after.reason) == lifecycle.LONGEST_REASON
