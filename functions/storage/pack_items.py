"""Packs as DynamoDB items, and the rules of functions/domain/packs.py as conditions on them. Absent stands for None."""

from __future__ import annotations

from contract.manifest import Pack
from functions.domain.change import Change, PackWrite, ReleasePack, mark_of
from functions.domain.packs import Sighting
from functions.domain.records import PackRecord
from functions.storage import keys
from functions.storage.items import Item, number

_DECLARED = "size_bytes = :size, crc64nvme = :crc"


def key(tenant: str, blake3: str) -> Item:
    """The key of a pack's item."""
    return {"pk": {"S": keys.pack_pk(tenant, blake3)}, "sk": {"S": keys.PACK}}


def from_item(item: Item) -> PackRecord:
    """The record in an item."""
    _, _, name = item["pk"]["S"].partition("#")
    tenant, _, blake3 = name.rpartition("#")
    return PackRecord(
        tenant=tenant,
        blake3=blake3,
        size_bytes=int(item["size_bytes"]["N"]),
        crc64nvme=item["crc64nvme"]["S"],
        jobs=frozenset(item["jobs"]["SS"]) if "jobs" in item else frozenset(),
        doubted="doubted" in item,
        condemned_at=int(item["condemned_at"]["N"]) if "condemned_at" in item else None,
        condemned_by=item["condemned_by"]["S"] if "condemned_by" in item else None,
        gone="gone" in item,
    )


def hold(tenant: str, job_id: str, sighting: Sighting) -> Item:
    """The arguments of the UpdateItem that adds a holder, `packs.may_hold` its condition."""
    pack, seen = sighting.pack, sighting.record
    values: Item = {":job": {"SS": [job_id]}, **_declared(pack)}
    if seen is None:
        condition = "attribute_not_exists(pk)"
    elif seen.condemned_by is not None:
        condition = "condemned_by = :seen"
        values[":seen"] = {"S": seen.condemned_by}
    elif seen.doubted:
        condition = "attribute_exists(jobs) AND attribute_exists(doubted)"
    else:
        condition = (
            "attribute_exists(jobs) AND attribute_not_exists(doubted) AND size_bytes = :size AND crc64nvme = :crc"
        )
    return {
        "Key": key(tenant, pack.blake3),
        "UpdateExpression": f"SET {_DECLARED} REMOVE condemned_at, condemned_by, gone, doubted, #ttl ADD jobs :job",
        "ConditionExpression": condition,
        "ExpressionAttributeNames": {"#ttl": "ttl"},
        "ExpressionAttributeValues": values,
    }


def transact_item(write: PackWrite, change: Change, table: str) -> Item:
    """Condemn or release as an action of a transaction."""
    tenant, job_id = change.job.tenant, change.job.id
    if isinstance(write, ReleasePack):
        return _update(
            table,
            key(tenant, write.blake3),
            "DELETE jobs :job",
            "contains(jobs, :id) AND size(jobs) > :one",
            {":job": {"SS": [job_id]}, ":id": {"S": job_id}, ":one": number(1)},
        )
    update = "SET condemned_at = :at, condemned_by = :mark REMOVE jobs, doubted, gone, #ttl"
    values: Item = {":at": number(write.at), ":mark": {"S": mark_of(change)}}
    if write.seen is None:
        condition = "attribute_not_exists(pk)"
        update = update.replace("SET ", f"SET {_DECLARED}, ")
        values |= _declared(write.pack)
    elif write.seen.condemned_by is not None:
        condition = "condemned_by = :seen"
        values[":seen"] = {"S": write.seen.condemned_by}
    else:
        condition = "contains(jobs, :id) AND size(jobs) = :one"
        values |= {":id": {"S": job_id}, ":one": number(1)}
    action = _update(table, key(tenant, write.pack.blake3), update, condition, values)
    action["Update"]["ExpressionAttributeNames"] = {"#ttl": "ttl"}
    return action


def _declared(pack: Pack) -> Item:
    return {":size": number(pack.size_bytes), ":crc": {"S": pack.crc64nvme}}


def _update(table: str, place: Item, update: str, condition: str, values: Item) -> Item:
    return {
        "Update": {
            "TableName": table,
            "Key": place,
            "UpdateExpression": update,
            "ConditionExpression": condition,
            "ExpressionAttributeValues": values,
        }
    }
