"""A job that must avoid the fleet's only machine gets another one: the old machine goes first, within `max`."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from functions.fleet import lifecycle
from functions.fleet.records import Machine
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import TENANT, Night, Training
from tests.unit.fleet.test_fleet_nights import spec

REASON = "it failed the jobs that wait"


class AvoidingNight(Night):
    """Night whose workers claim no job that avoids their machine; avoided until a time of the server."""

    def _worker(self, machine: Machine, training: Training | None, *, booted: bool) -> Machine:
        if machine.state is State.READY:
            free = [one for one in self.trainings if one.on is None and one.left_s > 0]
            if not any(machine.id not in one.job.avoid for one in free):
                return machine
            hidden = [one for one in free if machine.id in one.job.avoid]
            for one in hidden:
                one.on = "hidden"
            after = super()._worker(machine, training, booted=booted)
            for one in hidden:
                one.on = None
            return after
        return super()._worker(machine, training, booted=booted)

    def fail(self, training: Training, until: int) -> Machine:
        """Let the training fail on its machine, which the job avoids until then."""
        machine = next(one for one in self.machines() if one.id == training.on)
        training.on, training.since_checkpoint_s = None, 0
        training.job = training.job.model_copy(update={"avoid": {machine.id: until}})
        freed = lifecycle.released(machine, self.now)
        self.store.update_machine(freed.model_copy(update={"version": machine.version + 1}))
        return machine


def make_night(**changes: Any) -> AvoidingNight:
    document = {"max": 1, "idle_timeout_s": 3600, **changes}
    return AvoidingNight(spec(**document), {"loopback": VirtualProvider(slots=3)})


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("clock_ahead_s", [0, 10 * 86_400])
def test_the_only_machine_is_given_back_and_another_one_runs_the_job(least: int, clock_ahead_s: int) -> None:
    """The clock of the fleets can be ahead of the server's, by which a job avoids a machine."""
    night = make_night(min=least)
    training = night.submit(hours=0.5)
    night.step(6)
    first = night.fail(training, night.now + 86_400 - clock_ahead_s)
    for _ in range(12):
        night.step()
        assert sum(not one.state.ended for one in night.machines()) <= 1, "never more than max"
    second = next(one for one in night.machines() if one.id != first.id)
    given_back = next(one for one in night.machines() if one.id == first.id)
    assert (given_back.state, given_back.reason) == (State.GONE, REASON)
    assert training.on == second.id
    assert second.offer.machine_ref != first.offer.machine_ref, "a new container at the same host is no other machine"


def test_a_machine_that_another_waiting_job_can_use_stays() -> None:
    night = make_night(min=1)
    failing, other = night.submit(hours=0.5), night.submit(hours=0.5)
    night.step(6)
    first = night.fail(failing if failing.on else other, night.now + 86_400)
    night.step(20)
    (only,) = night.machines()
    assert (only.id, only.state) == (first.id, State.BUSY)
    night.step(60)
    assert (failing.left_s, other.left_s) == (0, 0)
    assert [one.reason for one in night.machines() if one.id == first.id] == [REASON]


def test_the_only_host_is_taken_again_rather_than_none() -> None:
    night = make_night()
    night.providers["loopback"].slots = 1
    training = night.submit(hours=0.5)
    night.step(6)
    first = night.fail(training, night.now + 86_400)
    night.step(12)
    (second,) = [one for one in night.machines() if one.id != first.id]
    assert (training.on, second.offer.machine_ref) == (second.id, first.offer.machine_ref)
    assert night.store.ledger(TENANT, "nights").waits == ""
