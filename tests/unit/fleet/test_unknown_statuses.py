"""A raw status that a driver does not know is counted and named, and ends no machine that costs money."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from fakes.salad.cloud import FakeGroup
from functions.fleet.drivers.protocol import Created
from functions.fleet.drivers.vast.wire import Instance
from functions.fleet.records import Sighting
from tests.conformance.drivers import driven_ec2
from tests.conformance.drivers.driver_kit import PREFIX, create, inventory
from tests.unit.fleet.rented import ALL_PROVIDERS, HAPPY, RentedNight

ODD = "hibernating\nagain"
"""Status of no provider, over two lines."""
NAMED = r"'hibernating\nagain'"


def _vast(driven: Any, patch: pytest.MonkeyPatch) -> None:
    for one in driven.fake.instances:
        one.forced = ODD


def _salad(driven: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeGroup, "status", property(lambda group: ODD))


def _salad_instance(driven: Any, patch: pytest.MonkeyPatch) -> None:
    for group in driven.fake.cloud.groups.values():
        for one in group.instances:
            one.state = ODD


def _runpod(driven: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(driven.fake, "status", lambda pod: ODD)


def _ec2(driven: Any, patch: pytest.MonkeyPatch) -> None:
    for one in driven_ec2._instances():
        if one.state == "running":
            one._state.name = ODD


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "vast": _vast,
    "salad": _salad,
    "runpod": _runpod,
    "ec2": _ec2,
}


@pytest.fixture(params=CHANGES)
def driven(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = ALL_PROVIDERS[request.param](tmp_path)
    yield made
    made.close()


def see(driven: Any, change: Callable[[Any, pytest.MonkeyPatch], None], patch: pytest.MonkeyPatch) -> Sighting:
    create(driven, f"{PREFIX}nights-1")
    driven.advance(600)
    inventory(driven)
    change(driven, patch)
    (found,) = inventory(driven).sightings
    return found


def test_each_driver_names_a_status_that_it_does_not_know(driven: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = see(driven, CHANGES[driven.driver.name], monkeypatch)
    assert (found.unknown_status, found.running) == (NAMED, True)
    assert found.usd_per_hour is None or found.usd_per_hour > 0, "the machine counts as billed"


def test_an_unknown_state_of_an_instance_of_salad_counts_as_billed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ALL_PROVIDERS["salad"](tmp_path)
    create(made, f"{PREFIX}nights-1")
    (before,) = inventory(made).sightings
    made.driver._hosts.clear()
    _salad_instance(made, monkeypatch)
    (after,) = inventory(made).sightings
    assert (before.unknown_status, after.unknown_status, after.running) == ("", NAMED, True)
    assert after.usd_per_hour == before.usd_per_hour and after.usd_per_hour
    made.close()


def test_a_job_ends_well_while_its_machine_has_an_unknown_status(driven: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    night = RentedNight(driven)
    night.night.submit(hours=0.2)
    night.step_until(State.BUSY)
    assert sum(one.unknown_statuses for one in night.night.reports) == 0
    CHANGES[night.name](driven, monkeypatch)
    night.step(3)
    (machine,) = night.machines()
    assert machine.state is State.BUSY
    for report in night.night.reports[-3:]:
        assert (report.unknown_statuses, report.finished) == (1, True)
        (told,) = report.failures
        assert told == f"{night.name}: machine {machine.id} has the unknown status {NAMED}, and counts as running"
    night.finish(HAPPY)


def test_an_unknown_status_lasts_until_the_deadline_of_the_boot(driven: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider then ends the machine, because the controller asks for the end."""
    night = RentedNight(driven)
    night.night.submit(hours=0.2)
    machine = night.step_until(State.BOOTING)
    night.night.silent.add(machine.id)
    night.step()
    CHANGES[night.name](driven, monkeypatch)
    night.step(5)
    assert night.machine(machine.id).state is State.BOOTING
    ended = night.step_until(State.GONE)
    assert (ended.id, ended.reason) == (machine.id, "the machine did not start its worker in time")
    assert machine.id not in driven.existing()


@pytest.mark.parametrize("status", [None, "created", "loading", "running", "rebooting", "scheduling", "unknown"])
def test_vasts_own_statuses_are_known(status: str | None) -> None:
    seen = Instance(id=1, actual_status=status).sighting()
    assert (seen.running, seen.unknown_status) == (True, "")
    assert Instance(id=1, actual_status="").sighting().unknown_status == "''"


def test_a_long_status_is_cut() -> None:
    seen = Instance(id=1, actual_status="x" * 10_000).sighting()
    assert len(seen.unknown_status) == 60


def test_a_machine_of_ec2_that_is_terminated_is_not_listed(tmp_path: Path) -> None:
    made = ALL_PROVIDERS["ec2"](tmp_path)
    created = create(made, f"{PREFIX}nights-1")
    assert isinstance(created, Created)
    made.driver.destroy(created.handle)
    assert inventory(made).sightings == []
    made.close()
