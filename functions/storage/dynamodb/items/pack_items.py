"""Convert packs to DynamoDB items and back, and the decisions of domain/checkpoints/packs.py to conditions."""

from __future__ import annotations

from baton.contract.checkpoints.manifest import Pack
from functions.domain import table_keys
from functions.domain.checkpoints.packs import CONDEMNED_RETENTION_S, CondemnPack, PackSnapshot, PackWrite
from functions.domain.records import PackRecord
from functions.storage.dynamodb.items.attribute_values import Item, number

_DECLARED = "size_bytes = :size, crc64nvme = :crc"
_NAMES = {"#ttl": "ttl", "#version": "version"}


def key(tenant: str, blake3: str) -> Item:
    """Return the key of a pack's item."""
    return {"pk": {"S": table_keys.pack_pk(tenant, blake3)}, "sk": {"S": table_keys.PACK}}


def from_item(item: Item) -> PackRecord:
    """Decode the record in an item."""
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
        version=item["version"]["S"] if "version" in item else None,
    )


def hold(tenant: str, job_id: str, sighting: PackSnapshot, version: str) -> Item:
    """Return the UpdateItem that adds a job's reference; its condition expresses `packs.may_reference`."""
    pack, seen = sighting.pack, sighting.record
    values: Item = {":job": {"SS": [job_id]}, ":version": {"S": version}, **_declared(pack)}
    if seen is None or seen.condemned_at is not None:
        condition = _as_seen(seen, values)
    elif seen.doubted:
        condition = "attribute_exists(jobs) AND attribute_exists(doubted)"
    else:
        condition = (
            "attribute_exists(jobs) AND attribute_not_exists(doubted) AND size_bytes = :size AND crc64nvme = :crc"
        )
    return {
        "Key": key(tenant, pack.blake3),
        "UpdateExpression": (f"SET {_DECLARED}, #version = :version REMOVE condemned_at, doubted, #ttl ADD jobs :job"),
        "ConditionExpression": condition,
        "ExpressionAttributeNames": _NAMES,
        "ExpressionAttributeValues": values,
    }


def remove_reference(tenant: str, job_id: str, write: PackWrite, version: str) -> Item:
    """Return the arguments of the UpdateItem that condemns or releases, with the condition of `packs.may_release`."""
    values: Item = {":version": {"S": version}}
    condition = _as_seen(write.seen, values)
    names = {"#version": "version"}
    if isinstance(write, CondemnPack):
        names = _NAMES
        update = "SET condemned_at = :at, #ttl = :ttl, #version = :version REMOVE jobs, doubted"
        values |= {":at": number(write.at), ":ttl": number(write.at + CONDEMNED_RETENTION_S)}
        if write.seen is None:
            update = update.replace("SET ", f"SET {_DECLARED}, ")
            values |= _declared(write.pack)
    else:
        update = "SET #version = :version DELETE jobs :job"
        values[":job"] = {"SS": [job_id]}
    return {
        "Key": key(tenant, write.pack.blake3),
        "UpdateExpression": update,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": names,
        "ExpressionAttributeValues": values,
    }


def _as_seen(seen: PackRecord | None, values: Item) -> str:
    """Return the condition that the item is unchanged since the read. `seen` None: no item existed."""
    if seen is None:
        return "attribute_not_exists(pk)"
    if seen.version is None:
        return "attribute_exists(pk) AND attribute_not_exists(#version)"
    values[":seen"] = {"S": seen.version}
    return "#version = :seen"


def _declared(pack: Pack) -> Item:
    return {":size": number(pack.size_bytes), ":crc": {"S": pack.crc64nvme}}
