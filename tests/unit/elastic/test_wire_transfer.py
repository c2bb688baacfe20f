"""Outer states that a node serves over the wire's port, read by a peer over real TLS connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.relay import relay_connection, relay_port
from gpu_client.elastic.engines.relay.relay_port import RelayPort
from gpu_client.elastic.engines.wire import connection as wire_connection
from gpu_client.elastic.engines.wire.connection import dial
from gpu_client.elastic.engines.wire.dialer import Dialer
from gpu_client.elastic.engines.wire.frames import FrameKind, Header
from gpu_client.elastic.engines.wire.identity import NodeIdentity
from gpu_client.elastic.engines.wire.listener import Listener
from gpu_client.elastic.engines.wire.wire_engine import WireEngine
from gpu_client.elastic.errors import PeerLostError
from gpu_client.elastic.membership.solo_world import SoloWorld
from gpu_client.elastic.recovery import wire_transfer
from gpu_client.elastic.recovery.state_transfer import PartRequest, PartUnavailableError, StateDescription
from gpu_client.elastic.recovery.wire_transfer import ANSWER_S, READ, StateServer, WireTransfer
from gpu_client.elastic.rounds import round_runner
from gpu_client.elastic.rounds.local_progress import LocalProgress
from gpu_client.elastic.rounds.round_actions import Action, DescribePeers
from gpu_client.elastic.rounds.round_runner import EngineTimeouts, RoundRunner
from tests.kits.elastic.relay_store import RelayStore
from tests.kits.network.ports import free_port

DESCRIPTION = StateDescription(12, (1 << 63, 7), averages=(11, 12))
VALUES = torch.tensor([0.1, -2.5, float("inf")])


class OneState:
    """State with one bucket."""

    def describe(self) -> StateDescription:
        return DESCRIPTION

    def read(self, request: PartRequest) -> torch.Tensor:
        if request.bucket:
            raise PartUnavailableError(f"no bucket {request.bucket}")
        return VALUES


@dataclass
class Pair:
    """Server of one node, and the transfer of another node."""

    server: StateServer
    listener: Listener
    identity: NodeIdentity
    transfer: WireTransfer
    peer: Peer


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = NodeIdentity(), NodeIdentity()
    server = StateServer()
    server.source = OneState()
    listener = Listener(theirs, server.handlers, lambda: [ours.certificate], host="127.0.0.1")
    transfer = WireTransfer(Dialer(ours), max_part_bytes=64)
    yield Pair(
        server, listener, ours, transfer, Peer("1.1.00000001", (f"127.0.0.1:{listener.port}",), theirs.certificate)
    )
    transfer.close()
    listener.close()


def test_a_node_reads_its_peers_state_bit_for_bit(pair: Pair) -> None:
    described = pair.transfer.describe(pair.peer)
    assert (described, described.relayed) == (DESCRIPTION, False)
    found = pair.transfer.read(pair.peer, PartRequest("state", 12, 0))
    assert found.view(torch.int32).tolist() == VALUES.view(torch.int32).tolist()


def test_a_node_reads_the_state_of_a_peer_that_it_does_not_reach(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_connection, "SMALLEST_BYTES", 7)
    monkeypatch.setattr(relay_port, "IDLE_POLL_S", 0.05)
    store, own_node = RelayStore(), "2.1.00000002"
    served = RelayPort(store.call, pair.peer.node, pair.server.handlers)
    dialer = Dialer(pair.identity)
    dialer.relay = RelayPort(store.call, own_node, {})
    transfer = WireTransfer(dialer, max_part_bytes=64)
    peer = Peer(pair.peer.node, (f"127.0.0.1:{free_port()}",), pair.peer.certificate)
    try:
        described = transfer.describe(peer)
        assert (described, described.relayed) == (DESCRIPTION, True)
        with pytest.raises(PartUnavailableError, match="no bucket 1"):
            transfer.read(peer, PartRequest("average", 3, 1))
        (kept,) = transfer._idle[peer]
        assert kept.is_relayed
        found = transfer.read(peer, PartRequest("state", 12, 0))
        assert found.view(torch.int32).tolist() == VALUES.view(torch.int32).tolist()
        kept.heard_at -= wire_transfer.KEPT_S
        assert transfer.describe(peer) == DESCRIPTION
        assert transfer._idle[peer] != [kept]
    finally:
        transfer.close()
        assert dialer.relay._is_closed
        served.close()
        store.close()


def test_a_part_that_the_peer_lacks_leaves_the_connection_usable(pair: Pair) -> None:
    with pytest.raises(PartUnavailableError, match="no bucket 1"):
        pair.transfer.read(pair.peer, PartRequest("average", 3, 1))
    assert pair.transfer.describe(pair.peer) == DESCRIPTION


def test_a_node_without_a_state_says_so(pair: Pair) -> None:
    pair.server.source = None
    with pytest.raises(PartUnavailableError, match="no outer state yet"):
        pair.transfer.describe(pair.peer)


def test_a_part_above_the_limit_is_refused_before_it_is_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneState, "read", lambda *_: torch.zeros(1000))
    with pytest.raises(PeerLostError) as raised:
        pair.transfer.read(pair.peer, PartRequest("state", 12, 0))
    assert (raised.value.cause, raised.value.nodes) == ("protocol", (pair.peer.node,))


def test_a_part_arrives_over_a_line_that_takes_longer_than_an_answer_may(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home line's uplink carries eight parts of 8 MiB at once."""
    size = 32 * 1024 * 1024  # More than the buffers of both sockets take.
    monkeypatch.setattr(OneState, "read", lambda *_: torch.zeros(size // 4))
    monkeypatch.setattr(wire_transfer, "ANSWER_S", 0.2)
    monkeypatch.setattr(wire_connection, "TICK_S", 0.1)
    caller = dial(pair.peer, pair.identity, 20)
    caller.send(Header(READ), b'{"kind": "state", "round": 12, "bucket": 0}')
    header = caller.receive_header(20)
    time.sleep(0.6)
    payload = bytearray(size)
    caller.receive_payload(header, memoryview(payload))
    caller.close()


def test_an_idle_connection_that_has_ended_is_replaced(pair: Pair) -> None:
    pair.transfer.describe(pair.peer)
    (idle,) = pair.transfer._idle[pair.peer]
    idle.interrupt()
    assert pair.transfer.describe(pair.peer) == DESCRIPTION
    assert idle not in pair.transfer._idle[pair.peer]


def test_idle_connections_to_peers_that_have_gone_are_closed(pair: Pair) -> None:
    pair.transfer.describe(pair.peer)
    (idle,) = pair.transfer._idle[pair.peer]
    idle.heard_at -= wire_transfer.KEPT_S
    gone = replace(pair.peer, node="1.2.00000009")
    pair.transfer.describe(gone)
    assert set(pair.transfer._idle) == {gone}
    with pytest.raises(OSError, match="Bad file descriptor"):
        idle.send(Header(READ))


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b'{"kind": "state"}', b'{"kind": "state", "round": 1, "bucket": 0, "x": 1}']
)
def test_a_malformed_request_costs_the_caller_its_connection(pair: Pair, payload: bytes) -> None:
    connection = dial(pair.peer, pair.identity, 60)
    connection.send(Header(READ), payload)
    with pytest.raises((EOFError, OSError)):
        connection.receive(64, 60)
    connection.close()
    connection = dial(pair.peer, pair.identity, 60)
    connection.send(Header(FrameKind.REQUESTS + 9), b"")
    assert connection.receive(64, 60).payload == b"unknown_kind"
    connection.close()
    assert pair.transfer.describe(pair.peer) == DESCRIPTION


def test_a_stranger_learns_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_transfer, "ANSWER_S", 1.0)
    stranger = WireTransfer(Dialer(NodeIdentity()), max_part_bytes=64)
    with pytest.raises(PeerLostError):
        stranger.describe(pair.peer)


def test_a_close_ends_the_read_of_another_thread(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        transfer = WireTransfer(Dialer(None), max_part_bytes=64)
        peer = Peer("2.1.00000002", (f"127.0.0.1:{silent.getsockname()[1]}",))
        read = pool.submit(transfer.describe, peer)
        called = silent.accept()[0]
        assert called.recv(1)
        transfer.close()
        with pytest.raises(PeerLostError):
            read.result(ANSWER_S / 4)
        called.close()
    pair.transfer.close()
    with pytest.raises(PeerLostError):
        pair.transfer.describe(pair.peer)
    assert not any(pair.transfer._idle.values()) and not pair.transfer._used


def test_a_stop_does_not_wait_for_a_peer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, answered = threading.Event(), threading.Event()

    def describe(_: Peer) -> StateDescription:
        reads.set()
        assert answered.wait(30)
        return DESCRIPTION

    def protocol() -> Generator[Action, Any, None]:
        yield DescribePeers((pair.peer,))

    monkeypatch.setattr(pair.transfer, "describe", describe)
    runner = RoundRunner(
        protocol(),
        LocalProgress(torch.zeros(1)),
        engine=WireEngine(None),
        world=SoloWorld(),
        transfer=pair.transfer,
        timeouts=EngineTimeouts(),
    )
    runner.start()
    try:
        assert reads.wait(30)
        runner.stop(20)
        assert not runner.is_running and runner.error is None
    finally:
        answered.set()


def test_a_frozen_peer_does_not_hold_up_the_states_of_the_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, answered, calls = Peer("9.1.00000009"), threading.Event(), list[Peer]()
    found: list[list[StateDescription | PeerLostError]] = []

    def describe(peer: Peer) -> StateDescription:
        calls.append(peer)
        assert peer != frozen or answered.wait(30)
        return DESCRIPTION

    def protocol() -> Generator[Action, Any, None]:
        for _ in range(2):
            found.append((yield DescribePeers((frozen, pair.peer))))
        answered.set()

    monkeypatch.setattr(pair.transfer, "describe", describe)
    monkeypatch.setattr(round_runner, "DESCRIBE_S", 0.1)
    runner = RoundRunner(
        protocol(),
        LocalProgress(torch.zeros(1)),
        engine=WireEngine(None),
        world=SoloWorld(),
        transfer=pair.transfer,
        timeouts=EngineTimeouts(),
    )
    runner.start()
    runner.join(20)
    assert not runner.is_running and runner.error is None
    for silent, description in found:
        assert isinstance(silent, PeerLostError) and silent.nodes == (frozen.node,)
        assert description == DESCRIPTION
    assert calls.count(frozen) == 1 and calls.count(pair.peer) == 2
