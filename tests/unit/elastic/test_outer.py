"""The outer loop of a training script, with real models and threads: equal to plain DiLoCo, bit for bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from gpu_client.elastic.errors import ElasticSetupError, StateLostError, WorldMismatchError
from gpu_client.elastic.recovery.state_transfer import PartRequest
from tests.kits.elastic.threads import (
    ThreadedCluster,
    ThreadedNode,
    make_model,
    outer_params,
    run_together,
    train_step,
)
from tests.kits.waiting import soon

INNER_STEPS = 5


def plain_diloco(seats: list[int], rounds: int) -> list[torch.Tensor]:
    """DiLoCo as in the paper: AdamW inside, the averaged delta as the gradient of torch's Nesterov SGD outside."""
    ranks = len(seats)
    models = [make_model() for _ in seats]
    inner = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in models]
    outer = [torch.nn.Parameter(one.detach().clone()) for one in models[0].parameters()]
    sgd = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(rounds * INNER_STEPS):
        for model, optimizer, seat in zip(models, inner, seats, strict=True):
            train_step(model, optimizer, seat, step)
        if (step + 1) % INNER_STEPS == 0:
            for place, shared in enumerate(outer):
                deltas = [shared.detach() - list(model.parameters())[place].detach() for model in models]
                shared.grad = sum((delta / ranks for delta in deltas[1:]), deltas[0] / ranks)
            sgd.step()
            for model in models:
                for own, shared in zip(model.parameters(), outer, strict=True):
                    own.data.copy_(shared)
    return [one.detach() for one in outer]


def equal(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_blocking_rounds_equal_plain_diloco_bit_for_bit(count: int) -> None:
    with ThreadedCluster(count) as cluster:
        nodes = [cluster.add(inner_steps=INNER_STEPS) for _ in range(count)]
        run_together(*[lambda one=one: one.train(4 * INNER_STEPS) for one in nodes])
        expected = plain_diloco([one.seat for one in cluster.world.view().members], 4)
        assert [one.outer.round for one in nodes] == [4] * count
        assert all(equal(one.values(), expected) for one in nodes)
        assert sum(one.outer.checkpoint_due for one in nodes) == 1
        run_together(*[one.outer.leave for one in nodes])


def test_a_round_is_due_after_round_s_whatever_the_number_of_steps() -> None:
    with ThreadedCluster() as one, ThreadedCluster() as other:
        timed, counted = one.add(inner_steps=10**6, round_s=0.05), other.add(inner_steps=10**6)
        soon(lambda: timed.train(1) or timed.outer.round >= 2)
        counted.train(timed.steps)
        assert counted.outer.round == 0


def test_nodes_that_begin_with_other_weights_take_the_weights_of_the_first_member() -> None:
    with ThreadedCluster(2) as cluster:
        nodes = [cluster.add(seed=seat) for seat in range(2)]
        run_together(*[one.outer.start for one in nodes])
        expected = list(make_model(cluster.world.view().members[0].seat).parameters())
        assert all(equal(one.values(), expected) for one in nodes)


def test_a_delta_that_is_not_finite_is_refused_at_its_own_node() -> None:
    with ThreadedCluster(2) as cluster:
        sane, broken = (cluster.add(inner_steps=INNER_STEPS) for _ in range(2))

        def diverge() -> None:
            broken.train(INNER_STEPS - 1)
            with torch.no_grad():
                broken.model[0].weight[0, 0] = float("nan")
            broken.step()

        run_together(lambda: sane.train(INNER_STEPS), diverge)
        assert ("delta_refused" in sane.kinds(), "delta_refused" in broken.kinds()) == (False, True)
        # The training may go on before the round thread reports the commit.
        soon(lambda: sane.commits() == ["1 of 2 members contributed"])
        assert equal(sane.values(), broken.values())
        moments = [one for state in broken.optimizer.state.values() for one in state.values()]
        assert all(bool(torch.isfinite(one).all()) for one in (*broken.values(), *moments))
        run_together(lambda: sane.train(INNER_STEPS), lambda: broken.train(INNER_STEPS))
        soon(lambda: sane.commits()[-1] == "2 of 2 members contributed")


@pytest.mark.parametrize(("saved_after", "is_flat"), [(7, False), (10, False), (10, True)])
def test_a_resumed_node_continues_bit_for_bit(saved_after: int, is_flat: bool) -> None:
    """is_flat: the form of earlier releases."""

    def begin(cluster: ThreadedCluster) -> ThreadedNode:
        return cluster.add(inner_steps=INNER_STEPS)

    with ThreadedCluster() as one, ThreadedCluster() as two, ThreadedCluster() as three:
        whole, first, second = begin(one), begin(two), begin(three)
        whole.train(20)
        first.train(saved_after)
        assert first.outer.checkpoint_due
        saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.outer.state_dict()))
        assert not first.outer.checkpoint_due
        if is_flat:
            saved[2]["params"] = torch.cat([one.reshape(-1) for one in saved[2]["params"].values()])
        for holder, state in zip((second.model, second.optimizer, second.outer), saved, strict=True):
            holder.load_state_dict(state)
        second.steps = saved_after
        second.train(20 - saved_after)
        assert second.outer.round == 4
        assert equal(second.values(), whole.values())
        with pytest.raises(ElasticSetupError, match="has started"):
            second.outer.load_state_dict(saved[2])


def test_a_checkpoint_during_an_adoption_waits_for_the_whole_state() -> None:
    with ThreadedCluster() as cluster:
        peer, node = (cluster.add(inner_steps=INNER_STEPS, seed=seed) for seed in range(2))
        peer.train(3 * INNER_STEPS)
        target, replica, progress = peer.outer.source.describe(), node.outer._replica, node.outer._progress
        parts = [peer.outer.source.read(PartRequest("state", 3, bucket)) for bucket in range(len(target.hashes))]
        progress.notify(is_checkpoint_due=True)
        replica.adopt(0, parts[0], 3)
        assert not node.outer.checkpoint_due, "another member saves the newer round"
        saved: list[dict[str, Any]] = []
        saving = threading.Thread(target=lambda: saved.append(node.outer.state_dict()), daemon=True)
        saving.start()
        saving.join(0.1)
        assert saving.is_alive() and not saved
        for bucket, values in enumerate(parts[1:], 1):
            replica.adopt(bucket, values, 3)
        replica.finish_adoption(target)
        saving.join(60)
        assert saved[0]["round"] == 3
        assert equal([*saved[0]["params"].values()], [*peer.outer.state_dict()["params"].values()])
        replica.adopt(0, parts[0], 4)
        progress.notify(is_ended=True)
        with pytest.raises(StateLostError, match="incomplete"):
            node.outer.state_dict()


def test_a_joiner_begins_with_the_state_of_the_group_and_soon_contributes() -> None:
    with ThreadedCluster() as cluster:
        first = cluster.add(inner_steps=INNER_STEPS)
        first.train(2 * INNER_STEPS)
        joiner = cluster.add(inner_steps=INNER_STEPS, seed=9)
        joiner.outer.start()
        assert equal(joiner.values(), first.values())

        def train_until_both_contribute(node: ThreadedNode) -> None:
            # A member that loses its peer right before the commit commits in the next epoch, without this line.
            while all("2 of 2 members contributed" not in one.commits() for one in (first, joiner)):
                node.step()

        run_together(lambda: train_until_both_contribute(first), lambda: train_until_both_contribute(joiner))
        # A training thread may take one more inner step before the round thread reports the commit, therefore the
        # outer parameters are compared.
        soon(lambda: joiner.outer.round == first.outer.round)
        assert torch.equal(*[outer_params(one) for one in (joiner, first)])


def test_a_node_that_leaves_contributes_its_partial_delta() -> None:
    with ThreadedCluster(2) as cluster:
        first, second = (cluster.add(inner_steps=INNER_STEPS) for _ in range(2))
        run_together(first.outer.start, second.outer.start)

        def leave() -> None:
            second.train(2)
            second.outer.leave()

        def stay() -> None:
            while len(cluster.world.view().members) > 1 or first.outer.round < 2:
                first.step()

        run_together(leave, stay)
        assert first.commits()[0] == "2 of 2 members contributed"
        assert "peer_lost" not in first.kinds()


@pytest.mark.parametrize("call", ["exchange", "reduce", "in reduce"])
def test_the_others_go_on_when_a_node_dies_in_a_call(call: str) -> None:
    with ThreadedCluster(3) as cluster:
        nodes = [cluster.add(inner_steps=INNER_STEPS) for _ in range(3)]
        run_together(*[lambda one=one: one.train(INNER_STEPS) for one in nodes])
        victim, survivors = nodes[0], nodes[1:]

        def die(name: str) -> None:
            if name == call:
                cluster.network.kill(victim.name)
                cluster.world.end(victim.name)

        victim.engine.at_call = die
        run_together(*[lambda one=one: one.train(2 * INNER_STEPS) for one in nodes])
        assert [one.outer.round for one in survivors] == [3, 3]
        assert equal(survivors[0].values(), survivors[1].values())
        assert {one.node for one in cluster.world.view().members} == {one.name for one in survivors}


def test_a_node_with_another_setting_is_refused_and_learns_the_difference() -> None:
    with ThreadedCluster() as cluster:
        cluster.add().outer.start()
        with pytest.raises(WorldMismatchError, match="outer_lr"):
            cluster.add(outer_lr=0.5).outer.start()


def test_an_overlapped_training_goes_on_during_the_reduce_and_applies_the_average_later() -> None:
    with ThreadedCluster(2) as cluster:
        nodes = [cluster.add(inner_steps=INNER_STEPS, overlap=True) for _ in range(2)]
        released = threading.Event()
        for node in nodes:
            node.engine.at_call = lambda name: name != "reduce" or released.wait(60)
        run_together(*[lambda one=one: one.train(INNER_STEPS) for one in nodes])
        for node in nodes:
            node.train(2)
            assert node.outer.round == 0
        before = [one.values() for one in nodes]
        released.set()
        soon(lambda: all(one.outer.round == 1 for one in nodes))
        assert all(equal(one.values(), values) for one, values in zip(nodes, before, strict=True))
        run_together(*[lambda one=one: one.train(3 * INNER_STEPS) for one in nodes])
        run_together(*[one.outer.leave for one in nodes])
        assert min(one.outer.round for one in nodes) >= 2


def test_wrong_calls_are_refused() -> None:
    with ThreadedCluster() as cluster:
        node = cluster.add()
        with pytest.raises(ElasticSetupError, match="tokens is 0"):
            node.outer.step(0)
        with pytest.raises(ElasticSetupError, match="has not started"):
            node.outer.step()
        with pytest.raises(ElasticSetupError, match="inner_steps is 0"):
            cluster.add(inner_steps=0)
        state = node.outer.state_dict()
        state["params"]["head.weight"] = state["params"].pop("0.weight")
        with pytest.raises(ElasticSetupError, match=r"'0\.weight' is in the model alone"):
            node.outer.load_state_dict(state)
