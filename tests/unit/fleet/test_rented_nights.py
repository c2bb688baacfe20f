"""The controller rents from RunPod and EC2 through the real drivers: state, money, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleet import FleetSpec
from baton.contract.fleet import MachineState as State
from baton.contract.money import Budget
from tests.conformance.driven_ec2 import Ec2Driven
from tests.conformance.driven_runpod import RunpodDriven
from tests.conformance.driver_kit import IMAGE, create
from tests.unit.fleet.night import Night

FOREIGN = "dep20000-nights-1"


@dataclass(frozen=True)
class Seen:
    """Machine, as the night's workers need it."""

    token: str
    created_at: int
    running: bool = True


class Rented:
    """A driven provider in the place of the night's virtual one."""

    def __init__(self, driven: Any) -> None:
        self.driven = driven
        self._now = 0
        self._since: dict[str, int] = {}

    @property
    def now(self) -> int:
        return self._now

    @now.setter
    def now(self, now: int) -> None:
        if self._now:
            self.driven.advance(now - self._now)
        self._now = now

    def alive(self) -> list[Seen]:
        tokens = set(self.driven.existing()) - self.driven.dead
        return [Seen(token, self._since.setdefault(token, self._now)) for token in tokens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driven.driver, name)


@pytest.fixture(params=[RunpodDriven, Ec2Driven])
def rented(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    driven = request.param(tmp_path)
    driven.dead = set()
    create(driven, FOREIGN)
    yield driven
    driven.close()


def night_of(driven: Any) -> Night:
    name = driven.driver.name
    spec = FleetSpec(
        name="nights",
        providers=[name],
        image=IMAGE,
        disk_gib=10,
        max=2,
        max_usd_per_hour=1,
        idle_timeout_s=120,
        budget=Budget(total_usd=20),
    )
    return Night(spec, {name: Rented(driven)})  # type: ignore[dict-item] - the real driver


def test_a_night_with_a_lost_answer_ends_with_all_work_done_and_the_bill_that_the_receipts_tell(rented: Any) -> None:
    night = night_of(rented)
    trainings = [night.submit(hours=0.3), night.submit(hours=0.3)]
    rented.inject("lost_answers")
    night.step(45)
    assert [one.left_s for one in trainings] == [0, 0]
    machines = night.machines()
    assert {one.state for one in machines} == {State.GONE} and len(machines) == 2
    assert rented.existing() == [FOREIGN]
    foreign = rented.fake.meter.billing()[0]
    billed = rented.fake.meter.usd() - rented.fake.meter.usd(foreign)
    observed = sum(one.spent_usd for one in machines)
    # A tick counts whole minutes; Amazon bills the address apart.
    assert billed <= observed <= billed * 1.25
    for one in machines:
        assert one.receipt and len(one.receipt.absent_at) == 2
        charged = pytest.approx(rented.fake.meter.usd(one.handle)) if rented.charges else None
        assert one.receipt.charged_usd == charged
    assert not any(report.failures for report in night.reports)


def test_a_machine_that_ends_in_a_training_is_removed_and_another_one_finishes(rented: Any) -> None:
    night = night_of(rented)
    training = night.submit(hours=0.2)
    night.step(8)
    token = training.on
    assert token
    rented.end(token)
    rented.dead.add(token)
    night.step(50)
    assert training.left_s == 0 and rented.existing() == [FOREIGN]
    assert [
        (one.state, one.id == token) for one in sorted(night.machines(), key=lambda one: one.requested_at or 0)
    ] == [
        (State.GONE, True),
        (State.GONE, False),
    ]
    assert len(rented.fake.meter.billing()) == 1


def test_a_machine_that_never_starts_its_worker_is_destroyed_at_its_deadline(rented: Any) -> None:
    night = night_of(rented)
    night.submit(hours=1)
    night.step(2)
    (machine,) = night.machines()
    night.silent = {machine.id, *(f"{machine.id}-{at}" for at in range(9))}
    night.step(22)
    assert machine.id not in rented.existing()
    found = next(one for one in night.machines() if one.id == machine.id)
    assert (found.state, found.reason) == (State.GONE, "the machine did not start its worker in time")
