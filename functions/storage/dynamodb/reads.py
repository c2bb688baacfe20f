"""Read from DynamoDB: one item, many items, a range of an index. Each function may raise StorageUnavailable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functions.domain.errors import StorageUnavailable
from functions.storage.dynamodb.items.attribute_values import Item
from functions.storage.failures import failures_translated

BATCH_KEYS = 100
MAX_ROUNDS = 8
"""Answers in a row without a processed key, after which a batch counts as throttled."""


def get_item(client: Any, table: str, key: Item) -> Item | None:
    """Read one item, strongly consistent; None for a missing item."""
    with failures_translated():
        answer = client.get_item(TableName=table, Key=key, ConsistentRead=True)
    item: Item | None = answer.get("Item")
    return item


def get_items(client: Any, table: str, wanted: Sequence[Item], *, consistent: bool = True) -> list[Item]:
    """Read the existing items of the distinct keys `wanted`, in no particular order.

    `consistent` False reads items that may be moments old, at half the price. Raises StorageUnavailable also if
    DynamoDB leaves keys unprocessed in MAX_ROUNDS answers in a row.
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


def query(client: Any, table: str, limit: int | None, start: Item | None = None, **request: Any) -> list[Item]:
    """Read up to `limit` items after `start`, with several requests if an answer ends at DynamoDB's limit of 1 MB.

    `limit` None reads all items. `request`: the other arguments of Query.
    """
    items: list[Item] = []
    while True:
        if start is not None:
            request["ExclusiveStartKey"] = start
        if limit is not None:
            request["Limit"] = limit - len(items)
        with failures_translated():
            answer = client.query(TableName=table, **request)
        items += answer["Items"]
        start = answer.get("LastEvaluatedKey")
        if start is None or (limit is not None and len(items) >= limit):
            return items
