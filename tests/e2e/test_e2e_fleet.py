"""Fleets on processes of this computer: jobs get machines, machines go back, and every dollar has a receipt.

Each test has a fleet and a queue of its own. The tests share one stack and one provider, therefore they run in turn.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import requests
from PIL import Image

from baton.contract.elastic.nodes import NodesSpec
from baton.contract.fleets.fleet import FleetSpec, MachineState, MachineView
from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import AttemptEnd, JobState, JobSubmit
from baton.contract.jobs.policy import Policy, Requirements
from baton.contract.jobs.rent import RentSpec, fleet_of
from functions.fleet.drivers.loopback import LoopbackFaults, LoopbackMarket
from tests.kits.stack.stack import Stack, chain
from tests.kits.stack.workshop import Gate
from tests.kits.waiting import until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

SPEED = 60
"""The fleets' minutes are seconds."""
PATIENT = {"idle_timeout_s": 86_400}
"""The machine waits for its first claim, for which a loaded computer needs seconds."""
PRICE = 0.2
"""Price of the loopback provider's cheapest host, in USD per hour."""


class Rental:
    """A stack with a fast fleet clock, and the loopback provider behind the stack."""

    def __init__(self, directory: Path) -> None:
        self.stack = Stack(fleet_clock_speed=SPEED, settings={"TMPDIR": str(directory)})
        (self.directory,) = directory.glob("baton-machines-*")
        self.client = self.stack.client

    def apply(self, name: str, **changes: object) -> None:
        """Store a fleet that serves the queue of its own name."""
        document = {"name": name, "providers": ["loopback"], "queues": [name], "disk_gib": 1, "max_usd_per_hour": 5}
        self.client.put_fleet(FleetSpec.model_validate({**document, "budget": {"total_usd": 5}, **changes}))

    def sell(self, **market: object) -> None:
        """Change the market of the provider."""
        LoopbackMarket.model_validate(market).save(self.directory)

    def agents(self) -> list[psutil.Process]:
        """Return the processes of machines."""
        found = []
        for process in psutil.process_iter():
            try:
                if Path(process.environ().get("HOME", "/")).is_relative_to(self.directory):
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def agent(self) -> psutil.Process:
        """Return the agent of the only machine that runs."""
        (found,) = [one for one in self.agents() if one.cmdline()[-1] == "gpu_client.agent"]
        return found

    def machine(self, name: str, *states: MachineState) -> MachineView:
        """Wait until the fleet has one machine, in one of the states."""
        found: MachineView = until(
            lambda: next((one for one in self.client.fleet(name).machines if one.state in states), None),
            what=f"a machine that is {' or '.join(states)}",
        )
        return found

    def receipts(self, name: str, count: int) -> list[MachineView]:
        """Wait until `count` machines have ended, check their receipts, return the machines, oldest first."""
        until(lambda: not self.client.fleet(name).machines, what="the end of all machines")
        ended = self.client.ended_machines(name)[::-1]
        assert [one.state for one in ended] == [MachineState.GONE] * count
        for one in ended:
            assert one.receipt and len(one.receipt.absent_at) == 2
            assert one.receipt.absent_at[1] - one.receipt.absent_at[0] >= 60
            # The provider bills until the destroy; the ledger counts, to six decimals, until the first list without the
            # machine, which can follow in the same second.
            assert one.receipt.charged_usd is not None
            assert 0 < round(one.receipt.charged_usd, 6) <= one.receipt.observed_usd
        spent = sum(one.receipt.observed_usd for one in ended if one.receipt)
        (bound,) = self.client.fleet(name).bounds
        assert bound.spent_usd == pytest.approx(spent, abs=1e-4)
        assert (bound.reserved_usd, bound.spent_usd <= bound.cap_usd) == (0, True)
        assert self.agents() == [], "nothing runs"
        return ended

    def sold(self, name: str) -> int:
        """Return the number of machines that the provider ever made for the fleet."""
        records = self.directory.glob("machines/*/machine.json")
        return sum(f"-{name}-" in json.loads(path.read_text())["token"] for path in records)

    def transitions(self, name: str, machine: MachineView) -> list[str]:
        """Return the states of a machine in their order, and the events of its money."""
        types = [one.type for one in reversed(self.client.fleet_events(name)) if one.machine == machine.id]
        # At this speed a late tick may also tell that a machine takes long, or that its bill differs.
        late = ("machine.overdue", "charge.differs")
        return [one.removeprefix("machine.") for one in types if one not in late]

    def attempts(self, job_id: str) -> list[AttemptView]:
        return self.stack.attempts(job_id)


@pytest.fixture(scope="module")
def rental(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rental]:
    """Yield one stack; afterwards no machine and no secret in a log is left, although a machine waits for work."""
    made = Rental(tmp_path_factory.mktemp("r"))
    with made.stack:
        yield made
        made.apply("waiting", min=1)
        made.machine("waiting", MachineState.READY)
        assert made.agent().is_running()
        logs = [path.read_text() for path in made.directory.glob("machines/*/output.log")]
    assert made.agents() == [], "a stack without state ends its machines"
    assert logs
    for log in logs:
        assert not re.search(r"baton_[a-z0-9]{8,}_|X-Amz-Signature|\nTraceback", log), log


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """A gate behind step 20 of `trainers/chain.py`."""
    return Gate(tmp_path / "gate", 20)


def train(rental: Rental, queue: str, gate: Gate) -> str:
    parameters = {"steps": 30, "every": 10}
    return rental.stack.submit(
        "chain.py", parameters, queue=queue, environment=gate.environment, heartbeat_interval_s=1
    )


def test_a_job_gets_a_machine_and_nothing_is_left_but_the_receipt(rental: Rental) -> None:
    stack, rng = rental.stack, np.random.default_rng(1)
    for label in (0, 1):
        for number in range(10):
            picture = io.BytesIO()
            Image.fromarray(rng.integers(100 * label, 100 * label + 100, (8, 8), dtype=np.uint8)).save(picture, "PNG")
            stack.write(f"digits/{label}/{number}.png", picture.getvalue(), bucket="training-data")
    rental.apply("digits", **PATIENT)
    job_id = stack.submit(
        "",
        {"steps": 20, "hidden": 4, "batch_size": 8},
        command=["python", "-m", "gpu_client.training.digits"],
        queue="digits",
        inputs=("digits/",),
        outputs=("model.safetensors", "predictions.json"),
    )
    stack.wait_for(job_id, JobState.COMPLETE)
    rental.apply("digits", idle_timeout_s=60)
    (machine,) = rental.receipts("digits", 1)
    assert machine.reason == "no job for idle_timeout_s"
    (attempt,) = rental.attempts(job_id)
    assert attempt.machine_id == machine.id and attempt.ended_at and attempt.price_usd_per_hour
    # The console computes the cost of an attempt in this way, from the hours of the server.
    usd = (attempt.ended_at - attempt.started_at) / 3600 * attempt.price_usd_per_hour
    assert usd == pytest.approx(rental.client.job_machines(job_id).usd, abs=1e-5)
    assert stack.artifact(job_id, "model.safetensors")
    assert rental.transitions("digits", machine) == [
        *("planned", "requested", "booting", "registered", "ready", "busy", "ready", "draining", "terminating", "gone")
    ]


def test_a_lost_host_and_a_lost_answer_cost_the_job_no_step_and_the_fleet_one_machine(
    rental: Rental, gate: Gate
) -> None:
    """The host vanishes in mid-job; the answer to the create of the next machine is lost."""
    rental.apply("faults", max=2, **PATIENT)
    job_id = train(rental, "faults", gate)
    rental.stack.wait_for_commit(job_id, 20)
    rental.machine("faults", MachineState.BUSY)
    rental.sell(faults=LoopbackFaults(lost_answers=1))
    os.killpg(rental.agent().pid, signal.SIGKILL)
    gate.open()
    rental.stack.wait_for(job_id, JobState.COMPLETE)
    rental.apply("faults", max=2, idle_timeout_s=60)
    first, second = rental.attempts(job_id)
    assert (first.end, first.checkpoint_step, second.resumed_step) == (AttemptEnd.INTERRUPTED, 20, 20)
    assert rental.stack.artifact(job_id) == chain(30)
    lost, found = rental.receipts("faults", 2)
    if lost.id != first.machine_id:
        lost, found = found, lost
    assert (lost.id, found.id) == (first.machine_id, second.machine_id)
    assert rental.transitions("faults", lost)[-4:] == ["busy", "lost", "terminating", "gone"]
    assert rental.transitions("faults", found)[:5] == ["planned", "requested", "ambiguous", "booting", "registered"]
    assert rental.sold("faults") == 2, "a create without an answer is never repeated"


def test_a_spent_budget_drains_with_a_checkpoint(rental: Rental, gate: Gate) -> None:
    """The provider raises the price; the money that is reserved no longer pays for the machine."""
    rental.apply("budget", budget={"total_usd": 1.1 * PRICE})
    job_id = train(rental, "budget", gate)
    rental.stack.wait_for_step(job_id, 20)
    rental.machine("budget", MachineState.BUSY)
    rental.sell(usd_per_hour=10 * PRICE)
    (machine,) = rental.receipts("budget", 1)
    rental.sell()
    assert machine.reason == "the budget is spent"
    assert rental.transitions("budget", machine)[-5:] == ["busy", "budget.drained", "draining", "terminating", "gone"]
    (attempt,) = rental.attempts(job_id)
    assert attempt.end is AttemptEnd.RELEASED and attempt.reason
    assert attempt.reason.message == "the fleet takes this machine back: the budget is spent"
    assert attempt.checkpoint_step == 21, "the step that began before the order"
    assert rental.client.get_job(job_id).state is JobState.PENDING
    assert "total_usd" in rental.client.fleet("budget").waits
    rental.client.stop(job_id)


def rent(rental: Rental, code: str) -> str:
    """Submit a job that rents a machine of its own; return the job's id."""
    job = rental.client.submit(
        JobSubmit(
            command=["python", "-c", code],
            outputs=["done.txt"],
            requirements=Requirements(min_disk_gib=1),
            policy=Policy(heartbeat_interval_s=1, stop_grace_s=5),
            rent=RentSpec(budget_usd=2, providers=["loopback"], max_usd_per_hour=1),
        )
    )
    return job.id


WRITE = "import os, pathlib; pathlib.Path(os.environ['BATON_OUTPUT_DIR'], 'done.txt').write_text('done')"


def test_a_job_with_rent_gets_a_machine_of_its_own_which_ends_with_the_job(rental: Rental) -> None:
    job_id = rent(rental, WRITE)
    name = fleet_of(job_id)
    rental.stack.wait_for(job_id, JobState.COMPLETE)
    (machine,) = rental.receipts(name, 1)
    assert machine.reason == "the job has ended"
    assert [one.machine_id for one in rental.attempts(job_id)] == [machine.id]
    assert rental.stack.artifact(job_id, "done.txt") == b"done"
    assert name not in {fleet.spec.name for fleet in rental.client.fleets().fleets}


def test_what_a_rented_machine_has_finished_is_seen_while_it_trains(rental: Rental, tmp_path: Path) -> None:
    job_id = rental.stack.submit(
        "shows.py", {"steps": 10, "go": str(tmp_path / "go")}, queue="pictures", outputs=("validation",)
    )
    rental.apply("pictures", **PATIENT)
    (shown,) = until(lambda: rental.client.artifacts(job_id).artifacts, what="the first picture")
    assert (shown.step, requests.get(shown.url, timeout=60).content) == (5, b"picture of step 5")
    assert rental.client.get_job(job_id).state is JobState.RUNNING
    for step in (5, 10):
        (tmp_path / f"go-{step}").touch()
    rental.stack.wait_for(job_id, JobState.COMPLETE)
    rental.apply("pictures", idle_timeout_s=60)
    (machine,) = rental.receipts("pictures", 1)
    assert [one.machine_id for one in rental.attempts(job_id)] == [machine.id]


def test_a_canceled_job_gives_its_machine_back_and_a_retry_rents_again(rental: Rental) -> None:
    job_id = rent(rental, "import time; time.sleep(600)")
    rental.stack.wait_for(job_id, JobState.RUNNING)
    rental.client.stop(job_id)
    rental.receipts(fleet_of(job_id), 1)
    rental.client.retry(job_id)
    rental.stack.wait_for(job_id, JobState.RUNNING)
    assert len({one.machine_id for one in rental.attempts(job_id)}) == 2
    rental.client.stop(job_id)
    rental.receipts(fleet_of(job_id), 2)


def test_a_training_rents_a_machine_for_each_node(rental: Rental) -> None:
    size = {"rounds": 2, "inner_steps": 5, "batch_size": 2, "context": 16, "width": 16, "layers": 1}
    job = rental.client.submit(
        JobSubmit(
            command=["python", "-m", "gpu_client.training.byte_transformer"],
            parameters=size,
            nodes=NodesSpec(min=2, max=2),
            outputs=["model.safetensors"],
            requirements=Requirements(min_disk_gib=1),
            policy=Policy(heartbeat_interval_s=1, stop_grace_s=5),
            rent=RentSpec(budget_usd=2, providers=["loopback"], max_usd_per_hour=1),
        )
    )
    rental.stack.wait_for(job.id, JobState.COMPLETE)
    machines = rental.receipts(fleet_of(job.id), 2)
    assert {one.reason for one in machines} == {"the job has ended"}
    attempts = rental.client.job_machines(job.id).attempts
    assert sorted(one.seat for one in attempts if one.seat is not None) == [0, 1]
    assert {one.machine.id for one in attempts} == {one.id for one in machines}
    world = rental.client.world(job.id)
    assert {one.machine_id for one in world.nodes} <= {one.id for one in machines} and world.epoch > 0
    assert rental.stack.artifact(job.id, "model.safetensors")
