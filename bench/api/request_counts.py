"""Count the AWS requests of a call at the client. The counts are exact, so a test asserts the same numbers."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from baton.contract.worker.calls import HeartbeatRequest
from bench.harness.figures import Figure
from bench.harness.plane import Plane
from gpu_client.checkpoints.save.checkpoint_commit import commit_checkpoint
from gpu_client.transport.transfer.manager import Transfer

FILES = ("model.safetensors", "state.pt", "baton.json")
"""Files of the session's checkpoint in the digits example."""


@dataclass(frozen=True)
class CommitCost:
    """Requests of a commit by the agent's own code: three new files in one pack."""

    job_id: str
    api_calls: int
    packs: int
    requests: Counter[str]
    """DynamoDB's and S3's, as the control plane sends them: the packs' uploads are the worker's and not in here."""


def heartbeat_requests(plane: Plane) -> Counter[str]:
    """Count the requests of one heartbeat with progress of a running job."""
    item = plane.claimed()
    body = HeartbeatRequest(step=120, total_steps=500, metrics={"loss": 0.5}, phase="training")
    with plane.requests() as sent:
        plane.worker_call(
            "POST /heartbeat/{id}", path={"id": item.id}, body=body, headers={"x-lease-token": item.lease_token}
        )
    return sent


def claim_requests(plane: Plane) -> Counter[str]:
    """Count the requests of one claim without rivals."""
    plane.submit()
    with plane.requests() as sent:
        claimed = plane.claim()
    if len(claimed) != 1:
        raise RuntimeError("the claim found no job")
    return sent


def commit_cost(plane: Plane, *, earlier: int = 0) -> CommitCost:
    """Count the requests of a commit after `earlier` others; retention deletes a checkpoint from the fourth on."""
    item = plane.claimed()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, closing(Transfer()) as transfer:
        for step in range(1, earlier + 2):
            directory = Path(folder, f"checkpoint-{step}")
            directory.mkdir()
            for name in FILES:
                # Of this job alone: what another one stored would not be sent again.
                (directory / name).write_bytes(f"{name} of step {step} of {item.id}".encode())
            with plane.requests() as sent:
                done = commit_checkpoint(plane, transfer, item, directory, step)
    return CommitCost(item.id, done.api_calls, done.uploaded_packs, sent)


def measure(plane: Plane) -> list[Figure]:
    """Measure requests of a heartbeat, a claim and a commit, with the calls behind the commit."""
    heartbeat, claim = heartbeat_requests(plane), claim_requests(plane)
    fresh, later = commit_cost(plane), commit_cost(plane, earlier=4)
    queries = claim["dynamodb.Query"]
    return [
        _count("heartbeat: requests", heartbeat.total(), 1, heartbeat),
        _count("claim: Query", queries, 1, claim),
        _count("claim: other requests", claim.total() - queries, 1, claim),
        _count("commit: API calls besides packs", fresh.api_calls, 2, fresh.requests),
        _count("commit: requests behind them", fresh.requests.total(), None, fresh.requests),
        _count("commit + retention: requests", later.requests.total(), None, later.requests),
    ]


def _count(name: str, count: int, at_most: int | None, requests: Counter[str]) -> Figure:
    return Figure(name=name, unit="", rounds=[count], at_most=at_most, counted=True, details={"requests": requests})
