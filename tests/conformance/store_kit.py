"""The stores under test, and how tests make jobs and move them through the real rules."""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from botocore.awsrequest import AWSPreparedRequest
from moto import mock_aws

from contract.jobs import Policy, Progress
from contract.work import FailRequest, WorkQuery
from functions.domain import checkpoints as checkpoint_rules
from functions.domain import jobs as rules
from functions.domain.change import Change
from functions.domain.leases import Fence
from functions.domain.ports import JobStore, LeaseStore, ObjectStore, TokenStore
from functions.domain.records import Attempt, CheckpointRecord, Job, Lease, Spec
from functions.local.emulator import Emulator
from functions.storage.clients import dynamodb_client, s3_client
from functions.storage.dynamo_jobs import DynamoJobStore
from functions.storage.dynamo_leases import DynamoLeaseStore
from functions.storage.dynamo_tokens import DynamoTokenStore
from functions.storage.keys import job_id_of
from functions.storage.memory import MemoryCloud
from functions.storage.s3_objects import S3ObjectStore
from functions.storage.tables import HEARTBEATS, JOBS, create_tables

NOW = 4_000_000_000
"""Far in the future: the emulator's broom sweeps whatever has a `ttl` before the real present."""

TENANT = "acme"
CREDENTIALS = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}


@dataclass
class Cloud:
    """One set of stores. `dynamodb` and `s3` are the clients beneath, None for the twins in memory."""

    kind: str
    jobs: JobStore
    leases: LeaseStore
    tokens: TokenStore
    objects: ObjectStore
    prefix: str = ""
    dynamodb: Any = None
    s3: Any = None
    buckets: dict[str, str] = field(default_factory=dict)
    memory: MemoryCloud | None = None

    def members(self, index: str) -> set[str]:
        """Ids of the jobs that a sparse index holds."""
        if self.memory is not None:
            return set(getattr(self.memory.state, index).members())
        table = HEARTBEATS if index == "due" else JOBS
        found: set[str] = set()
        pages = self.dynamodb.get_paginator("scan").paginate(TableName=table.name(self.prefix), IndexName=index)
        for page in pages:
            found |= {job_id_of(item["pk"]["S"]) for item in page["Items"]}
        return found

    def raw(self, table: str, **key: str) -> dict[str, Any]:
        """A stored item as it is; {} if there is none. Not for the twins in memory."""
        answer = self.dynamodb.get_item(
            TableName=f"{self.prefix}{table}", Key={name: {"S": value} for name, value in key.items()}
        )
        found: dict[str, Any] = answer.get("Item", {})
        return found


def memory_cloud() -> Cloud:
    """The twins."""
    memory = MemoryCloud()
    return Cloud("memory", memory.jobs, memory.leases, memory.tokens, memory.objects, memory=memory)


def aws_cloud(kind: str, dynamodb: Any, s3: Any, prefix: str) -> Cloud:
    """The real stores over these clients, on tables and buckets of their own."""
    create_tables(dynamodb, prefix)
    buckets = {name: f"{prefix}{name}" for name in ("training-data", "training-checkpoints")}
    for bucket in buckets.values():
        s3.create_bucket(Bucket=bucket)
    return Cloud(
        kind,
        DynamoJobStore(dynamodb, prefix),
        DynamoLeaseStore(dynamodb, prefix),
        DynamoTokenStore(dynamodb, prefix),
        S3ObjectStore(s3, s3, buckets),
        prefix=prefix,
        dynamodb=dynamodb,
        s3=s3,
        buckets=buckets,
    )


@contextmanager
def moto_cloud() -> Iterator[Cloud]:
    """On moto: for single-threaded use, since its conditional writes race."""
    with mock_aws():
        yield aws_cloud("moto", *_moto_clients(), "moto-")


@cache
def _moto_clients() -> tuple[Any, Any]:
    # Once: making clients takes longer than most tests.
    return dynamodb_client(**CREDENTIALS), s3_client(**CREDENTIALS)


@dataclass(frozen=True)
class MinistackClients:
    """Clients for one running emulator, made once: making them takes longer than most tests."""

    dynamodb: Any
    s3: Any

    @classmethod
    def of(cls, emulator: Emulator) -> MinistackClients:
        """Clients as a deployment has them."""
        url = emulator.endpoint_url
        return cls(dynamodb_client(url, **CREDENTIALS), s3_client(url, **CREDENTIALS))

    def cloud(self) -> Cloud:
        """Fresh tables and buckets."""
        return aws_cloud("ministack", self.dynamodb, self.s3, f"t{uuid.uuid4().hex[:10]}-")


class SeededRandomness:
    """ports.Randomness, the same in every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def token(self) -> str:
        return self._random.randbytes(32).hex()

    def job_id(self) -> str:
        return str(uuid.UUID(bytes=self._random.randbytes(16)))

    def key_id(self) -> str:
        return self._random.randbytes(10).hex()

    def below(self, bound: int) -> int:
        return self._random.randrange(bound)


@contextmanager
def counted_requests(client: Any) -> Iterator[list[str]]:
    """The operations that a client really sends, repeats included."""
    sent: list[str] = []

    def note(request: AWSPreparedRequest, event_name: str, **_: Any) -> None:
        sent.append(event_name.rpartition(".")[2])

    client.meta.events.register("before-send", note)
    try:
        yield sent
    finally:
        client.meta.events.unregister("before-send", note)


def submission(**more: Any) -> Change:
    """A new job, not yet stored."""
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
    """A stored job, ready to be claimed."""
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
        """What the holder proves; `other` replaces parts of it."""
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


def failed(held: Held, fence: Fence, now: int) -> Change:
    """The holder gives up."""
    report = FailRequest(job_id=held.job.id)
    return rules.fail(held.job, held.attempt, fence, report, progress=None, now=now)


def progress_at(step: int, now: int = NOW) -> Progress:
    """A report with numbers that are easily rounded."""
    return Progress(step=step, total_steps=10**12, metrics={"loss": 0.1 + 0.2, "lr": 1e-300}, reported_at=now)


def record(step: int, epoch: int = 1, **more: Any) -> CheckpointRecord:
    """A checkpoint with numbers that are easily rounded."""
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
    """The holder commits a checkpoint."""
    new = record(step, epoch=held.lease.epoch)
    change = checkpoint_rules.commit(held.job, held.attempt, held.fence(), new, now=NOW)
    cloud.jobs.apply(change)
    assert change.attempt is not None
    return Held(change.job, change.attempt, held.lease, held.token)
