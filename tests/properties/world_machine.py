"""Test the world of an elastic job: nodes join, die, restart and propose from what they have read, also long ago.

The machine keeps the world as the store does (compare-and-swap on the version) and each seat's own last read of the
world. Leases are read at the moment of a decision. The promises are checked against the leases at that moment.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.contract.elastic.world import EpochProposal, JoinRequest, NodeProgram, WorldReport
from functions.domain.errors import Refusal
from functions.domain.records import Lease
from functions.domain.seat_records import Seat
from functions.domain.worlds import membership
from functions.domain.worlds.world_record import WorldNode, WorldRecord
from tests.kits.api.factories import JOB_ID, NOW, make_lease

SEATS, LEAST = 5, 2
SEAT = st.integers(0, SEATS - 1)
MASK = st.integers(0, 2**SEATS - 1)
PROGRAM = NodeProgram(torch="2.13.0", engine="wire", codec="int8", parameters=64, model_sha256="9f" * 32)


class World(RuleBasedStateMachine):
    """Five seats, their leases, and one world that all nodes change."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: WorldRecord | None = None
        self.reads: dict[int, WorldRecord | None] = {}
        self.leases: dict[int, Lease] = {}
        self.processes = 0
        self.nodes: dict[int, str] = {}
        self.memberships: dict[int, list[str]] = {}

    @initialize(seats=st.integers(LEAST, SEATS))
    def begin(self, seats: int) -> None:
        """Let some seats join, and the first form the world."""
        for seat in range(seats):
            self.claim(seat)
            self.join(seat, ready=True)
        self.propose(0, mask=0, admits=True, fresh=True)
        assert self.stored is not None and self.stored.epoch == 1

    @rule(seat=SEAT)
    def claim(self, seat: int) -> None:
        """Begin the next attempt at a seat."""
        epoch = self.leases[seat].epoch + 1 if seat in self.leases else 1
        self.leases[seat] = make_lease(epoch, machine_id=f"m-{seat}")
        self.restart(seat)

    @rule(seat=SEAT)
    def restart(self, seat: int) -> None:
        """Start a new training process within the attempt."""
        if seat in self.leases:
            self.processes += 1
            self.nodes[seat] = f"{seat}.{self.leases[seat].epoch}.{self.processes:08x}"

    @rule(seat=SEAT)
    def end(self, seat: int) -> None:
        """End the attempt at a seat."""
        if seat in self.leases:
            self.leases[seat] = self.leases[seat].model_copy(update={"closed": "interrupted"})

    @rule(seat=SEAT, late_s=st.sampled_from([0, 100]))
    def pass_time(self, seat: int, late_s: int) -> None:
        """Let a lease expire without a sweep, or renew the lease."""
        if seat in self.leases:
            self.leases[seat] = self.leases[seat].model_copy(update={"expires_at": NOW + 90 - late_s})

    @rule(seat=SEAT)
    def read(self, seat: int) -> None:
        """Read the world; later decisions of the seat rest on this read."""
        self.reads[seat] = self.stored

    @rule(seat=SEAT, ready=st.booleans())
    def join(self, seat: int, ready: bool) -> None:
        """Ask to join, with a fresh read as the call makes."""
        if not self.bears(seat):
            return
        request = JoinRequest(node=self.nodes[seat], ready=ready, program=PROGRAM)
        self.write(
            self.stored,
            membership.join(self.stored, request, self.seat(seat), self.leases[seat], self.leases),
        )

    @rule(seat=SEAT)
    def come(self, seat: int) -> None:
        """Begin an attempt whose node joins at once."""
        self.claim(seat)
        self.join(seat, ready=True)

    @rule(seat=SEAT)
    def repair(self, seat: int) -> None:
        """Propose as a node does: without the members that are gone, with the joining nodes."""
        world = self.stored
        assert world is not None
        mask = sum(1 << place for place, one in enumerate(world.members) if not self.is_gone(world, one))
        self.propose(seat, mask, admits=True, fresh=True)

    @rule(seat=SEAT, mask=MASK, admits=st.booleans(), fresh=st.booleans())
    def propose(self, seat: int, mask: int, admits: bool, fresh: bool) -> None:
        """Propose the members of the mask, and all joining nodes, from a fresh or an old read."""
        seen = self.stored if fresh else self.reads.get(seat)
        if not self.bears(seat) or seen is None:
            return
        kept = [one.node for place, one in enumerate(seen.members) if mask >> place & 1]
        added = [one.node for one in seen.joining if one.ready] if admits else []
        if not kept + added:
            return
        proposal = EpochProposal(node=self.nodes[seat], epoch=seen.epoch, members=kept + added, round=3)
        try:
            after = membership.propose(seen, proposal, self.seat(seat), self.leases[seat], self.leases, now=NOW)
        except Refusal:
            return
        if self.write(seen, after):
            self.check_epoch(seen, [*kept, *added], self.nodes[seat])

    @rule(seat=SEAT)
    def report(self, seat: int) -> None:
        """Report a round as a member."""
        if not self.bears(seat) or self.stored is None:
            return
        body = WorldReport(node=self.nodes[seat], epoch=self.stored.epoch)
        try:
            after = membership.report(self.stored, body, self.seat(seat), self.leases[seat])
        except Refusal:
            assert self.nodes[seat] not in [one.node for one in self.stored.members]
            return
        self.write(self.stored, after)

    @invariant()
    def each_epoch_has_one_membership(self) -> None:
        """Compare the present membership with all memberships that the epoch ever had."""
        if self.stored is not None:
            members = [one.node for one in self.stored.members]
            assert self.memberships.setdefault(self.stored.epoch, members) == members
            assert (self.stored.epoch == 0) == (members == [])

    @invariant()
    def each_seat_has_one_node(self) -> None:
        """Count the seats of members and of joining nodes."""
        for nodes in ([], []) if self.stored is None else (self.stored.members, self.stored.joining):
            assert len({one.seat for one in nodes}) == len(nodes)

    def check_epoch(self, before: WorldRecord, members: list[str], proposer: str) -> None:
        """Check an accepted epoch against the leases of this moment; a proposer may leave by its own proposal."""
        gone = [one.node for one in before.members if self.is_gone(before, one)]
        gone += [proposer] if proposer not in members else []
        going_on = [one.node for one in before.members if one.node not in gone]
        kept = [name for name in going_on if name in members]
        if going_on:
            assert len(kept) > len(going_on) / 2 or (len(kept) == len(going_on) / 2 and kept[0] == going_on[0])
        else:
            assert len(members) >= LEAST
        for name in set(members) - {one.node for one in before.members}:
            seat, attempt, _ = name.split(".")
            lease = self.leases[int(seat)]
            assert (lease.epoch, lease.closed) == (int(attempt), "") and lease.expires_at > NOW

    def is_gone(self, world: WorldRecord, member: WorldNode) -> bool:
        """Return whether the attempt is over or another process of the seat asks to join."""
        lease = self.leases[member.seat]
        newer = any(one.seat == member.seat for one in world.joining)
        return newer or lease.epoch != member.attempt or lease.closed != ""

    def bears(self, seat: int) -> bool:
        """Return whether the seat's worker may call."""
        lease = self.leases.get(seat)
        return lease is not None and not lease.closed and lease.expires_at > NOW

    def seat(self, seat: int) -> Seat:
        """Make the seat of a claim."""
        return Seat(job=JOB_ID, seat=seat, min=LEAST, max=SEATS)

    def write(self, seen: WorldRecord | None, after: WorldRecord | None) -> bool:
        """Compare and swap as the store does."""
        if after is None or seen is not self.stored:
            return False
        assert after.version == (seen.version if seen else 0) + 1
        self.stored = after
        return True
