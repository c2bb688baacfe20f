"""One failure at each place of a round: no survivor loses a step, and all survivors commit one state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from functions.domain.worlds import membership
from gpu_client.elastic.engines.engine import EpochGroup, Peer
from gpu_client.elastic.errors import PeerLostError
from gpu_client.elastic.recovery.state_transfer import PartRequest, PartUnavailableError
from gpu_client.elastic.rounds.member_status import AttemptStatus
from gpu_client.elastic.rounds.round_actions import ExchangeStatus, ReduceBuckets
from gpu_client.elastic.rounds.round_decisions import MIN_GRACE_S
from gpu_client.elastic.rounds.world_metrics import Orders, SilentObserver
from tests.kits.elastic.memory_engine import ReduceCall
from tests.kits.elastic.simulation import PATIENCE, SimulatedNode, Simulation


def begin(count: int, *, least: int | None = None) -> tuple[Simulation, list[SimulatedNode]]:
    """Return nodes that are members of one epoch and have not begun a round."""
    sim = Simulation(least or count)
    nodes = [sim.start(seat) for seat in range(count)]
    run(sim, lambda: all(one.progress.is_started for one in nodes), trains=False)
    return sim, nodes


def run(
    sim: Simulation, done: Callable[[], bool], *, trains: bool = True, only: list[SimulatedNode] | None = None
) -> None:
    """Let the live nodes act in turn until `done`."""
    waits = dict.fromkeys(sim.nodes, 0)
    for _ in range(20_000):
        for node in only or list(sim.nodes.values()):
            if done():
                return
            if node.name in sim.network.hung or node.name not in sim.nodes:
                continue
            moved = node.advance(suspects=waits[node.name] > PATIENCE)
            waits[node.name] = 0 if moved else waits[node.name] + 1
            if trains:
                node.train(0.125 * (1 + int(node.name[0])))
    raise AssertionError("the nodes did not get there")


def in_reduce(node: SimulatedNode, left: int) -> bool:
    return isinstance(node.call, ReduceCall) and len(node.call.left) == left


def contributors(node: SimulatedNode, number: int) -> list[int]:
    """Return the number of deltas in each bucket of a committed round."""
    parts = dict(node.replica.describe().inclusions)[number]
    return [len(next(one.nodes for one in parts if one.buckets >> bucket & 1)) for bucket in range(3)]


def round_of(nodes: list[SimulatedNode], number: int) -> Callable[[], bool]:
    return lambda: all(one.replica.state.round >= number for one in nodes)


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        (lambda victim: victim.contribution is not None, [2, 2, 2]),
        (lambda victim: isinstance(victim.action, ReduceBuckets) and victim.call is None, [2, 2, 2]),
        (lambda victim: in_reduce(victim, 2), None),
        (lambda victim: in_reduce(victim, 1), None),
        (lambda victim: isinstance(victim.action, ExchangeStatus) and victim.replica.candidate is not None, None),
        (lambda victim: victim.replica.state.round == 1, [3, 3, 3]),
    ],
    ids=[
        "before the round",
        "before the reduce",
        "after one bucket",
        "after two buckets",
        "before the commit",
        "after",
    ],
)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_member_dies(reached: Callable[[SimulatedNode], bool], expected: list[int] | None, victim: int) -> None:
    sim, nodes = begin(3)
    run(sim, lambda: reached(nodes[victim]))
    sim.kill(nodes[victim])
    survivors = [one for one in nodes if one is not nodes[victim]]
    for node in survivors:
        node.advance(prefers_loss=True)
    run(sim, round_of(survivors, 1))
    for node in survivors:
        found = contributors(node, 1)
        assert expected is None or found == expected
        # A bucket that all survivors held is kept, with the delta of the victim; the others are reduced again.
        assert sorted(found, reverse=True) == found
        assert set(found) <= {2, 3}
    sim.settle(3)


def lose_in_reduce(sim: Simulation, nodes: list[SimulatedNode]) -> None:
    """Let the last node vanish for the others when all hold the first bucket, and one survivor holds the second."""
    run(sim, lambda: all(isinstance(one.action, ReduceBuckets) for one in nodes))
    # All begin the reduce; the last one to begin already finishes the first bucket.
    for node in (*nodes, *nodes[:2], nodes[0]):
        node.advance()
    sim.network.dead.add(nodes[2].name)
    for node in nodes[:2]:
        node.advance(prefers_loss=True)
    sim.network.dead.clear()


def test_buckets_that_all_survivors_hold_are_kept() -> None:
    sim, nodes = begin(3)
    lose_in_reduce(sim, nodes)
    sim.kill(nodes[2])
    run(sim, round_of(nodes[:2], 1), trains=False)
    assert contributors(nodes[0], 1) == contributors(nodes[1], 1) == [3, 2, 2]
    run(sim, round_of(nodes[:2], 2))
    for node in nodes[:2]:
        assert [one.repaired for one in node.protocol.steward._rounds] == [2, 0], "the other buckets, and no later ones"


def test_the_speed_of_the_line_is_that_of_all_reduces_of_the_round() -> None:
    sim, nodes = begin(3)
    sent = [0]

    def send(*_: object) -> None:
        sent[0] += 10_000_000
        sim.now += 1.0

    sim.network.distort = send
    for node in nodes[:2]:
        node.protocol._traffic = lambda: sent[0]
    lose_in_reduce(sim, nodes)
    sim.kill(nodes[2])
    sent[0] += 5_000_000  # Statuses and pings.
    run(sim, round_of(nodes[:2], 1), trains=False)
    for node in nodes[:2]:
        assert node.progress.world_metrics["world.link_mbit_s"] == pytest.approx(80.0)
        (report,) = node.protocol.steward._rounds
        assert report.sent_bytes == 10_000_000 * report.reduce_s > 50_000_000


def test_a_hung_member_is_excluded_returns_and_counts_its_delta_once_per_bucket() -> None:
    sim, nodes = begin(3)
    victim, survivors = nodes[2], nodes[:2]
    lose_in_reduce(sim, nodes)
    sim.network.hung.add(victim.name)
    run(sim, round_of(survivors, 1))
    assert [one.node for one in sim.world.view().members] == [one.name for one in survivors]
    assert contributors(survivors[0], 1) == [3, 2, 2]
    progress = victim.uncounted.clone()
    sim.network.hung.clear()
    run(sim, lambda: not victim.progress.is_apart and victim.replica.state.round >= 1, trains=False)
    victim.train(0)
    assert [one.kind for one in victim.events if one.kind == "excluded"] == ["excluded"]
    assert victim.uncounted.tolist() == [0, 0, *progress[2:].tolist()]
    before = victim.replica.state.round
    run(sim, round_of(nodes, before + 1))
    assert not bool(victim.uncounted[2:].ge(progress[2:] + 1).any())


def test_a_late_member_contributes_nothing_and_keeps_its_delta_for_the_next_round() -> None:
    sim, nodes = begin(3)
    late = nodes[2]
    late.train(0.5)
    run(sim, lambda: all(one.contribution for one in nodes[:2]), only=nodes[:2])
    started_at = sim.now
    for node in nodes[:2]:
        node.inner_steps = 10**9
    while late.replica.state.round < 1:
        for node in nodes:
            node.advance()
    assert sim.now - started_at >= 30, "the members were patient"
    assert contributors(late, 1) == [2, 2, 2]
    assert late.progress.is_hurried is False
    late.train(0)
    assert late.uncounted.tolist() == [0.5] * 6
    for node in nodes:
        node.inner_steps = 2
    run(sim, round_of(nodes, 2))
    assert contributors(late, 2) == [3, 3, 3]


def test_members_that_are_asked_to_hurry_contribute_what_they_have() -> None:
    sim, nodes = begin(3)
    slow = nodes[2]
    slow.inner_steps = 1000
    run(sim, round_of(nodes, 1))
    assert contributors(slow, 1) == [3, 3, 3]
    assert slow.steps < 1000


def test_rounds_go_on_without_the_control_plane() -> None:
    sim, nodes = begin(3)
    sim.world.is_down = True
    calls = sim.world.calls
    sim.settle(5)
    assert sim.world.calls > calls, "the steward goes on asking"
    assert [one.replica.state.round for one in nodes] == [nodes[0].replica.state.round] * 3
    assert all("peer_lost" not in [event.kind for event in one.events] for one in nodes)


def test_a_first_member_without_the_control_plane_keeps_no_joiner_out() -> None:
    sim, nodes = begin(3)
    sim.world.cut_off.add(nodes[0].name)
    joiner = sim.start(3, value=7.0)
    run(sim, lambda: sim.world.view().members[-1].node == joiner.name and not joiner.progress.is_apart)
    sim.world.cut_off.clear()
    sim.settle(2)
    assert len({one.replica.hash for one in sim.nodes.values()}) == 1


def test_the_next_attempt_at_a_seat_replaces_a_process_that_lives_on() -> None:
    sim, nodes = begin(3)
    zombie, *others = nodes
    sim.world.cut_off.add(zombie.name)
    sim.end(zombie)
    heir = SimulatedNode(sim.world.claim(0), sim)
    sim.nodes[heir.name] = heir
    group = [*others, heir]
    run(sim, lambda: [one.node for one in sim.world.view().members] == [one.name for one in group])
    run(sim, lambda: zombie.progress.is_apart)
    run(sim, round_of(group, heir.replica.state.round + 2))
    assert zombie.replica.state.round < heir.replica.state.round


def test_a_loss_during_an_outage_of_the_control_plane_pauses_rounds_and_keeps_the_training_going() -> None:
    sim, nodes = begin(2)
    sim.world.is_down = True
    sim.kill(nodes[1])
    run(sim, lambda: float(nodes[0].uncounted[0]) > 5)
    assert nodes[0].replica.state.round == 0
    sim.world.is_down = False
    run(sim, round_of(nodes[:1], 2))
    assert float(nodes[0].uncounted[0]) < 5


def test_an_operator_lets_the_half_without_the_first_member_go_on() -> None:
    sim, nodes = begin(4)
    gone, rest = nodes[:2], nodes[2:]
    sim.network.hung |= {one.name for one in gone}
    run(sim, lambda: any(one.kind == "no_majority" for one in rest[0].events))
    assert len(sim.world.view().members) == 4
    sim.world.world = membership.exclude(sim.world.world, [0, 1])
    run(sim, round_of(rest, 2))
    sim.network.hung.clear()
    run(sim, lambda: {one.node for one in sim.world.view().members} == {one.name for one in nodes})
    sim.settle(2)
    assert len({one.replica.hash for one in nodes}) == 1


def test_a_third_of_the_members_vanishes_at_once() -> None:
    sim, nodes = begin(6)
    run(sim, lambda: all(isinstance(one.action, ReduceBuckets) for one in nodes))
    for victim in nodes[1::3]:
        sim.kill(victim)
    sim.settle(2)
    assert len(sim.world.view().members) == 4
    assert len({one.replica.hash for one in sim.nodes.values()}) == 1


def test_the_last_survivor_goes_on_and_others_join_again() -> None:
    sim, nodes = begin(3, least=1)
    sim.settle(1)
    for victim in nodes[:2]:
        sim.kill(victim)
    run(sim, round_of(nodes[2:], nodes[2].replica.state.round + 3))
    joiner = sim.start(0, value=7.0)
    run(sim, lambda: joiner.progress.is_started and not joiner.progress.is_apart)
    sim.settle(1)
    assert joiner.replica.hash == nodes[2].replica.hash
    assert torch.equal(joiner.replica.state.momentum, nodes[2].replica.state.momentum)


def test_a_zombie_of_an_old_epoch_contributes_to_no_round() -> None:
    sim, nodes = begin(3)
    zombie = nodes[2]
    run(sim, lambda: all(isinstance(one.action, ReduceBuckets) for one in nodes))
    sim.network.hung.add(zombie.name)
    sim.end(zombie)
    run(sim, round_of(nodes[:2], 3))
    sim.network.hung.clear()
    before = dict(sim.ledger.included)
    run(sim, lambda: zombie.protocol.epochs.synced_epoch == 0, only=[zombie])
    assert sim.ledger.included == before
    assert [one.node for one in sim.world.view().members] == [one.name for one in nodes[:2]]


class NotedOrders(SilentObserver):
    """Observer that sends orders between the first statuses of an epoch, and notes each commit."""

    def __init__(self, orders: Sequence[Mapping[str, Any]] = ()) -> None:
        self.orders = orders
        self.commits: list[tuple[int, list[Mapping[str, Any]], bool]] = []

    def describe(self, *, leads: bool, enters: bool) -> Orders:
        return () if enters else self.orders

    def commit(self, number: int, statuses: Sequence[Orders], *, saves: bool) -> None:
        self.commits.append((number, [one for orders in statuses for one in orders], saves))


def test_a_member_that_a_death_kept_from_a_commit_takes_the_orders_and_its_turn_to_save() -> None:
    sim, nodes = begin(3)
    order = {"id": "1.0.rule", "order": {"action": "save"}}
    observers = [NotedOrders([order]), NotedOrders(), NotedOrders()]
    for node, observer in zip(nodes, observers, strict=True):
        node.protocol._observer = observer
    run(sim, lambda: all(isinstance(one.action, ExchangeStatus) and one.replica.candidate for one in nodes))
    for node in (nodes[1], nodes[2], nodes[0]):
        node.advance()
    assert [one.replica.state.round for one in nodes] == [1, 0, 0], "the first member alone has all statuses"
    sim.kill(nodes[2])
    nodes[1].advance(prefers_loss=True)
    run(sim, round_of(nodes[:2], 1), trains=False)
    assert [one.commits for one in observers[:2]] == [[(1, [order], False)], [(1, [order], True)]]
    assert [one.progress.is_checkpoint_due for one in nodes[:2]] == [False, True]


@pytest.mark.parametrize("faulty", [0, 2])
def test_members_whose_hashes_differ_take_the_bytes_of_the_majority(faulty: int) -> None:
    sim, nodes = begin(3)

    def distort(node: str, bucket: int, average: torch.Tensor) -> None:
        if node == nodes[faulty].name and bucket == 1:
            average += 0.25

    sim.network.distort = distort
    sim.settle(2)
    events = [one for one in nodes[0].events if one.kind == "hashes_differ"]
    assert events and nodes[faulty].name not in events[0].message
    assert [one.repaired for one in nodes[0].protocol.steward._rounds][:2] == [1, 1]
    assert len({one.replica.hash for one in nodes}) == 1
    assert all(torch.equal(one.replica.state.params, nodes[0].replica.state.params) for one in nodes)


@pytest.mark.parametrize("faulty", [0, 2])
def test_a_member_whose_repairs_fail_is_excluded(faulty: int) -> None:
    sim, nodes = begin(3)
    victim, others = nodes[faulty], [one for one in nodes if one is not nodes[faulty]]

    def distort(node: str, bucket: int, average: torch.Tensor) -> None:
        if node == victim.name and bucket == 1:
            average += 0.25

    def serve_no_candidate(request: PartRequest) -> torch.Tensor:
        raise PartUnavailableError("the read fails")

    sim.network.distort = distort
    for node in others:
        node.replica.read = serve_no_candidate  # type: ignore[method-assign]
    run(sim, round_of(others, 1))
    assert [one.node for one in sim.world.view().members] == [one.name for one in others]
    assert victim.replica.state.round == 0
    for node in others:
        del node.replica.read
    sim.network.distort = lambda *_: None
    run(sim, lambda: not victim.progress.is_apart and victim.replica.state.round > 1)
    sim.settle(1)
    assert len({one.replica.hash for one in nodes}) == 1


def test_a_member_that_tells_no_hashes_ends_nobody() -> None:
    sim, nodes = begin(3)
    sim.network.distort = lambda node, bucket, average: average.add_(0.25) if node == nodes[2].name else None
    describe = nodes[2].protocol._describe
    nodes[2].protocol._describe = lambda *given, **named: replace(  # type: ignore[method-assign]
        describe(*given, **named), hashes=()
    )
    run(sim, round_of(nodes[:2], 1))
    assert [one.node for one in sim.world.view().members] == [one.name for one in nodes[:2]]


def test_joiners_without_the_state_never_outvote_a_holder_of_the_state() -> None:
    sim, nodes = begin(2, least=1)
    sim.settle(2)
    holder, lost = nodes
    joiners = [sim.start(seat, value=float(seat)) for seat in (2, 3)]
    # The holder may have committed rounds since the joiners fetched its state.
    run(sim, lambda: len(sim.world.view().members) == 4)
    number = holder.replica.state.round
    sim.kill(lost)
    sim.network.hung.add(holder.name)
    for _ in range(20 * PATIENCE):
        for node in joiners:
            node.advance(suspects=True)
            node.train()
    assert holder.name in [one.node for one in sim.world.view().members]
    assert all(one.replica.state.round <= number for one in joiners)
    sim.network.hung.clear()
    sim.settle(2)
    assert len({(one.replica.state.round, one.replica.hash) for one in sim.nodes.values()}) == 1


def test_a_status_about_other_buckets_loses_its_peer() -> None:
    _, nodes = begin(2)
    group = EpochGroup(1, tuple(Peer(one.name) for one in nodes), 0)
    protocol, own = nodes[0].protocol, nodes[0].protocol._describe(group)
    wrong = AttemptStatus(1, 1, tuple(one.name for one in nodes), {}, (0,) * 7)
    payloads = [own.encode(), replace(own, node=nodes[1].name, attempt=wrong).encode()]
    steps = protocol._exchange(group, own)
    assert isinstance(next(steps), ExchangeStatus)
    with pytest.raises(PeerLostError, match="buckets") as raised:
        steps.send(payloads)
    assert (raised.value.nodes, raised.value.cause) == ((nodes[1].name,), "protocol")


@pytest.mark.parametrize("speed", [-1.0, math.nan, math.inf])
def test_a_member_that_tells_an_impossible_speed_ends_nobody(speed: float) -> None:
    sim, nodes = begin(2)
    run(sim, lambda: nodes[1].progress.contribution is not None)
    nodes[1].progress.metrics = {"world.link_mbit_s": speed}
    run(sim, round_of(nodes, 1))
    assert [one.link_mbit_s for one in nodes[0].protocol.steward._nodes] == [None, None]


def test_the_others_wait_for_a_step_of_a_new_member_and_not_for_its_round() -> None:
    sim, nodes = begin(2)
    run(sim, round_of(nodes, 2))
    joiner = sim.start(2, inner_steps=1000)
    run(sim, lambda: not joiner.progress.is_apart and nodes[0].progress.contribution is not None)
    contribution = nodes[0].progress.contribution
    assert contribution is not None
    number = nodes[0].replica.state.round + 1
    run(sim, round_of([*nodes, joiner], number))
    assert sim.now - contribution.ready_at < MIN_GRACE_S
    assert contributors(joiner, number) == [3, 3, 3]
    assert joiner.progress.is_hurried is False
