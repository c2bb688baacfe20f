"""A node that is asked to leave between two rounds hands over what it has trained: its tokens are in a round."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from gpu_client.elastic.errors import WorldChangedError
from gpu_client.elastic.rounds.round_actions import ReduceBuckets
from tests.kits.elastic import endless_node
from tests.kits.elastic.memory_world import MemoryWorldCalls
from tests.kits.elastic.node_processes import NodeProcesses
from tests.kits.elastic.threads import ThreadedCluster, ThreadedNode, run_together
from tests.kits.waiting import soon, until
from tests.unit.elastic.test_round_failures import begin, contributors, round_of, run

FOREVER = 10**6


def test_a_waiting_node_that_must_leave_does_not_wait_for_the_deltas_of_the_others() -> None:
    sim, nodes = begin(3)
    leaver, *others = nodes
    for node in others:
        node.inner_steps = FOREVER
    run(sim, lambda: leaver.contribution is not None)
    before = sim.now
    leaver.progress.notify(is_stopping=True)
    run(sim, round_of(nodes, 1))
    assert sim.now - before < 10
    assert contributors(leaver, 1) == [3, 3, 3], "the others were asked for what they had"
    assert leaver.name in [one.node for one in sim.world.view().members], "it leaves when the script says so"
    leaver.progress.notify(is_leaving=True)
    run(sim, lambda: leaver.is_finished, trains=False)
    assert [one.node for one in sim.world.view().members] == [one.name for one in others]


@pytest.mark.parametrize("is_away", [False, True])
def test_the_last_members_report_the_last_rounds(is_away: bool) -> None:
    sim, nodes = begin(2)
    run(sim, round_of(nodes, 3))
    sim.world.is_down = is_away
    reported = sim.world.view().round
    for node in nodes:
        node.progress.notify(is_leaving=True)
    run(sim, lambda: all(one.is_finished for one in nodes), trains=False)
    last = nodes[0].replica.state.round
    assert reported < last, "the report that is due every 15 s came later"
    assert sim.world.view().round == (reported if is_away else last)


def test_the_delta_of_a_leaving_node_survives_the_loss_of_a_peer() -> None:
    sim, nodes = begin(3)
    leaver, victim, other = nodes
    run(sim, lambda: isinstance(victim.action, ReduceBuckets) and victim.call is None)
    leaver.progress.notify(is_leaving=True)
    sim.kill(victim)
    run(sim, round_of([other], 1), trains=False)
    assert contributors(other, 1) == [2, 2, 2]
    run(sim, lambda: leaver.is_finished, trains=False)
    assert leaver.uncounted.tolist() == [0] * 6


def stop_during(cluster: ThreadedCluster, *, overlap: bool) -> tuple[ThreadedNode, ThreadedNode]:
    """Stop a node whose delta waits for a peer in the middle of its inner steps; let the node leave."""
    stopped = threading.Event()
    leaver = cluster.add(inner_steps=5, overlap=overlap, is_stopping=stopped.is_set)
    peer = cluster.add(inner_steps=FOREVER, overlap=overlap)
    run_together(leaver.outer.start, peer.outer.start)

    def stay() -> None:
        while len(cluster.world.view().members) > 1:
            peer.step()
            if leaver.outer._progress.contribution is not None:
                stopped.set()

    def leave() -> None:
        while not stopped.is_set():
            leaver.step()
        leaver.outer.leave()

    run_together(stay, leave)
    return leaver, peer


@pytest.mark.parametrize("overlap", [False, True])
def test_all_steps_of_a_stopped_node_are_in_rounds(overlap: bool) -> None:
    with ThreadedCluster(2) as cluster:
        leaver, peer = stop_during(cluster, overlap=overlap)
        assert leaver.outer.tokens == 0
        soon(lambda: "2 of 2 members contributed" in peer.commits())
        assert "peer_lost" not in peer.kinds()


def test_a_training_ends_though_the_world_refuses_the_report_of_its_last_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise WorldChangedError("another node has begun an epoch")

    monkeypatch.setattr(MemoryWorldCalls, "report", refuse)
    with ThreadedCluster() as cluster:
        node = cluster.add(inner_steps=2)
        node.train(3)
        node.outer.leave()
        assert node.outer.state_dict()["round"] == 2


def test_a_node_that_is_stopped_before_its_world_begins_ends_without_a_world() -> None:
    with ThreadedCluster(2) as cluster:
        node = cluster.add(is_stopping=lambda: True)
        run_together(node.outer.start)
        node.step()
        node.outer.leave()
        assert cluster.world.view().epoch == 0
        assert not node.outer._runner.is_running


@pytest.mark.parametrize(("grace_s", "timeout_s"), [(None, 20.0), (90.0, 60.0), (-1.0, 0.0)])
def test_the_last_round_has_two_thirds_of_the_grace(grace_s: float | None, timeout_s: float) -> None:
    with ThreadedCluster() as cluster:
        node = cluster.add(grace_left_s=lambda: grace_s)
        waits: list[float] = []
        node.outer._progress.wait_for = lambda done, timeout_s=None: waits.append(timeout_s) or True  # type: ignore
        node.outer._runner.start()
        node.outer.leave()
        assert waits[0] == pytest.approx(timeout_s, abs=1)


@pytest.mark.processes
def test_all_tokens_of_a_terminated_process_are_in_a_committed_round(tmp_path: Path) -> None:
    with NodeProcesses(tmp_path, 2, 2, endless_node.__name__, {}) as processes:
        peer, leaver = processes.start_all([0, 1])
        until(lambda: all((one.output / endless_node.TRAINING).exists() for one in (peer, leaver)))
        leaver.kill(signal.SIGTERM)
        assert leaver.wait(120) == 0, leaver.log
        (first,) = until(lambda: processes.view().rounds)
        steps = int((leaver.output / endless_node.STEPS).read_text())
        assert first.contributors == 2
        assert first.tokens // endless_node.TOKENS_OF_SEAT_1 == steps > 0
        until(lambda: len(processes.view().members) == 1)
        assert peer.process.poll() is None
