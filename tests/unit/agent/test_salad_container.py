"""Test a rented machine on Salad: the proof of its identity, and its wait for the deletion of its group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import EnrollRequest
from fakes.salad.api import RTX_4090, FakeSalad
from fakes.salad.imds import FakeImds
from fakes.salad.signing_key import WorkloadKey
from gpu_client.agent.app import program, salad_container
from gpu_client.agent.app.settings import AgentSettings
from gpu_client.agent.app.shutdown import ShutdownRequest
from gpu_client.transport.errors import Unreachable
from tests.kits.clock import Clock
from tests.unit.agent.test_enrolment import ANSWER, Api, enroll

NAME = "dep10000-nights-1"
TOKEN = "baton_enrolid_verysecret"


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeImds]:
    salad, key = FakeSalad(Clock(1_700_000_000)), WorkloadKey()
    resources = {"cpu": 4, "memory": 4096, "gpu_classes": [RTX_4090]}
    container = {"image": "i", "resources": resources, "environment_variables": {"BATON_ENROLMENT_TOKEN": TOKEN}}
    policies = {"replicas": 1, "restart_policy": "always", "autostart_policy": True}
    salad.cloud.create({"name": NAME, **policies, "container": container})
    with FakeImds(salad, NAME, sign=key.sign, key_id=key.key_id) as imds:
        for name, value in salad.environment(NAME).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SALAD_IMDS_URL", imds.url)
        monkeypatch.setenv("BATON_API_URL", "http://127.0.0.1:9")
        monkeypatch.delenv("BATON_API_KEY", raising=False)
        yield imds


def test_the_identity_comes_from_the_node_and_never_through_a_proxy(
    imds: FakeImds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert salad_container.read_identity().count(".") == 2
    assert imds.calls[0].headers["metadata"] == "true"


def test_each_try_proves_the_identity_anew(imds: FakeImds, tmp_path: Path) -> None:
    """A node may be slow to know its container, and a proof lives for 5 minutes."""
    settings = AgentSettings(workspace=tmp_path, gpus=0, vram_gib=0)
    api, clock = Api(Unreachable("no route"), ANSWER), Clock()
    imds.inject("500")
    assert enroll(settings, api, identify=salad_container.read_identity, clock=clock, pause=clock.sleep) == ANSWER
    first, second = (one.identity for one in api.requests)
    assert first and second and first != second
    assert len(clock.slept) == 2
    EnrollRequest(identity=first)


def test_only_machines_of_fleets_on_salad_prove_themselves(imds: FakeImds, monkeypatch: pytest.MonkeyPatch) -> None:
    assert salad_container.is_rented(AgentSettings())
    monkeypatch.setenv("BATON_API_KEY", "baton_id_verysecret")
    assert not salad_container.is_rented(AgentSettings())
    monkeypatch.delenv("BATON_API_KEY")
    monkeypatch.delenv("SALAD_CONTAINER_GROUP_ID")
    assert not salad_container.is_rented(AgentSettings())


def test_a_machine_that_is_done_idles_until_its_group_is_deleted(
    imds: FakeImds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends would be started again by Salad, after a failure on another node, and billed for ever."""
    waited: list[str] = []

    @contextmanager
    def signals(stop: ShutdownRequest) -> Iterator[None]:
        waited.append("for a signal")
        stop.request("SIGTERM")
        yield

    monkeypatch.setattr(salad_container, "stop_on_signals", signals)
    monkeypatch.setattr(program, "_run", lambda settings, stop: program.EXIT_BAD_SETTINGS)
    assert program.main() == program.EXIT_BAD_SETTINGS
    assert waited == ["for a signal"]
    monkeypatch.setattr(program, "_run", lambda settings, stop: int(stop.request("SIGTERM")))
    program.main()
    assert len(waited) == 1
