"""Nights of the real controller at the fake of Salad: state, money, and nothing left over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from fakes.salad.api import PUBLIC, FakeSalad
from fakes.salad.cloud import FakeGroup
from functions.fleet import lifecycle
from functions.fleet.drivers.salad.driver import SaladDriver
from functions.fleet.records import Machine
from tests.conformance.drivers.driven_salad import salad_account
from tests.unit.fleet.night import BOOT_S, TENANT, Night
from tests.unit.fleet.test_salad_driver import spec

GROUPS = f"{PUBLIC}/organizations/acme/projects/training/containers"
BOOTED_MIN = 12
"""Minutes from a create to a working machine: 340 s of the provider, 120 s of the worker, ticks."""


@dataclass
class Body:
    """Container, as the workers of a night see it."""

    token: str
    created_at: int
    running: bool


class SaladMarket:
    """Salad with its driver, on the clock of a night."""

    def __init__(self, served: ExitStack) -> None:
        self.now = 0
        self.night: Night | None = None
        self.fake = FakeSalad(lambda: self.night.now if self.night else self.now)
        served.enter_context(self.fake)
        self.driver = SaladDriver(salad_account(self.fake), now=self.fake.now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def alive(self) -> list[Body]:
        self.fake.cloud.settle()
        return [
            Body(group.name, int(one.since), running=one.state == "running")
            for group in self.fake.cloud.groups.values()
            for one in group.instances
        ]

    def billed_usd(self) -> float:
        return self.fake.usd()


class SaladNight:
    """One fleet at Salad."""

    def __init__(self, served: ExitStack, **changes: Any) -> None:
        self.market = SaladMarket(served)
        self.fake = self.market.fake
        self.night = Night(spec(**{"max": 1, **changes}), {"salad": self.market})  # type: ignore[dict-item]
        self.market.night = self.night
        self.hosts: dict[str, str] = {}
        """Host on which each machine enrolled."""

    def step(self, minutes: int = 1) -> None:
        for _ in range(minutes):
            self.night.time_left_s = 60
            self.night.step()
            self._enrol_moved()

    def _enrol_moved(self) -> None:
        """Let the container of a machine that moved enrol again, as the API does with a proof of identity."""
        for machine in self.night.store.machines(TENANT, self.night.spec.name):
            group = self.fake.cloud.groups.get(machine.id)
            if group is None or machine.enrolled_at is None or not group.instances:
                continue
            instance = group.instances[0]
            host = self.hosts.setdefault(machine.id, instance.machine_id)
            ready = instance.state == "running" and self.night.now - instance.since >= BOOT_S
            if ready and host != instance.machine_id and machine.state is State.BUSY:
                self.hosts[machine.id] = instance.machine_id
                after = lifecycle.released(machine, self.night.now)
                self.night.store.update_machine(after.model_copy(update={"version": machine.version + 1}))

    def machine(self) -> Machine:
        (one,) = [one for one in self.night.machines() if not one.state.ended]
        return one

    def group(self) -> FakeGroup:
        return self.fake.group(self.machine().id)

    def end(self) -> list[Machine]:
        """Stop the fleet; assert that nothing is left and billed, and that the ledger tells the bill."""
        fleet = self.night.store.fleets()[0]
        self.night.store.put_fleet(fleet.model_copy(update={"stopped": True, "version": fleet.version + 1}))
        self.step(15)
        machines = self.night.machines()
        assert self.fake.billing() == []
        assert not [name for name in self.fake.cloud.groups if name.startswith("dep10000-")]
        assert {one.state for one in machines} <= {State.GONE, State.FAILED}
        # A start is noticed by the next tick, which counts the whole minute.
        starts = sum(one.enrolled_at is not None for one in machines) + len(machines)
        assert self.night.spent_usd() == pytest.approx(self.fake.usd(), abs=0.15 * starts * 2 / 60 + 1e-6)
        assert self.night.spent_usd() >= self.fake.usd() - 1e-6
        assert self.night.store.orphans() == {}
        return machines


@pytest.fixture
def served() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_job_pays_for_the_container_and_not_for_its_boot(served: ExitStack) -> None:
    night = SaladNight(served)
    training = night.night.submit(hours=1)
    night.step(90)
    assert training.left_s <= 0
    (machine,) = night.end()
    assert machine.offer.gpu_model == "RTX 3090" and machine.charged_usd is None
    # 340 s until the container runs are free; then 2 minutes of enrolment, an hour of work, 5 minutes idle.
    assert 0.15 * 66 / 60 <= night.fake.usd() <= 0.15 * 72 / 60


def test_machines_of_one_class_start_in_one_tick(served: ExitStack) -> None:
    night = SaladNight(served, max=3)
    for _ in range(3):
        night.night.submit(hours=1)
    night.step()
    assert len(night.fake.cloud.groups) == 3
    night.step(BOOTED_MIN)
    assert [one.state for one in night.night.machines()] == [State.BUSY] * 3
    night.end()


@pytest.mark.parametrize("fault", ["lost", "reset", "500", "html", "truncated"])
def test_a_create_without_an_answer_is_resolved_by_the_name(served: ExitStack, fault: Any) -> None:
    night = SaladNight(served)
    night.fake.inject(fault, f"POST {GROUPS}")
    night.night.submit(hours=1)
    night.step()
    assert night.machine().state is State.AMBIGUOUS
    night.step(BOOTED_MIN + 5)
    assert night.machine().state is State.BUSY and len(night.fake.cloud.groups) == 1
    night.end()


@pytest.mark.parametrize(("quota", "credit", "code"), [(0, True, "quota_reached"), (9, False, "credit_exhausted")])
def test_an_account_that_is_refused_is_asked_once_a_tick_and_the_fleet_says_why(
    served: ExitStack, quota: int, credit: bool, code: str
) -> None:
    night = SaladNight(served)
    night.fake.cloud.replicas_quota, night.fake.has_credit = quota, credit
    night.night.submit(hours=1)
    night.step(2)
    assert len([one for one in night.fake.calls if (one.method, one.path) == ("POST", GROUPS)]) == 2
    assert f"provider_{code}: " in night.night.store.ledger(TENANT, "nights").waits
    night.fake.cloud.replicas_quota, night.fake.has_credit = 9, True
    night.step(BOOTED_MIN + 1)
    assert night.machine().state is State.BUSY
    night.end()


def test_a_job_goes_on_in_the_same_machine_on_another_node_which_is_free_while_it_moves(served: ExitStack) -> None:
    night = SaladNight(served)
    training = night.night.submit(hours=1)
    night.step(BOOTED_MIN + 20)
    before = night.machine()
    assert before.state is State.BUSY
    night.fake.cloud.lose_node(night.group(), night.group().instances[0])
    night.step(5)
    assert night.machine().usd_per_hour == 0
    night.step(5)
    after = night.machine()
    assert (after.id, after.state, after.usd_per_hour) == (before.id, State.BUSY, 0.15)
    assert after.offer.machine_ref not in (None, before.offer.machine_ref)
    night.step(70)
    assert training.left_s <= 0 and len(night.night.machines()) == 1
    night.end()


@pytest.mark.parametrize("crashes", [True, False])
def test_a_machine_that_never_runs_is_given_back_after_half_an_hour_and_costs_nothing(
    served: ExitStack, crashes: bool
) -> None:
    night = SaladNight(served)
    night.night.submit(hours=1)
    if crashes:
        night.fake.cloud.crashing_images = {"me/trainer:1"}
    else:
        night.fake.cloud.allocate_s = 1e9
    night.step(29)
    first = night.machine()
    assert first.state is State.BOOTING
    night.step(5)
    (ended,) = [one for one in night.night.machines() if one.id == first.id]
    assert (ended.state, ended.reason) == (State.GONE, "the machine did not start its worker in time")
    machines = night.end()
    assert night.fake.usd() == 0
    # The minute before the first list may count at the price of the offer.
    assert night.night.spent_usd() <= 0.15 / 60 * len(machines) + 1e-9


def test_an_idle_machine_is_given_back_beside_a_busy_one(served: ExitStack) -> None:
    night = SaladNight(served, max=2)
    short, long = night.night.submit(hours=0.2), night.night.submit(hours=2)
    night.step(BOOTED_MIN + 25)
    assert short.left_s <= 0 < long.left_s
    assert (night.machine().state, night.machine().id) == (State.BUSY, long.on)
    assert len(night.fake.cloud.groups) == 1
    night.step(120)
    assert long.left_s <= 0
    night.end()


def test_a_tick_without_answers_takes_nothing_for_gone(served: ExitStack) -> None:
    night = SaladNight(served)
    training = night.night.submit(hours=1)
    night.step(BOOTED_MIN)
    night.fake.inject("401", f"GET {PUBLIC}", count=8)
    night.step(3)
    night.fake.inject("500", f"GET {PUBLIC}", count=8)
    night.step(3)
    night.fake.inject("truncated", f"GET {PUBLIC}", count=8)
    night.step(3)
    assert night.machine().state is State.BUSY
    night.step(70)
    assert training.left_s <= 0 and len(night.night.machines()) == 1
    night.end()


def test_a_group_that_somebody_stops_is_deleted_and_its_job_goes_on(served: ExitStack) -> None:
    night = SaladNight(served)
    training = night.night.submit(hours=1)
    night.step(BOOTED_MIN + 10)
    first = night.machine()
    night.fake.cloud.stop(night.group())
    night.step(20)
    assert first.id not in night.fake.cloud.groups
    (ended,) = [one for one in night.night.machines() if one.id == first.id]
    assert ended.reason == "the container group is stopped"
    night.step(90)
    assert training.left_s <= 0
    night.end()


def test_groups_of_others_are_never_touched(served: ExitStack) -> None:
    night = SaladNight(served)
    night.night.submit(hours=0.1)
    night.step()
    group = night.group()
    for name in ("dep20000-nights-1", "somebody-elses"):
        night.fake.cloud.create({**group.body, "name": name})
    night.step(40)
    assert sorted(night.fake.cloud.groups) == ["dep20000-nights-1", "somebody-elses"]
    assert {one.path.rpartition("/")[2] for one in night.fake.calls if one.method in ("DELETE", "PATCH")} == {
        group.name
    }
    for name in list(night.fake.cloud.groups):
        night.fake.cloud.delete(night.fake.group(name))
