"""Frames survive unchanged, and a reader refuses damaged, endless and slow ones without memory for their length."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.elastic.world import LostNode
from gpu_client.elastic.engines.engine import EpochGroup, Peer
from gpu_client.elastic.engines.wire import connection as connections
from gpu_client.elastic.engines.wire.connection import SocketConnection
from gpu_client.elastic.engines.wire.dialer import Dialer
from gpu_client.elastic.engines.wire.frames import FrameError, Header, check_payload, pack_header, parse_header
from gpu_client.elastic.engines.wire.mesh import Mesh
from gpu_client.elastic.errors import PeerLostError

numbers = st.integers(0, 2**32 - 1)
headers = st.builds(Header, st.integers(0, 255), st.just(0), numbers, numbers, numbers, numbers, numbers)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, SocketConnection]]:
    """Return a raw socket and the connection at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname())
        reader = SocketConnection(server.accept()[0])
    with raw:
        yield raw, reader
    reader.close()


@given(headers, st.binary(max_size=50))
def test_a_header_is_read_as_written(header: Header, payload: bytes) -> None:
    header = header._replace(length=len(payload))
    data = pack_header(header, payload)
    assert parse_header(data) == header
    check_payload(data, payload)


@given(st.binary(min_size=1, max_size=50), st.data())
def test_each_changed_bit_is_noticed(payload: bytes, data: st.DataObject) -> None:
    frame = bytearray(pack_header(Header(8, len(payload), 1, 2, 3, 4, 5), payload) + payload)
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    head, tail = bytes(frame[: -len(payload)]), bytes(frame[-len(payload) :])
    with pytest.raises(FrameError):
        parse_header(head)
        check_payload(head, tail)


@given(st.binary(min_size=36, max_size=36))
def test_garbage_is_no_header(data: bytes) -> None:
    with pytest.raises(FrameError, match="BTN1"):
        parse_header(data)


def test_frames_arrive_in_order(pair: tuple[socket.socket, SocketConnection]) -> None:
    raw, reader = pair
    writer = SocketConnection(raw)
    for payload in (b"", b"one", bytes(70_000)):
        thread = threading.Thread(target=writer.send, args=(Header(9, epoch=3, part=7), payload))
        thread.start()
        frame = reader.receive(70_000, 60)
        thread.join()
        assert frame.payload == payload
        assert frame.header == Header(9, len(payload), epoch=3, part=7)
    assert 0 < writer.round_trip_s < 10
    assert writer.sent_bytes == reader.received_bytes == 3 * 36 + 70_003


def test_checksums_leave_out_the_payloads_that_tls_proves(pair: tuple[socket.socket, SocketConnection]) -> None:
    raw, reader = pair
    writer, payload = SocketConnection(raw), b"payload"
    writer.is_sealed = True
    writer.send(Header(9), payload)
    with pytest.raises(FrameError, match="checksum"):
        reader.receive(len(payload), 5)
    reader.is_sealed = True
    writer.send(Header(9), payload)
    assert reader.receive(len(payload), 5).payload == payload


def test_an_announced_gigabyte_takes_no_memory(pair: tuple[socket.socket, SocketConnection]) -> None:
    raw, reader = pair
    raw.sendall(pack_header(Header(5, 2**30), b""))
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="1073741824 bytes, at most 65536"):
            reader.receive(65536, 60)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_slow_sender_ends_within_the_time_of_a_frame(
    pair: tuple[socket.socket, SocketConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, reader = pair
    monkeypatch.setattr(connections, "FRAME_S", 0.3)
    raw.sendall(pack_header(Header(5, 1000), bytes(1000)))
    stopped = threading.Event()

    def drip() -> None:
        while not stopped.wait(0.02):
            raw.send(b"\0")

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        reader.receive(1000, 60)
    # The whole frame takes at least 20 s.
    assert time.monotonic() - began < 18
    stopped.set()
    thread.join()


def test_a_closed_connection_ends_the_reader(pair: tuple[socket.socket, SocketConnection]) -> None:
    raw, reader = pair
    raw.sendall(pack_header(Header(5, 1000), bytes(1000)) + bytes(10))
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        reader.receive(1000, 60)


def test_another_thread_interrupts_a_reader(pair: tuple[socket.socket, SocketConnection]) -> None:
    _, reader = pair
    threading.Timer(0.1, reader.interrupt).start()
    with pytest.raises(EOFError):
        reader.receive(1000)


def test_a_reader_that_takes_no_data_ends_the_sender(pair: tuple[socket.socket, SocketConnection]) -> None:
    raw, _ = pair
    with pytest.raises(TimeoutError, match="takes no data"):
        SocketConnection(raw).send(Header(5), bytes(100_000_000), timeout_s=0.1)


@pytest.mark.parametrize(
    "told", ["SILENT 2.1.00000002", "x\u00e4 2.1.00000002", f"{'x' * 33} 2.1.00000002", "silent", "silent 3.1.0"]
)
def test_a_peer_tells_known_words_about_members_only(told: str) -> None:
    peers = tuple(Peer(f"{seat}.1.0000000{seat}") for seat in range(3))
    mesh = Mesh(EpochGroup(1, peers, 0), 1, Dialer(None))
    with pytest.raises(FrameError, match="the cause is no word, or"):
        mesh._note_told(mesh.links[1], told.encode())
    assert mesh.failure is None
    mesh._note_told(mesh.links[1], b"connection_reset 2.1.00000002")
    assert isinstance(mesh.failure, PeerLostError)
    assert LostNode(node=mesh.failure.nodes[0], cause=mesh.failure.cause).cause == "connection_reset"
