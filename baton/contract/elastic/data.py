"""Define the leases of shards: the part of the data that an elastic job has trained, and the shards of each node.

The nodes agree on one order of all shards, in which a shard has a position; the control plane knows only positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from baton.contract.base import AnswerModel, WireModel
from baton.contract.elastic.nodes import MAX_NODES
from baton.contract.elastic.spans import Spans, has_number, make_spans, merge_spans, subtract_spans
from baton.contract.elastic.world import NodeId, Round, WorldEpoch

MAX_LEASES = 96
"""Largest number of shards that a node holds, with the shards whose progress no committed round contains."""
MAX_SPANS = 2 * MAX_LEASES * MAX_NODES

Position = Annotated[int, Field(ge=0, le=10**12)]
Span = Annotated[list[Position], Field(min_length=2, max_length=2)]


class DataProgress(WireModel):
    """Trained part of the data. Example: `{"finished": [[0, 12], [14, 15]], "offsets": [[12, 4096]]}`"""

    finished: Annotated[list[Span], Field(max_length=MAX_SPANS)] = []
    """Positions of shards trained to the end, as half-open ranges: ascending, none empty, none adjacent."""
    offsets: Annotated[list[Span], Field(max_length=MAX_SPANS)] = []
    """Position and trained offset of shards begun, ascending by position."""

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if merge_spans(self.finished) != self.finished or any(start >= end for start, end in self.finished):
            raise ValueError("'finished' is not ascending, or has empty, overlapping or adjacent ranges")
        begun = [position for position, _ in self.offsets]
        if any(one >= other for one, other in pairwise(begun)):
            raise ValueError("'offsets' is not ascending by position")
        return self

    @property
    def positions(self) -> list[list[int]]:
        """Return the spans of all shards finished or begun."""
        return merge_spans(self.finished, make_spans(position for position, _ in self.offsets))

    def merge(self, other: DataProgress) -> DataProgress:
        """Return the progress of both; of two offsets of one shard, the larger."""
        finished = merge_spans(self.finished, other.finished)
        return _build(finished, sorted([*self.offsets, *other.offsets]), finished)

    def without(self, other: DataProgress) -> DataProgress:
        """Return the progress that `other` lacks."""
        new = [one for one in self.offsets if one[1] > other.offset_of(one[0])]
        return _build(subtract_spans(self.finished, other.finished), new, other.finished)

    def offset_of(self, position: int) -> int:
        """Return the trained offset of a shard begun; 0 for another shard."""
        return next((offset for one, offset in self.offsets if one == position), 0)

    def covers(self, positions: int | None) -> bool:
        """Return True if all of `positions` shards are finished; None for endless data, which never is."""
        return positions is not None and (self.finished == [[0, positions]] or not positions)


def _build(finished: list[list[int]], offsets: Iterable[list[int]], done: Spans) -> DataProgress:
    begun = {position: offset for position, offset in offsets if not has_number(done, position)}
    return DataProgress(finished=finished, offsets=[[position, offset] for position, offset in begun.items()])


class DataRequest(WireModel):
    """Body of `POST /job/{id}/world/data`: a node asks for shards, and says what the committed rounds contain.

    Example: `{"node": "3.1.9f86d081", "plan_sha256":
    "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "positions": 1000, "epoch": 4, "round": 12,
    "concluded": true, "trained": {"finished": [[0, 12]]}, "pending": {"offsets": [[14, 4096]]}, "want": 4}`
    """

    node: NodeId
    plan_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Digest of the order of the shards, equal at all nodes."""
    positions: Annotated[int, Field(ge=0, le=10**12)] | None = None
    """Number of shards in the order; None for endless data."""
    epoch: WorldEpoch = 0
    """Newest epoch in which the node has had the group's outer state; 0 for a joining node."""
    round: Round = 0
    concluded: bool = False
    """True once no unfinished round can contain deltas of nodes that are no members of this epoch."""
    trained: DataProgress = DataProgress()
    """Data in the committed rounds, up to `round`."""
    pending: DataProgress = DataProgress()
    """Data that the node has trained since its newest delta in a committed round."""
    want: Annotated[int, Field(ge=0, le=MAX_LEASES)] = 0
    """Number of unfinished shards that the node wants to hold."""


class DataGrant(AnswerModel):
    """Shards that a node holds. Example: `{"leases": [[14, 4096], [15, 0]], "exhausted": false}`"""

    leases: list[list[int]] = []
    """Position, and offset at which the training of the shard continues, of each unfinished shard of the node."""
    exhausted: bool = False
    """True if every other shard is finished or held by another node."""
