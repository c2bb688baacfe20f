"""Convert records to items of the jobs table and back, and writes to actions of TransactWriteItems."""

from __future__ import annotations

from typing import TypeVar

from functions.domain import table_keys
from functions.domain.jobs.transaction import Delete, Put, PutFleet
from functions.domain.record_base import TableRecord
from functions.domain.records import MemberRecord
from functions.domain.table_keys import Key
from functions.storage.dynamodb.items.attribute_values import Item, attribute, number, value_of
from functions.storage.dynamodb.items.documents import dump, load

R = TypeVar("R", bound=TableRecord)


def key_item(key: Key) -> Item:
    """Return the key attributes of an item."""
    return {"pk": {"S": key.partition}, "sk": {"S": key.sort}}


def item_of(write: Put) -> Item:
    """Return the item that a write stores: attributes for conditions and indexes, and the document `doc`."""
    beside = {name: attribute(value) for name, value in write.attributes.items()}
    return {**key_item(write.key), **beside, "doc": {"S": dump(write.record)}}


def record_of(kind: type[R], item: Item) -> R:
    """Decode the record in an item."""
    record = load(kind, item["doc"]["S"])
    beside = {name: value_of(item[name]) for name in kind.BESIDE}
    return record.model_copy(update=beside) if beside else record


def put(write: Put, table: str) -> Item:
    """Return the arguments of a Put with the condition of its write."""
    request: Item = {"TableName": table, "Item": item_of(write)}
    if write.seen is None:
        return request
    if not write.seen:
        return {**request, "ConditionExpression": "attribute_not_exists(pk)"}
    return {
        **request,
        "ConditionExpression": " AND ".join(f"{name} = :{name}" for name in write.seen),
        "ExpressionAttributeValues": {f":{name}": attribute(value) for name, value in write.seen.items()},
    }


def put_fleet(write: PutFleet, table: str) -> Item:
    """Return the arguments of a Put of a job's fleet with the condition of its write."""
    item = {**key_item(write.key), "version": number(write.version), "doc": {"S": dump(write.record)}}
    request: Item = {"TableName": table, "Item": item, "ConditionExpression": "attribute_not_exists(pk)"}
    if write.version == 1:
        return request
    return {
        **request,
        "ConditionExpression": "attribute_not_exists(pk) OR version = :before",
        "ExpressionAttributeValues": {":before": number(write.version - 1)},
    }


def delete(write: Delete, table: str) -> Item:
    """Return the arguments of a Delete with the condition of its write."""
    request: Item = {"TableName": table, "Key": key_item(write.key)}
    if write.seen is None:
        return request
    terms = " AND ".join([*(f"{name} = :{name}" for name in write.seen), "protected_until <= :now"])
    return {
        **request,
        "ConditionExpression": f"attribute_not_exists(pk) OR ({terms})",
        "ExpressionAttributeValues": {
            ":now": number(write.now),
            **{f":{name}": attribute(value) for name, value in write.seen.items()},
        },
    }


def member(tenant: str, group: str, job_id: str, record: MemberRecord) -> Item:
    """Return the item of a job of a group, which TTL deletes some time after the job's end."""
    return {
        **key_item(Key(table_keys.group_pk(tenant, group), job_id)),
        "doc": {"S": dump(record)},
        "ttl": number(record.expires_at),
    }
