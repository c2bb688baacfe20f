"""Rules of an elastic training in real outer loops: all nodes see the mean loss and act after the same round."""

from __future__ import annotations

import pytest

from gpu_client.elastic.engines.engine import EpochGroup, Peer
from gpu_client.elastic.rounds.member_status import MemberStatus
from tests.kits.elastic.simulation import Simulation
from tests.kits.elastic.threads import ThreadedCluster, run_together
from tests.unit.controller.controller_kit import Rate, Setup, rule

INNER_STEPS = 2


def test_all_nodes_lower_the_rate_after_the_round_in_which_the_mean_loss_is_high() -> None:
    text = rule("high", "loss > 2", '{"set": {"knob": "lr", "factor": 0.5}}')
    steered = [Setup(text, elastic=True) for _ in range(3)]
    rates = [Rate() for _ in steered]
    with ThreadedCluster(3) as cluster:
        nodes = [cluster.add(inner_steps=INNER_STEPS, observer=one.steering.world) for one in steered]
        seen: list[list[tuple[int, float]]] = [[] for _ in nodes]

        def train(place: int) -> None:
            node, steering = nodes[place], steered[place].steering
            steering.offer(knobs={"lr": rates[place]})
            steering.note_metrics = node.outer.note_metrics
            node.outer.start()
            while node.outer.round < 5:
                # The loss of one node alone is high from round 0 on, the mean from round 2 on.
                node.outer.note_metrics({"loss": 4.0 if place == 0 or node.outer.round >= 2 else 0.5})
                before = node.outer.round
                node.step()
                steered[place].report(node.outer.round)
                if node.outer.round > before:
                    seen[place].append((node.outer.round, rates[place].value))

        run_together(*[lambda place=place: train(place) for place in range(3)])
        leader = cluster.world.view().members[0].seat
    assert seen == [[(1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5), (5, 0.5)]] * 3
    fired = [one.agent.fired() for one in steered]
    assert fired[leader] == [("high", 3)]
    assert sum(map(len, fired)) == 1


def test_a_joiner_that_has_no_part_in_a_round_acts_after_the_round_like_the_others() -> None:
    joiner, steered, rate = Simulation().start(1), Setup(elastic=True), Rate()
    steered.steering.offer(knobs={"lr": rate})
    assert steered.steering.world is not None
    joiner.protocol._observer = steered.steering.world
    member = "0.1.aaaaaaaa"
    group = EpochGroup(2, (Peer(member, (), ""), Peer(joiner.name, (), "")), 1)
    order = {"action": "set", "arguments": {"knob": "lr", "factor": 0.5}, "rule": "high", "step": 3}
    orders = [{"id": "3.0.high", "order": order}]
    steps = joiner.protocol._conclude(group, (member,))
    own = next(steps).payload
    with pytest.raises(StopIteration):
        steps.send([MemberStatus(member, 2, 7, done=9, orders=orders).encode(), own])
    steered.report(3)
    assert rate.value == 0.5
