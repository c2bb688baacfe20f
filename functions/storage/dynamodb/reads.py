"""Reading from DynamoDB: one item, many items, a range of an index. Each raises StorageUnavailable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functions.domain.errors import StorageUnavailable
from functions.storage.dynamodb.items.attribute_values import Item
from functions.storage.failures import failures_translated

BATCH_KEYS = 100
MAX_ROUNDS = 8
"""DynamoDB may answer a batch in part; so many answers without a single item mean that it is throttling."""


def get_item(client: Any, table: str, key: Item) -> Item | None:
    """The item, strongly consistent; None if there is none."""
    with failures_translated():
        answer = client.get_item(TableName=table, Key=key, ConsistentRead=True)
    item: Item | None = answer.get("Item")
    return item


def get_items(client: Any, table: str, wanted: Sequence[Item], *, consistent: bool = True) -> list[Item]:
    """The items that exist among the different keys `wanted`, in no particular order.

    Strongly consistent unless said otherwise: then they may be as they were moments ago, at half the price.

    Raises StorageUnavailable also if the service keeps leaving keys out.
    """
    items: list[Item] = []
    pending = list(wanted)
    fruitless = 0
    while pending:
        batch, pending = pending[:BATCH_KEYS], pending[BATCH_KEYS:]
        with failures_translated():
            answer = client.batch_get_item(RequestItems={table: {"Keys": batch, "ConsistentRead": consistent}})
        left_out = answer.get("UnprocessedKeys", {}).get(table, {}).get("Keys", [])
        items += answer["Responses"].get(table, [])
        pending = left_out + pending
        fruitless = fruitless + 1 if len(left_out) == len(batch) else 0
        if fruitless == MAX_ROUNDS:
            raise StorageUnavailable(f"BatchGetItem on {table}: keys left unprocessed")
    return items


def query(client: Any, table: str, limit: int, start: Item | None = None, **request: Any) -> list[Item]:
    """Up to `limit` items behind `start`; asks again where the service cuts an answer at 1 MB.

    `request`: the other arguments of Query.
    """
    items: list[Item] = []
    while True:
        if start is not None:
            request["ExclusiveStartKey"] = start
        with failures_translated():
            answer = client.query(TableName=table, Limit=limit - len(items), **request)
        items += answer["Items"]
        start = answer.get("LastEvaluatedKey")
        if start is None or len(items) >= limit:
            return items
