"""The calls of the workers on rented machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineState
from baton.contract.names import Scope
from functions.api.machines.machine_calls import ALONE_S, HEARTBEAT_S, SEEN_EVERY_S
from functions.fleet.offers.reputation import QUARANTINE_S
from functions.fleet.records import FleetEvent, Machine
from functions.settings import ControlPlaneSettings
from tests.kits.api.fleets import DOCUMENT, OFFER, machine_of, make_machine, put_machine
from tests.kits.api.harness import NOW, TENANT, Answer, Api, Held, memory_api

AS_OFFERED = {"gpu_model": "NVIDIA GeForce RTX 4090", "gpus": 1, "vram_gib": 23.5, "disk_gib": 60}
NONCE = "0123456789abcdef" * 4
JOB = "146683a1-cb76-4702-9fef-fcccd32594f1"


def prepare(api: Api, state: MachineState = MachineState.BOOTING, *, image: str | None = None, **changes: Any) -> str:
    """Store the fleet and a machine `m1`; return the machine's enrolment token."""
    api.call("PUT", "/fleets/nights", {**DOCUMENT, "queues": ["default", "slow"], "image": image}).ok()
    put_machine(api, make_machine("m1", state, **changes))
    return api.issue(TENANT, Scope.ENROLL, expires_at=NOW + 1800, machine="nights/m1")


def enroll(api: Api, token: str, **changes: Any) -> Answer:
    return api.post("/machines/enroll", {**AS_OFFERED, **changes}, key=token)


def beat(api: Api, key: str, job_id: str | None = None) -> dict[str, Any]:
    orders: dict[str, Any] = api.post("/machines/heartbeat", {"job_id": job_id} if job_id else {}, key=key).ok()
    return orders


def claim(api: Api, machine_id: str = "m1") -> Held:
    """Submit a job, and claim the job as a machine's worker does."""
    api.submit()
    return api.claim(machine_id=machine_id)


def events(api: Api) -> list[tuple[str, str]]:
    found = api.get("/fleets/nights/events").ok()["events"]
    return [(one["type"], one["reason"]) for one in reversed(found)]


def test_a_machine_enrols_and_works(api: Api) -> None:
    token = prepare(api, image="me/trainer:1")
    api.clock.advance(90)
    made = enroll(api, token).ok()
    key = made.pop("api_key")
    assert made == {
        "machine_id": "m1",
        "queues": ["default", "slow"],
        "usd_per_hour": 0.4,
        "heartbeat_interval_s": HEARTBEAT_S,
        "gpu_model": "RTX 4090",
        "vram_gib": 24,
        "disk_gib": 40,
        "image": "me/trainer:1",
    }
    stored = machine_of(api, "m1")
    assert (stored.state, stored.version, stored.worker_key) == (MachineState.READY, 2, key.split("_")[1])
    assert (stored.enrolled_at, stored.seen_at, stored.since) == (NOW + 90, NOW + 90, NOW + 90)

    (issued,) = [one for one in api.get("/keys").ok()["keys"] if one["id"] == stored.worker_key]
    assert (issued["name"], issued["scopes"]) == ("machine m1", ["worker"])
    assert issued["expires_at"] == stored.ends_by + 3600
    assert api.get("/work", key=key).ok() == []
    api.get("/jobs", key=key).refused(ErrorCode.WRONG_SCOPE, "x-api-key")

    held, other = claim(api), claim(api)
    assert beat(api, key, held.id) == {
        "state": "busy",
        "drain": False,
        "reason": "",
        "alone_s": ALONE_S,
        "heartbeat_interval_s": HEARTBEAT_S,
    }
    assert beat(api, key, other.id)["state"] == "busy"
    assert machine_of(api, "m1").job_id == other.id
    assert beat(api, key)["state"] == "ready"
    assert machine_of(api, "m1").job_id is None
    assert [type_.removeprefix("machine.") for type_, _ in events(api)] == [
        *("registered", "ready", "busy"),
        *("ready", "busy", "ready"),
    ]


def test_a_machine_claims_only_from_the_queues_of_its_fleet(api: Api) -> None:
    key = enroll(api, prepare(api)).ok()["api_key"]
    api.submit(queue="elsewhere")
    with api.unchanged():
        for path in ("/work", "/work/peek"):
            said = api.get(path, key=key, query={"queue": "elsewhere"}).refused(ErrorCode.WRONG_SCOPE, "queue")
            assert "from the queues default, slow only" in said["message"]
    api.submit(queue="slow")
    (work,) = api.get("/work", key=key, query={"queue": "slow"}, headers={"x-lease-aware": "1"}).ok()
    assert api.job(work["id"])["queue"] == "slow"


def test_a_machine_claims_only_jobs_with_the_tags_of_its_fleet(api: Api) -> None:
    token = prepare(api)
    api.call("PUT", "/fleets/nights", {**DOCUMENT, "tags": {"team": "a,b"}}).ok()
    key = enroll(api, token).ok()["api_key"]
    assert machine_of(api, "m1").terms.tags == {"team": "a,b"}
    for tags in ({}, {"team": "a"}, {"team": "b", "of": "a,b"}):
        api.submit(tags=tags)
    with api.unchanged():
        for path in ("/work", "/work/peek"):
            assert api.get(path, key=key, headers={"x-lease-aware": "1"}).ok() == []
    tagged = api.submit(tags={"team": "a,b", "run": "7"})["id"]
    (work,) = api.get("/work", key=key, headers={"x-lease-aware": "1"}).ok()
    assert work["id"] == tagged
    # A worker with a key of a user takes every job.
    assert [api.claim().id for _ in range(3)]


def test_an_enrolment_token_is_valid_once_and_for_one_call(api: Api) -> None:
    token = prepare(api)
    api.get("/work", key=token).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
    enroll(api, token).ok()
    with api.unchanged():
        assert "m1 is ready" in enroll(api, token).refused(ErrorCode.ENROLMENT_USED, "x-api-key")["message"]
    late = api.issue(TENANT, Scope.ENROLL, expires_at=NOW + 1800, machine="nights/m1")
    api.clock.advance(1800)
    with api.unchanged():
        enroll(api, late).refused(ErrorCode.ENROLMENT_EXPIRED, "x-api-key")


def test_a_container_that_proves_itself_enrols_again_and_its_former_key_ends(api: Api) -> None:
    """The answer to the enrolment was lost, or the agent of the container started again, hours later."""
    token = prepare(api)
    lost = enroll(api, token, nonce=NONCE).ok()
    again = enroll(api, token, nonce=NONCE, disk_gib=1).ok()
    assert again.pop("api_key") != lost.pop("api_key") and again == lost
    api.clock.advance(7200)
    key = enroll(api, token, nonce=NONCE).ok()["api_key"]
    stored = machine_of(api, "m1")
    assert stored.worker_key == key.split("_")[1] and stored.state is MachineState.READY
    assert beat(api, key)["state"] == "ready"
    valid = [
        one["id"] for one in api.get("/keys").ok()["keys"] if one["name"] == "machine m1" and not one["revoked_at"]
    ]
    assert valid == [stored.worker_key]
    assert [type_ for type_, _ in events(api)] == ["machine.registered", "machine.ready"]
    for other in ({"nonce": "f" * 64}, {}):
        with api.unchanged():
            enroll(api, token, **other).refused(ErrorCode.ENROLMENT_USED, "x-api-key")


def test_a_token_whose_container_has_a_secret_lives_as_long_as_the_machine(api: Api) -> None:
    token = prepare(api)
    enroll(api, token, nonce=NONCE).ok()
    ends_by = machine_of(api, "m1").ends_by
    (enrolment,) = [one for one in api.get("/keys").ok()["keys"] if one["id"] == token.split("_")[1]]
    assert enrolment["expires_at"] == ends_by + 3600
    assert machine_of(api, "m1").enrolment_key == enrolment["id"]
    lost = machine_of(api, "m1").model_copy(update={"state": MachineState.TERMINATING, "version": 3})
    put_machine(api, lost)
    with api.unchanged():
        enroll(api, token, nonce=NONCE).refused(ErrorCode.MACHINE_UNKNOWN, "x-api-key")
        enroll(api, token, nonce="short").refused(ErrorCode.INVALID_VALUE, "nonce")


def overtaken_by(api: Api, monkeypatch: pytest.MonkeyPatch, other: Callable[[], object]) -> None:
    """Let another writer come before the next write of a machine."""
    assert api.context.fleet is not None
    real = api.context.fleet.update_machine

    def update(machine: Machine, events: Sequence[FleetEvent] = ()) -> None:
        monkeypatch.undo()
        other()
        real(machine, events)

    monkeypatch.setattr(api.context.fleet, "update_machine", update)


def test_two_enrolments_at_once_make_one_worker(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    token = prepare(api)
    winners: list[Answer] = []
    overtaken_by(api, monkeypatch, lambda: winners.append(enroll(api, token)))
    enroll(api, token).refused(ErrorCode.CONFLICT)
    assert winners[0].ok()["api_key"].split("_")[1] == machine_of(api, "m1").worker_key
    enroll(api, token).refused(ErrorCode.ENROLMENT_USED, "x-api-key")


@pytest.mark.parametrize(
    ("hardware", "problem"),
    [
        ({"gpu_model": "NVIDIA RTX 4090D"}, "names the GPU RTX 4090, the machine has NVIDIA RTX 4090D"),
        ({"gpu_model": None}, "names the GPU RTX 4090, the machine has none"),
        ({"gpus": 0}, "names 1 GPUs, the machine has 0"),
        ({"vram_gib": 22.3}, "names 24 GiB VRAM, the machine has 22.3"),
        ({"disk_gib": 35}, "names 40 GiB disk, the machine has 35 free"),
    ],
    ids=["model", "none", "number", "vram", "disk"],
)
def test_a_machine_unlike_its_offer_is_given_back(api: Api, hardware: dict[str, Any], problem: str) -> None:
    token = prepare(api)
    error = enroll(api, token, **hardware).refused(ErrorCode.PREFLIGHT_FAILED)
    assert problem in error["message"]
    stored = machine_of(api, "m1")
    assert (stored.state, stored.worker_key) == (MachineState.TERMINATING, None)
    assert problem in stored.reason
    assert [type_ for type_, _ in events(api)] == ["machine.registered", "machine.terminating"]
    assert api.context.fleet is not None
    (host, quarantine), *_ = api.context.fleet.quarantined(NOW).items()
    assert (host, quarantine.until, quarantine.failures) == ("loopback:h1", NOW + QUARANTINE_S["hardware"], 1)
    enroll(api, token).refused(ErrorCode.ENROLMENT_USED, "x-api-key")


def test_another_container_with_the_token_of_a_machine_enrols_nobody(api: Api) -> None:
    """The provider made two containers for one token: the tick destroys the second one, whose worker must not begin."""
    token = prepare(api, offer=OFFER.model_copy(update={"provider": "vast"}))
    with api.unchanged():
        said = enroll(api, token, instance="h-other").refused(ErrorCode.MACHINE_UNKNOWN, "instance")
    assert "instance h-other" in said["message"] and "h-m1" not in said["message"]
    enroll(api, token, instance="h-m1", nonce=NONCE).ok()
    with api.unchanged():
        enroll(api, token, instance="h-other", nonce=NONCE).refused(ErrorCode.MACHINE_UNKNOWN, "instance")
    enroll(api, token, instance="h-m1", nonce=NONCE).ok()


def test_a_host_that_is_itself_a_rented_container_enrols(api: Api) -> None:
    enroll(api, prepare(api, offer=OFFER.model_copy(update={"provider": "ssh"})), instance="42").ok()


def test_a_machine_whose_create_is_not_recorded_yet_enrols_later(api: Api) -> None:
    token = prepare(api, MachineState.REQUESTED, handle=None, created_at=None)
    with api.unchanged():
        assert "not recorded yet" in enroll(api, token).refused(ErrorCode.CONFLICT, "x-api-key")["message"]


@pytest.mark.parametrize("state", [MachineState.TERMINATING, MachineState.LOST, MachineState.GONE])
def test_a_machine_that_was_given_up_does_not_enrol(api: Api, state: MachineState) -> None:
    token = prepare(api, state, reason="the machine did not start its worker in time")
    with api.unchanged():
        enroll(api, token).refused(ErrorCode.MACHINE_UNKNOWN, "x-api-key")


def test_only_the_keys_of_machines_make_the_calls_of_machines(api: Api) -> None:
    prepare(api)
    elsewhere = api.issue(TENANT, Scope.ENROLL, Scope.WORKER, machine="days/m1")
    foreign = api.issue("rival", Scope.ENROLL, Scope.WORKER, machine="nights/m1")
    unbound = api.issue(TENANT, Scope.ENROLL, Scope.WORKER)
    with api.unchanged():
        for key in (unbound, elsewhere, foreign):
            api.post("/machines/heartbeat", {}, key=key).refused(ErrorCode.MACHINE_UNKNOWN, "x-api-key")
            enroll(api, key).refused(ErrorCode.MACHINE_UNKNOWN, "x-api-key")


@pytest.mark.parametrize("state", [MachineState.DRAINING, MachineState.TERMINATING, MachineState.LOST])
def test_a_machine_on_its_way_out_drains(api: Api, state: MachineState) -> None:
    prepare(api, state, job_id=JOB, reason="the budget is spent")
    key = api.issue(TENANT, Scope.WORKER, machine="nights/m1")
    orders = beat(api, key, JOB)
    assert (orders["state"], orders["drain"], orders["reason"]) == (state, True, "the budget is spent")


def test_a_draining_machine_ends_when_it_holds_no_job(api: Api) -> None:
    prepare(api, MachineState.DRAINING, job_id=JOB, reason="max_hours is over")
    key = api.issue(TENANT, Scope.WORKER, machine="nights/m1")
    # The worker claimed the other job before it learned that it drains.
    other = claim(api)
    assert beat(api, key, other.id)["state"] == "draining"
    assert machine_of(api, "m1").job_id == other.id
    assert beat(api, key)["state"] == "terminating"
    assert events(api) == [("machine.terminating", "max_hours is over")]


def test_a_machine_is_busy_only_with_a_job_that_it_holds(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(api, MachineState.READY)
    key = api.issue(TENANT, Scope.WORKER, machine="nights/m1")
    ended = claim(api)
    ended.post("/fail", {"job_id": ended.id}).ok()
    for invented in (JOB, claim(api, "m2").id, ended.id):
        assert beat(api, key, invented)["state"] == "ready"
    held = claim(api).id
    assert beat(api, key, held)["state"] == "busy"
    monkeypatch.setattr(api.context.leases, "get", None)
    # The lease is read only when the job changes.
    assert beat(api, key, held)["state"] == "busy"


def test_signs_of_life_are_stored_once_an_interval(api: Api) -> None:
    prepare(api, MachineState.READY, seen_at=NOW)
    key = api.issue(TENANT, Scope.WORKER, machine="nights/m1")
    api.clock.advance(SEEN_EVERY_S - 1)
    with api.unchanged():
        beat(api, key)
    api.clock.advance(1)
    beat(api, key)
    assert machine_of(api, "m1").seen_at == NOW + SEEN_EVERY_S
    assert events(api) == []


def test_the_tick_may_write_in_between(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(api, MachineState.READY)
    key = api.issue(TENANT, Scope.WORKER, machine="nights/m1")
    tick = machine_of(api, "m1").model_copy(update={"version": 2})
    overtaken_by(api, monkeypatch, lambda: put_machine(api, tick))
    api.post("/machines/heartbeat", {}, key=key).refused(ErrorCode.CONFLICT)


def test_a_fast_clock_counts_in_the_fleets_time_and_answers_in_real_time() -> None:
    api = memory_api(
        settings=ControlPlaneSettings(fleet_clock_speed=60, fleet_clock_server_s=NOW, fleet_clock_fleet_s=NOW)
    )
    token = prepare(api)
    api.clock.advance(10)
    made = enroll(api, token).ok()
    assert made["heartbeat_interval_s"] == 1
    stored = machine_of(api, "m1")
    assert stored.enrolled_at == NOW + 600
    (key,) = [one for one in api.get("/keys").ok()["keys"] if one["id"] == stored.worker_key]
    assert key["expires_at"] == NOW + 24 * 60 + 3600
    assert beat(api, made["api_key"])["alone_s"] == 15
    assert api.get("/fleets/nights").ok()["at"] == NOW + 600


def test_a_fast_clock_lets_the_worker_report_the_price_of_an_hour_of_the_server() -> None:
    # Attempts last hours of the server: consoles, rules and `baton watch` multiply these by the price of the worker.
    api = memory_api(
        settings=ControlPlaneSettings(fleet_clock_speed=60, fleet_clock_server_s=NOW, fleet_clock_fleet_s=NOW)
    )
    assert api.context.fleet
    token = f"{api.context.fleet.deployment()}-nights-000000000001"
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    put_machine(api, make_machine(token, MachineState.BOOTING))
    key = api.issue(TENANT, Scope.ENROLL, expires_at=NOW + 1800, machine=f"nights/{token}")
    price = enroll(api, key).ok()["usd_per_hour"]
    job = api.submit()
    api.claim(machine_id=token, price_usd_per_hour=str(price))
    api.clock.advance(60)
    (attempt,) = api.get(f"/job/{job['id']}/attempts").ok()["attempts"]
    machines = api.get(f"/job/{job['id']}/machines").ok()
    assert (machines["usd"], machines["attempts"][0]["machine"]["usd_per_hour"]) == (0.4, 0.4)
    assert attempt["price_usd_per_hour"] * 60 / 3600 == pytest.approx(0.4)
