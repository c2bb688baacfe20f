"""Machines for the seats of elastic jobs: the first `min` together or none, the others after every other job."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.records import Machine
from functions.fleet.ticks.gangs import select
from tests.kits.api.factories import make_job
from tests.kits.api.fleets import make_machine
from tests.unit.fleet.elastic_night import ElasticNight, make_elastic_night, make_seats
from tests.unit.fleet.night import TENANT
from tests.unit.fleet.test_fleet_nights import spec

NAME = "rent-0badcafe"


def ended(night: ElasticNight) -> list[Machine]:
    return list(night.store.ended(TENANT, NAME, limit=99))


def waits(night: ElasticNight) -> str:
    return night.store.ledger(TENANT, NAME).waits


@pytest.mark.parametrize(
    ("nodes", "waiting", "startable", "states", "first", "later", "held"),
    [
        ((1, 2), 2, None, [], 1, 1, ""),
        ((4, 6), 6, None, [], 4, 2, ""),
        ((4, 6), 6, 4, [], 4, 2, ""),
        ((4, 6), 6, 3, [], 0, 0, "3 of 4"),
        ((4, 6), 6, 0, [], 0, 0, "0 of 4"),
        # Machines that start, or are free, take the first seats.
        ((4, 6), 6, 1, [State.BOOTING, State.READY, State.PLANNED], 4, 2, ""),
        ((4, 6), 6, 0, [State.BOOTING, State.READY, State.DRAINING], 0, 0, "2 of 4"),
        # Running seats count.
        ((4, 6), 4, 1, [State.BUSY, State.BUSY], 0, 0, "3 of 4"),
        ((4, 6), 4, 2, [State.BUSY, State.BUSY], 2, 2, ""),
        ((2, 6), 4, 0, [State.BUSY, State.BUSY], 0, 4, ""),
        ((9, 9), 9, None, [], 0, 0, "8 of 9"),
    ],
)
def test_the_first_seats_are_rented_together(
    nodes: tuple[int, int], waiting: int, startable: int | None, states: list[State], first: int, later: int, held: str
) -> None:
    machines = [make_machine(f"m-{at}", state) for at, state in enumerate(states)]
    found = select(make_seats(*nodes)[-waiting:], spec(max=8), machines, startable=startable)
    assert (len(found.first), len(found.later)) == (first, later)
    assert found.held == (f"{held} nodes can be rented" if held else "")


def test_a_training_that_has_lost_nodes_takes_each_machine() -> None:
    seats = make_seats(4, 6)[1:]
    assert select(seats, spec(max=8), [], startable=0).held
    found = select(seats, spec(max=8), [], startable=0, trains=lambda job: job == "job-elastic")
    assert (len(found.first), len(found.later), found.held) == (3, 2, "")
    assert select(make_seats(4, 6), spec(max=8), [], startable=3, trains=lambda _: True).held, "no node trains"


def test_other_jobs_do_not_wait_for_a_training_that_cannot_begin() -> None:
    jobs = [*make_seats(3, 4, "large"), make_job(id="alone"), *make_seats(2, 3, "small")]
    found = select(jobs, spec(max=8), [], startable=3)
    assert [one.id for one in found.first] == ["large-0", "large-1", "large-2", "alone"]
    assert found.held == "0 of 2 nodes can be rented"
    found = select(jobs[::-1], spec(max=8), [], startable=3)
    assert [one.id for one in found.jobs] == ["small-2", "small-1", "alone", "small-0"]
    assert found.held == "0 of 3 nodes can be rented"


def test_a_night_begins_with_min_fills_to_max_and_gives_all_back() -> None:
    night = make_elastic_night(2, 5, hours=1)
    night.step()
    assert len(night.providers["loopback"].alive()) == 2
    night.step()
    assert len(night.providers["loopback"].alive()) == 5
    assert {one.port for one in night.providers["loopback"].creates} == {47100}
    night.step(70)
    assert all(one.left_s <= 0 for one in night.seats)
    night.step(5)
    assert (night.billing(), night.store.fleets()) == ([], [])
    assert [one.reason for one in ended(night)] == ["the job has ended"] * 5
    receipts = [one.receipt for one in ended(night) if one.receipt]
    assert sum(one.observed_usd for one in receipts) == pytest.approx(night.spent_usd(), abs=1e-5)
    assert night.spent_usd() == pytest.approx(night.billed_usd(), abs=5 * 0.2 * 4 / 60)


def test_nothing_is_rented_while_too_few_offers_fit() -> None:
    night = make_elastic_night(4, 4, slots=1)
    night.step(30)
    assert night.providers["loopback"].machines == []
    assert waits(night) == "1 of 4 nodes can be rented: only one offer fits"
    night.providers["loopback"].slots = 4
    night.step(80)
    assert all(one.left_s <= 0 for one in night.seats) and waits(night) == ""


def test_nothing_is_rented_while_the_budget_pays_for_too_few() -> None:
    night = make_elastic_night(4, 4)
    (fleet,) = night.store.fleets()
    poor = fleet.spec.model_copy(update={"budget": fleet.spec.budget.model_copy(update={"total_usd": 0.5})})
    night.store.put_fleet(fleet.model_copy(update={"spec": poor, "version": 3}))
    night.step(5)
    assert night.providers["loopback"].machines == []
    assert "2 of 4 nodes" in waits(night) and "USD left" in waits(night)
    assert [one.type for one in night.store.events(TENANT, NAME, limit=9)] == ["budget.exhausted"]


@pytest.mark.parametrize("step", [None, 7])
def test_the_checkpoints_of_a_training_save_the_work_of_all_its_nodes(step: int | None) -> None:
    night = make_elastic_night(2, 2, hours=20)
    night.checkpoint_step = step
    (fleet,) = night.store.fleets()
    poor = fleet.spec.model_copy(update={"budget": fleet.spec.budget.model_copy(update={"total_usd": 1})})
    night.store.put_fleet(fleet.model_copy(update={"spec": poor, "version": 3}))
    night.step(150)
    (warning,) = [one for one in night.store.events(TENANT, NAME, limit=99) if one.type == "budget.warning"]
    assert ("lose their work: job-elas" in warning.reason) is (step is None)
    assert night.billed_usd() <= 1


def test_nodes_beyond_min_come_after_the_first_machine_of_other_jobs() -> None:
    """The budget of the deployment pays for three machines at a time, and the other fleet's turn comes later."""
    night = make_elastic_night(1, 4)
    own: list[Any] = [make_job(id="alone", queue="other")]
    other = spec(name="nights", queues=["other"], max=1)
    (fleet,) = night.store.fleets()
    night.step()
    night.store.put_fleet(fleet.model_copy(update={"tenant": "zeta", "spec": other, "job_id": None, "version": 1}))
    waiting, controller = [one.job for one in night.seats], night.controller()
    controller._waiting = lambda fleet: own if fleet.tenant == "zeta" else waiting[1:]
    controller._budget = fleet.spec.budget.model_copy(update={"total_usd": 0.75})
    controller.tick()
    assert [len(night.store.machines(*place)) for place in (("zeta", "nights"), (TENANT, NAME))] == [1, 2]
