"""Rounds that average one fragment of the model at a time keep the promises of rounds of the whole model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch

from gpu_client.elastic.engines.engine import EpochGroup, Peer
from gpu_client.elastic.errors import ElasticSetupError
from gpu_client.elastic.parameters import Stripes, TrainedParameters, split_buckets
from gpu_client.elastic.rounds.local_progress import LocalProgress
from gpu_client.elastic.rounds.round_actions import ReduceBuckets
from gpu_client.elastic.rounds.round_decisions import Reduce
from tests.kits.elastic.threads import (
    ThreadedCluster,
    ThreadedNode,
    make_model,
    outer_params,
    run_together,
    train_step,
)
from tests.kits.waiting import soon, until
from tests.unit.elastic.test_round_failures import begin

INNER_STEPS, FRAGMENTS, BUCKET = 6, 2, 16


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def plain_streaming_diloco(seats: list[int], rounds: int) -> torch.Tensor:
    """DiLoCo whose outer gradient has every second bucket, in turn."""
    models = [make_model() for _ in seats]
    inner = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in models]
    outer = flat(models[0])
    buckets = [slice(begin, begin + BUCKET) for begin in range(0, len(outer), BUCKET)]
    shared = [torch.nn.Parameter(outer[part].clone()) for part in buckets]
    optimizers = [torch.optim.SGD([one], lr=0.7, momentum=0.9, nesterov=True) for one in shared]
    for step in range(rounds * INNER_STEPS // FRAGMENTS):
        for model, optimizer, seat in zip(models, inner, seats, strict=True):
            train_step(model, optimizer, seat, step)
        number, rest = divmod(step + 1, INNER_STEPS // FRAGMENTS)
        if rest:
            continue
        deltas = [outer - flat(model) for model in models]
        for place in range((number - 1) % FRAGMENTS, len(buckets), FRAGMENTS):
            part = buckets[place]
            shared[place].grad = sum((one[part] / len(seats) for one in deltas[1:]), deltas[0][part] / len(seats))
            optimizers[place].step()
            outer[part] = shared[place].detach()
            for one in deltas:
                one[part] = 0
        for model, delta in zip(models, deltas, strict=True):
            torch.nn.utils.vector_to_parameters(outer - delta, model.parameters())
    return outer


def add(cluster: ThreadedCluster) -> ThreadedNode:
    return cluster.add(inner_steps=INNER_STEPS, fragments=FRAGMENTS, overlap=False)


@pytest.mark.parametrize("count", [1, 2])
def test_blocking_rounds_of_fragments_equal_plain_streaming_diloco_bit_for_bit(count: int) -> None:
    with ThreadedCluster(count) as cluster:
        nodes = [add(cluster) for _ in range(count)]
        saved: list[int] = []

        def train(node: ThreadedNode) -> None:
            node.outer.start()
            for _ in range(5 * INNER_STEPS // FRAGMENTS):
                node.step()
                if node.outer.checkpoint_due:
                    saved.append(node.outer.state_dict()["round"])

        run_together(*[lambda one=one: train(one) for one in nodes])
        expected = plain_streaming_diloco([one.seat for one in cluster.world.view().members], 5)
        assert [one.outer.round for one in nodes] == [5] * count
        assert all(torch.equal(outer_params(one), expected) for one in nodes)
        assert sorted(saved) == [2, 4], "one checkpoint for each turn of all fragments"
        run_together(*[one.outer.leave for one in nodes])
        assert [one.outer.round for one in nodes] == [6] * count, "the other fragment has its last steps, too"
        assert torch.equal(flat(nodes[0].model), flat(nodes[-1].model))
        assert [one.outer.tokens for one in nodes] == [0] * count


@pytest.mark.parametrize("overlap", [False, True])
def test_nodes_that_leave_within_a_turn_end_with_one_model(overlap: bool) -> None:
    with ThreadedCluster(2) as cluster:
        nodes = [cluster.add(inner_steps=INNER_STEPS, fragments=3, overlap=overlap) for _ in range(2)]
        run_together(*[lambda one=one: one.train(INNER_STEPS + 1) for one in nodes])
        run_together(*[one.outer.leave for one in nodes])
        assert [one.outer.tokens for one in nodes] == [0, 0]
        for one in nodes:
            assert torch.equal(flat(one.model), outer_params(one))
        # A node that trains during the rounds may be done before the other node, which then ends alone.
        is_together = nodes[0].outer.round == nodes[1].outer.round
        assert is_together or overlap
        assert not is_together or torch.equal(flat(nodes[0].model), flat(nodes[1].model))


def test_a_node_that_leaves_after_rounds_of_all_its_progress_keeps_nothing_mixed() -> None:
    with ThreadedCluster() as cluster:
        node = cluster.add(inner_steps=INNER_STEPS, fragments=FRAGMENTS, overlap=True)
        node.outer.start()
        while node.outer.round < 2 * FRAGMENTS:
            node.step()
            soon(lambda: node.outer._progress.contribution is None)
        node.outer.leave()
        assert node.outer.tokens == 0
        assert torch.equal(flat(node.model), outer_params(node))


def test_a_training_node_mixes_the_result_of_a_round_into_its_parameters() -> None:
    local, outer = torch.nn.Parameter(torch.full((2,), 3.0)), torch.zeros(2)
    parameters, progress = TrainedParameters([("local", local)]), LocalProgress(outer, mix=0.25)
    progress.hold(parameters)
    progress.proceed(parameters)
    for bucket, mixes in ((slice(0, 1), True), (slice(1, 2), False)):
        progress.move(bucket, lambda bucket=bucket: outer[bucket].fill_(1.0), mixes=mixes)
        progress.include(bucket, mixes=mixes)
    progress.follow(parameters)
    assert local.tolist() == [0.25 * 3 + 0.75 * 1, 1.0], "a state that is fetched from peers is taken as a whole"


def test_a_training_node_does_not_wait_for_a_commit_that_moves_the_outer_parameters() -> None:
    local, outer = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2)
    parameters, progress = TrainedParameters([("local", local)]), LocalProgress(outer)
    progress.hold(parameters)
    progress.proceed(parameters)
    with progress.changed:
        progress.move(slice(0, 2), lambda: outer.fill_(1.0))
        run_together(lambda: progress.follow(parameters))
        assert local.tolist() == [0, 0]
    progress.follow(parameters)
    assert local.tolist() == [1, 1]


def test_a_resumed_node_continues_within_a_turn_of_the_fragments() -> None:
    with ThreadedCluster() as one, ThreadedCluster() as two, ThreadedCluster() as three:
        whole, first, second = add(one), add(two), add(three)
        whole.train(20)
        first.train(10)
        saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.outer.state_dict()))
        assert saved[2]["tokens"].tolist() == [1, 4], "the second fragment's newest round was after step 6"
        for holder, state in zip((second.model, second.optimizer, second.outer), saved, strict=True):
            holder.load_state_dict(state)
        second.steps = 10
        second.train(10)
        assert second.outer.tokens == whole.outer.tokens
        assert torch.equal(flat(second.model), flat(whole.model))


def test_a_fragment_weighs_by_the_tokens_since_its_own_newest_round() -> None:
    with ThreadedCluster() as cluster:
        node = add(cluster)
        node.outer.start()
        for _ in range(4 * INNER_STEPS // FRAGMENTS):
            node.step(tokens=200)
        until(lambda: len(cluster.world.view().rounds) == 4)
        reports = cluster.world.view().rounds
        assert [one.tokens for one in reports] == [400, 400, 800, 400], "the first has two of three buckets"


def test_a_member_without_part_in_a_round_reduces_the_same_buckets_as_the_others() -> None:
    _, nodes = begin(2)
    group = EpochGroup(3, tuple(Peer(one.name) for one in nodes), 1)
    decided = Reduce(1, {nodes[0].name: 4}, (nodes[0].name,), kept=(0,))
    action = next(nodes[1].protocol._reduce(group, decided, []))
    assert isinstance(action, ReduceBuckets)
    assert [one.index for one in action.buckets] == [1, 2], "the others keep the first bucket"


class RacingParameters(TrainedParameters):
    """Parameters whose next read takes so long that `meanwhile` happens; counts the values of each read."""

    def __init__(self, local: torch.nn.Parameter, meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__([("local", local)])
        self.meanwhile = meanwhile
        self.copied: list[int] = []

    def read(self, flat: torch.Tensor, stripes: Stripes | None = None) -> None:
        super().read(flat, stripes)
        self.copied.append(sum(len(one.values) for one in self.choose(stripes)))
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()


def striped(mix: float = 0.0) -> tuple[torch.nn.Parameter, RacingParameters, LocalProgress, list[slice]]:
    """Return local parameters of 3 beside outer parameters of 0, in 4 buckets and 2 fragments."""
    local = torch.nn.Parameter(torch.full((8,), 3.0))
    parameters, buckets = RacingParameters(local), split_buckets(8, 2)
    progress = LocalProgress(torch.zeros(8), fragments=parameters.stripe(buckets, 2), mix=mix)
    progress.is_started, progress.is_apart, progress.tokens = True, False, 4
    progress.hold(parameters)
    progress.proceed(parameters)
    parameters.copied.clear()
    return local, parameters, progress, buckets


def pass_round(progress: LocalProgress, buckets: list[slice], *, moves: float, includes: bool) -> None:
    """Commit a round of the next fragment, as the round thread does."""
    fragment = progress.next_fragment
    with progress.changed:
        for bucket in buckets[fragment::2]:
            progress.move(bucket, lambda bucket=bucket: progress.outer[bucket].add_(moves))  # type: ignore[misc]
            if includes:
                progress.include(bucket)
        progress.next_fragment = 1 - fragment
        progress.finish_round(included=float(includes), fragment=fragment)


def test_a_hand_over_copies_the_buckets_of_the_next_round_alone() -> None:
    local, parameters, progress, buckets = striped()
    for number, expected in enumerate(([7, 7, 3, 3] * 2, [7] * 8)):
        assert progress.hand_over(parameters, 0.0) is not None
        progress.proceed(parameters)
        assert progress.delta[buckets[number]].tolist() == [-3.0, -3.0]
        pass_round(progress, buckets, moves=7.0, includes=True)
        progress.follow(parameters)
        assert local.tolist() == expected
    assert parameters.copied == [4, 4]


@pytest.mark.parametrize("waits", [False, True])
def test_a_round_that_ends_while_the_delta_is_copied_moves_the_delta_to_the_next_fragment(waits: bool) -> None:
    local, parameters, progress, buckets = striped()
    parameters.meanwhile = lambda: pass_round(progress, buckets, moves=1.0, includes=False)
    contribution = progress.hand_over(parameters, 0.0)
    assert contribution is not None
    assert progress.contribution is contribution
    assert parameters.copied == [4, 4], "the delta of the first fragment has no round any more"
    assert [progress.delta[one].tolist() for one in buckets[1::2]] == [[-3.0, -3.0]] * 2
    if not waits:
        progress.proceed(parameters)
    pass_round(progress, buckets, moves=3.0, includes=True)
    progress.proceed(parameters)
    progress.follow(parameters)
    assert local.tolist() == [4.0, 4.0, 3.0, 3.0] * 2


def test_buckets_outside_of_the_delta_move_during_a_wait_as_in_training() -> None:
    """A node that waits for its round may fetch the whole state instead."""
    local, parameters, progress, buckets = striped()
    progress.hand_over(parameters, 0.0)
    progress.begin_adoption()
    with progress.changed:
        for bucket in buckets:
            progress.move(bucket, lambda bucket=bucket: progress.outer[bucket].add_(2.0))  # type: ignore[misc]
        progress.finish_round(included=0)
        progress.notify(is_adopting=False)
    progress.proceed(parameters)
    assert local.tolist() == [5.0] * 8
    assert not progress.pending_shift().numel()


def test_a_refused_delta_takes_the_outer_parameters_of_all_fragments() -> None:
    local, parameters, progress, buckets = striped()
    pass_round(progress, buckets, moves=1.0, includes=False)
    with torch.no_grad():
        local[2] = torch.nan
    contribution = progress.hand_over(parameters, 0.0)
    assert contribution is not None and contribution.is_refused
    progress.proceed(parameters)
    assert torch.equal(local.detach(), progress.outer)
    assert progress.pending_tokens == [0, 0]
    assert not bool(progress.delta.any())


@pytest.mark.parametrize(("fragments", "overlap", "waits"), [(1, None, True), (2, None, False), (2, False, True)])
def test_a_node_trains_on_during_rounds_of_fragments(fragments: int, overlap: bool | None, waits: bool) -> None:
    with ThreadedCluster() as cluster:
        node = cluster.add(inner_steps=2, fragments=fragments, overlap=overlap)
        node.outer.start()
        released = threading.Event()
        node.outer._progress.begin_round = lambda: released.wait(60)  # type: ignore[method-assign]
        training = threading.Thread(target=lambda: [node.step() for _ in range(4)], daemon=True)
        training.start()
        training.join(0.3 if waits else 60)
        assert training.is_alive() == waits
        released.set()
        training.join(60)


@pytest.mark.parametrize(("inner_steps", "fragments"), [(10, 3), (10, 0), (100, 100)])
def test_fragments_that_do_not_fit_are_refused(inner_steps: int, fragments: int) -> None:
    with ThreadedCluster() as cluster:
        with pytest.raises(ElasticSetupError, match="fragments is"):
            cluster.add(inner_steps=inner_steps, fragments=fragments)
        with pytest.raises(ElasticSetupError, match="mix is 1"):
            cluster.add(mix=1.0)
