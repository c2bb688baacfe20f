"""Test the enrolment of a rented machine: hardware in, identity out; patience with an API that is not ready yet."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
from pydantic import SecretStr

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import EnrollAnswer, EnrollRequest, MachineMeasurements
from gpu_client.agent.app.enrolment import ENROL_WITHIN_S, NONCE, settings_of_machine
from gpu_client.agent.app.enrolment import enroll as agent_enroll
from gpu_client.agent.app.settings import AgentSettings
from gpu_client.transport.errors import ApiError, BatonError, UnexpectedAnswer, Unreachable
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import foreign, refusal

TOKEN = "baton_enrol_verysecret"
ANSWER = EnrollAnswer(
    machine_id="dep10000-nights-1",
    api_key="baton_worker_alsosecret",
    queues=["nights", "default"],
    usd_per_hour=0.2,
    heartbeat_interval_s=60,
)
MEASURED = MachineMeasurements(driver="580.65.06", disk_write_mb_s=850.5, download_mbit_s=400)
enroll = partial(agent_enroll, measure=lambda: MEASURED)


class Api:
    """Answers enrolments with the next answer, the last one forever."""

    def __init__(self, *answers: EnrollAnswer | BatonError) -> None:
        self.answers = list(answers)
        self.requests: list[EnrollRequest] = []

    def enroll(self, request: EnrollRequest) -> EnrollAnswer:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BatonError):
            raise answer
        return answer


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    return AgentSettings(
        api_url="http://control.plane",
        enrolment_token=TOKEN,
        workspace=tmp_path,
        gpus=2,
        vram_gib=23.7,
        gpu_model="NVIDIA GeForce RTX 4090",
        disk_gib=80,
    )


def test_the_hardware_goes_out_and_the_identity_comes_back(settings: AgentSettings) -> None:
    api, clock = Api(ANSWER), Clock()
    assert enroll(settings, api, clock=clock, pause=clock.sleep) == ANSWER
    (request,) = api.requests
    hardware = {"gpu_model": "NVIDIA GeForce RTX 4090", "gpus": 2, "vram_gib": 23.7, "disk_gib": 80}
    assert request.model_dump(exclude={"nonce", "measured", "instance"}, exclude_none=True) == hardware
    assert request.measured == MEASURED
    found = settings_of_machine(settings, ANSWER)
    assert (found.machine_id, found.worker_id, found.price_usd_per_hour) == (ANSWER.machine_id, ANSWER.machine_id, 0.2)
    assert found.api_key and found.api_key.get_secret_value() == ANSWER.api_key
    assert found.workspace == settings.workspace
    assert "secret" not in repr(found)


def test_a_container_names_its_instance(settings: AgentSettings) -> None:
    for environ, instance in (
        ({"CONTAINER_ID": "42", "CONTAINER_API_KEY": "k"}, "42"),
        ({"RUNPOD_POD_ID": "pod-1"}, "pod-1"),
        ({"CONTAINER_ID": ""}, None),
        ({"CONTAINER_ID": "of the host's owner " * 7}, None),
        ({"CONTAINER_ID": "of the host's owner " * 7, "RUNPOD_POD_ID": "pod-1"}, "pod-1"),
        ({}, None),
    ):
        api = Api(ANSWER)
        enroll(settings, api, environ=environ)
        assert api.requests[0].instance == instance


def test_a_machine_claims_with_what_its_fleet_has_rented(settings: AgentSettings) -> None:
    """The preflight check permits a little less VRAM and free disk than rented; jobs ask for what the fleet rents."""
    rented = ANSWER.model_copy(
        update={"gpu_model": "RTX 4090", "vram_gib": 24.0, "disk_gib": 80.0, "image": "me/trainer:1"}
    )
    less = settings.model_copy(update={"vram_gib": 22.9, "disk_gib": 73.0})
    query = settings_of_machine(less, rented).work_query()
    assert (query.gpu_model, query.vram_gib, query.disk_gib, query.image) == ("RTX 4090", 24, 80, "me/trainer:1")
    own = settings_of_machine(less, ANSWER).work_query()
    assert (own.gpu_model, own.vram_gib, own.disk_gib) == ("NVIDIA GeForce RTX 4090", 22.9, 73)


def test_a_machine_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_client.agent.app.settings._query_nvidia_gpus", lambda: [])
    bare = AgentSettings(api_url="http://control.plane", enrolment_token=TOKEN, workspace=tmp_path)
    api, clock = Api(ANSWER), Clock()
    enroll(bare, api, clock=clock, pause=clock.sleep)
    (request,) = api.requests
    assert (request.gpu_model, request.gpus, request.vram_gib) == (None, 0, 0)
    assert request.disk_gib > 0


def test_the_api_may_be_late(settings: AgentSettings, caplog: pytest.LogCaptureFixture) -> None:
    """The network of a young machine, or the record of its own create, can be later than the machine's first call."""
    late = [Unreachable("no route"), UnexpectedAnswer("?"), foreign(503), refusal(ErrorCode.CONFLICT)]
    api, clock = Api(*late, ANSWER), Clock()
    with caplog.at_level(logging.INFO):
        assert enroll(settings, api, clock=clock, pause=clock.sleep) == ANSWER
    assert clock.slept == sorted(clock.slept) and len(clock.slept) == len(late)
    assert "no route" in caplog.text
    assert "secret" not in caplog.text


def test_a_machine_is_measured_once_and_again_only_after_a_failure(settings: AgentSettings) -> None:
    """The store of the download can be out of reach for a young machine, as the API can."""
    outcomes: list[MachineMeasurements | BatonError] = [Unreachable("no route to the store"), MEASURED]

    def measure() -> MachineMeasurements:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    api, clock = Api(Unreachable("lost"), ANSWER), Clock()
    agent_enroll(settings, api, measure=measure, clock=clock, pause=clock.sleep)
    assert [one.measured for one in api.requests] == [MEASURED] * 2 and outcomes == []
    assert len(clock.slept) == 2


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.ENROLMENT_USED, 409),
        (ErrorCode.ENROLMENT_EXPIRED, 403),
        (ErrorCode.PREFLIGHT_FAILED, 409),
        (ErrorCode.MACHINE_UNKNOWN, 404),
        (ErrorCode.KEY_UNKNOWN, 403),
    ],
)
def test_a_refusal_is_final(settings: AgentSettings, code: ErrorCode, status: int) -> None:
    api, clock = Api(refusal(code, status)), Clock()
    with pytest.raises(ApiError):
        enroll(settings, api, clock=clock, pause=clock.sleep)
    assert (len(api.requests), clock.slept) == (1, [])


def test_patience_has_an_end(settings: AgentSettings) -> None:
    api, clock = Api(Unreachable("no route")), Clock()
    with pytest.raises(Unreachable):
        enroll(settings, api, clock=clock, pause=clock.sleep)
    assert ENROL_WITHIN_S - 60 < sum(clock.slept) <= ENROL_WITHIN_S


def nonces(settings: AgentSettings) -> list[str | None]:
    """Return the secrets of one enrolment with a lost answer."""
    api, clock = Api(Unreachable("lost"), ANSWER), Clock()
    enroll(settings, api, clock=clock, pause=clock.sleep)
    return [one.nonce for one in api.requests]


def test_a_container_keeps_its_secret_for_its_token(settings: AgentSettings) -> None:
    first = nonces(settings)
    assert len(first) == 2 and len(set(first)) == 1 and first[0] is not None and len(first[0]) == 64
    assert nonces(settings) == first, "the agent started again"
    place = settings.workspace / NONCE
    assert place.stat().st_mode & 0o777 == 0o600 and TOKEN not in place.read_text()
    other = settings.model_copy(update={"enrolment_token": SecretStr(f"{TOKEN}2")})
    assert nonces(other)[0] != first[0], "another machine in the same workspace"
    place.write_bytes(b"\xff")
    assert nonces(settings)[0] not in (None, first[0])
