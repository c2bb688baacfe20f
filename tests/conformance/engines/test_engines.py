"""Engines compute exact averages, name lost members, and end a call of another thread at once."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from conftest import CrewMaker
from engines_kit import ROUND, TIMEOUT_S, weighted_sum

from gpu_client.elastic.engines.engine import MAX_EXCHANGE_BYTES, Bucket, Engine, EpochGroup
from gpu_client.elastic.errors import GroupAbortedError, NotFiniteError, PeerLostError

SILENCE_S = 2.0
"""Time limit in which all threads of a loaded machine give signs of life."""
WEIGHTS = {1: [1.0], 2: [0.3, 0.7], 3: [0.5, 0.0, 0.5], 5: [0.1, 0.2, 0.3, 0.4, 0.0]}


@pytest.mark.parametrize("size", WEIGHTS)
def test_averages_are_weighted_sums_in_the_order_of_ranks(crews: CrewMaker, size: int) -> None:
    crew = crews(size)
    crew.open()
    weights = WEIGHTS[size]
    deltas = [[torch.randn(count) for count in (0, 1, 4, 1023, 5000)] for _ in range(size)]
    for rank, weight in enumerate(weights):
        if not weight:
            # A member of weight 0 contributes nothing.
            deltas[rank] = [torch.full_like(delta, math.nan) for delta in deltas[rank]]
    for _ in range(2):
        averages = crew.reduce(deltas, weights)
        for bucket in range(5):
            expected = weighted_sum([own[bucket] for own in deltas], weights)
            assert all(torch.equal(own[bucket], expected) for own in averages)


def test_a_new_epoch_has_its_own_members(crews: CrewMaker) -> None:
    crew = crews(3)
    crew.open()
    assert crew.together(lambda rank, engine: engine.exchange(b"%d" % rank, TIMEOUT_S)) == [[b"0", b"1", b"2"]] * 3
    crew.engines.pop(1).close()
    crew.peers = (crew.peers[0], crew.peers[2])
    crew.open()
    assert crew.together(lambda rank, engine: engine.exchange(b"%d" % rank, TIMEOUT_S)) == [[b"0", b"1"]] * 2


def test_payloads_have_any_length_up_to_the_limit(crews: CrewMaker) -> None:
    crew = crews(3)
    crew.open()
    for lengths in ([0, 0, 0], [0, 1, MAX_EXCHANGE_BYTES]):
        payloads = [bytes([rank + 1]) * length for rank, length in enumerate(lengths)]
        found = crew.together(lambda rank, engine, payloads=payloads: engine.exchange(payloads[rank], TIMEOUT_S))
        assert found == [payloads] * 3
    with pytest.raises(ValueError, match="65537 bytes"):
        crew.engines[0].exchange(bytes(MAX_EXCHANGE_BYTES + 1), TIMEOUT_S)


@pytest.mark.parametrize("size", [1, 2])
def test_deltas_that_are_not_finite_are_refused(crews: CrewMaker, size: int) -> None:
    crew = crews(size)
    crew.open()
    values = torch.tensor([1.0, math.nan])
    with pytest.raises(NotFiniteError, match=f"bucket 3 of round {ROUND}"):
        crew.engines[0].reduce(ROUND, [Bucket(3, values, values.clone())], [1.0 / size] * size, 2, lambda _: None)


def test_an_abort_ends_the_call_at_once(crews: CrewMaker) -> None:
    crew = crews(2)
    crew.open()
    waiting = crew.start(lambda rank, engine: engine.exchange(b"", TIMEOUT_S) if rank == 0 else None)
    assert waiting[1].result() is None
    threading.Timer(0.2, crew.engines[0].abort).start()
    began = time.monotonic()
    assert isinstance(waiting[0].exception(TIMEOUT_S), GroupAbortedError)
    assert time.monotonic() - began < 0.9 * TIMEOUT_S
    with pytest.raises(GroupAbortedError):
        crew.engines[0].exchange(b"", TIMEOUT_S)


def test_a_silent_member_is_named_after_the_time_limit(crews: CrewMaker) -> None:
    crew = crews(3)
    crew.open()
    began = time.monotonic()
    found = crew.together(lambda rank, engine: engine.exchange(b"", SILENCE_S) if rank != 1 else None)
    assert [error.nodes for error in (found[0], found[2])] == [(crew.peers[1].node,)] * 2
    assert {error.cause for error in (found[0], found[2])} == {"silent"}
    assert 0.9 * SILENCE_S < time.monotonic() - began < 30


def test_a_member_that_does_not_reduce_is_named(crews: CrewMaker) -> None:
    crew = crews(3)
    crew.open()

    def reduce(rank: int, engine: Engine) -> None:
        if rank != 1:
            buckets = [Bucket(index, torch.ones(3000), torch.empty(3000)) for index in range(3)]
            engine.reduce(ROUND, buckets, [1 / 3] * 3, SILENCE_S, lambda _: None)

    found = crew.together(reduce)
    assert [(error.nodes, error.cause) for error in (found[0], found[2])] == [((crew.peers[1].node,), "silent")] * 2


def test_members_that_do_not_come_are_named(crews: CrewMaker) -> None:
    crew = crews(3)
    group = EpochGroup(1, crew.peers, 0)
    with pytest.raises(PeerLostError) as caught:
        crew.engines[0].open(group, 1.0)
    assert caught.value.nodes == (crew.peers[1].node, crew.peers[2].node)


def test_an_absent_first_member_is_named(crews: CrewMaker) -> None:
    crew = crews(2)
    with pytest.raises(PeerLostError) as caught:
        crew.engines[1].open(EpochGroup(1, crew.peers, 1), 1.0)
    assert caught.value.nodes == (crew.peers[0].node,)


def test_traffic_counts_bytes(crews: CrewMaker) -> None:
    crew = crews(2)
    crew.open()
    before = [engine.traffic for engine in crew.engines]
    crew.reduce([[torch.ones(4096)], [torch.ones(4096)]], [0.5, 0.5])
    moved = [engine.traffic for engine in crew.engines]
    for old, new in zip(before, moved, strict=True):
        assert 4 * 4096 <= new.sent_bytes - old.sent_bytes <= 4 * 4096 + 2000
        assert 4 * 4096 <= new.received_bytes - old.received_bytes <= 4 * 4096 + 2000
