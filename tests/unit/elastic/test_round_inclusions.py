"""A node that returns from a long exclusion counts its last delta once, or drops the delta and tells so."""

from __future__ import annotations

import pytest

from gpu_client.elastic.recovery.state_transfer import StateDescription
from gpu_client.elastic.rounds import outer_replica
from tests.kits.elastic.simulation import SimulatedNode, Simulation
from tests.unit.elastic.test_round_failures import begin, lose_in_reduce, round_of, run


def exclude(sim: Simulation, nodes: list[SimulatedNode]) -> SimulatedNode:
    """Hang the last node after the first bucket of its delta has reached the others, who go on without the node."""
    victim, survivors = nodes[2], nodes[:2]
    lose_in_reduce(sim, nodes)
    sim.network.hung.add(victim.name)
    run(sim, round_of(survivors, 1))
    return victim


def let_return(sim: Simulation, victim: SimulatedNode) -> None:
    sim.network.hung.clear()
    progress = victim.progress
    run(sim, lambda: victim.replica.state.round > 0 and not (progress.is_apart or progress.is_adopting), trains=False)
    victim.train(0)


def test_a_node_learns_after_any_number_of_rounds_which_buckets_contain_its_delta() -> None:
    sim, nodes = begin(3)
    victim = exclude(sim, nodes)
    progress = victim.uncounted.clone()
    run(sim, round_of(nodes[:2], 80))
    let_return(sim, victim)
    assert victim.uncounted.tolist() == [0, 0, *progress[2:].tolist()]
    assert "delta_dropped" not in [one.kind for one in victim.events]
    sim.settle(2)
    rounds = [number for number, _ in nodes[0].replica.describe().inclusions]
    assert len(rounds) == 1, "the newest round of each node is enough"


def test_a_node_whose_delta_is_forgotten_drops_the_delta_and_tells_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_replica, "KEPT_INCLUSIONS", 1)
    sim, nodes = begin(3)
    victim = exclude(sim, nodes)
    run(sim, round_of(nodes[:2], 2))
    sim.kill(nodes[1])
    run(sim, round_of(nodes[:1], 4))
    description = nodes[0].replica.describe()
    assert description.forgotten >= 1
    assert StateDescription.decode(description.encode()) == description
    let_return(sim, victim)
    assert victim.uncounted.tolist() == [0] * 6, "all of the delta has left the local parameters"
    assert [one.message for one in victim.events if one.kind == "delta_dropped"] != []
    sim.settle(2)


def test_the_rounds_before_a_loaded_checkpoint_are_forgotten() -> None:
    _, (node,) = begin(1)
    node.replica.load(node.replica.state.params.clone(), node.replica.state.momentum.clone(), 7)
    assert node.replica.describe().forgotten == 7
