"""A node behind a slow line enters, or says why not, and costs the members a bounded time; in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.contract.elastic.world import EpochProposal
from gpu_client.elastic.rounds.epoch_protocol import RoundTiming
from gpu_client.elastic.rounds.round_actions import CallWorld, DescribePeers, FetchParts
from gpu_client.elastic.rounds.round_protocol import MAX_CATCH_UP_S
from tests.kits.elastic.simulation import SimulatedNode, Simulation

LONGEST_STALL_S = MAX_CATCH_UP_S + 10


class Watched:
    """Simulation of two members and a joiner, with the longest time between two commits of the members."""

    def __init__(self, part_s: float) -> None:
        self.sim = Simulation(least=2)
        self.members = [self.sim.start(seat) for seat in range(2)]
        self.sim.settle(3)
        self.joiner = self.sim.start(2, value=5.0, part_s=part_s)
        self.stall_s = 0.0
        self._round, self._committed_at = 0, self.sim.now

    def run(self, done: Callable[[], bool], *, trains: bool = True) -> None:
        """Let all nodes act in turn until `done`. Without training no round commits, whatever the time."""
        for _ in range(50_000):
            for node in self.sim.nodes.values():
                if done():
                    return
                node.advance()
                if trains:
                    node.train()
            number = self.members[0].replica.state.round
            if number != self._round or not trains:
                self._round, self._committed_at = number, self.sim.now
            self.stall_s = max(self.stall_s, self.sim.now - self._committed_at)
        raise AssertionError(f"the nodes did not get there: {[one.action for one in self.sim.nodes.values()]}")

    def is_member(self, node: SimulatedNode) -> bool:
        return any(one.node == node.name for one in self.sim.world.view().members)

    def messages(self, node: SimulatedNode, kind: str) -> list[str]:
        return [one.message for one in node.events if one.kind == kind]


def test_a_joiner_whose_line_is_slower_than_the_rounds_enters_while_the_members_wait_for_a_bounded_time() -> None:
    watched = Watched(part_s=3.0)
    watched.run(lambda: bool(watched.joiner.protocol.epochs.synced_epoch))
    assert watched.stall_s < LONGEST_STALL_S
    assert not watched.messages(watched.members[0], "peer_lost")
    watched.sim.settle(3)


def test_a_joiner_that_the_members_cannot_wait_for_leaves_the_group_and_enters_once_rounds_last_long_enough() -> None:
    watched = Watched(part_s=20.0)
    joiner, first = watched.joiner, watched.members[0]
    watched.run(lambda: bool(watched.messages(joiner, "behind")))
    (message,) = watched.messages(joiner, "behind")
    assert "within 30 s: the line is too slow" in message and "once it has the newest round" in message
    watched.run(lambda: not watched.is_member(joiner))
    assert watched.stall_s < LONGEST_STALL_S
    assert any("behind" in one for one in watched.messages(first, "peer_lost"))
    assert all(watched.is_member(one) for one in watched.members)
    # The node asks for no second admission without the newest round.
    epoch, goal = first.protocol.epochs.epoch, first.replica.state.round + 100
    watched.run(lambda: first.replica.state.round >= goal)
    assert first.protocol.epochs.epoch == epoch
    watched.run(lambda: watched.is_member(joiner), trains=False)
    watched.run(lambda: bool(joiner.protocol.epochs.synced_epoch), trains=False)
    assert joiner.replica.hash == first.replica.hash
    assert len(watched.messages(joiner, "behind")) == 1
    watched.sim.settle(3)


def test_a_ready_joiner_looks_at_the_world_after_each_short_fetch() -> None:
    """Once a joiner is ready, the members may open a group with the joiner at any time."""
    watched = Watched(part_s=3.0)
    joiner, fetches, most = watched.joiner, 0, 0

    def is_ready() -> bool:
        return any(one.ready for one in watched.sim.world.view().joining)

    watched.run(is_ready)
    while not watched.is_member(joiner):
        for node in watched.members:
            node.advance()
            node.train()
        if isinstance(joiner.action, CallWorld):
            fetches = 0
        fetches += isinstance(joiner.action, FetchParts)
        most = max(most, fetches)
        joiner.advance()
    assert most == 1


def test_joiners_ask_seldom_while_the_leases_of_members_have_expired_and_fetch_once_they_are_renewed() -> None:
    watched = Watched(part_s=0.0)
    sim, joiner = watched.sim, watched.joiner
    answer, proposals = sim.world.answer, list[float]()

    def note(node: str, request: object) -> object:
        if isinstance(request, EpochProposal):
            proposals.append(sim.now)
        return answer(node, request)  # type: ignore[arg-type]

    sim.world.least = 1
    sim.world.answer = note  # type: ignore[assignment,method-assign]
    kept = dict(sim.world.leases)
    for seat in (0, 1):
        sim.world.leases[seat] = kept[seat].model_copy(update={"expires_at": int(sim.now) - 1})
    began, calls = sim.now, sim.world.calls
    while sim.now < began + 60:
        joiner.advance()
    polls = 60 / RoundTiming().poll_s
    assert 0 < len(proposals) <= polls + 1
    assert sim.world.calls - calls <= 3 * polls
    sim.world.leases.update(kept)
    while not isinstance(joiner.action, DescribePeers):
        joiner.advance()
    assert not any(one.ready for one in sim.world.view().joining)
    watched.run(lambda: bool(joiner.protocol.epochs.synced_epoch))
    sim.settle(3)


def test_a_member_behind_a_slow_line_repairs_a_bucket_over_several_reads() -> None:
    sim = Simulation(least=3)
    nodes = [sim.start(seat) for seat in range(3)]
    sim.settle(1)
    faulty, number = nodes[2], nodes[0].replica.state.round
    faulty.part_s = 5.0

    def distort(node: str, bucket: int, average: torch.Tensor) -> None:
        if node == faulty.name and bucket == 1:
            average += 0.25

    sim.network.distort = distort
    sim.settle(2)
    (repaired, *_) = [one.repaired for one in nodes[0].protocol.steward._rounds if one.round > number]
    assert repaired == 1
    comparisons = [one for one in nodes[0].events if one.kind == "hashes_differ" and one.round == number]
    assert len(comparisons) == 1
    assert not any(one.kind == "peer_lost" for one in nodes[0].events)
