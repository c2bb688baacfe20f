"""Time from the submission of a job until a worker has claimed the job: a rented loopback machine beside an agent that
a person starts at the same moment.

The submission lets a tick follow at once; otherwise a job would wait half a minute on average for the scheduled tick.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.jobs.job import JobState, JobSubmit
from bench.harness.figures import Figure
from bench.harness.local_stack import RunningStack, clean_environment, running_stack
from gpu_client.transport.api.client import BatonClient

POLL_S = 0.02
TIMEOUT_S = 60.0


def measure(rounds: int) -> list[Figure]:
    """Time both ways in turns, on one stack."""
    rented: list[float] = []
    by_hand: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        running_stack(Path(folder, "stack.log")) as stack,
        stack.client("submit") as client,
    ):
        for number in range(rounds):
            by_hand.append(_by_hand(stack, client, Path(folder, f"agent-{number}")))
            rented.append(_rented(client, f"rent-{number}"))
    return [
        Figure(
            name="submit to claimed on a rented machine",
            unit="s",
            rounds=rented,
            baseline_name="agent started by hand",
            baseline=by_hand,
            details={"tick": "each minute, and at once after a submission", "provider": "loopback: a process, no boot"},
        )
    ]


def _rented(client: BatonClient, name: str) -> float:
    """Time a job whose fleet exists and has no machine."""
    document = {
        "name": name,
        "providers": ["loopback"],
        "queues": [name],
        "max_usd_per_hour": 5,
        "disk_gib": 1,
        "idle_timeout_s": 60,
        "budget": {"total_usd": 100},
    }
    client.put_fleet(FleetSpec.model_validate(document))
    took_s = _time_claim(client, name)
    client.stop_fleet(name)
    return took_s


def _by_hand(stack: RunningStack, client: BatonClient, folder: Path) -> float:
    with _agent(stack, folder, "by-hand"):
        return _time_claim(client, "by-hand")


def _time_claim(client: BatonClient, queue: str) -> float:
    began = time.perf_counter()
    job = client.submit(JobSubmit(command=["true"], queue=queue))
    while client.get_job(job.id).state is JobState.PENDING:
        if time.perf_counter() - began > TIMEOUT_S:
            raise RuntimeError(f"nobody claimed the job of queue {queue} within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    return time.perf_counter() - began


@contextmanager
def _agent(stack: RunningStack, folder: Path, queue: str) -> Iterator[None]:
    """Run the agent as a person starts it."""
    folder.mkdir()
    environment = {
        **clean_environment(),
        "BATON_API_URL": stack.url,
        "BATON_API_KEY": stack.keys["worker"],
        "BATON_QUEUE": queue,
        "BATON_WORKSPACE": str(folder),
        "BATON_MAX_JOBS": "1",
        "PYTHONPATH": str(Path.cwd()),
    }
    with (folder / "agent.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_client.agent"], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
