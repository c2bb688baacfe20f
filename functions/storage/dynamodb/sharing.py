"""Store the records of shared outputs as items of the jobs table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from botocore.exceptions import ClientError

from functions.domain import table_keys
from functions.domain.checkpoints.shared_outputs import SharedRecord
from functions.storage.dynamodb.items.attribute_values import Item
from functions.storage.dynamodb.items.documents import dump, load
from functions.storage.dynamodb.reads import get_item
from functions.storage.failures import error_code, failures_translated
from functions.storage.tables import JOBS


class DynamoSharedStore:
    """SharedStore over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = JOBS.name(prefix)

    def get_many(self, tenant: str, shared_keys: Sequence[str]) -> dict[str, SharedRecord]:
        # Nearly all calls name one key, therefore a batch would add code without a benefit.
        items = {key: get_item(self._client, self._table, _key(tenant, key)) for key in dict.fromkeys(shared_keys)}
        return {key: load(SharedRecord, item["doc"]["S"]) for key, item in items.items() if item is not None}

    def replace(self, record: SharedRecord, *, seen: SharedRecord | None) -> bool:
        request: Item = {"ConditionExpression": "attribute_not_exists(pk)"}
        if seen is not None:
            request = {
                "ConditionExpression": "object_key = :seen",
                "ExpressionAttributeValues": {":seen": {"S": seen.object_key}},
            }
        item = {
            **_key(record.tenant, record.key),
            "doc": {"S": dump(record)},
            "object_key": {"S": record.object_key},
        }
        try:
            with failures_translated():
                self._client.put_item(TableName=self._table, Item=item, **request)
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            return False
        return True


def _key(tenant: str, shared_key: str) -> Item:
    return {"pk": {"S": table_keys.shared_pk(tenant, shared_key)}, "sk": {"S": table_keys.SHARED}}
