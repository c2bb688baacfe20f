"""Definitions of the seven DynamoDB tables, for the local stack, the tests and the deployed stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from functions.storage.failures import failures_translated

ACTIVE_TIMEOUT_S = 60
STREAM = {"StreamEnabled": True, "StreamViewType": "NEW_IMAGE"}


@dataclass(frozen=True, kw_only=True)
class KeySchema:
    """Partition key and optional sort key of a table or an index: name and type (S text, N number)."""

    partition: str
    sort: str | None = None
    sort_type: Literal["S", "N"] = "S"

    def attributes(self) -> dict[str, str]:
        """Return the type of each key attribute, by name."""
        return {self.partition: "S"} | ({self.sort: self.sort_type} if self.sort else {})

    def elements(self) -> list[dict[str, str]]:
        """Return the `KeySchema` argument of CreateTable."""
        hash_key = [{"AttributeName": self.partition, "KeyType": "HASH"}]
        return hash_key + ([{"AttributeName": self.sort, "KeyType": "RANGE"}] if self.sort else [])


@dataclass(frozen=True, kw_only=True)
class Index:
    """Global secondary index, sparse: the index contains the items that have its key attributes."""

    name: str
    key: KeySchema
    projection: Literal["ALL", "KEYS_ONLY"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """DynamoDB table with on-demand capacity.

    `ttl_attribute`: attribute with the epoch second after which DynamoDB's TTL deletes the item. `stream`: True if
    DynamoDB keeps the new image of each changed item for a day, in order per item, for the stream consumer.
    """

    suffix: str
    key: KeySchema
    indexes: tuple[Index, ...] = ()
    ttl_attribute: str | None = None
    stream: bool = False

    def name(self, prefix: str) -> str:
        """Return the physical name of the table in a deployment."""
        return f"{prefix}{self.suffix}"

    def definition(self, prefix: str) -> dict[str, Any]:
        """Return the arguments of CreateTable."""
        attributes = self.key.attributes()
        for index in self.indexes:
            attributes |= index.key.attributes()
        definition: dict[str, Any] = {
            "TableName": self.name(prefix),
            "BillingMode": "PAY_PER_REQUEST",
            "KeySchema": self.key.elements(),
            "AttributeDefinitions": [
                {"AttributeName": name, "AttributeType": type_} for name, type_ in attributes.items()
            ],
        }
        if self.indexes:
            definition["GlobalSecondaryIndexes"] = [
                {
                    "IndexName": index.name,
                    "KeySchema": index.key.elements(),
                    "Projection": {"ProjectionType": index.projection},
                }
                for index in self.indexes
            ]
        if self.stream:
            definition["StreamSpecification"] = STREAM
        return definition


JOBS = Table(
    suffix="jobs",
    key=KeySchema(partition="pk", sort="sk"),
    indexes=(
        Index(name="ready", key=KeySchema(partition="ready_pk", sort="ready_sk"), projection="ALL"),
        Index(name="by_tenant", key=KeySchema(partition="tenant", sort="created_sk"), projection="KEYS_ONLY"),
        Index(name="by_state", key=KeySchema(partition="state_pk", sort="created_sk"), projection="KEYS_ONLY"),
        Index(
            name="timers", key=KeySchema(partition="timer_pk", sort="timer_at", sort_type="N"), projection="KEYS_ONLY"
        ),
    ),
    # Only condemned packs, members of groups and scaling records expire; no other item of the table has `ttl`.
    ttl_attribute="ttl",
    stream=True,
)
HEARTBEATS = Table(
    suffix="heartbeats",
    key=KeySchema(partition="pk"),
    indexes=(
        Index(name="due", key=KeySchema(partition="due_pk", sort="due_at", sort_type="N"), projection="KEYS_ONLY"),
    ),
    ttl_attribute="ttl",
)
TOKENS = Table(
    suffix="tokens",
    key=KeySchema(partition="pk"),
    indexes=(Index(name="keys_by_tenant", key=KeySchema(partition="tenant", sort="created_sk"), projection="ALL"),),
    ttl_attribute="ttl",
)
WEBHOOKS = Table(suffix="webhooks", key=KeySchema(partition="pk", sort="sk"), ttl_attribute="ttl")
RECIPES = Table(suffix="recipes", key=KeySchema(partition="pk", sort="sk"))
RINGS = Table(suffix="rings", key=KeySchema(partition="pk", sort="sk"))
# Events, quarantines and orphans expire; fleets, machines and ledgers have no `ttl`.
FLEET = Table(suffix="fleet", key=KeySchema(partition="pk", sort="sk"), ttl_attribute="ttl", stream=True)
TABLES = (JOBS, HEARTBEATS, TOKENS, WEBHOOKS, RECIPES, RINGS, FLEET)


def create_tables(client: Any, prefix: str) -> None:
    """Create missing tables, enable TTL and streams of all tables, and wait until the tables are usable.

    `client`: a low-level DynamoDB client. Raises StorageUnavailable, or botocore's errors for a wrong set-up.
    """
    with failures_translated():
        made = [_create(client, table.definition(prefix)) for table in TABLES]
        waiter = client.get_waiter("table_exists")
        for table, status in zip(TABLES, made, strict=True):
            name = table.name(prefix)
            if status != "ACTIVE":
                waiter.wait(TableName=name, WaiterConfig={"Delay": 1, "MaxAttempts": ACTIVE_TIMEOUT_S})
            existed = status is None
            if table.ttl_attribute and not (existed and _has_ttl(client, name)):
                ttl = {"Enabled": True, "AttributeName": table.ttl_attribute}
                client.update_time_to_live(TableName=name, TimeToLiveSpecification=ttl)
            if table.stream and existed:
                _enable_stream(client, name)


def _create(client: Any, definition: dict[str, Any]) -> str | None:
    """Create a table and return its status; None if a table of this name exists."""
    try:
        status: str = client.create_table(**definition)["TableDescription"]["TableStatus"]
    except client.exceptions.ResourceInUseException:
        return None
    return status


def _has_ttl(client: Any, name: str) -> bool:
    described = client.describe_time_to_live(TableName=name)["TimeToLiveDescription"]
    return described.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")


def _enable_stream(client: Any, name: str) -> None:
    described = client.describe_table(TableName=name)["Table"]
    if not described.get("StreamSpecification", {}).get("StreamEnabled"):
        client.update_table(TableName=name, StreamSpecification=STREAM)
