"""Rings: their records, URLs for their samples and manifests, which there are, and removing one."""

from __future__ import annotations

import base64

from baton.contract.errors import ErrorCode
from baton.contract.names import DATA_BUCKET, RING_SETTINGS
from baton.contract.rings import (
    MAX_DELETED,
    MAX_RECORD_BYTES,
    DeleteRequest,
    GetUrl,
    PutUrl,
    RecordsAnswer,
    RecordsRequest,
    RecordView,
    RecordWrite,
    RemovalAnswer,
    RingKeysPage,
    RingKeysQuery,
    RingsPage,
    RingsQuery,
    RingView,
    UrlsAnswer,
    UrlsRequest,
    is_object,
    is_sample,
)
from functions.api.http.context import Call, Context, NoContent
from functions.domain.access.rings import RingRecord, StoredRing
from functions.domain.errors import Refusal
from functions.domain.ports import RingStore

_LISTED = 1000
"""Objects that one call removes: what S3 lists, and deletes, at a time."""


def list_rings(context: Context, call: Call) -> RingsPage:
    """The tenant's rings, by name."""
    query: RingsQuery = call.query
    page = _store(context).list(call.tenant, limit=query.limit, cursor=query.cursor)
    return RingsPage(rings=[_view(ring) for ring in page.items], next_cursor=page.cursor)


def records(context: Context, call: Call) -> RecordsAnswer:
    """Write a record if it is as it was seen, then read some: what is read is as it was after that write."""
    body: RecordsRequest = call.body
    wanted = list(dict.fromkeys(body.read))
    for key in (*wanted, *([body.write.key] if body.write else [])):
        _require_kind(key, of_object=False)
    written: bool | None = None
    if body.write is not None and body.write.key == RING_SETTINGS:
        written = _made(context, call, body.write)
        ring = _ring_or_none(context, call, body.of)
    elif body.write is None and wanted == [RING_SETTINGS]:
        ring = _ring_or_none(context, call, body.of)
    else:
        ring = _ring(context, call, body.of)
        if body.write is not None:
            seen, version = body.write.seen, body.write.version
            written = _store(context).write(ring, body.write.key, _data(body.write), version=version, seen=seen)
    return RecordsAnswer(written=written, records=_read(context, ring, wanted))


def urls(context: Context, call: Call) -> UrlsAnswer:
    """Presigned URLs for objects: to store those that are not there, and to fetch. Nobody looks whether they are."""
    body: UrlsRequest = call.body
    for key in (*body.put, *body.get, *(one.key for one in body.declared)):
        _require_kind(key, of_object=True)
    ring = _ring(context, call, body.of)
    life_s = context.settings.url_life_s
    put, get = [], []
    plain: list[tuple[str, int | None, str | None]] = [(key, None, None) for key in dict.fromkeys(body.put)]
    for key, size_bytes, crc64nvme in (
        *plain,
        *((one.key, one.size_bytes, one.crc64nvme) for one in body.declared),
    ):
        signed = context.objects.presign_put(
            call.tenant,
            DATA_BUCKET,
            ring.object_key(key),
            expires_s=life_s,
            size_bytes=size_bytes,
            crc64nvme=crc64nvme,
            create_only=True,
            # Of manifests the newest is needed however long its ring rests.
            expiring=context.settings.samples_expire and is_sample(key),
        )
        put.append(PutUrl(key=key, url=signed.url, headers=dict(signed.headers)))
    for key in dict.fromkeys(body.get):
        url = context.objects.presign_get(call.tenant, DATA_BUCKET, ring.object_key(key), expires_s=life_s)
        get.append(GetUrl(key=key, url=url))
    return UrlsAnswer(put=put, get=get, life_s=life_s)


def list_keys(context: Context, call: Call) -> RingKeysPage:
    """Keys below a prefix, in order: of objects or of records."""
    query: RingKeysQuery = call.query
    ring = _ring(context, call, query.of)
    if not is_object(query.prefix):
        found = _store(context).keys(ring, query.prefix, limit=query.limit, cursor=query.cursor)
        return RingKeysPage(keys=list(found.items), next_cursor=found.cursor)
    page = context.objects.list(
        call.tenant, DATA_BUCKET, ring.object_key(query.prefix), limit=query.limit, cursor=query.cursor
    )
    keys = [item.key.removeprefix(ring.objects_prefix) for item in page.items]
    return RingKeysPage(keys=keys, next_cursor=page.cursor)


def delete_keys(context: Context, call: Call) -> NoContent:
    """Forget records and objects; those that are not there are passed over."""
    body: DeleteRequest = call.body
    if RING_SETTINGS in body.keys:
        raise Refusal(ErrorCode.INVALID_KEY, f"{RING_SETTINGS} goes with its ring: DELETE /rings/<ring>.", field="keys")
    ring = _ring(context, call, body.of)
    objects = [ring.object_key(key) for key in body.keys if is_object(key)]
    _store(context).delete(ring, [key for key in body.keys if not is_object(key)])
    context.objects.delete_many(call.tenant, DATA_BUCKET, objects)
    return NoContent()


def remove(context: Context, call: Call) -> RemovalAnswer:
    """Remove a ring with all that is in it, a part with each call; from the first one on nobody else is let in."""
    store = _store(context)
    ring = store.get(call.tenant, call.path["ring"])
    if ring is None or not (ring.removing or store.begin_removal(ring)):
        raise _unknown(call)
    objects = context.objects.list(call.tenant, DATA_BUCKET, ring.objects_prefix, limit=_LISTED)
    context.objects.delete_many(call.tenant, DATA_BUCKET, [item.key for item in objects.items])
    # DynamoDB deletes 25 at a time: more would not be done within the call's time.
    found = store.keys(ring, "", limit=MAX_DELETED // 2)
    store.delete(ring, found.items)
    done = objects.cursor is None and found.cursor is None
    if done:
        store.forget(ring)
    return RemovalAnswer(removed=len(objects.items) + len(found.items), done=done)


def _store(context: Context) -> RingStore:
    if context.rings is None:
        raise RuntimeError("this function was not given the store of rings")
    return context.rings


def _made(context: Context, call: Call, write: RecordWrite) -> bool:
    """The settings are what makes a ring. They never change."""
    _require_named(call)
    if write.seen is not None:
        return False
    ring = StoredRing(
        tenant=call.tenant, name=call.path["ring"], id=write.version, settings=_data(write), created_at=call.now
    )
    return _store(context).make(ring)


def _ring(context: Context, call: Call, of: str | None) -> StoredRing:
    found = _ring_or_none(context, call, of)
    if found is None:
        raise _unknown(call)
    return found


def _ring_or_none(context: Context, call: Call, of: str | None) -> StoredRing | None:
    """The ring, unless there is none, or another than is meant. Refuses one that is being removed."""
    _require_named(call)
    found = _store(context).get(call.tenant, call.path["ring"])
    if found is not None and found.removing:
        raise Refusal(
            ErrorCode.RING_NOT_FOUND, f"The ring {found.name} is being removed; finish that first.", field="ring"
        )
    return found if found is None or of is None or found.id == of else None


def _require_named(call: Call) -> None:
    """A job's processes get at the rings that it names."""
    named = call.principal.rings
    if named is not None and call.path["ring"] not in named:
        said = ", ".join(sorted(named))
        raise Refusal(ErrorCode.WRONG_SCOPE, f"This job names the rings {said}, and no others.", field="ring")


def _require_kind(key: str, *, of_object: bool) -> None:
    if is_object(key) != of_object:
        where = "an object, which has URLs" if is_object(key) else "a record, which has no URL"
        raise Refusal(ErrorCode.INVALID_KEY, f"What lies under {key} is {where}.", field="key")


def _data(write: RecordWrite) -> bytes:
    data = base64.b64decode(write.data)
    if len(data) > MAX_RECORD_BYTES:
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"The record {write.key} has {len(data)} bytes; at most {MAX_RECORD_BYTES} are kept.",
            field="write.data",
        )
    return data


def _read(context: Context, ring: StoredRing | None, wanted: list[str]) -> list[RecordView]:
    if ring is None or not wanted:
        return []
    found = _store(context).read(ring, [key for key in wanted if key != RING_SETTINGS])
    found[RING_SETTINGS] = RingRecord(ring.settings, ring.id)
    return [
        RecordView(key=key, data=base64.b64encode(found[key].data).decode(), version=found[key].version)
        for key in wanted
        if key in found
    ]


def _view(ring: StoredRing) -> RingView:
    return RingView(name=ring.name, id=ring.id, created_at=ring.created_at, removing=ring.removing)


def _unknown(call: Call) -> Refusal:
    return Refusal(ErrorCode.RING_NOT_FOUND, f"No ring {call.path['ring']}.", field="ring")
