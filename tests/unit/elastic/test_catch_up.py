"""A node that lacks its peers' state reads missed averages where peers keep them, and states elsewhere."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace

import pytest
import torch

from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.recovery.catch_up import choose_target, plan_parts
from gpu_client.elastic.recovery.state_transfer import Inclusion, PartRequest, PartUnavailableError, StateDescription
from gpu_client.elastic.rounds.round_actions import DescribePeers, FetchParts
from tests.kits.elastic.simulation import Simulation

A, B, C = Peer("0.1.0000000a"), Peer("1.1.0000000b"), Peer("2.1.0000000c")
TARGET = StateDescription(9, (1, 2, 3, 4), averages=(8, 9))


def test_the_newest_state_is_the_target_and_all_its_holders_serve() -> None:
    described = {A: StateDescription(8, (0, 0, 0, 0)), B: TARGET, C: TARGET}
    assert choose_target(described) == (TARGET, [B, C])
    relayed = replace(TARGET, relayed=True)
    assert choose_target({A: relayed, B: TARGET, C: relayed}) == (TARGET, [B])
    assert choose_target({A: relayed, C: relayed}) == (TARGET, [A, C])


def test_missed_averages_come_first_and_the_reads_spread_over_the_peers() -> None:
    assert plan_parts(TARGET, [A, B], [0, 1, 3], rounds=[8, 3, 9, 7], limit=9) == [
        (A, PartRequest("average", 9, 0)),
        (B, PartRequest("average", 8, 3)),
        (A, PartRequest("state", 9, 1)),
    ]
    assert len(plan_parts(TARGET, [A], [0, 1, 3], rounds=[0] * 4, limit=2)) == 2


def test_a_bucket_misses_the_averages_of_its_own_fragment() -> None:
    target = StateDescription(9, (1, 2, 3, 4), averages=(7, 8, 9))
    assert plan_parts(target, [A], [0, 1, 2, 3], rounds=[6, 6, 7, 4], limit=9, fragments=2) == [
        (A, PartRequest("average", 7, 0)),
        (A, PartRequest("average", 8, 1)),
        (A, PartRequest("average", 9, 2)),
        (A, PartRequest("state", 9, 3)),
    ]


def test_a_joiner_of_a_long_training_lists_no_million_missed_rounds() -> None:
    target = StateDescription(10**6, (1, 2, 3, 4), averages=(10**6 - 1, 10**6))
    tracemalloc.start()
    try:
        parts = plan_parts(target, [A], [0, 1, 2, 3], rounds=[0] * 4, limit=9)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert parts == [(A, PartRequest("state", 10**6, bucket)) for bucket in range(4)]


@pytest.mark.parametrize(
    "change",
    [
        {"round": 10**30},
        {"round": -1},
        {"round": math.inf},
        {"hashes": [math.inf]},
        {"hashes": [-1]},
        {"hashes": [2**64]},
        {"averages": [math.nan]},
        {"forgotten": 10**30},
        {"inclusions": [[1, [{"nodes": ["a"], "buckets": -1}]]]},
    ],
    ids=str,
)
def test_a_description_with_impossible_numbers_is_refused(change: dict[str, object]) -> None:
    """The peer loses its connection, and the reader goes on."""
    fields = json.loads(TARGET.encode())
    with pytest.raises(ValueError):
        StateDescription.decode(json.dumps({**fields, **change}).encode())


def test_a_description_of_endless_depth_is_refused() -> None:
    with pytest.raises(ValueError):
        StateDescription.decode(b"[" * 1_000_000)


def test_descriptions_survive_their_encoding_and_other_texts_are_refused() -> None:
    described = StateDescription(9, (2**64 - 1,), (9,), ((9, (Inclusion(("0.1.0000000a",), 5),)),))
    assert StateDescription.decode(described.encode()) == described
    for text in (b"", b"[]", b"{}", b'{"round": []}'):
        with pytest.raises(ValueError):
            StateDescription.decode(text)


@pytest.mark.parametrize(("fragments", "averages"), [(1, 6), (3, 2)])
def test_a_joiner_replays_the_rounds_that_pass_while_it_fetches(fragments: int, averages: int) -> None:
    sim = Simulation()
    first = sim.start(0, fragments=fragments)
    sim.settle(3)
    joiner = sim.start(1, value=5.0, fragments=fragments)
    reads: list[str] = []
    read = first.replica.read
    first.replica.read = lambda request: reads.append(request.kind) or read(request)  # type: ignore[method-assign]
    while not isinstance(joiner.action, DescribePeers):
        joiner.advance()
    while not first.protocol.steward.is_joining:
        first.advance()
    for _ in range(2):
        while not isinstance(joiner.action, FetchParts):
            joiner.advance()
        joiner.advance()
        before = first.replica.state.round
        while first.replica.state.round == before:
            first.train()
            first.advance()
    while joiner.replica.state.round < first.replica.state.round:
        joiner.advance()
    assert reads == ["state"] * 3 + ["average"] * averages
    assert joiner.replica.describe().hashes == first.replica.describe().hashes
    assert torch.equal(joiner.replica.state.momentum, first.replica.state.momentum)


def test_a_node_that_is_catching_up_serves_no_state() -> None:
    node = Simulation().start(0)
    node.progress.begin_adoption()
    with pytest.raises(PartUnavailableError, match="is fetching"):
        node.replica.describe()
    for request in (PartRequest("state", 0, 0), PartRequest("state", 0, 99), PartRequest("candidate", 1, 0)):
        with pytest.raises(PartUnavailableError, match=f"no {request.kind} of bucket {request.bucket}"):
            node.replica.read(request)
