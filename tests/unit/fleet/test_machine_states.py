"""The state machine of machines: the table itself, and every step that the clock, a list or a worker can cause."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.contract.fleets.fleet import MachineState as State
from functions.fleet import lifecycle
from functions.fleet.machine_states import DEADLINES, EXISTING, MAYBE_EXISTING, TRANSITIONS
from functions.fleet.records import Inventory, Machine, Offer, Sighting

NOW = 1_700_000_000


def make_machine(state: State, **fields: Any) -> Machine:
    values: dict[str, Any] = {
        "id": "dep10000-nights-1",
        "tenant": "acme",
        "fleet": "nights",
        "version": 1,
        "state": state,
        "since": NOW - 60,
        "offer": Offer(provider="loopback", ref="o", machine_ref="host", usd_per_hour=0.2),
        "cap_usd_per_hour": 0.5,
        "ends_by": NOW + 3600,
        "usd_per_hour": 0.2,
        "reserved_usd": 0.2,
    }
    if state is not State.PLANNED:
        values |= {"requested_at": NOW - 300, "priced_until": NOW - 60}
    if state in EXISTING:
        values |= {"handle": "h", "created_at": NOW - 200}
    if state is State.TERMINATING:
        values |= {"destroy_at": NOW - 60}
    return Machine(**{**values, **fields})


def inventory(*sightings: Sighting, at: int = NOW, complete: bool = True) -> Inventory:
    return Inventory(provider="loopback", at=at, complete=complete, sightings=list(sightings))


SEEN = Sighting(token="dep10000-nights-1", handle="h")


def test_the_table_names_every_state_and_each_can_end() -> None:
    assert set(TRANSITIONS) == set(State)
    reaches = {State.GONE, State.FAILED}
    for _ in State:
        reaches |= {state for state, nexts in TRANSITIONS.items() if nexts & reaches}
    assert reaches == set(State)


def test_every_state_is_reached_from_planned() -> None:
    reached = {State.PLANNED}
    for _ in State:
        reached |= {to for state in reached for to in TRANSITIONS[state]}
    assert reached == set(State)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("to", State)
def test_move_permits_exactly_the_table(state: State, to: State) -> None:
    machine = make_machine(state)
    if to in TRANSITIONS[state]:
        assert lifecycle.move(machine, to, NOW).state is to
    else:
        with pytest.raises(lifecycle.InvalidTransition):
            lifecycle.move(machine, to, NOW)


@pytest.mark.parametrize("state", DEADLINES)
def test_a_deadline_ends_each_state_that_waits(state: State) -> None:
    deadline = DEADLINES[state]
    seen = inventory(SEEN)
    machine = make_machine(state, since=NOW - deadline.after_s + 1)
    assert lifecycle.advance(machine, seen, idle_timeout_s=300).state is state
    late = make_machine(state, since=NOW - deadline.after_s)
    assert lifecycle.advance(late, seen, idle_timeout_s=300).state is deadline.then


def test_a_machine_may_boot_half_as_long_again_as_its_offer_names() -> None:
    offer = Offer(provider="loopback", ref="o", usd_per_hour=0.2, boot_s=1200)
    at_1799, at_1800 = (make_machine(State.BOOTING, since=NOW - age, offer=offer) for age in (1799, 1800))
    assert lifecycle.advance(at_1799, inventory(SEEN), idle_timeout_s=None).state is State.BOOTING
    assert lifecycle.advance(at_1800, inventory(SEEN), idle_timeout_s=None).state is State.TERMINATING


@pytest.mark.parametrize("state", sorted(EXISTING - {State.LOST}))
def test_one_absence_proves_nothing(state: State) -> None:
    once = lifecycle.advance(make_machine(state), inventory(), idle_timeout_s=None)
    assert once.state is state
    soon = lifecycle.advance(once, inventory(at=NOW + 59), idle_timeout_s=None)
    assert soon.state is state
    again = lifecycle.advance(once, inventory(at=NOW + 60), idle_timeout_s=None)
    assert again.state is (State.GONE if state is State.TERMINATING else State.LOST)
    assert again.absences == [NOW, NOW + 60]


@pytest.mark.parametrize("state", [State.BOOTING, State.TERMINATING])
def test_the_absence_of_a_new_machine_proves_nothing(state: State) -> None:
    """Providers list a new machine late."""
    machine = make_machine(state, requested_at=NOW, handle="h")
    for second in (30, 119):
        machine = lifecycle.advance(machine, inventory(at=NOW + second), idle_timeout_s=None)
    assert (machine.state, machine.absences) == (state, [])
    for second in (120, 180):
        machine = lifecycle.advance(machine, inventory(at=NOW + second), idle_timeout_s=None)
    assert machine.state is (State.GONE if state is State.TERMINATING else State.LOST)


@pytest.mark.parametrize("state", sorted(EXISTING - {State.LOST}))
def test_a_sighting_between_two_absences_counts(state: State) -> None:
    machine = lifecycle.advance(make_machine(state), inventory(), idle_timeout_s=None)
    machine = lifecycle.advance(machine, inventory(SEEN, at=NOW + 30), idle_timeout_s=None)
    assert lifecycle.advance(machine, inventory(at=NOW + 60), idle_timeout_s=None).state is state


@pytest.mark.parametrize("state", sorted(MAYBE_EXISTING - {State.REQUESTED, State.LOST}))
def test_an_incomplete_list_proves_nothing(state: State) -> None:
    machine = make_machine(state, since=NOW)
    for minute in range(3):
        machine = lifecycle.advance(machine, inventory(at=NOW + 50 * minute, complete=False), idle_timeout_s=None)
    assert machine.state is state


def test_a_machine_is_billed_until_its_first_proved_absence() -> None:
    machine = make_machine(State.TERMINATING)
    machine = lifecycle.advance(machine, inventory(SEEN), idle_timeout_s=None)
    assert machine.spent_usd == pytest.approx(0.2 / 60)
    machine = lifecycle.advance(machine, inventory(at=NOW + 60), idle_timeout_s=None)
    machine = lifecycle.advance(machine, inventory(at=NOW + 600), idle_timeout_s=None)
    assert machine.state is State.GONE
    assert machine.spent_usd == pytest.approx(0.2 / 60 * 2)


@pytest.mark.parametrize("state", [State.READY, State.BUSY])
def test_a_worker_that_is_silent_for_longer_than_its_dead_man_waits_is_lost(state: State) -> None:
    silent = make_machine(state, created_at=NOW - 4000, seen_at=NOW - 3599)
    assert lifecycle.advance(silent, inventory(SEEN), idle_timeout_s=None).state is state
    silent = make_machine(state, created_at=NOW - 4000, seen_at=NOW - 3600)
    assert lifecycle.advance(silent, inventory(SEEN), idle_timeout_s=None).state is State.LOST


def test_a_ready_machine_drains_because_its_worker_may_have_claimed_a_job_in_this_moment() -> None:
    idle = lifecycle.advance(make_machine(State.READY, since=NOW - 300), inventory(SEEN), idle_timeout_s=300)
    assert (idle.state, idle.reason) == (State.DRAINING, "no job for idle_timeout_s")


def test_duplicates_of_one_token_are_billed_and_listed() -> None:
    second = Sighting(token=SEEN.token, handle="h2", created_at=NOW)
    machine = lifecycle.advance(make_machine(State.BUSY), inventory(SEEN, second), idle_timeout_s=None)
    assert machine.duplicates == ["h2"]
    assert machine.spent_usd == pytest.approx(2 * 0.2 / 60)
    alone = lifecycle.advance(make_machine(State.TERMINATING), inventory(second), idle_timeout_s=None)
    assert alone.duplicates == ["h2"], "a duplicate that outlives the machine is destroyed, too"


@pytest.mark.parametrize("price", [-0.1, float("nan"), float("inf"), 1e308])
def test_a_price_that_nobody_can_pay_is_no_price(price: float) -> None:
    with pytest.raises(ValidationError):
        Sighting(token=SEEN.token, handle="h", usd_per_hour=price)
    with pytest.raises(ValidationError):
        Offer(provider="loopback", ref="o", usd_per_hour=price)


def test_a_price_of_nearly_nothing_is_paid_for_a_long_time() -> None:
    until = make_machine(State.BUSY, usd_per_hour=1e-320).budget_until
    assert until is not None and until > NOW + 365 * 86_400


@given(
    state=st.sampled_from([one for one in State if one is not State.GONE]),
    seen=st.sampled_from(["none", "running", "ended", "double"]),
    complete=st.booleans(),
    absences=st.lists(st.integers(NOW - 300, NOW - 1), max_size=2).map(sorted),
    since=st.integers(NOW - 2000, NOW),
    price=st.floats(0, 2),
    reserved=st.floats(0, 1),
    idle=st.none() | st.integers(0, 600),
    heard=st.none() | st.integers(NOW - 2000, NOW),
)
def test_advance_makes_only_permitted_steps_and_never_loses_money(
    state: State,
    seen: str,
    complete: bool,
    absences: list[int],
    since: int,
    price: float,
    reserved: float,
    idle: int | None,
    heard: int | None,
) -> None:
    sightings = {
        "none": [],
        "running": [SEEN],
        "ended": [SEEN.model_copy(update={"running": False})],
        "double": [SEEN, Sighting(token=SEEN.token, handle="h2", created_at=NOW)],
    }[seen]
    machine = make_machine(
        state, absences=absences, since=since, usd_per_hour=price, reserved_usd=reserved, seen_at=heard
    )
    after = lifecycle.advance(machine, inventory(*sightings, complete=complete), idle_timeout_s=idle)
    assert after.state is state or after.state in TRANSITIONS[state]
    assert after.spent_usd >= machine.spent_usd or after.state is State.FAILED
    assert after.spent_usd - machine.spent_usd >= machine.reserved_usd - after.reserved_usd - 1e-9 or not after.billed
    if after.state is State.GONE or (after.state is State.FAILED and state is State.AMBIGUOUS):
        assert after.absence_proved
        assert not sightings
