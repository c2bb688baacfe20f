"""Sets of stores: the twins in memory, and the real stores on moto and on the emulated cloud."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from moto import mock_aws

from baton.contract.names import BUCKETS
from functions.domain.ports import (
    JobStore,
    LeaseStore,
    ObjectStore,
    PackStore,
    RecipeStore,
    RingStore,
    SharedStore,
    TokenStore,
    WebhookStore,
)
from functions.domain.table_keys import job_id_of
from functions.fleet.store import FleetStore
from functions.local.emulator import Emulator
from functions.storage.clients import dynamodb_client, s3_client
from functions.storage.dynamodb.fleet import DynamoFleetStore
from functions.storage.dynamodb.jobs import DynamoJobStore
from functions.storage.dynamodb.leases import DynamoLeaseStore
from functions.storage.dynamodb.packs import DynamoPackStore
from functions.storage.dynamodb.recipes import DynamoRecipeStore
from functions.storage.dynamodb.rings import DynamoRings
from functions.storage.dynamodb.sharing import DynamoSharedStore
from functions.storage.dynamodb.tokens import DynamoTokenStore
from functions.storage.dynamodb.webhooks import DynamoWebhookStore
from functions.storage.s3.objects import S3ObjectStore
from functions.storage.tables import HEARTBEATS, JOBS, create_tables
from tests.kits.clouds.emulator import CREDENTIALS
from tests.twins.cloud import MemoryCloud


@dataclass
class Cloud:
    """Set of stores. `dynamodb` and `s3` are the clients below, None for the twins in memory."""

    kind: str
    jobs: JobStore
    leases: LeaseStore
    packs: PackStore
    tokens: TokenStore
    objects: ObjectStore
    webhooks: WebhookStore
    recipes: RecipeStore
    shared: SharedStore
    rings: RingStore
    fleet: FleetStore
    prefix: str = ""
    dynamodb: Any = None
    s3: Any = None
    buckets: dict[str, str] = field(default_factory=dict)
    memory: MemoryCloud | None = None

    def members(self, index: str) -> set[str]:
        """List the ids of jobs in a sparse index."""
        if self.memory is not None:
            state = self.memory.state
            return set(getattr(state if index == "due" else state.jobs, index).members())
        table = HEARTBEATS if index == "due" else JOBS
        found: set[str] = set()
        pages = self.dynamodb.get_paginator("scan").paginate(TableName=table.name(self.prefix), IndexName=index)
        for page in pages:
            found |= {job_id_of(item["pk"]["S"]) for item in page["Items"]}
        return found

    def raw(self, table: str, **key: str) -> dict[str, Any]:
        """Read a stored item; {} if missing. Not for the twins in memory."""
        answer = self.dynamodb.get_item(
            TableName=f"{self.prefix}{table}", Key={name: {"S": value} for name, value in key.items()}
        )
        found: dict[str, Any] = answer.get("Item", {})
        return found


def memory_cloud() -> Cloud:
    """Make a set of twins in memory."""
    memory = MemoryCloud()
    return Cloud(
        "memory",
        memory.jobs,
        memory.leases,
        memory.packs,
        memory.tokens,
        memory.objects,
        memory.webhooks,
        memory.recipes,
        memory.shared,
        memory.rings,
        memory.fleet,
        memory=memory,
    )


def aws_cloud(kind: str, dynamodb: Any, s3: Any, prefix: str) -> Cloud:
    """Make the real stores over these clients, with tables and buckets of their own."""
    create_tables(dynamodb, prefix)
    buckets = {name: f"{prefix}{name}" for name in BUCKETS}
    for bucket in buckets.values():
        s3.create_bucket(Bucket=bucket)
    return Cloud(
        kind,
        DynamoJobStore(dynamodb, prefix),
        DynamoLeaseStore(dynamodb, prefix),
        DynamoPackStore(dynamodb, prefix),
        DynamoTokenStore(dynamodb, prefix),
        S3ObjectStore(s3, s3, buckets),
        DynamoWebhookStore(dynamodb, prefix),
        DynamoRecipeStore(dynamodb, prefix),
        DynamoSharedStore(dynamodb, prefix),
        DynamoRings(dynamodb, prefix),
        DynamoFleetStore(dynamodb, prefix),
        prefix=prefix,
        dynamodb=dynamodb,
        s3=s3,
        buckets=buckets,
    )


@contextmanager
def moto_cloud() -> Iterator[Cloud]:
    """Make a set on moto, for one thread: moto's conditional writes race."""
    with mock_aws():
        yield aws_cloud("moto", *_moto_clients(), "moto-")


@cache
def _moto_clients() -> tuple[Any, Any]:
    # Once: making clients takes longer than most tests.
    return dynamodb_client(**CREDENTIALS), s3_client(**CREDENTIALS)


@dataclass(frozen=True)
class MinistackClients:
    """Clients of one running emulator, made once because making them takes longer than most tests."""

    dynamodb: Any
    s3: Any

    @classmethod
    def of(cls, emulator: Emulator) -> MinistackClients:
        """Make clients as a deployment does."""
        url = emulator.endpoint_url
        return cls(dynamodb_client(url, **CREDENTIALS), s3_client(url, **CREDENTIALS))

    def cloud(self) -> Cloud:
        """Make a set with fresh tables and buckets."""
        return aws_cloud("ministack", self.dynamodb, self.s3, f"t{uuid.uuid4().hex[:10]}-")
