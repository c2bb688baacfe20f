"""Lease shards of an elastic job's data to its nodes."""

from __future__ import annotations

from baton.contract.elastic.data import DataGrant, DataRequest
from baton.contract.errors import ErrorCode
from functions.api.http.context import ApiCall, Context
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.api.worlds.world_calls import read_leases, require_seat
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs.transaction import CheckLease, Put, Transaction
from functions.domain.worlds.data_pool import DataRecord, lease_shards
from functions.domain.worlds.membership import require_own_node
from functions.domain.worlds.world_record import WorldRecord


def lease(context: Context, call: ApiCall) -> DataGrant:
    """Lease shards to the node, and return all shards that the node holds; a repeat returns the same shards."""
    body: DataRequest = call.body
    seat, fence = require_seat(context, call), call.fence(call.path["id"])
    for _ in range(WRITE_TRIES):
        record = context.jobs.read(DataRecord, seat.job)
        world = context.jobs.read(WorldRecord, seat.job) or WorldRecord(version=0)
        leases = read_leases(context, seat)
        own = leases.get(seat.seat)
        if own is None or not fence.admits(own):
            raise fence.refusal(own)
        require_own_node(body.node, seat, own)
        after, grant = lease_shards(record, body, world, leases)
        if after is None:
            return grant
        try:
            context.jobs.apply(Transaction((Put(owner=seat.job, record=after), CheckLease(fence=fence))))
        except WriteConflict:
            continue
        except FenceBroken as broken:
            raise fence.refusal(broken.lease) from broken
        return grant
    raise Refusal(ErrorCode.CONFLICT, f"Other nodes leased shards during all {WRITE_TRIES} tries.")
