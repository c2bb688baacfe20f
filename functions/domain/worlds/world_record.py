"""Define the stored world of an elastic job, and the view that nodes and users receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from baton.contract.elastic.world import NodeProgram, NodeView, RoundReport, TensorShape, WorldState, WorldView
from functions.domain.record_base import Record, TableRecord
from functions.domain.records import Lease
from functions.domain.seat_records import SeatMark

RECENT_ROUNDS = 8
"""Rounds whose tokens a node keeps."""
Leases = Mapping[int, Lease]
"""Newest lease of each seat, by seat; no entry for a seat that no worker has claimed."""


class WorldNode(Record):
    """Node of a world: one training process of one attempt at a seat."""

    node: str
    machine_id: str | None = None
    addresses: list[str] = []
    certificate: str = ""
    round: int = 0
    """Round of the outer state that the node held at its last join."""
    ready: bool = True
    """False for a joining node that fetches the outer state."""
    relay: bool = False
    """True once the node exchanges bytes with a peer through the object store."""
    joined_at: int | None = None
    """Instant of the epoch that made the node a member; None for a joining node."""
    state: str = ""
    """State, tokens and link speed of the newest report."""
    tokens: int = 0
    link_mbit_s: float | None = None
    recent_tokens: list[int] = []
    """Tokens in the newest RECENT_ROUNDS reported rounds as a member, oldest first."""

    @property
    def seat(self) -> int:
        """Return the seat in the node's id."""
        return int(self.node.split(".")[0])

    @property
    def attempt(self) -> int:
        """Return the attempt at the seat in the node's id."""
        return int(self.node.split(".")[1])

    def has_ended(self, leases: Leases) -> bool:
        """Return True if the attempt is over. An expired lease may be renewed until a sweep revokes the lease."""
        lease = leases.get(self.seat)
        return lease is None or lease.epoch != self.attempt or bool(lease.closed)

    def is_live(self, leases: Leases, now: int) -> bool:
        """Return True if the node's attempt holds an unexpired lease."""
        return not self.has_ended(leases) and leases[self.seat].expires_at > now

    def view(self, leases: Leases, now: int) -> NodeView:
        """Return the node for nodes and users."""
        return NodeView(
            **self.model_dump(),
            seat=self.seat,
            member=self.joined_at is not None,
            lease_live=self.is_live(leases, now),
        )


class WorldRecord(TableRecord):
    """World of an elastic job, a record of the elastic job. Each write is a compare-and-swap on `version`."""

    KIND: ClassVar[str] = "WORLD"
    VERSION: ClassVar[str | None] = "version"

    version: int
    epoch: int = 0
    """Number of the membership; 0 before the first."""
    formed_epoch: int = 0
    """Newest epoch without members of the epoch before."""
    round: int = 0
    members: list[WorldNode] = []
    """Members of the epoch in the order of their ranks."""
    joining: list[WorldNode] = []
    program: NodeProgram | None = None
    """Program of all nodes, without its tensors, which `WorldTensors` has: most writes do not change the program."""
    rounds: list[RoundReport] = []
    """Newest rounds, oldest first."""

    def is_lost(self, member: WorldNode, leases: Leases) -> bool:
        """Return True if the member has ended, or if a newer process of its seat asks to join."""
        return member.has_ended(leases) or any(one.seat == member.seat for one in self.joining)

    def trains(self, seats: Sequence[SeatMark]) -> bool:
        """Return True if a member is of an attempt that runs, as the elastic job has recorded its seats."""
        return any(seats[one.seat].running and seats[one.seat].epoch == one.attempt for one in self.members)


class WorldTensors(TableRecord):
    """First tensors of a world's program, to name the first difference in a refusal."""

    KIND: ClassVar[str] = "TENSORS"

    tensors: list[TensorShape]


def view_world(
    job_id: str, world: WorldRecord | None, leases: Leases, *, least: int, most: int, ended: bool = False, now: int
) -> WorldView:
    """Return the world for nodes and users. `least`, `most`: numbers of nodes of the elastic job."""
    world = world or WorldRecord(version=0)
    live = [one for one in world.members if not one.has_ended(leases)]
    state: WorldState = "ended" if ended else "training" if live else "forming"
    return WorldView(
        job=job_id,
        state=state,
        epoch=world.epoch,
        round=world.round,
        min=least,
        max=most,
        nodes=[one.view(leases, now) for one in (*world.members, *world.joining)],
        program=world.program,
        rounds=world.rounds,
    )
