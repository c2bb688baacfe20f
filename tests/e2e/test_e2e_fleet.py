"""A fleet on processes of this computer: a job gets a machine, the machine goes back, its receipt stays."""

from __future__ import annotations

import psutil
import pytest

from baton.contract.fleet import FleetSpec, MachineState
from baton.contract.jobs.job import JobState, JobSubmit
from tests.kits.stack.stack import Stack
from tests.kits.waiting import until

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

SPEED = 60
"""The fleets' minutes are seconds."""


def make_spec(**changes: object) -> FleetSpec:
    document = {"name": "nights", "providers": ["loopback"], "disk_gib": 1, "max_usd_per_hour": 1}
    return FleetSpec.model_validate({**document, "budget": {"total_usd": 5}, **changes})


def agents_of(url: str) -> list[psutil.Process]:
    """Return the processes on rented machines of a control plane."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if environment.get("BATON_API_URL") == url and "BATON_ENROLMENT_TOKEN" in environment:
            found.append(process)
    return found


def test_a_job_gets_a_machine_and_nothing_is_left_but_the_receipt() -> None:
    with Stack(fleet_clock_speed=SPEED) as stack:
        client = stack.client
        client.put_fleet(make_spec())
        job = client.submit(JobSubmit(command=["python", "-c", "pass"]))
        until(lambda: client.get_job(job.id).state is JobState.COMPLETE, what="the end of the job", every_s=0.2)
        (machine,) = until(lambda: client.ended_machines("nights"), what="the machine's end", every_s=0.2)
        assert (machine.state, machine.reason) == (MachineState.GONE, "no job for idle_timeout_s")
        (attempt,) = client.attempts(job.id).attempts
        assert attempt.machine_id == machine.id
        assert machine.receipt is not None and len(machine.receipt.absent_at) == 2
        # The provider bills up to the destroy; the ledger, up to the first list without the machine.
        assert machine.receipt.charged_usd is not None
        assert 0 < machine.receipt.charged_usd <= machine.receipt.observed_usd < 0.2
        steps = [event.type.removeprefix("machine.") for event in reversed(client.fleet_events("nights"))]
        assert steps[:5] == ["planned", "requested", "booting", "registered", "ready"]
        assert steps[-2:] == ["terminating", "gone"]
        assert agents_of(stack.url) == []

        client.put_fleet(make_spec(min=1))
        until(lambda: [one.state for one in client.fleet("nights").machines] == [MachineState.READY], what="a machine")
        assert len(agents_of(stack.url)) == 1
    assert agents_of(stack.url) == [], "a stack without state ends its machines"
