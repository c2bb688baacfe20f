"""A machine of Salad whose container moves in mid-job: real processes for control plane and agents, the fake of Salad.

The test is the node: it starts the agent with the environment that Salad gives to the container, and with the metadata
service of the node.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import FleetSpec, MachineState
from baton.contract.jobs.job import AttemptEnd, JobState
from fakes.salad.api import FakeSalad
from fakes.salad.imds import FakeImds
from fakes.salad.signing_key import WorkloadKey
from tests.conformance.drivers.driven_salad import salad_account
from tests.kits.stack.stack import AgentProcess, Stack, chain, clean_environment
from tests.kits.stack.workshop import Gate
from tests.kits.waiting import until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

SPEED = 60
"""The fleets' minutes are seconds."""
DOCUMENT = {
    "name": "nights",
    "providers": ["salad"],
    "image": "me/trainer:1",
    "min_vram_gib": 20,
    "disk_gib": 1,
    "max_usd_per_hour": 1,
    "max_hours": 100,
    "idle_timeout_s": 86_400,
    "queues": ["nights"],
    "budget": {"total_usd": 50},
}


class Node:
    """Node of Salad with a GPU that runs the container of a group."""

    def __init__(self, folder: Path, salad: FakeSalad, name: str, imds: FakeImds) -> None:
        programs = folder / "bin"
        programs.mkdir(parents=True)
        (programs / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 3090, 24576, 580.65.06'\n")
        (programs / "nvidia-smi").chmod(0o700)
        base = clean_environment()
        environment = {**base, **salad.environment(name), "SALAD_IMDS_URL": imds.url, "HOME": str(folder)}
        environment["PATH"] = os.pathsep.join([str(programs), base["PATH"]])
        self.agent = AgentProcess(environment, folder / "output.log")

    def vanish(self) -> None:
        self.agent.kill_group()


@pytest.fixture
def salad() -> Iterator[FakeSalad]:
    with FakeSalad(time.time) as salad:
        cloud = salad.cloud
        cloud.allocate_s = cloud.download_s = cloud.create_s = cloud.stopping_s = 0.0
        yield salad


def test_a_job_goes_on_where_salad_moves_its_machine_and_nothing_is_left(salad: FakeSalad, tmp_path: Path) -> None:
    key, gate = WorkloadKey(), Gate(tmp_path / "gate", 20)
    salad.keys = [key.jwk]
    with Stack(fleet_clock_speed=SPEED, settings={"TMPDIR": str(tmp_path)}) as stack:
        view = stack.client.put_provider("salad", salad_account(salad))
        assert (view.account, view.problems) == ("acme/training", [])
        stack.client.put_fleet(FleetSpec.model_validate(DOCUMENT))
        job_id = stack.submit(
            "chain.py",
            {"steps": 30, "step_s": 0.01},
            queue="nights",
            environment=gate.environment,
            heartbeat_interval_s=1,
        )
        (name,) = until(lambda: list(salad.cloud.groups), what="a group")
        with FakeImds(salad, name, sign=key.sign, key_id=key.key_id) as imds:
            first = Node(tmp_path / "first", salad, name, imds)
            stack.wait_for_commit(job_id, 20)
            salad.cloud.lose_node(salad.group(name), salad.group(name).instances[0])
            first.vanish()
            stack.expire_lease(job_id)
            second = Node(tmp_path / "second", salad, name, imds)
            gate.open()
            stack.wait_for(job_id, JobState.COMPLETE)

            before, after = stack.attempts(job_id)
            assert (before.end, before.checkpoint_step, after.resumed_step) == (AttemptEnd.INTERRUPTED, 20, 20)
            assert before.machine_id == after.machine_id == name
            assert stack.artifact(job_id) == chain(30)

            stack.client.stop_fleet("nights")
            until(lambda: "waits for its deletion" in second.agent.log(), what="an agent that waits")
            assert second.agent.process.poll() is None
            until(lambda: name not in salad.cloud.groups, what="the deletion of the group")
            second.agent.signal(signal.SIGTERM)
            assert second.agent.wait() == 0
        (machine,) = until(lambda: stack.client.ended_machines("nights"), what="a receipt")
        assert machine.state is MachineState.GONE and machine.receipt and len(machine.receipt.absent_at) == 2
        assert machine.receipt.charged_usd is None and machine.receipt.observed_usd > 0
    assert (salad.billing(), salad.cloud.groups) == ([], {})
    secret = salad_account(salad).api_key.get_secret_value()
    for log in tmp_path.rglob("output.log"):
        assert secret not in log.read_text() and "baton_" not in log.read_text()
