"""Test the leases of shards: nodes die, hang, come back, lose answers, and all of them restart from older rounds.

The machine keeps the world, the control plane's record, and for each node the data of its committed state, its pending
data and its tail: the pieces that it has trained since its newest delta in a committed round. `history` has the pieces
of each committed round. The promise: the history has each piece of each shard once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.contract.elastic.data import DataProgress, DataRequest
from functions.domain.records import Lease
from functions.domain.worlds.data_pool import DataRecord, lease_shards
from functions.domain.worlds.world_record import WorldNode, WorldRecord
from tests.kits.api.factories import NOW, make_lease

SEATS, SHARDS, PIECES = 3, 7, 3
SEAT = st.integers(0, SEATS - 1)
Pieces = list[tuple[int, int]]
"""Position and number of each piece."""


@dataclass
class Trainer:
    """Model of one training process."""

    name: str
    trained: DataProgress
    round: int
    epoch: int = 0
    concluded: bool = False
    pending: DataProgress = field(default_factory=DataProgress)
    tail: Pieces = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    """Next piece of each unfinished shard."""
    is_dead: bool = False


Offer = tuple[DataProgress, Pieces]


class SharedData(RuleBasedStateMachine):
    """Three seats that train seven shards of three pieces each."""

    def __init__(self) -> None:
        super().__init__()
        self.world = WorldRecord(version=1)
        self.record: DataRecord | None = None
        self.leases: dict[int, Lease] = {}
        self.nodes: dict[int, Trainer] = {}
        self.history: list[tuple[int, Pieces]] = []
        self.checkpoint = (0, DataProgress())
        self.unfinished: dict[str, Offer] = {}
        """Deltas of lost members in a round that the others may still commit."""

    @property
    def members(self) -> list[Trainer]:
        names = [one.node for one in self.world.members]
        return [one for one in self.nodes.values() if one.name in names]

    @property
    def live(self) -> list[Trainer]:
        return [one for one in self.members if not one.is_dead]

    @initialize()
    def form(self) -> None:
        """Let all seats but the last form the world, from the checkpoint."""
        self.history = [one for one in self.history if one[0] <= self.checkpoint[0]]
        self.unfinished = {}
        for seat in range(SEATS):
            self.start(seat)
        self.begin_epoch([self.nodes[seat] for seat in range(SEATS - 1)], formed=True)

    def start(self, seat: int) -> None:
        attempt = self.leases[seat].epoch + 1 if seat in self.leases else 1
        self.leases[seat] = make_lease(attempt, machine_id=f"m-{seat}", expires_at=NOW + 90)
        number, trained = self.checkpoint
        self.nodes[seat] = Trainer(f"{seat}.{attempt}.{attempt:08x}", trained, number)

    def begin_epoch(self, trainers: list[Trainer], *, formed: bool = False) -> None:
        epoch = self.world.epoch + 1
        members = [WorldNode(node=one.name, joined_at=NOW) for one in trainers]
        update = {"epoch": epoch, "members": members} | ({"formed_epoch": epoch} if formed else {})
        self.world = self.world.model_copy(update=update)
        newest = max(trainers, key=lambda one: (one.epoch, one.round))
        for one in trainers:
            one.trained, one.round, one.epoch, one.concluded = newest.trained, newest.round, epoch, False
            one.pending = one.pending.without(one.trained)

    @rule(seat=SEAT, want=st.integers(0, 4), is_lost=st.booleans())
    def lease(self, seat: int, want: int, is_lost: bool) -> None:
        """Ask for shards; the answer may get lost."""
        node = self.nodes[seat]
        if self.leases[seat].closed:
            return
        request = DataRequest(
            node=node.name,
            plan_sha256="9f" * 32,
            positions=SHARDS,
            epoch=node.epoch,
            round=node.round,
            concluded=node.concluded,
            trained=node.trained,
            pending=node.pending,
            want=want,
        )
        after, grant = lease_shards(self.record, request, self.world, self.leases)
        self.record = after or self.record
        if not is_lost:
            node.held |= {position: offset for position, offset in grant.leases if position not in node.held}

    @rule(seat=SEAT, want=st.integers(1, 4), pieces=st.integers(1, 2 * PIECES))
    def train(self, seat: int, want: int, pieces: int) -> None:
        """Ask for shards, and train pieces of the held shards in order; a dead process does neither."""
        self.lease(seat, want, is_lost=False)
        node = self.nodes[seat]
        for _ in range(0 if node.is_dead else pieces):
            if not node.held:
                return
            position = min(node.held)
            piece = node.held.pop(position)
            node.tail.append((position, piece))
            is_last = piece == PIECES - 1
            done = {"finished": [[position, position + 1]]} if is_last else {"offsets": [[position, piece + 1]]}
            node.pending = node.pending.merge(DataProgress.model_validate(done))
            if not is_last:
                node.held[position] = piece + 1

    @rule(seat=SEAT)
    def come(self, seat: int) -> None:
        """Begin the next attempt at the seat of a dead process."""
        if self.leases[seat].closed and self.nodes[seat] not in self.members:
            self.start(seat)

    @rule(seat=SEAT)
    def revoke(self, seat: int) -> None:
        """End the attempt of a process that does not know yet, and trains on."""
        self.leases[seat] = self.leases[seat].model_copy(update={"closed": "interrupted"})

    @rule(seat=SEAT, in_round=st.booleans(), is_dead=st.sampled_from([True, True, False]))
    def lose(self, seat: int, in_round: bool, is_dead: bool) -> None:
        """Exclude a member, whose delta the unfinished round may contain; the process dies, or hangs and comes back."""
        node = self.nodes[seat]
        if is_dead:
            self.revoke(seat)
            node.is_dead = True
        others = [one for one in self.live if one is not node]
        if node not in self.members or not others:
            return
        # A hanging node learns from its peers later which round has its delta; here, the round lacks the delta.
        if in_round and is_dead:
            self.unfinished[node.name] = node.pending, node.tail
        self.begin_epoch(others)
        self.train(int(others[0].name[0]), 4, PIECES)

    @rule(seat=SEAT)
    def admit(self, seat: int) -> None:
        """Admit the process at a seat as a member."""
        self.come(seat)
        node = self.nodes[seat]
        if node not in self.members and self.live:
            node.epoch = 0
            self.begin_epoch([*self.live, node])

    @rule(without=st.sets(SEAT, max_size=2), has_unfinished=st.sampled_from([True, True, False]))
    def commit(self, without: set[int], has_unfinished: bool) -> None:
        """Commit a round with the deltas of some members, and perhaps of lost ones."""
        members = self.members
        if members != self.live:
            return
        late = [self.nodes[seat] for seat in without]
        offers = {one.name: (one.pending, one.tail) for one in members if one not in late}
        offers |= self.unfinished if has_unfinished else {}
        self.unfinished = {}
        trained, number = members[0].trained, members[0].round + 1
        for pending, _ in offers.values():
            trained = trained.merge(pending)
        self.history.append((number, [piece for _, tail in offers.values() for piece in tail]))
        for one in members:
            one.trained, one.round = trained, number
            one.pending = one.pending.without(trained)
            one.tail = [] if one.name in offers else one.tail

    @rule()
    def conclude(self) -> None:
        """Let the members find that no round is unfinished, or abandon the round."""
        if self.members == self.live:
            self.unfinished = {}
            for one in self.members:
                one.concluded = True

    @rule()
    def save(self) -> None:
        """Commit a checkpoint of the newest round."""
        self.checkpoint = self.members[0].round, self.members[0].trained

    @precondition(lambda self: self.history)
    @rule(asks=st.booleans())
    def restart(self, asks: bool) -> None:
        """Lose all machines, and begin anew from the checkpoint; a joining node may ask first."""
        for seat in range(SEATS):
            self.revoke(seat)
        self.form()
        if asks:
            self.train(SEATS - 1, 4, PIECES)

    @invariant()
    def the_history_has_each_piece_once_and_in_order(self) -> None:
        """Compare the pieces of all committed rounds with the committed data of the members."""
        pieces = [piece for _, round_pieces in self.history for piece in round_pieces]
        assert len(pieces) == len(set(pieces)), "a piece was trained twice"
        counts = {position: len([1 for one, _ in pieces if one == position]) for position in range(SHARDS)}
        assert set(pieces) == {(position, piece) for position, count in counts.items() for piece in range(count)}
        for member in self.members[:1]:
            done = [position for start, end in member.trained.finished for position in range(start, end)]
            assert done == [position for position, count in counts.items() if count == PIECES]
            begun = [[position, count] for position, count in counts.items() if 0 < count < PIECES]
            assert member.trained.offsets == begun

    def teardown(self) -> None:
        """Train to the end: nothing is left out."""
        if not self.nodes:
            return
        for seat in [seat for seat in range(SEATS) if self.leases[seat].closed]:
            self.lose(seat, in_round=False, is_dead=True)
        if not self.live:
            self.restart(asks=False)
        for _ in range(SHARDS):
            for seat in range(SEATS):
                self.admit(seat)
                self.conclude()
                self.train(seat, 4, SHARDS * PIECES)
            self.commit(set(), has_unfinished=False)
            self.the_history_has_each_piece_once_and_in_order()
        assert self.members[0].trained.covers(SHARDS), self.members[0].trained
