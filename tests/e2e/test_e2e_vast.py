"""Machines of Vast.ai: real processes for control plane and agents, the fake of Vast.ai; the test is the host.

A container gets the environment of its instance and the variables with which it can destroy its own instance.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import FleetSpec, MachineState, MachineView
from baton.contract.jobs.job import JobState
from fakes.vast.instances import FakeInstance
from fakes.vast.provider import KEY, FakeVast
from tests.conformance.drivers.driven_vast import vast_account
from tests.kits.network.proxies import FaultyProxy
from tests.kits.stack.stack import AgentProcess, Stack, chain, clean_environment
from tests.kits.waiting import until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

SPEED = 60
"""The fleets' minutes are seconds."""


class FleetTime:
    """Clock of the fleets, once `begin` knows its time; the provider bills by the same clock."""

    def __init__(self) -> None:
        self._began, self._base = time.time(), time.time()

    def begin(self, at: int) -> None:
        self._began, self._base = time.time(), at

    def __call__(self) -> float:
        return self._base + (time.time() - self._began) * SPEED


class Cloud:
    """Control plane and Vast.ai."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.time = FleetTime()
        self.fake = FakeVast(self.time)
        self.fake.boot_s = 30
        self.stack = Stack(fleet_clock_speed=SPEED, settings={"TMPDIR": str(directory)})

    def apply(self, name: str, **changes: Any) -> None:
        document = {
            "name": name,
            "providers": ["vast"],
            "image": "registry.example/baton-agent:0.1.0",
            "gpu_models": ["RTX 4090"],
            "min_vram_gib": 24,
            "disk_gib": 1,
            "max_usd_per_hour": 0.6,
            "queues": [name],
            "budget": {"total_usd": 5},
            **changes,
        }
        view = self.stack.client.put_fleet(FleetSpec.model_validate(document))
        self.time.begin(view.at)

    def container(self, **variables: str) -> tuple[FakeInstance, AgentProcess]:
        """Wait until an instance runs; start its container. `variables`: replace those of its environment."""
        running = lambda one: not one.destroyed and one.status(self.time()) == "running"  # noqa: E731
        instance: FakeInstance = until(
            lambda: next((one for one in self.fake.instances if running(one)), None), what="an instance"
        )
        home = self.directory / instance.handle
        programs = home / "bin"
        programs.mkdir(parents=True)
        (programs / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 24564, 580.65.06'\n")
        (programs / "nvidia-smi").chmod(0o700)
        base = clean_environment()
        environment = {**base, **instance.environment, "VAST_URL": self.fake.url, "HOME": str(home), **variables}
        environment["PATH"] = os.pathsep.join([str(programs), base["PATH"]])
        return instance, AgentProcess(environment, home / "output.log")

    def machine(self, name: str, state: MachineState) -> MachineView:
        found: MachineView = until(
            lambda: next((one for one in self.stack.client.fleet(name).machines if one.state is state), None),
            what=f"a machine that is {state}",
        )
        return found

    def receipt(self, name: str) -> MachineView:
        """Wait for the end of the only machine."""
        (machine,) = until(lambda: self.stack.client.ended_machines(name), what="a receipt")
        assert (machine.state, len(machine.receipt.absent_at)) == (MachineState.GONE, 2)
        return machine


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    made = Cloud(tmp_path_factory.mktemp("v"))
    with made.fake, made.stack:
        view = made.stack.client.put_provider("vast", vast_account(made.fake))
        assert (view.account, view.balance_usd, view.problems) == ("ada@example.com", 100.0, [])
        yield made
    assert (made.fake.labels(), made.fake.meter.billing()) == ([], [])
    for log in made.directory.rglob("output.log"):
        assert KEY not in log.read_text() and "baton_" not in log.read_text()


def test_a_job_runs_on_a_rented_instance_and_the_receipt_is_the_bill(cloud: Cloud) -> None:
    cloud.apply("nights", idle_timeout_s=240)  # A loaded computer may need more than a second for the first claim.
    job_id = cloud.stack.submit("chain.py", {"steps": 20}, queue="nights")
    instance, agent = cloud.container()
    assert set(instance.body["env"]) == {"BATON_API_URL", "BATON_ENROLMENT_TOKEN"}
    cloud.stack.wait_for(job_id, JobState.COMPLETE)
    assert cloud.stack.artifact(job_id) == chain(20)
    assert agent.wait() == 0
    assert "this machine is given back to Vast.ai" in agent.log()
    machine = cloud.receipt("nights")
    assert (machine.provider_id, machine.reason) == (instance.handle, "no job for idle_timeout_s")
    assert machine.receipt is not None
    assert machine.receipt.charged_usd == pytest.approx(cloud.fake.meter.usd(instance.handle))
    billed_until = max(one.end_at or 0 for one in cloud.fake.meter.spans if one.handle == instance.handle)
    # The ledger counts until the first list without the machine, which comes late on a loaded computer.
    late_usd = (machine.receipt.absent_at[0] - billed_until) / 3600 * 0.23
    # The clocks of the provider and of the fleets differ by what a request takes, a minute at this speed.
    minute_usd = 0.23 / 60
    surplus_usd = machine.receipt.observed_usd - machine.receipt.charged_usd - late_usd
    assert -minute_usd <= surplus_usd <= 3 * minute_usd
    assert cloud.stack.client.fleet("nights").bounds[0].spent_usd == pytest.approx(machine.receipt.observed_usd)


def test_a_machine_ends_its_own_bill_while_no_control_plane_answers(cloud: Cloud) -> None:
    cloud.apply("alone", min=1, idle_timeout_s=86_400)
    with FaultyProxy(cloud.stack.front) as way:
        instance, agent = cloud.container(BATON_API_URL=way.url)
        cloud.machine("alone", MachineState.READY)
        # The first answer names the time of this fast clock, and the second request follows the first answer.
        until(lambda: len(way.requests("/machines/heartbeat$")) > 1, what="an answered heartbeat")
        with way.dropping():
            assert agent.wait(120) == 0
            assert (instance.destroyed, cloud.fake.meter.billing()) == (True, [])
    assert "the control plane has not answered" in agent.log()
    cloud.stack.client.stop_fleet("alone")
    assert "vanished" in cloud.receipt("alone").reason
