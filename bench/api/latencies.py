"""Time the most frequent calls of a worker through HTTP, gateway, authorizer, handler and emulated cloud."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from baton.contract.jobs.job import JobSubmit
from baton.contract.worker.calls import HeartbeatRequest, WorkQuery
from bench.api.request_counts import FILES
from bench.harness.figures import Figure
from bench.harness.local_stack import RunningStack
from gpu_client.checkpoints.save.checkpoint_commit import commit_checkpoint
from gpu_client.transport.transfer.manager import Transfer

WARM_UP = 3
QUEUE = "latency"


def measure(stack: RunningStack, *, rounds: int, calls: int) -> list[Figure]:
    """Measure medians of `calls` calls a round; no figure has a target, because the emulator decides the speed."""
    times: dict[str, list[float]] = {"claim": [], "heartbeat": [], "commit": []}
    with stack.client("submit") as submitter, stack.client("worker") as worker:
        for number in range(rounds + 1):
            taken: dict[str, list[float]] = {name: [] for name in times}
            with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, closing(Transfer()) as transfer:
                for turn in range(calls if number else WARM_UP):
                    # A job of its own each time: the emulator, unlike DynamoDB, is slower on a job with a long history.
                    job = submitter.submit(JobSubmit(command=["true"], queue=QUEUE))
                    began = time.perf_counter()
                    item = worker.claim(WorkQuery(queue=QUEUE, machine_id="m-1"))
                    taken["claim"].append(time.perf_counter() - began)
                    if item is None:
                        raise RuntimeError("there was nothing to claim")

                    began = time.perf_counter()
                    worker.heartbeat(item.id, item.lease_token, HeartbeatRequest(step=turn, metrics={"loss": 0.5}))
                    taken["heartbeat"].append(time.perf_counter() - began)

                    step = number * 1000 + turn
                    directory = Path(folder, f"checkpoint-{step}")
                    directory.mkdir()
                    for name in FILES:
                        (directory / name).write_bytes(f"{name} {step}".encode() * 10_000)
                    began = time.perf_counter()
                    commit_checkpoint(worker, transfer, item, directory, step)
                    taken["commit"].append(time.perf_counter() - began)
                    submitter.stop(job.id)
            if number:
                for name, seconds in taken.items():
                    times[name].append(median(seconds) * 1000)
    notes = {"commit": f"{len(FILES)} new blobs of about 200 kB: two calls, hashing and uploads"}
    return [
        Figure(
            name=f"{name} through the local front",
            unit="ms",
            rounds=values,
            details={"each round": f"median of {calls}", "what": notes.get(name, "one call")},
        )
        for name, values in times.items()
    ]
