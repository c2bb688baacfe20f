"""Let nodes that cannot connect to each other exchange bytes through the object store.

The lease of the sender's seat fences each upload, and the name of an object has both nodes: a receiver reads only what
the named sender has stored.
"""

from __future__ import annotations

from baton.contract.elastic.relay import (
    MAX_DOWNLOADS,
    RelayAnswer,
    RelayCaller,
    RelayRequest,
    RelayTarget,
    RelayUpload,
)
from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from functions.api.http.context import ApiCall, Context
from functions.api.worker.lease_guard import WRITE_TRIES, require_lease
from functions.api.worlds.world_calls import build_conflict, require_seat
from functions.domain.checkpoints.object_keys import RelayStream, parse_relay_call, relay_calls_prefix
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs.transaction import CheckLease, Put, Transaction
from functions.domain.seat_records import Seat
from functions.domain.worlds import membership as rules
from functions.domain.worlds.world_record import WorldRecord

URL_LIFE_S = 900
MAX_CALLS = 1000


def relay(context: Context, call: ApiCall) -> RelayAnswer:
    """Sign the URLs of a node's streams, delete the objects that the node has read, list the channels to the node."""
    body: RelayRequest = call.body
    seat = require_seat(context, call)
    fence = call.fence(call.path["id"])
    rules.require_own_node(body.node, seat, require_lease(context, fence))
    world = _find_present(context, seat, body)
    if body.upload is not None and body.upload.number == 0:
        _mark_relayed(context, call, seat, world, body)
    life_s = min(URL_LIFE_S, context.settings.url_life_s)
    upload, download = body.upload, body.download
    target = None
    if upload is not None:
        sent = RelayStream(seat.job, sender=body.node, receiver=upload.to, channel=upload.channel)
        target = _sign_upload(context, call, sent, upload, life_s)
    downloads = []
    if download is not None:
        received = RelayStream(seat.job, sender=download.source, receiver=body.node, channel=download.channel)
        downloads = _sign_downloads(context, call, received, download.number, life_s)
    # Without a mark no peer has opened a channel; a list of objects costs more than all else of the call.
    is_called = any(one.node == body.node and one.relay for one in (*world.members, *world.joining))
    calls = _list_calls(context, call, seat.job, body.node) if body.calls and is_called else []
    return RelayAnswer(upload=target, downloads=downloads, calls=calls, life_s=life_s)


def _find_present(context: Context, seat: Seat, body: RelayRequest) -> WorldRecord:
    """Return the world. Refuses nodes that are neither members nor joining."""
    world = context.jobs.read(WorldRecord, seat.job) or WorldRecord(version=0)
    peers = [one for one in (body.upload and body.upload.to, body.download and body.download.source) if one]
    present = {one.node for one in (*world.members, *world.joining)}
    for name in (body.node, *peers):
        if name not in present:
            detail = f"Node {name} is neither a member of epoch {world.epoch} nor joining."
            raise Refusal(ErrorCode.NOT_A_MEMBER, detail, field="node")
    return world


def _mark_relayed(context: Context, call: ApiCall, seat: Seat, world: WorldRecord, body: RelayRequest) -> None:
    """Mark the nodes of a new channel, because an unmarked node is not told of calls."""
    assert body.upload is not None
    fence = call.fence(call.path["id"])
    for _ in range(WRITE_TRIES):
        relayed = rules.mark_relayed(world, [body.node, body.upload.to])
        if relayed is None:
            return
        try:
            context.jobs.apply(Transaction((Put(owner=seat.job, record=relayed), CheckLease(fence=fence))))
        except WriteConflict:
            world = _find_present(context, seat, body)
            continue
        except FenceBroken as broken:
            raise fence.refusal(broken.lease) from broken
        return
    raise build_conflict()


def _sign_upload(context: Context, call: ApiCall, stream: RelayStream, upload: RelayUpload, life_s: int) -> RelayTarget:
    signed = context.objects.presign_put(
        call.tenant,
        CHECKPOINTS_BUCKET,
        stream.key(upload.number),
        expires_s=life_s,
        size_bytes=upload.size_bytes,
        create_only=True,
    )
    return RelayTarget(url=signed.url, headers=dict(signed.headers))


def _sign_downloads(context: Context, call: ApiCall, stream: RelayStream, first: int, life_s: int) -> list[str]:
    """Return the URLs of the next objects of a stream, and delete the objects before, which the node has read."""
    read = [stream.key(number) for number in range(max(0, first - MAX_DOWNLOADS), first)]
    context.objects.delete_many(call.tenant, CHECKPOINTS_BUCKET, read)
    return [
        context.objects.presign_get(call.tenant, CHECKPOINTS_BUCKET, stream.key(number), expires_s=life_s)
        for number in range(first, first + MAX_DOWNLOADS)
    ]


def _list_calls(context: Context, call: ApiCall, job_id: str, node: str) -> list[RelayCaller]:
    """Return the channels whose first object the node has not read yet."""
    prefix = relay_calls_prefix(job_id, node)
    page = context.objects.list(call.tenant, CHECKPOINTS_BUCKET, prefix, limit=MAX_CALLS)
    callers = [parse_relay_call(prefix, one.key) for one in page.items]
    return [RelayCaller(node=sender, channel=channel) for sender, channel in callers]
