"""Store rings and their records in DynamoDB."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from botocore.exceptions import ClientError

from baton.contract.errors import ErrorCode
from functions.domain import table_keys as names
from functions.domain.access.rings import RingRecord, StoredRing
from functions.domain.errors import Refusal, StorageUnavailable
from functions.domain.ports import ResultPage
from functions.storage.dynamodb.items.attribute_values import Item, number
from functions.storage.dynamodb.reads import MAX_ROUNDS, get_item, get_items, query
from functions.storage.failures import error_code, failures_translated
from functions.storage.paging import page, ring_keys_list, rings_list
from functions.storage.tables import RINGS

DELETES_PER_CALL = 25


class DynamoRings:
    """RingStore over a low-level DynamoDB client. Attributes: `data` (absent if empty) and `version`."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = RINGS.name(prefix)

    def make(self, ring: StoredRing) -> bool:
        item = {
            **_ring_key(ring.tenant, ring.name),
            **({"data": {"B": ring.settings}} if ring.settings else {}),
            "version": {"S": ring.id},
            "created_at": number(ring.created_at),
        }
        if self._done(self._client.put_item, Item=item, ConditionExpression="attribute_not_exists(pk)"):
            return True
        # A repeated call finds the ring of the first call, therefore an equal id is a success (idempotent).
        there = self.get(ring.tenant, ring.name)
        return there is not None and there.id == ring.id

    def get(self, tenant: str, name: str) -> StoredRing | None:
        item = get_item(self._client, self._table, _ring_key(tenant, name))
        return None if item is None else _ring(tenant, item)

    def list(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[StoredRing]:
        listed = rings_list(tenant)
        position = listed.position(cursor)
        items = query(
            self._client,
            self._table,
            limit + 1,
            None if position is None else _ring_key(tenant, str(position[0])),
            KeyConditionExpression="pk = :pk",
            ExpressionAttributeValues={":pk": {"S": names.rings_pk(tenant)}},
            ConsistentRead=True,
        )
        return page([_ring(tenant, item) for item in items], limit, listed, lambda ring: (ring.name,))

    def begin_removal(self, ring: StoredRing) -> bool:
        return self._done(
            self._client.update_item,
            Key=_ring_key(ring.tenant, ring.name),
            UpdateExpression="SET removing = :yes",
            ConditionExpression="version = :id",
            ExpressionAttributeValues={":yes": {"BOOL": True}, ":id": {"S": ring.id}},
        )

    def forget(self, ring: StoredRing) -> None:
        self._done(
            self._client.delete_item,
            Key=_ring_key(ring.tenant, ring.name),
            ConditionExpression="version = :id AND removing = :yes",
            ExpressionAttributeValues={":id": {"S": ring.id}, ":yes": {"BOOL": True}},
        )

    def write(self, ring: StoredRing, key: str, data: bytes, *, version: str, seen: str | None) -> bool:
        item = {**_key(ring, key), **({"data": {"B": data}} if data else {}), "version": {"S": version}}
        values = {":version": {"S": version}}
        condition = "attribute_not_exists(pk) OR version = :version"
        if seen is not None:
            condition, values = "version = :seen OR version = :version", {**values, ":seen": {"S": seen}}
        return self._done(
            self._client.put_item, Item=item, ConditionExpression=condition, ExpressionAttributeValues=values
        )

    def read(self, ring: StoredRing, keys: Sequence[str]) -> dict[str, RingRecord]:
        items = get_items(self._client, self._table, [_key(ring, key) for key in dict.fromkeys(keys)])
        return {item["sk"]["S"]: RingRecord(_data(item), item["version"]["S"]) for item in items}

    def keys(self, ring: StoredRing, prefix: str, *, limit: int, cursor: str | None = None) -> ResultPage[str]:
        listed = ring_keys_list(ring.id, prefix)
        position = listed.position(cursor)
        if position is not None and not str(position[0]).startswith(prefix):
            raise Refusal(ErrorCode.INVALID_CURSOR, field="cursor")
        condition, values = "pk = :pk", {":pk": _key(ring, "")["pk"]}
        if prefix:
            condition, values = f"{condition} AND begins_with(sk, :prefix)", {**values, ":prefix": {"S": prefix}}
        items = query(
            self._client,
            self._table,
            limit + 1,
            None if position is None else _key(ring, str(position[0])),
            KeyConditionExpression=condition,
            ExpressionAttributeValues=values,
            ProjectionExpression="sk",
            ConsistentRead=True,
        )
        return page([str(item["sk"]["S"]) for item in items], limit, listed, lambda key: (key,))

    def delete(self, ring: StoredRing, keys: Sequence[str]) -> None:
        pending = [{"DeleteRequest": {"Key": _key(ring, key)}} for key in dict.fromkeys(keys)]
        fruitless = 0
        while pending:
            batch, pending = pending[:DELETES_PER_CALL], pending[DELETES_PER_CALL:]
            with failures_translated():
                answer = self._client.batch_write_item(RequestItems={self._table: batch})
            left: builtins.list[Item] = answer.get("UnprocessedItems", {}).get(self._table, [])
            pending = left + pending
            fruitless = fruitless + 1 if len(left) == len(batch) else 0
            if fruitless == MAX_ROUNDS:
                raise StorageUnavailable(f"BatchWriteItem on {self._table}: items left unprocessed")

    def _done(self, operation: Any, **request: Any) -> bool:
        try:
            with failures_translated():
                operation(TableName=self._table, **request)
        except ClientError as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            return False
        return True


def _ring_key(tenant: str, name: str) -> Item:
    return {"pk": {"S": names.rings_pk(tenant)}, "sk": {"S": name}}


def _key(ring: StoredRing, key: str) -> Item:
    return {"pk": {"S": names.ring_pk(ring.tenant, ring.name, ring.id)}, "sk": {"S": key}}


def _ring(tenant: str, item: Item) -> StoredRing:
    return StoredRing(
        tenant=tenant,
        name=item["sk"]["S"],
        id=item["version"]["S"],
        settings=_data(item),
        created_at=int(item["created_at"]["N"]),
        removing=bool(item.get("removing", {}).get("BOOL", False)),
    )


def _data(item: Item) -> bytes:
    return bytes(item["data"]["B"]) if "data" in item else b""
