"""Reading many items by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functions.domain.errors import StorageUnavailable
from functions.storage.failures import failures_translated

BATCH_KEYS = 100
MAX_ROUNDS = 8
"""DynamoDB may answer a batch in part; so many answers without a single item mean that it is throttling."""


def get_items(client: Any, table: str, wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that exist among the different keys `wanted`, in no particular order; strongly consistent.

    Raises StorageUnavailable if the service keeps leaving keys out.
    """
    items: list[dict[str, Any]] = []
    pending = list(wanted)
    fruitless = 0
    while pending:
        batch, pending = pending[:BATCH_KEYS], pending[BATCH_KEYS:]
        with failures_translated():
            answer = client.batch_get_item(RequestItems={table: {"Keys": batch, "ConsistentRead": True}})
        left_out = answer.get("UnprocessedKeys", {}).get(table, {}).get("Keys", [])
        items += answer["Responses"].get(table, [])
        pending = left_out + pending
        fruitless = fruitless + 1 if len(left_out) == len(batch) else 0
        if fruitless == MAX_ROUNDS:
            raise StorageUnavailable(f"BatchGetItem on {table}: keys left unprocessed")
    return items
