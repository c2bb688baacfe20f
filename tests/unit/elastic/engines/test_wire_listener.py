"""A node serves callers whose certificates it trusts; other callers cost themselves their connections."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.contract.elastic.world import WorldView
from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.wire import connection as connections
from gpu_client.elastic.engines.wire import listener as listeners
from gpu_client.elastic.engines.wire.connection import Connection, dial
from gpu_client.elastic.engines.wire.frames import HEADER_BYTES, FrameKind, Header, WireFrame
from gpu_client.elastic.engines.wire.identity import NodeIdentity
from gpu_client.elastic.engines.wire.listener import Listener
from gpu_client.elastic.errors import PeerLostError, WorldUnavailableError
from gpu_client.elastic.membership.solo_world import SoloWorld
from gpu_client.elastic.node import _certificates_of
from tests.kits.network.ports import free_port
from tests.kits.waiting import soon

ECHO = FrameKind.REQUESTS + 1


@dataclass
class Node:
    """Listener that answers ECHO frames, and its record of callers."""

    encrypted: bool = True
    trusted: list[str] = field(default_factory=list)
    questions: int = 0
    callers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.identity = NodeIdentity() if self.encrypted else None
        self.listener = Listener(self.identity, {ECHO: self.echo}, self.certificates, "127.0.0.1")
        certificate = self.identity.certificate if self.identity else ""
        self.peer = Peer("0.1.00000000", (f"127.0.0.1:{self.listener.port}",), certificate)

    def certificates(self) -> list[str]:
        self.questions += 1
        return self.trusted

    def echo(self, connection: Connection, frame: WireFrame) -> None:
        self.callers.append(connection.certificate)
        connection.send(frame.header, frame.payload)


@pytest.fixture
def node() -> Iterator[Node]:
    """Run a node."""
    running = Node()
    yield running
    running.listener.close()


@pytest.fixture
def caller(node: Node) -> NodeIdentity:
    """Return an identity that the node trusts."""
    identity = NodeIdentity()
    node.trusted.append(identity.certificate)
    return identity


def ask(peer: Peer, identity: NodeIdentity | None, payload: bytes = b"hello", kind: int = ECHO) -> WireFrame:
    connection = dial(peer, identity, 30)
    try:
        connection.send(Header(kind), payload, 30)
        return connection.receive(1000, 30)
    finally:
        connection.close()


def test_a_trusted_caller_reaches_the_handler(node: Node, caller: NodeIdentity) -> None:
    assert ask(node.peer, caller).payload == b"hello"
    assert node.callers == [caller.certificate]


def test_an_unknown_kind_is_refused(node: Node, caller: NodeIdentity) -> None:
    answer = ask(node.peer, caller, kind=200)
    assert (answer.header.kind, answer.payload) == (FrameKind.REFUSED, b"unknown_kind")
    assert node.callers == []


def test_the_first_address_that_answers_is_used(node: Node, caller: NodeIdentity) -> None:
    peer = Peer(node.peer.node, (f"127.0.0.1:{free_port()}", *node.peer.addresses), node.peer.certificate)
    assert ask(peer, caller).payload == b"hello"


def test_an_untrusted_caller_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    # No time is left for another try.
    monkeypatch.setattr(connections, "UNKNOWN_S", 60.0)
    with pytest.raises(PeerLostError, match="UNRECOGNIZED_NAME"):
        dial(node.peer, NodeIdentity(), 30)
    assert node.callers == []


def test_a_caller_that_becomes_known_meanwhile_is_served(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = NodeIdentity()
    answers = iter([[], [identity.certificate]])
    monkeypatch.setattr(node, "certificates", lambda: next(answers))
    node.listener._certificates = node.certificates
    assert ask(node.peer, identity).payload == b"hello"


def test_unknown_callers_cause_one_question_in_a_while(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNKNOWN_S", 60.0)
    questions = []
    for asking_s in (0.0, 3600.0, 3600.0, 3600.0, 0.0):
        monkeypatch.setattr(listeners, "ASKING_S", asking_s)
        with pytest.raises(PeerLostError, match="UNRECOGNIZED_NAME"):
            dial(node.peer, NodeIdentity(), 30)
        questions.append(node.questions)
    assert questions == [1, 1, 1, 1, 2]


def test_a_known_caller_waits_for_no_question(
    node: Node, caller: NodeIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "ASKING_S", 0.0)
    # No time is left for another try of the stranger.
    monkeypatch.setattr(connections, "UNKNOWN_S", 60.0)
    ask(node.peer, caller)
    asked, answered = threading.Event(), threading.Event()

    def question() -> list[str]:
        asked.set()
        assert answered.wait(30)
        return node.trusted

    monkeypatch.setattr(node.listener, "_certificates", question)
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(ask, node.peer, NodeIdentity())
        assert asked.wait(30)
        try:
            assert ask(node.peer, caller).payload == b"hello"
        finally:
            answered.set()
        with pytest.raises(PeerLostError):
            stranger.result()


def test_a_certificate_that_cannot_be_read_keeps_no_other_caller_out(node: Node) -> None:
    identity = NodeIdentity()
    node.trusted += ["A", identity.certificate]
    assert ask(node.peer, identity).payload == b"hello"
    assert node.questions == 1


def test_a_stranger_while_the_control_plane_is_away_keeps_no_known_caller_out(
    node: Node, caller: NodeIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(node.peer, caller)
    monkeypatch.setattr(listeners, "ASKING_S", 0.0)
    monkeypatch.setattr(connections, "UNKNOWN_S", 60.0)
    asked: list[str] = []

    class AbsentWorld(SoloWorld):
        def view(self) -> WorldView:
            asked.append("view")
            raise WorldUnavailableError("away")

    monkeypatch.setattr(node.listener, "_certificates", _certificates_of(AbsentWorld()))
    with pytest.raises(PeerLostError, match="UNRECOGNIZED_NAME"):
        dial(node.peer, NodeIdentity(), 30)
    assert ask(node.peer, caller).payload == b"hello"
    assert asked == ["view"]


def test_a_machine_without_threads_loses_one_caller(
    node: Node, caller: NodeIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(PeerLostError):
            ask(node.peer, caller)
    assert ask(node.peer, caller).payload == b"hello"


def test_a_caller_with_the_label_of_another_one_is_refused(node: Node, caller: NodeIdentity) -> None:
    impostor = NodeIdentity()
    impostor.certificate = caller.certificate
    with pytest.raises((OSError, EOFError)):
        ask(node.peer, impostor)
    assert node.callers == []


def test_a_node_with_another_certificate_is_not_the_peer(node: Node, caller: NodeIdentity) -> None:
    peer = Peer(node.peer.node, node.peer.addresses, NodeIdentity().certificate)
    with pytest.raises(PeerLostError) as caught:
        dial(peer, caller, 60)
    assert (caught.value.nodes, caught.value.cause) == ((peer.node,), "protocol")


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), bytes(range(256))])
def test_garbage_before_tls_ends_its_connection_only(node: Node, caller: NodeIdentity, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", node.listener.port), 60) as raw, contextlib.suppress(OSError):
        raw.sendall(garbage)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(1000):
            continue
    soon(lambda: not node.listener._greeting)
    assert ask(node.peer, caller).payload == b"hello"
    assert len(node.callers) == 1


def test_a_slow_greeting_ends(node: Node, caller: NodeIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(listeners, "GREETING_S", 0.2)
        with socket.create_connection(("127.0.0.1", node.listener.port), 60) as raw:
            assert raw.recv(100) == b""
    assert ask(node.peer, caller).payload == b"hello"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files in memory")
def test_a_key_is_on_no_disk_which_may_be_full(
    node: Node, caller: NodeIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert ask(node.peer, caller).payload == b"hello"


def test_too_many_greetings_are_refused(node: Node, caller: NodeIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_GREETING", 2)
    held = [socket.create_connection(("127.0.0.1", node.listener.port), 60) for _ in range(2)]
    soon(lambda: len(node.listener._greeting) == 2)
    with socket.create_connection(("127.0.0.1", node.listener.port), 60) as refused:
        assert refused.recv(100) == b""
    for raw in held:
        raw.close()
    soon(lambda: not node.listener._greeting)
    assert ask(node.peer, caller).payload == b"hello"


def test_a_closed_port_refuses(node: Node, caller: NodeIdentity) -> None:
    node.listener.close()
    with pytest.raises(PeerLostError) as caught:
        dial(node.peer, caller, 60)
    assert caught.value.cause == "refused"


def test_a_closed_listener_ends_connections(node: Node, caller: NodeIdentity) -> None:
    node.listener._handlers = {ECHO: lambda connection, _: connection.receive(1000)}
    connection = dial(node.peer, caller, 60)
    connection.send(Header(ECHO), b"", 5)
    soon(lambda: node.listener._connections)
    node.listener.close()
    with pytest.raises((EOFError, OSError)):
        connection.receive(1000, 60)
    connection.close()


def test_plain_text_stays_on_the_machine() -> None:
    with pytest.raises(ValueError, match="need certificates"):
        Listener(None, {}, list, "0.0.0.0")
    with pytest.raises(PeerLostError, match="is not a loopback address"):
        dial(Peer("0.1.00000000", ("192.0.2.1:47100",)), NodeIdentity(), 1)
    plain = Node(encrypted=False)
    assert ask(plain.peer, None).payload == b"hello"
    plain.listener.close()


def test_a_plain_listener_survives_garbage() -> None:
    plain = Node(encrypted=False)
    with socket.create_connection(("127.0.0.1", plain.listener.port), 10) as raw:
        raw.sendall(bytes(HEADER_BYTES))
        assert raw.recv(100) == b""
    assert ask(plain.peer, None).payload == b"hello"
    plain.listener.close()
