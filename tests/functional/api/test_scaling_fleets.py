"""A rule scales a group whose queue a fleet serves: copies rent machines, fewer jobs give machines back."""

from __future__ import annotations

import pytest

from baton.contract.fleets.fleet import MachineState as State
from functions.fleet import lifecycle
from functions.fleet.records import Machine
from tests.functional.api.scaling_kit import GROUP, generators, live, scaling, told, training
from tests.functional.api.test_fleet_tick import Deployment, make_fleet
from tests.kits.api.harness import TENANT, Api, Held


@pytest.fixture
def deployment(api: Api, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    found = Deployment(api, monkeypatch)
    found.store.put_fleet(make_fleet(queues=["generators"], max=5, idle_timeout_s=120))
    return found


class Workers:
    """The workers of all machines of the fleet."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._held: dict[str, Held] = {}

    def pass_minutes(self, minutes: int) -> None:
        for _ in range(minutes):
            self._deployment.tick()
            for machine in self.machines():
                after = self._work(machine)
                if after is not machine:
                    self._deployment.store.update_machine(after.model_copy(update={"version": machine.version + 1}))

    def machines(self) -> list[Machine]:
        return [one for one in self._deployment.store.machines(TENANT, "nights") if not one.state.ended]

    def _work(self, machine: Machine) -> Machine:
        api, now = self._deployment.api, self._deployment.api.clock.now()
        if machine.state is State.BOOTING:
            return lifecycle.enrolled(machine, now)
        if machine.state is State.REGISTERED:
            return lifecycle.checked(machine, "", now)
        if machine.state is State.READY:
            query = {"queue": "generators", "machine_id": machine.id}
            work = api.get("/work", headers={"x-lease-aware": "1"}, query=query).ok()
            if not work:
                return machine
            self._held[machine.id] = Held(api, work[0])
            return lifecycle.claimed(machine, work[0]["id"], now)
        if machine.state is State.BUSY:
            held = self._held[machine.id]
            if held.report(1).ok()["commands"]:
                held.complete().ok()
                return lifecycle.released(machine, now)
        return lifecycle.released(machine, now) if machine.state is State.DRAINING else machine


def test_copies_rent_machines_and_fewer_jobs_give_them_back(api: Api, deployment: Deployment) -> None:
    workers = Workers(deployment)
    generators(api, policy={"heartbeat_interval_s": 600})
    held = training(api, scaling(2), policy={"heartbeat_interval_s": 600})
    workers.pass_minutes(5)
    assert [one.state for one in workers.machines()] == [State.BUSY]
    held.heartbeat(step=5).ok()
    assert len(live(api)) == 3
    workers.pass_minutes(5)
    assert [one.state for one in workers.machines()] == [State.BUSY] * 3
    assert {one.job_id for one in workers.machines()} == {job["id"] for job in live(api)}
    # Another training takes two of the three out again.
    held.complete().ok()
    fewer = training(api, scaling(-2), policy={"heartbeat_interval_s": 600})
    fewer.heartbeat(step=5).ok()
    workers.pass_minutes(10)
    assert len(live(api)) == 1
    assert [one.job_id for one in workers.machines()] == [live(api)[0]["id"]]
    assert len(deployment.provider.alive()) == 1, "two machines went back and bill no more"
    reasons = [one.reason for one in deployment.store.ended(TENANT, "nights", limit=9)]
    assert reasons == ["no job for idle_timeout_s"] * 2


def test_a_job_that_rents_its_own_machine_is_not_copied(api: Api) -> None:
    rent = {"budget_usd": 5, "providers": ["loopback"]}
    api.post("/job", {"command": ["train"], "tags": GROUP, "rent": rent}).ok()
    held = training(api, scaling(2))
    held.heartbeat(step=5).ok()
    assert len(live(api)) == 1
    (event,) = [message for kind, message in told(api, held.id) if kind.startswith("action.")]
    assert "rent machines of their own or have nodes" in event
    generators(api)
    api.clock.advance(60)
    other = training(api, scaling(1))
    other.heartbeat(step=5).ok()
    assert [job["rent"] for job in live(api) if job["copy_of"]] == [None]
