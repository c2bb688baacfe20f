"""A machine of Salad from the login to its receipt: the real API, controller and driver at the fake of Salad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.providers import reveal
from fakes.salad.api import FakeSalad
from fakes.salad.imds import FakeImds
from fakes.salad.signing_key import WorkloadKey
from functions.api.machines import machine_calls
from functions.api.machines.machine_calls import MOST_REALLOCATIONS, MOVED
from functions.fleet.records import Machine, Quarantine
from functions.handlers import fleet
from tests.conformance.drivers.driven_salad import salad_account
from tests.functional.api.test_sweeper import Invocation
from tests.kits.api.fleets import deploy_controller, machine_of
from tests.kits.api.harness import Answer, Api

AS_OFFERED = {"gpu_model": "NVIDIA GeForce RTX 3090", "gpus": 1, "vram_gib": 24.0, "disk_gib": 39.5}
OTHER = {**AS_OFFERED, "gpu_model": "NVIDIA GeForce GTX 1060", "vram_gib": 6.0}
DOCUMENT = {
    "name": "nights",
    "providers": ["salad"],
    "image": "me/trainer:1",
    "max_usd_per_hour": 0.5,
    "min_vram_gib": 20,
    "idle_timeout_s": 86_400,
    "budget": {"total_usd": 20},
}


class Container:
    """Container of a machine, with the environment and the metadata service of its node of the moment."""

    def __init__(self, api: Api, salad: FakeSalad, name: str, key: WorkloadKey) -> None:
        self.api, self.salad = api, salad
        self.imds = FakeImds(salad, name, sign=key.sign, key_id=key.key_id)
        self.environment = salad.environment(name)
        self.nonce = f"{int(salad.group(name).instances[0].id[-8:], 16):064x}"

    def enroll(self, proof: str | None = None, *, hardware: dict[str, Any] = AS_OFFERED) -> Answer:
        token = self.environment["BATON_ENROLMENT_TOKEN"]
        body = {**hardware, "nonce": self.nonce, "identity": proof or self.imds.token()}
        return self.api.post("/machines/enroll", body, key=token)


class Deployment:
    """API and controller with an account at Salad."""

    def __init__(self, api: Api, salad: FakeSalad, patch: pytest.MonkeyPatch) -> None:
        self.api, self.salad, self.key = api, salad, WorkloadKey()
        salad.keys = [self.key.jwk]
        deploy_controller(api, patch)

    def tick(self, minutes: int = 1) -> None:
        for _ in range(minutes):
            self.api.clock.advance(60)
            fleet.handler({}, Invocation(55))

    def rent(self) -> Container:
        """Log in, store a fleet, submit a job; return the container of the machine, once it runs."""
        self.api.call("PUT", "/providers/salad", reveal(salad_account(self.salad))).ok()
        self.api.call("PUT", "/fleets/nights", DOCUMENT).ok()
        self.api.submit()
        self.tick(8)
        return self.container()

    def container(self) -> Container:
        (name,) = self.salad.cloud.groups
        return Container(self.api, self.salad, name, self.key)

    def machine(self) -> Machine:
        return machine_of(self.api, self.container().imds.name)

    def move(self) -> Container:
        """Take the node away; return the container on the next one, once it runs."""
        group = self.salad.group(self.container().imds.name)
        self.salad.cloud.lose_node(group, group.instances[0])
        self.tick(8)
        return self.container()


@pytest.fixture
def salad(api: Api) -> Iterator[FakeSalad]:
    with FakeSalad(api.clock.now) as salad:
        yield salad


@pytest.fixture
def deployment(api: Api, salad: FakeSalad, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return Deployment(api, salad, monkeypatch)


def avoid(deployment: Deployment, hours: float = 24) -> str:
    """Quarantine the host of the container; return the host."""
    host = deployment.container().environment["SALAD_MACHINE_ID"]
    until = deployment.api.clock.now() + int(hours * 3600)
    assert deployment.api.context.fleet is not None
    deployment.api.context.fleet.put_quarantine(
        Quarantine(host=f"salad:{host}", until=until, reason="the worker is silent")
    )
    return host


def moves(salad: FakeSalad) -> int:
    """Return the number of reallocations that Salad was asked for."""
    return sum(one.path.endswith("/reallocate") for one in salad.calls)


def events(api: Api) -> list[tuple[str, str]]:
    found = api.get("/fleets/nights/events").ok()["events"]
    return [(one["type"].removeprefix("machine."), one["reason"]) for one in reversed(found)]


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"api_key": "salad_cloud_user_other"}, ErrorCode.PROVIDER_KEY_REFUSED, "401"),
        ({"project": "no-such"}, ErrorCode.PROVIDER_REQUEST_REFUSED, "organization or the project does not exist"),
        ({"organization": "no-such"}, ErrorCode.PROVIDER_REQUEST_REFUSED, "organization or the project does not exist"),
    ],
)
def test_an_account_that_does_not_work_is_not_stored(
    deployment: Deployment, api: Api, salad: FakeSalad, change: dict[str, str], code: ErrorCode, says: str
) -> None:
    account = {**reveal(salad_account(salad)), **change}
    said = api.call("PUT", "/providers/salad", account).refused(code, remedy="`baton fleet login")["message"]
    assert says in said and account["api_key"] not in said
    assert api.get("/providers").ok()["providers"] == []


def test_a_machine_works_moves_and_ends_without_a_trace_at_the_provider(
    deployment: Deployment, api: Api, salad: FakeSalad
) -> None:
    first = deployment.rent()
    assert set(salad.group(first.imds.name).container["environment_variables"]) == {
        "BATON_API_URL",
        "BATON_ENROLMENT_TOKEN",
    }
    old = first.enroll().ok()["api_key"]

    # The token's first half hour is over and the token is used up when Salad moves the container.
    deployment.tick(40)
    second = deployment.move()
    assert second.environment["SALAD_MACHINE_ID"] != first.environment["SALAD_MACHINE_ID"]
    new = second.enroll().ok()["api_key"]
    assert deployment.machine().offer.machine_ref == second.environment["SALAD_MACHINE_ID"]
    api.post("/machines/heartbeat", {}, key=old).refused(ErrorCode.KEY_REVOKED, "x-api-key")
    assert api.post("/machines/heartbeat", {}, key=new).ok()["state"] == "ready"

    api.post("/fleets/nights/stop", {}).ok()
    deployment.tick(10)
    (receipt,) = api.get("/fleets/nights/machines").ok()["machines"]
    assert (receipt["state"], receipt["receipt"]["charged_usd"]) == ("gone", None)
    assert receipt["receipt"]["observed_usd"] == pytest.approx(salad.usd(), abs=0.15 * 4 / 60)
    assert (salad.cloud.groups, salad.billing()) == ({}, [])
    api.post("/machines/heartbeat", {}, key=new).refused(ErrorCode.KEY_REVOKED, "x-api-key")


def test_a_token_without_the_proof_of_its_container_enrols_nobody(
    deployment: Deployment, api: Api, salad: FakeSalad
) -> None:
    container = deployment.rent()
    token = container.environment["BATON_ENROLMENT_TOKEN"]
    with api.unchanged():
        api.post("/machines/enroll", AS_OFFERED, key=token).refused(ErrorCode.IDENTITY_REFUSED, "identity")
        container.imds.claims = {"salad_workload_name": "dep10000-nights-other"}
        container.enroll().refused(ErrorCode.IDENTITY_REFUSED, "identity")
    container.imds.claims = {}
    container.enroll().ok()


def test_the_job_of_a_machine_that_moved_is_no_longer_its_own(deployment: Deployment, api: Api) -> None:
    container = deployment.rent()
    key = container.enroll().ok()["api_key"]
    headers = {"x-lease-aware": "1"}
    query = {"machine_id": container.imds.name}
    (work,) = api.get("/work", key=key, query=query, headers=headers).ok()
    assert api.post("/machines/heartbeat", {"job_id": work["id"]}, key=key).ok()["state"] == "busy"
    deployment.move().enroll().ok()
    assert (deployment.machine().state, deployment.machine().job_id) == (State.READY, None)
    assert events(api)[-2:] == [("busy", ""), ("ready", MOVED)]


def test_a_new_host_with_other_hardware_ends_the_machine_and_is_remembered(deployment: Deployment, api: Api) -> None:
    deployment.rent().enroll().ok()
    moved = deployment.move()
    said = moved.enroll(hardware=OTHER).refused(ErrorCode.PREFLIGHT_FAILED)["message"]
    assert "the offer names the GPU RTX 3090, the machine has NVIDIA GeForce GTX 1060" in said
    assert deployment.machine().state is State.TERMINATING
    assert api.context.fleet is not None
    assert set(api.context.fleet.quarantined(0)) == {f"salad:{moved.environment['SALAD_MACHINE_ID']}"}
    moved.enroll().refused(ErrorCode.MACHINE_UNKNOWN, "x-api-key")


def test_a_machine_that_moved_while_it_drains_does_not_come_back(deployment: Deployment, api: Api) -> None:
    deployment.rent().enroll().ok()
    stored = deployment.machine()
    assert api.context.fleet is not None
    api.context.fleet.update_machine(
        stored.model_copy(update={"state": State.DRAINING, "version": stored.version + 1, "since": api.clock.now()})
    )
    container = deployment.container()
    container.nonce = "0" * 64
    with api.unchanged():
        container.enroll().refused(ErrorCode.MACHINE_UNKNOWN, "x-api-key")


def test_a_worker_that_calls_before_a_list_shows_its_instance_knows_its_price(
    deployment: Deployment, api: Api, salad: FakeSalad
) -> None:
    """Salad bills running instances only, and the agent calls seconds after the start: jobs would cost nothing."""
    api.call("PUT", "/providers/salad", reveal(salad_account(salad))).ok()
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    api.submit()
    deployment.tick(2)
    assert deployment.machine().usd_per_hour == 0
    api.clock.advance(8 * 60)
    price = deployment.machine().offer.usd_per_hour
    assert deployment.container().enroll().ok()["usd_per_hour"] == deployment.machine().usd_per_hour == price > 0


def test_a_machine_on_a_quarantined_host_is_moved_and_paid_once(
    deployment: Deployment, api: Api, salad: FakeSalad
) -> None:
    container = deployment.rent()
    host = avoid(deployment)
    said = container.enroll().refused(ErrorCode.HOST_QUARANTINED, "identity")["message"]
    assert f"{host} is quarantined: the worker is silent" in said
    machine = deployment.machine()
    assert (machine.state, machine.enrolled_at, machine.reallocated) == (State.BOOTING, None, [host])
    assert events(api)[-1] == ("reallocated", f"the host {host} is quarantined: the worker is silent")
    assert moves(salad) == 1 and salad.billing() == []

    # The image takes 25 minutes to the next node: longer than the rest of the first boot, and of the first token.
    salad.cloud.download_s = 1500
    deployment.tick(29)
    moved = deployment.container()
    assert moved.environment["SALAD_MACHINE_ID"] != host
    key = moved.enroll().ok()["api_key"]
    assert deployment.machine().offer.machine_ref == moved.environment["SALAD_MACHINE_ID"]
    assert api.post("/machines/heartbeat", {}, key=key).ok()["state"] == "ready"
    assert moves(salad) == 1

    api.post("/fleets/nights/stop", {}).ok()
    deployment.tick(10)
    (receipt,) = api.get("/fleets/nights/machines").ok()["machines"]
    assert receipt["receipt"]["observed_usd"] == pytest.approx(salad.usd(), abs=0.15 * 6 / 60)
    assert receipt["receipt"]["observed_usd"] >= salad.usd() - 1e-6
    assert (salad.cloud.groups, salad.billing()) == ({}, [])


def test_the_moves_of_a_machine_have_an_end(deployment: Deployment, api: Api, salad: FakeSalad) -> None:
    container = deployment.rent()
    for _ in range(MOST_REALLOCATIONS):
        avoid(deployment)
        container.enroll().refused(ErrorCode.HOST_QUARANTINED, "identity")
        deployment.tick(8)
        container = deployment.container()
    host = avoid(deployment)
    container.enroll().refused(ErrorCode.HOST_QUARANTINED, "identity")
    machine = deployment.machine()
    assert (machine.state, moves(salad)) == (State.TERMINATING, MOST_REALLOCATIONS)
    told = f"the host {host} is quarantined: the worker is silent, and the machine was moved {MOST_REALLOCATIONS} times"
    assert machine.reason == told
    api.post("/fleets/nights/stop", {}).ok()
    deployment.tick(10)
    assert (salad.cloud.groups, salad.billing()) == ({}, [])


def test_the_moves_of_a_day_have_an_end(
    deployment: Deployment, api: Api, salad: FakeSalad, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each move takes a node from the supply for a while."""
    monkeypatch.setattr(machine_calls, "MOST_REALLOCATIONS_A_DAY", 1)
    container = deployment.rent()
    avoid(deployment)
    container.enroll().refused(ErrorCode.HOST_QUARANTINED, "identity")
    deployment.tick(8)
    avoid(deployment)
    deployment.container().enroll().refused(ErrorCode.HOST_QUARANTINED, "identity")
    assert deployment.machine().reason.endswith("the 1 moves of the deployment for today are used up")
    assert (deployment.machine().state, moves(salad)) == (State.TERMINATING, 1)


@pytest.mark.parametrize("fault", ["429", "lost"])
def test_a_move_without_an_answer_is_asked_for_again_and_counts_once(
    deployment: Deployment, api: Api, salad: FakeSalad, fault: Any
) -> None:
    container = deployment.rent()
    host = avoid(deployment)
    salad.inject(fault, f"POST /api/public/organizations/acme/projects/training/containers/{container.imds.name}/inst")
    container.enroll().refused(ErrorCode.UNAVAILABLE)
    if fault == "429":
        container.enroll().refused(ErrorCode.HOST_QUARANTINED, "identity")
    assert deployment.container().environment["SALAD_MACHINE_ID"] != host
    assert deployment.machine().reallocated == [host]
    assert [type_ for type_, _ in events(api)].count("reallocated") == 1


def test_a_machine_that_moved_to_a_quarantined_host_gives_its_job_back_first(
    deployment: Deployment, api: Api, salad: FakeSalad
) -> None:
    container = deployment.rent()
    key = container.enroll().ok()["api_key"]
    query = {"machine_id": container.imds.name}
    (work,) = api.get("/work", key=key, query=query, headers={"x-lease-aware": "1"}).ok()
    api.post("/machines/heartbeat", {"job_id": work["id"]}, key=key).ok()
    moved = deployment.move()
    host = avoid(deployment)
    moved.enroll().refused(ErrorCode.HOST_QUARANTINED, "identity")
    assert (deployment.machine().state, deployment.machine().job_id) == (State.READY, None)
    assert [type_ for type_, _ in events(api)][-3:] == ["busy", "ready", "reallocated"]
    deployment.tick(8)
    deployment.container().enroll().ok()
    assert deployment.machine().reallocated == [host]


def test_a_host_whose_quarantine_is_over_enrols(deployment: Deployment, salad: FakeSalad) -> None:
    container = deployment.rent()
    avoid(deployment, hours=0)
    container.enroll().ok()
    assert (moves(salad), deployment.machine().reallocated) == (0, [])


def test_a_host_that_comes_back_ends_the_machine_with_its_boot(
    deployment: Deployment, api: Api, salad: FakeSalad
) -> None:
    container = deployment.rent()
    name, host = container.imds.name, avoid(deployment)
    for _ in range(40):
        deployment.tick()
        instance = salad.group(name).instances[0]
        instance.machine_id = host
        if instance.state == "running" and deployment.machine().state is State.BOOTING:
            container.enroll().refused(ErrorCode.HOST_QUARANTINED, "identity")
        if deployment.machine().state is not State.BOOTING:
            break
    assert deployment.machine().reason == "the machine did not start its worker in time"
    assert deployment.machine().reallocated == [host] and moves(salad) > 1
