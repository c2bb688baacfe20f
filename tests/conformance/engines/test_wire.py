"""The wire computes gloo's averages bit for bit, with each codec identical bytes at all members."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import gloo_members, wire_members
from engines_kit import ROUND, TIMEOUT_S, Crew, same_bits, weighted_sum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_client.elastic.codecs import CODECS
from gpu_client.elastic.codecs.plain_codecs import Fp32Codec
from gpu_client.elastic.engines.engine import Bucket, EpochGroup, Peer
from gpu_client.elastic.engines.wire import reduction
from gpu_client.elastic.errors import GroupAbortedError, NotFiniteError, PeerLostError
from tests.kits.waiting import soon

ERRORS = {"fp32": 1e-6, "bf16": 0.006, "int8": 0.02, "int4": 0.35}
"""Errors of averages, relative to the averages of absolute values."""


class SlowCodec(Fp32Codec):
    """Codec of a slow machine."""

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the values after a while."""
        time.sleep(0.01)
        super().decode(data, out)


def crew_of(size: int, codec: str = "fp32", **options: Any) -> Crew:
    makers, peers = wire_members(size, codec, **options)
    return Crew([maker() for maker in makers], peers)


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split buckets into many parts, and let the window hold two buckets."""
    monkeypatch.setattr(reduction, "PART_BYTES", 1000)
    monkeypatch.setattr(reduction, "LONGEST_WINDOW_BYTES", 1)


@pytest.fixture(scope="module", params=[2, 3, 4, 5])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Crew, Crew]]:
    """Open an epoch of the wire and one of gloo with equally many members."""
    makers, peers = gloo_members(request.param)
    crews = crew_of(request.param), Crew([maker() for maker in makers], peers)
    for crew in crews:
        crew.open()
    yield crews
    for crew in crews:
        crew.close()


@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fp32_averages_equal_those_of_gloo(small_frames: None, both: tuple[Crew, Crew], data: st.DataObject) -> None:
    wire, gloo = both
    size = len(wire.peers)
    lengths = data.draw(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 9000)), max_size=6))
    shares = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    deltas = [[torch.randn(length, generator=generator) for length in lengths] for _ in range(size)]
    weights = [share / sum(shares) for share in shares]
    found, expected = wire.reduce(deltas, weights), gloo.reduce(deltas, weights)
    for rank in range(size):
        assert all(map(same_bits, found[rank], expected[0]))


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_all_members_hold_identical_averages(small_frames: None, codec: str, encrypted: bool) -> None:
    crew = crew_of(3, codec, encrypted=encrypted)
    crew.open()
    weights = [0.2, 0.3, 0.5]
    deltas = [[torch.randn(length) for length in (1, 5000, 3072, 100)] for _ in crew.peers]
    averages = crew.reduce(deltas, weights)
    for bucket in range(4):
        expected = weighted_sum([own[bucket] for own in deltas], weights)
        size = weighted_sum([own[bucket].abs() for own in deltas], weights)
        assert (averages[0][bucket] - expected).norm() <= ERRORS[codec] * size.norm()
        assert all(same_bits(own[bucket], averages[0][bucket]) for own in averages)
    crew.close()


def test_a_slow_member_of_weight_zero_receives_all_averages_and_sends_nothing(small_frames: None) -> None:
    """No member waits for the contributions of such a member, so only its memory limits the others."""
    crew = crew_of(3)
    crew.open()
    slow = crew.engines[2]
    slow._codec = SlowCodec()  # type: ignore[attr-defined]
    before = slow.traffic
    deltas = [[torch.full((3000,), float(rank * 10 + i)) for i in range(12)] for rank in range(3)]
    averages = crew.reduce(deltas, [0.5, 0.5, 0.0])
    for own in averages:
        assert [average.unique().tolist() for average in own] == [[5.0 + i] for i in range(12)]
    assert slow.traffic.sent_bytes - before.sent_bytes < 2000
    crew.close()


def test_a_member_in_order_is_named_as_left() -> None:
    crew = crew_of(3)
    crew.open()
    found = crew.together(lambda rank, engine: engine.close() if rank == 1 else engine.exchange(b"", TIMEOUT_S))
    for error in (found[0], found[2]):
        assert (error.nodes, error.cause) == ((crew.peers[1].node,), "left")
    crew.close()


def test_members_leave_one_after_the_other() -> None:
    crew = crew_of(3)
    for _ in range(10):
        crew.open()
        meshes = [engine._mesh for engine in crew.engines]  # type: ignore[attr-defined]
        crew.engines[0].close()
        soon(lambda meshes=meshes: meshes[1].links[0].left)
        crew.engines[1].close()
        # The goodbyes arrive on connections of their own.
        last = meshes[2]
        soon(lambda last=last: last.failure or (last.links[0].left and last.links[1].left))
        assert last.failure is None
    crew.close()


def test_a_member_that_leaves_after_its_last_message_disturbs_nobody() -> None:
    crew = crew_of(3)
    crew.open()

    def call(rank: int, engine: Any) -> list[bytes]:
        if rank == 2:
            time.sleep(0.3)
        payloads: list[bytes] = engine.exchange(b"%d" % rank, TIMEOUT_S)
        if rank == 0:
            engine.close()
        return payloads

    # Member 0 has all payloads at last; members 1 and 2 still read theirs.
    assert crew.together(call) == [[b"0", b"1", b"2"]] * 3
    crew.close()


def test_members_name_the_lost_member_and_not_the_messenger() -> None:
    crew = crew_of(3)
    crew.open()
    nodes = [peer.node for peer in crew.peers]
    waiting = crew.start(lambda rank, engine: rank == 1 or engine.exchange(b"", TIMEOUT_S))
    crew.engines[1]._mesh.lose([nodes[2]], "silent")  # type: ignore[attr-defined]
    first, last = waiting[0].exception(TIMEOUT_S), waiting[2].exception(TIMEOUT_S)
    assert isinstance(first, PeerLostError) and isinstance(last, PeerLostError)
    assert (first.nodes, first.cause) == ((nodes[2],), "silent")
    assert (last.nodes, last.cause) == ((nodes[1],), "silent")
    crew.close()


def test_a_member_with_values_that_are_not_finite_leaves() -> None:
    crew = crew_of(2)
    crew.open()

    def reduce(rank: int, engine: Any) -> None:
        values = torch.tensor([1.0, math.nan if rank else 2.0])
        engine.reduce(ROUND, [Bucket(9, values, torch.empty(2))], [0.5, 0.5], TIMEOUT_S, lambda _: None)

    found = crew.together(reduce)
    assert isinstance(found[1], NotFiniteError)
    assert f"bucket 9 of round {ROUND}" in str(found[1])
    assert (found[0].nodes, found[0].cause) == ((crew.peers[1].node,), "left")
    crew.close()


def test_an_abort_ends_a_reduce_at_once() -> None:
    crew = crew_of(2)
    crew.open()
    buckets = [Bucket(0, torch.ones(5), torch.empty(5))]
    reducing = crew.start(
        lambda rank, engine: rank or engine.reduce(ROUND, buckets, [0.5, 0.5], TIMEOUT_S, lambda _: None)
    )
    assert reducing[1].result() == 1
    began = time.monotonic()
    crew.engines[0].abort()
    assert isinstance(reducing[0].exception(TIMEOUT_S), GroupAbortedError)
    assert time.monotonic() - began < 0.9 * TIMEOUT_S
    crew.close()


def test_an_earlier_epoch_is_refused_as_stale() -> None:
    crew = crew_of(2)
    crew.epoch = 4
    crew.open()
    crew.engines[1].close()
    with pytest.raises(PeerLostError) as caught:
        crew.engines[1].open(EpochGroup(4, crew.peers, 1), TIMEOUT_S)
    assert caught.value.cause in ("stale_epoch", "refused")
    with pytest.raises(PeerLostError) as caught:
        crew.engines[1].open(EpochGroup(3, crew.peers, 1), TIMEOUT_S)
    assert (caught.value.nodes, caught.value.cause) == ((crew.peers[0].node,), "stale_epoch")
    crew.close()


def test_an_earlier_member_without_address_calls_the_later_one() -> None:
    crew = crew_of(3)
    first, *others = crew.peers
    crew.peers = (Peer(first.node, (), first.certificate), *others)
    crew.open()
    assert crew.together(lambda rank, engine: engine.exchange(b"%d" % rank, TIMEOUT_S)) == [[b"0", b"1", b"2"]] * 3
    crew.close()


def test_two_members_without_addresses_cannot_meet() -> None:
    crew = crew_of(2)
    crew.peers = tuple(Peer(peer.node, (), peer.certificate) for peer in crew.peers)
    with pytest.raises(PeerLostError, match="the node has no address") as caught:
        crew.engines[0].open(EpochGroup(1, crew.peers, 0), TIMEOUT_S)
    assert caught.value.nodes == (crew.peers[1].node,)
    crew.close()
