"""The calls for rings: list, records, URLs of objects, keys, deletion."""

from __future__ import annotations

import base64

from baton.contract.errors import ErrorCode
from baton.contract.names import DATA_BUCKET, RING_SETTINGS
from baton.contract.objects.rings import (
    MAX_DELETED,
    MAX_LISTED,
    MAX_RECORD_BYTES,
    MAX_RECORDS_BYTES,
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
    RingRecordsQuery,
    RingRecordsView,
    RingsPage,
    RingsQuery,
    RingView,
    UrlsAnswer,
    UrlsRequest,
    is_object,
    is_sample,
)
from functions.api.http.context import ApiCall, Context, NoContent
from functions.api.http.paging import read_fitting_page
from functions.domain.access.rings import RingRecord, StoredRing
from functions.domain.errors import Refusal
from functions.domain.ports import RingStore

_RECORDS_AT_ONCE = 100
_OBJECTS_PER_CALL = 1000
"""Objects that one call deletes: the limit of one listing, and of one deletion, in S3."""


def list_rings(context: Context, call: ApiCall) -> RingsPage:
    """List the tenant's rings by name."""
    query: RingsQuery = call.query
    wanted = _split_keys(query.records)
    limit = min(query.limit, MAX_LISTED) if wanted else query.limit
    rings, cursor = read_fitting_page(
        lambda most: _require_store(context).list(call.tenant, limit=most, cursor=query.cursor),
        lambda found: [_view(ring, [] if ring.removing else _read_records(context, ring, wanted)) for ring in found],
        limit,
    )
    return RingsPage(rings=rings, next_cursor=cursor)


def records(context: Context, call: ApiCall) -> RecordsAnswer:
    """Write a record if its version is the one seen, then read records; the reads follow the write."""
    body: RecordsRequest = call.body
    wanted = list(dict.fromkeys(body.read))
    for key in (*wanted, *([body.write.key] if body.write else [])):
        _require_kind(key, of_object=False)
    written: bool | None = None
    if body.write is not None and body.write.key == RING_SETTINGS:
        written = _create_ring(context, call, body.write)
        ring = _find_ring(context, call, body.of)
    elif body.write is None and wanted == [RING_SETTINGS]:
        ring = _find_ring(context, call, body.of)
    else:
        ring = _require_ring(context, call, body.of)
        if body.write is not None:
            seen, version = body.write.seen, body.write.version
            written = _require_store(context).write(
                ring, body.write.key, _decode(body.write), version=version, seen=seen
            )
    return RecordsAnswer(written=written, records=_read_records(context, ring, wanted))


def list_records(context: Context, call: ApiCall) -> RingRecordsView:
    """Read records by key and by prefix, for programs that follow a ring by conditional requests."""
    query: RingRecordsQuery = call.query
    wanted, incomplete = _split_keys(query.keys), []
    ring = _require_ring(context, call, query.of)
    for prefix in query.prefixes.split(",") if query.prefixes else []:
        _require_kind(prefix, of_object=False)
        found = _require_store(context).keys(ring, prefix, limit=query.limit)
        wanted += found.items
        incomplete += [prefix] if found.cursor is not None else []
    records, room_bytes = [], MAX_RECORDS_BYTES
    wanted = list(dict.fromkeys(wanted))
    while wanted and room_bytes >= 0:
        batch, wanted = wanted[:_RECORDS_AT_ONCE], wanted[_RECORDS_AT_ONCE:]
        for one in _read_records(context, ring, batch):
            room_bytes -= len(one.data)
            if room_bytes >= 0:
                records.append(one)
            else:
                incomplete.append(one.key)
    incomplete += wanted
    return RingRecordsView(records=records, incomplete=incomplete)


def urls(context: Context, call: ApiCall) -> UrlsAnswer:
    """Presign URLs to create and to fetch objects, without a check that the objects exist."""
    body: UrlsRequest = call.body
    for key in (*body.put, *body.get, *(one.key for one in body.declared)):
        _require_kind(key, of_object=True)
    ring = _require_ring(context, call, body.of)
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
            # Manifests never expire, because an idle ring needs its newest manifest.
            expiring=context.settings.samples_expire and is_sample(key),
        )
        put.append(PutUrl(key=key, url=signed.url, headers=dict(signed.headers)))
    for key in dict.fromkeys(body.get):
        url = context.objects.presign_get(call.tenant, DATA_BUCKET, ring.object_key(key), expires_s=life_s)
        get.append(GetUrl(key=key, url=url))
    return UrlsAnswer(put=put, get=get, life_s=life_s)


def list_keys(context: Context, call: ApiCall) -> RingKeysPage:
    """List keys of objects or records below a prefix, in order."""
    query: RingKeysQuery = call.query
    ring = _require_ring(context, call, query.of)
    if not is_object(query.prefix):
        found = _require_store(context).keys(ring, query.prefix, limit=query.limit, cursor=query.cursor)
        return RingKeysPage(keys=list(found.items), next_cursor=found.cursor)
    page = context.objects.list(
        call.tenant, DATA_BUCKET, ring.object_key(query.prefix), limit=query.limit, cursor=query.cursor
    )
    keys = [item.key.removeprefix(ring.objects_prefix) for item in page.items]
    return RingKeysPage(keys=keys, next_cursor=page.cursor)


def delete_keys(context: Context, call: ApiCall) -> NoContent:
    """Delete records and objects; ignore missing keys."""
    body: DeleteRequest = call.body
    if RING_SETTINGS in body.keys:
        raise Refusal(
            ErrorCode.INVALID_KEY, f"{RING_SETTINGS} is deleted with its ring: DELETE /rings/<ring>.", field="keys"
        )
    ring = _require_ring(context, call, body.of)
    objects = [ring.object_key(key) for key in body.keys if is_object(key)]
    _require_store(context).delete(ring, [key for key in body.keys if not is_object(key)])
    context.objects.delete_many(call.tenant, DATA_BUCKET, objects)
    return NoContent()


def remove(context: Context, call: ApiCall) -> RemovalAnswer:
    """Delete a ring and its contents, a part with each call; the first call closes the ring to other calls."""
    store = _require_store(context)
    ring = store.get(call.tenant, call.path["ring"])
    if ring is None or not (ring.removing or store.begin_removal(ring)):
        raise _not_found(call)
    objects = context.objects.list(call.tenant, DATA_BUCKET, ring.objects_prefix, limit=_OBJECTS_PER_CALL)
    context.objects.delete_many(call.tenant, DATA_BUCKET, [item.key for item in objects.items])
    # DynamoDB deletes 25 items at a time, so the call has no time for more.
    found = store.keys(ring, "", limit=MAX_DELETED // 2)
    store.delete(ring, found.items)
    done = objects.cursor is None and found.cursor is None
    if done:
        store.forget(ring)
    return RemovalAnswer(removed=len(objects.items) + len(found.items), done=done)


def _require_store(context: Context) -> RingStore:
    if context.rings is None:
        raise RuntimeError("this function has no store of rings")
    return context.rings


def _create_ring(context: Context, call: ApiCall, write: RecordWrite) -> bool:
    """Create a ring by its settings, which never change."""
    _require_named(call)
    if write.seen is not None:
        return False
    ring = StoredRing(
        tenant=call.tenant, name=call.path["ring"], id=write.version, settings=_decode(write), created_at=call.now
    )
    return _require_store(context).make(ring)


def _require_ring(context: Context, call: ApiCall, of: str | None) -> StoredRing:
    found = _find_ring(context, call, of)
    if found is None:
        raise _not_found(call)
    return found


def _find_ring(context: Context, call: ApiCall, of: str | None) -> StoredRing | None:
    """Return the ring; None if the ring is missing or has another id. Refuses a ring that is being deleted."""
    _require_named(call)
    found = _require_store(context).get(call.tenant, call.path["ring"])
    if found is not None and found.removing:
        raise Refusal(
            ErrorCode.RING_NOT_FOUND,
            f"The ring {found.name} is being deleted; repeat the deletion until it is done.",
            field="ring",
        )
    return found if found is None or of is None or found.id == of else None


def _require_named(call: ApiCall) -> None:
    """Refuse the processes of a job that does not name the ring."""
    named = call.principal.rings
    if named is not None and call.path["ring"] not in named:
        names = ", ".join(sorted(named))
        raise Refusal(ErrorCode.WRONG_SCOPE, f"This job names only the rings {names}.", field="ring")


def _split_keys(keys: str | None) -> list[str]:
    """Return the keys of records that a query names. Refuses keys of objects."""
    found = list(dict.fromkeys(keys.split(","))) if keys else []
    for key in found:
        _require_kind(key, of_object=False)
    return found


def _require_kind(key: str, *, of_object: bool) -> None:
    if is_object(key) != of_object:
        kind = "an object, which has URLs" if is_object(key) else "a record, which has no URL"
        raise Refusal(ErrorCode.INVALID_KEY, f"The key {key} names {kind}.", field="key")


def _decode(write: RecordWrite) -> bytes:
    data = base64.b64decode(write.data)
    if len(data) > MAX_RECORD_BYTES:
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"The record {write.key} has {len(data)} bytes; a record may have at most {MAX_RECORD_BYTES}.",
            field="write.data",
        )
    return data


def _read_records(context: Context, ring: StoredRing | None, wanted: list[str]) -> list[RecordView]:
    if ring is None or not wanted:
        return []
    found = _require_store(context).read(ring, [key for key in wanted if key != RING_SETTINGS])
    found[RING_SETTINGS] = RingRecord(ring.settings, ring.id)
    return [
        RecordView(key=key, data=base64.b64encode(found[key].data).decode(), version=found[key].version)
        for key in wanted
        if key in found
    ]


def _view(ring: StoredRing, records: list[RecordView]) -> RingView:
    return RingView(name=ring.name, id=ring.id, created_at=ring.created_at, removing=ring.removing, records=records)


def _not_found(call: ApiCall) -> Refusal:
    return Refusal(ErrorCode.RING_NOT_FOUND, f"No ring {call.path['ring']}.", field="ring")
