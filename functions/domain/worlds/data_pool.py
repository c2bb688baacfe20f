"""Decide which node trains which shards of the data of an elastic job.

The truth about trained data is part of the outer state, and the record repeats this truth as its newest member has
told it. Therefore a world that is formed anew from an older checkpoint needs no correction but the word of a member.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from baton.contract.elastic.data import MAX_LEASES, DataGrant, DataProgress, DataRequest
from baton.contract.elastic.spans import count_spans, list_numbers, merge_spans, subtract_spans, take_free
from baton.contract.elastic.world import WorldShards
from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.record_base import TableRecord
from functions.domain.worlds.world_record import Leases, WorldNode, WorldRecord


class DataRecord(TableRecord):
    """Leases of shards. Each write is a compare-and-swap on `version`."""

    KIND: ClassVar[str] = "DATA"
    VERSION: ClassVar[str | None] = "version"

    version: int
    plan_sha256: str
    positions: int | None = None
    """Number of shards; None for endless data."""
    epoch: int = 0
    """Epoch and round of `trained`."""
    round: int = 0
    trained: DataProgress = DataProgress()
    """Data in the committed rounds."""
    leases: dict[str, list[list[int]]] = {}
    """By node, the spans of its shards."""

    def view(self) -> WorldShards:
        """Return the shards for users."""
        held = {node: count_spans(spans) for node, spans in self.leases.items()}
        return WorldShards(total=self.positions, finished=count_spans(self.trained.finished), held=held)


def lease_shards(
    record: DataRecord | None, request: DataRequest, world: WorldRecord, leases: Leases
) -> tuple[DataRecord | None, DataGrant]:
    """Return the next record, None for no change, and the shards of the node.

    Before a member of a new world has told its committed data, no node receives shards.
    """
    is_member = request.epoch == world.epoch and any(one.node == request.node for one in world.members)
    is_confirmed = record is not None and record.epoch >= world.formed_epoch
    if not is_confirmed and not is_member:
        return None, DataGrant()
    if record is None or (not is_confirmed and record.plan_sha256 != request.plan_sha256):
        version = 0 if record is None else record.version
        record = DataRecord(version=version, plan_sha256=request.plan_sha256, positions=request.positions)
    if record.plan_sha256 != request.plan_sha256:
        detail = f"Node {request.node} has another order of the shards than the nodes of epoch {record.epoch}."
        raise Refusal(ErrorCode.DATA_MISMATCH, detail, field="plan_sha256")
    before = record
    known, told = (record.epoch, record.round), (request.epoch, request.round)
    if is_member and told >= known:
        # Equal rounds may differ in shards that ended without a further batch.
        trained = request.trained if told > known else request.trained.merge(record.trained)
        record = record.model_copy(update={"epoch": request.epoch, "round": request.round, "trained": trained})
    held = record.leases
    # Until the members of an epoch without the node have concluded, an unfinished round may still contain its delta.
    if is_member and (request.concluded or request.epoch == world.formed_epoch):
        held = {node: spans for node, spans in held.items() if not _has_left(node, world, leases)}
    held = {node: left for node, spans in held.items() if (left := subtract_spans(spans, record.trained.finished))}
    own = held.get(request.node, [])
    unfinished = subtract_spans(own, request.pending.finished)
    want = min(request.want, _fair_share(record, len(world.members)))
    count = min(want - count_spans(unfinished), MAX_LEASES - count_spans(own))
    taken = merge_spans(record.trained.finished, *held.values())
    free = take_free(taken, record.positions, max(0, count))
    own = merge_spans(own, free)
    # A node that has resumed may have trained a shard before its lease.
    unfinished = subtract_spans(merge_spans(unfinished, free), request.pending.finished)
    after = record.model_copy(update={"leases": {**held, request.node: own} if own else held})
    grant = DataGrant(
        leases=[[one, _offset_of(one, (record.trained, request.pending))] for one in list_numbers(unfinished)],
        exhausted=not take_free(merge_spans(taken, free), record.positions, 1),
    )
    if after == before and before.version:
        return None, grant
    return after.model_copy(update={"version": before.version + 1}), grant


def _fair_share(record: DataRecord, members: int) -> int:
    """Return how many unfinished shards a node may hold, so that all nodes have work until the end of the data."""
    if record.positions is None:
        return MAX_LEASES
    left = record.positions - count_spans(record.trained.finished)
    return max(2, left // (2 * max(1, members)))


def _offset_of(position: int, progress: Iterable[DataProgress]) -> int:
    return max(one.offset_of(position) for one in progress)


def _has_left(node: str, world: WorldRecord, leases: Leases) -> bool:
    """Return True if no later round can contain a delta of the node."""
    one = WorldNode(node=node)
    others = [*world.members, *world.joining]
    is_replaced = any(other.seat == one.seat and other.node != node for other in others)
    return all(other.node != node for other in world.members) and (one.has_ended(leases) or is_replaced)
