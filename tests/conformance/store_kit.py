"""Make jobs for tests of the stores, and move the jobs through the real rules."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from botocore.awsrequest import AWSPreparedRequest

from baton.contract.jobs.job import Progress
from baton.contract.jobs.policy import Policy
from baton.contract.worker.calls import FailRequest, WorkQuery
from functions.domain.checkpoints import commit as checkpoint_rules
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import Attempt, CheckpointRecord, Job, Lease, Spec
from tests.kits.clouds.store_sets import Cloud

NOW = 4_000_000_000
"""Far in the future: the emulator's broom sweeps whatever has a `ttl` before the real present."""

TENANT = "acme"


@contextmanager
def counted_requests(client: Any) -> Iterator[list[str]]:
    """Yield a list that collects the operations that a client sends, repeats included."""
    sent: list[str] = []

    def note(request: AWSPreparedRequest, event_name: str, **_: Any) -> None:
        sent.append(event_name.rpartition(".")[2])

    client.meta.events.register("before-send", note)
    try:
        yield sent
    finally:
        client.meta.events.unregister("before-send", note)


def submission(**more: Any) -> Transaction:
    """Return the transaction that submits a new job; nothing is stored."""
    arguments: dict[str, Any] = {
        "job_id": str(uuid.uuid4()),
        "tenant": TENANT,
        "spec": Spec(command=["train"], policy=more.pop("policy", Policy())),
        "queue": "default",
        "shard": 0,
        "priority": 50,
        "now": NOW,
    }
    return rules.submit(**{**arguments, **more})


def submit(cloud: Cloud, **more: Any) -> Job:
    """Submit a job, ready to be claimed; return the job."""
    change = submission(**more)
    cloud.jobs.apply(change)
    return change.job


@dataclass(frozen=True)
class Held:
    """A job that a worker holds, as the rules left it."""

    job: Job
    attempt: Attempt
    lease: Lease
    token: str | None

    def fence(self, now: int = NOW, **other: Any) -> Fence:
        """Return the fence of the holder's writes; `other` replaces fields of the fence."""
        arguments: dict[str, Any] = {
            "job_id": self.job.id,
            "tenant": self.job.tenant,
            "now": now,
            "epoch": self.lease.epoch,
            "token_sha256": self.lease.token_sha256,
            "machine_id": self.lease.machine_id,
        }
        return Fence(**{**arguments, **other})


def claim(cloud: Cloud, job: Job, *, token: str | None = "t", machine_id: str | None = "m-1", now: int = NOW) -> Held:
    """Claim a stored job; without a token as an original client does."""
    token_sha256 = hashlib.sha256(token.encode()).hexdigest() if token else None
    change = rules.claim(job, WorkQuery(machine_id=machine_id), token_sha256=token_sha256, key_id="k", now=now)
    cloud.jobs.apply(change)
    assert change.attempt is not None
    lease = cloud.leases.get(job.id)
    assert lease is not None
    return Held(change.job, change.attempt, lease, token)


def failed(held: Held, fence: Fence, now: int) -> Transaction:
    """Return the transaction by which the holder fails the job."""
    report = FailRequest(job_id=held.job.id)
    return rules.fail(held.job, held.attempt, fence, report, progress=None, now=now)


def progress_at(step: int, now: int = NOW) -> Progress:
    """Return a report with numbers that are easily rounded."""
    return Progress(step=step, total_steps=10**12, metrics={"loss": 0.1 + 0.2, "lr": 1e-300}, reported_at=now)


def record(step: int, epoch: int = 1, **more: Any) -> CheckpointRecord:
    """Return the record of a checkpoint with numbers that are easily rounded."""
    return CheckpointRecord(
        step=step,
        epoch=epoch,
        committed_at=NOW + step,
        num_files=2,
        total_bytes=10**13,
        metrics={"loss": 0.1 + 0.2},
        manifest_key=f"manifests/{step}-{epoch}.json",
        **more,
    )


def commit(cloud: Cloud, held: Held, step: int) -> Held:
    """Commit a checkpoint as the holder."""
    new = record(step, epoch=held.lease.epoch)
    change = checkpoint_rules.commit(held.job, held.fence(), new, now=NOW)
    cloud.jobs.apply(change)
    return Held(change.job, held.attempt, held.lease, held.token)
