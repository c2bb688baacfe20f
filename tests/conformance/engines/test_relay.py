"""Members that do not reach each other meet in the object store, with the averages of the wire bit for bit."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from conftest import wire_members
from engines_kit import HASTE, TIMEOUT_S, Crew, RelayMember, make_hasty_member, same_bits
from member_process import Member

from baton.contract.elastic.relay import MAX_DOWNLOADS
from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.relay import relay_connection
from gpu_client.elastic.engines.relay.relay_port import RelayPort
from gpu_client.elastic.engines.wire import mesh, reduction
from gpu_client.elastic.errors import PeerLostError
from tests.kits.elastic.relay_store import RelayStore
from tests.kits.network.ports import free_port
from tests.kits.waiting import until

REFUSALS = 8
"""Refused requests after which both members have repeated theirs."""
SILENCE_S = next(value for _, name, value in HASTE if name == "silence_s")


def mixed_crew(store: RelayStore, size: int, hidden: Sequence[int], codec: str = "int8") -> Crew:
    """Return members with the relay, of which peers reach all but the hidden ones by TCP."""
    makers, peers = wire_members(size, codec)
    members = [maker() for maker in makers]
    for member, peer in zip(members, peers, strict=True):
        member.dialer.relay = RelayPort(store.answer, peer.node, member.handlers)
    dead = (f"127.0.0.1:{free_port()}",)
    seen = [
        Peer(one.node, dead if rank in hidden else one.addresses, one.certificate) for rank, one in enumerate(peers)
    ]
    return Crew(members, seen)


def close(crew: Crew) -> None:
    for member in crew.engines:
        member.dialer.relay.close()  # type: ignore[attr-defined]
    crew.close()


def relayed_pairs(crew: Crew) -> set[tuple[int, int]]:
    return {
        (rank, link.rank)
        for rank, engine in enumerate(crew.engines)
        for link in engine._mesh.links.values()  # type: ignore[attr-defined]
        if any(lane.is_relayed for lane in link.lanes.values())
    }


def test_only_pairs_without_a_way_by_tcp_use_the_relay(
    relay_store: RelayStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_connection, "SMALLEST_BYTES", 300)
    monkeypatch.setattr(relay_connection, "LARGEST_BYTES", 300)
    monkeypatch.setattr(reduction, "PART_BYTES", 1000)
    monkeypatch.setattr(reduction, "LONGEST_WINDOW_BYTES", 1)
    crews = mixed_crew(relay_store, 4, [1, 3]), mixed_crew(relay_store, 4, [])
    deltas = [[torch.randn(length) for length in (1, 5000, 20_000, 30_000)] for _ in range(4)]
    weights, found = [0.4, 0.3, 0.2, 0.1], []
    for crew in crews:
        crew.open()
        crew.open()
        assert (
            crew.together(lambda rank, engine: engine.exchange(b"%d" % rank, TIMEOUT_S))
            == [[b"0", b"1", b"2", b"3"]] * 4
        )
        found.append(crew.reduce(deltas, weights))
    assert [relayed_pairs(crew) for crew in crews] == [{(1, 3), (3, 1)}, set()]
    expected = found[1][0]
    assert all(same_bits(one, other) for own in found[0] for one, other in zip(own, expected, strict=True))
    # The receivers delete what they have read.
    streams = Counter(name.rpartition("/")[0] for name in relay_store.objects)
    assert max(streams.values()) <= MAX_DOWNLOADS + 1 < relay_store.deleted
    for crew in crews:
        close(crew)


def test_an_epoch_leaves_no_read_call_behind(relay_store: RelayStore) -> None:
    """A list of calls has an end, and the calls of later epochs would not fit."""
    crew = mixed_crew(relay_store, 2, [0, 1])
    for _ in range(2):
        crew.open()
        assert crew.together(lambda rank, engine: engine.exchange(b"%d" % rank, TIMEOUT_S)) == [[b"0", b"1"]] * 2
    calls = [name for name in relay_store.objects if name.endswith("/0")]
    assert calls == []
    close(crew)


def test_an_outage_of_the_store_is_survived_or_named(relay_store: RelayStore) -> None:
    crew = mixed_crew(relay_store, 2, [0, 1])
    crew.open()
    relay_store.is_down = True
    waiting = crew.start(lambda rank, engine: engine.exchange(b"%d" % rank, TIMEOUT_S))
    until(lambda: relay_store.refused >= REFUSALS, what="requests of both members")
    relay_store.is_down = False
    assert [one.result(TIMEOUT_S) for one in waiting] == [[b"0", b"1"]] * 2
    relay_store.is_down = True
    errors = crew.together(lambda _, engine: engine.exchange(b"", TIMEOUT_S))
    lost = [((peer.node,), "silent") for peer in reversed(crew.peers)]
    assert [(error.nodes, error.cause) for error in errors] == lost
    relay_store.is_down = False
    crew.open()
    close(crew)


def test_an_outage_of_the_control_plane_loses_no_relayed_member(
    relay_store: RelayStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = mixed_crew(relay_store, 2, [0, 1])
    crew.open()
    lanes = [
        lane
        for member in crew.engines
        for link in member._mesh.links.values()  # type: ignore[attr-defined]
        for lane in link.lanes.values()
    ]
    for lane in lanes:
        lane.silence_s = 0.9 * SILENCE_S
    monkeypatch.setattr(relay_connection, "RETRY_PAUSE_S", 0.05)
    relay_store.is_cut_off = True
    waiting = crew.start(lambda rank, engine: engine.exchange(b"%d" % rank, 0.9 * SILENCE_S))
    until(lambda: time.monotonic() - max(lane.heard_at for lane in lanes) > SILENCE_S, what="a long silence")
    assert not any(one.done() for one in waiting)
    relay_store.is_cut_off = False
    assert [one.result(TIMEOUT_S) for one in waiting] == [[b"0", b"1"]] * 2
    close(crew)


def test_a_dead_member_that_has_called_by_tcp_is_not_awaited_at_the_relay(
    relay_store: RelayStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "RELAY_OPEN_S", 60.0)
    monkeypatch.setattr(mesh, "HEAD_START_S", 0.5)
    crew = mixed_crew(relay_store, 2, [])
    crew.open()
    dead = crew.engines[1]
    dead.close()
    dead.listener.close()  # type: ignore[attr-defined]
    crew.epoch += 1
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        crew.engines[0].open(crew.group(0), 3.0)
    assert caught.value.nodes == (crew.peers[1].node,)
    assert time.monotonic() - began < 30
    close(crew)


def test_a_member_leaves_in_order_through_the_relay(relay_store: RelayStore) -> None:
    crew = mixed_crew(relay_store, 2, [0, 1])
    crew.open()
    found = crew.together(lambda rank, engine: engine.close() if rank else engine.exchange(b"", TIMEOUT_S))
    assert (found[0].nodes, found[0].cause) == ((crew.peers[1].node,), "left")
    close(crew)


def test_a_stranger_in_the_name_of_a_member_is_refused(relay_store: RelayStore) -> None:
    crew = mixed_crew(relay_store, 2, [0, 1])
    stranger = RelayMember(relay_store.call, "9.1.00000009", "int8")
    crew.peers = (crew.peers[0], Peer(crew.peers[1].node))
    waiting = crew.start(lambda rank, engine: rank or engine.open(crew.group(0), 2.0))
    with pytest.raises(PeerLostError, match="not_a_member"):
        stranger.open(crew.group(1), TIMEOUT_S)
    error = waiting[0].exception(TIMEOUT_S)
    assert isinstance(error, PeerLostError) and error.nodes == (crew.peers[1].node,)
    stranger.port.close()
    close(crew)


@pytest.mark.processes
def test_survivors_name_a_relayed_member_whose_process_dies_inside_a_reduce() -> None:
    store = RelayStore()
    peers = [Peer(f"{rank}.1.{rank:08x}") for rank in range(3)]
    with contextlib.ExitStack() as ended:
        ended.callback(store.close)
        members = [
            Member(partial(make_hasty_member, store.call, one.node, "int8"), peers, one_rank, 60.0)
            for one_rank, one in enumerate(peers)
        ]
        for member in members:
            ended.callback(member.end)
            member.report("made")
        for member in members:
            member.begin()
        for member in members:
            member.report("inside")
        members[1].signal(signal.SIGKILL)
        began = time.monotonic()
        for member in (members[0], members[2]):
            _, nodes, cause, lost_at = member.report("lost")
            assert (nodes, cause) == ((peers[1].node,), "silent")
            assert lost_at - began < 30
