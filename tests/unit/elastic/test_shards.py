"""Shards of an elastic training: their order, their nodes, and what a death or a restart returns."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from baton import Session
from gpu_client.elastic.data.leased_shards import LeasedShards
from gpu_client.elastic.data.local_shards import LocalShards
from gpu_client.elastic.data.shard_plan import Shard, ShardPlan
from gpu_client.elastic.errors import DataMismatchError, ElasticSetupError
from gpu_client.training.errors import SessionError
from tests.kits.elastic.threads import ThreadedCluster, ThreadedNode, run_together

BATCHES = 3


def locate(plan: ShardPlan, count: int) -> list[Shard]:
    return [plan.locate(position, 0, lambda *_: None) for position in range(count)]


def test_each_pass_has_each_shard_once_in_an_order_of_its_own() -> None:
    plan = ShardPlan.make(7, seed=3, passes=2)
    assert plan.positions == 14
    indices = [one.index for one in locate(plan, 14)]
    assert sorted(indices[:7]) == sorted(indices[7:]) == list(range(7))
    assert indices[:7] != indices[7:]
    assert [one.index for one in locate(ShardPlan.make(7, seed=3, passes=None), 14)] == indices
    assert [one.index for one in locate(ShardPlan.make(7, seed=4), 7)] != indices[:7]


def test_a_mixture_alternates_by_ratio_and_ends_before_a_data_set_repeats() -> None:
    plan = ShardPlan.make({"web": 100, "code": 10}, {"web": 3, "code": 1.0})
    assert plan.positions is not None
    shards = locate(plan, plan.positions)
    assert [one.source for one in shards[:8]] == ["web", "code", "web", "web"] * 2
    assert Counter(one.source for one in shards) == {"web": 31, "code": 10}
    assert len({(one.source, one.index) for one in shards}) == len(shards)
    assert locate(plan, plan.positions + 1)[-1].source == "code"
    both = ShardPlan.make({"web": 4, "code": 2})
    assert Counter(one.source for one in locate(both, both.positions or 0)) == {"web": 4, "code": 2}


def test_the_same_files_have_the_same_digest_in_any_folder_and_order(tmp_path: Path) -> None:
    names = ["a/1.bin", "a/2.bin", "b/1.bin"]
    here, there = ([tmp_path / root / one for one in names] for root in ("x", "y/z"))
    plan = ShardPlan.make(here)
    assert plan.sha256 == ShardPlan.make(iter(there[::-1])).sha256
    assert sorted(one.path for one in locate(plan, 3) if one.path) == here
    others = [ShardPlan.make(here, seed=1), ShardPlan.make(here, passes=2), ShardPlan.make(here[:2]), ShardPlan.make(3)]
    assert len({plan.sha256, *[one.sha256 for one in others]}) == 5


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ShardPlan.make(0), "has 0 shards"),
        (lambda: ShardPlan.make(3, passes=0), "passes is 0"),
        (lambda: ShardPlan.make({"a": 3}, {"b": 1}), "a, b is a data set or a ratio only"),
        (lambda: ShardPlan.make({"a": 3}, {"a": -1}), "the ratio -1"),
        (lambda: ShardPlan.make({"a": 3, "b": 3}, {"a": 10**7, "b": 1}), "in periods of 10000001 shards"),
    ],
)
def test_unusable_data_is_refused(make: Callable[[], ShardPlan], problem: str) -> None:
    with pytest.raises(ElasticSetupError, match=problem):
        make()


def test_a_training_without_an_outer_loop_continues_where_its_checkpoint_was() -> None:
    whole = [one.index for one in LocalShards(ShardPlan.make(5))]
    first, second = LocalShards(ShardPlan.make(5)), LocalShards(ShardPlan.make(5))
    seen = []
    for shard in first:
        if len(seen) == 2:
            shard.advance(7)
            assert [one.index for one in first.upcoming] == whole[3:]
            break
        seen.append(shard.index)
    second.load_state_dict(first.state_dict())
    rest = list(second)
    assert (rest[0].offset, [*seen, *[one.index for one in rest]]) == (7, whole)
    with pytest.raises(ElasticSetupError, match="another order"):
        LocalShards(ShardPlan.make(6)).load_state_dict(first.state_dict())


def test_a_session_without_an_outer_loop_has_all_shards_unless_its_job_has_nodes(tmp_path: Path) -> None:
    with Session.start(output_dir=tmp_path, variables={}) as session:
        assert sorted(one.index for one in session.shards(4)) == [0, 1, 2, 3]
    with (
        Session.start(output_dir=tmp_path, variables={"BATON_WORLD": "{}"}) as session,
        pytest.raises(SessionError, match=r"Call session\.elastic before session\.shards"),
    ):
        session.shards(4)


class Reader:
    """Node that trains its shards batch by batch. `seen`: position and batch of each step."""

    def __init__(self, node: ThreadedNode, plan: ShardPlan) -> None:
        self.node, self.seen = node, []
        self.shards: LeasedShards = node.outer.shards(plan)

    def train(self, until: Callable[[], bool] = lambda: False) -> None:
        self.node.outer.start()
        for shard in self.shards:
            for batch in range(shard.offset, BATCHES):
                if until():
                    return
                self.seen.append((shard.position, batch))
                shard.advance(batch + 1)
                self.node.step()

    @property
    def trained(self) -> list[list[int]]:
        return self.node.outer._replica.data.finished


def batches(count: int) -> list[tuple[int, int]]:
    return [(position, batch) for position in range(count) for batch in range(BATCHES)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_all_nodes_together_train_each_shard_once(count: int, overlap: bool) -> None:
    with ThreadedCluster(count) as cluster:
        readers = [Reader(cluster.add(inner_steps=4, overlap=overlap), ShardPlan.make(20)) for _ in range(count)]
        run_together(*[one.train for one in readers])
        assert sorted(batch for one in readers for batch in one.seen) == batches(20)
        assert [one.trained for one in readers] == [[[0, 20]]] * count
        run_together(*[one.node.outer.leave for one in readers])


def test_a_node_with_other_data_is_refused() -> None:
    with ThreadedCluster(2) as cluster:
        first, second = (Reader(cluster.add(), ShardPlan.make(20, seed=seed)) for seed in range(2))
        run_together(first.node.outer.start, second.node.outer.start)
        next(iter(first.shards))
        with pytest.raises(DataMismatchError, match="another order of the shards"):
            next(iter(second.shards))


def test_a_restart_continues_with_the_data_of_its_checkpoint() -> None:
    with ThreadedCluster() as one, ThreadedCluster() as two:
        first = Reader(one.add(inner_steps=4), ShardPlan.make(6))
        first.train(until=lambda: len(first.seen) == 10)
        state = copy.deepcopy((first.node.model.state_dict(), first.node.outer.state_dict()))
        second = Reader(two.add(inner_steps=4), ShardPlan.make(6))
        for holder, found in zip((second.node.model, second.node.outer), state, strict=True):
            holder.load_state_dict(found)
        second.train()
        # The progress since round 2 stays, and with it the batches 8 and 9.
        assert first.seen + second.seen == batches(6)
        other = two.add().outer
        other.load_state_dict(state[1])
        with pytest.raises(ElasticSetupError, match="another order"):
            other.shards(ShardPlan.make(7))


def test_a_node_trains_the_shards_leased_ahead_while_the_control_plane_is_away() -> None:
    with ThreadedCluster() as cluster:
        reader = Reader(cluster.add(inner_steps=4), ShardPlan.make(20))
        reader.train(until=lambda: len(reader.shards.upcoming) > 2)
        ahead = {one.position for one in reader.shards.upcoming}
        cluster.world.is_down = True
        reader.train(until=lambda: ahead <= {position for position, _ in reader.seen})
        assert not {one.position for one in reader.shards.upcoming} & ahead
        cluster.world.is_down = False
        reader.train()
        assert sorted(reader.seen) == batches(20)


def test_shards_before_the_start_are_refused() -> None:
    with ThreadedCluster() as cluster, pytest.raises(ElasticSetupError, match="has not started"):
        next(iter(cluster.add().outer.shards(ShardPlan.make(1))))
