"""A member that breaks the protocol is named, and costs the others nothing else."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch
from conftest import wire_members
from engines_kit import ROUND, TIMEOUT_S, Crew, SocketMember

from gpu_client.elastic.engines.engine import Bucket, EpochGroup
from gpu_client.elastic.engines.wire.connection import Connection, dial
from gpu_client.elastic.engines.wire.frames import FrameKind, Header, WireFrame, pack_header
from gpu_client.elastic.errors import PeerLostError

EPOCH, LENGTH = 3, 5000
HALF = 4 * 3072
"""Encoded bytes of the honest member's slice."""


class Rogue:
    """Member 1 of 2, played by hand, beside an honest member that waits in a reduce."""

    def __init__(
        self, buckets: int = 1, length: int = LENGTH, own_weight: float = 0.5, timeout_s: float = TIMEOUT_S
    ) -> None:
        makers, self.peers = wire_members(2)
        self.identity = makers[1].args[-1]
        self.crew = Crew([makers[0]()], self.peers)
        honest = self.crew.engines[0]
        group = EpochGroup(EPOCH, tuple(self.peers), 0)
        deltas = [Bucket(index, torch.ones(length), torch.empty(length)) for index in range(buckets)]

        def play(_: int, engine: SocketMember) -> None:
            engine.open(group, TIMEOUT_S)
            engine.reduce(ROUND, deltas, [1 - own_weight, own_weight], timeout_s, lambda _: None)

        assert isinstance(honest, SocketMember)
        self.outcome: Future[None] = self.crew.start(play)[0]
        self.lanes = {(lane, sends): self.hello(lane, sends) for lane in range(3) for sends in (True, False)}

    def hello(self, lane: int, sends: bool, epoch: int = EPOCH, node: str = "") -> Connection:
        """Open a lane; the connection is returned even if the member refuses."""
        connection = dial(self.peers[0], self.identity, TIMEOUT_S)
        name = (node or self.peers[1].node).encode()
        connection.send(Header(FrameKind.HELLO, epoch=epoch, part=lane, bucket=int(sends)), name)
        self.answer: WireFrame = connection.receive(1000, TIMEOUT_S)
        return connection

    def send(self, header: Header, payload: bytes, lane: int = 1) -> None:
        """Send a frame."""
        self.send_raw(frame(header, payload), lane)

    def send_raw(self, data: bytes, lane: int = 1) -> None:
        """Send bytes; the other member may end the connection before it has all."""
        with contextlib.suppress(OSError):
            self.lanes[lane, True]._send_all(memoryview(data), None)

    def close(self) -> None:
        """End all connections."""
        for connection in self.lanes.values():
            connection.close()
        self.crew.close()


@pytest.fixture
def rogue() -> Iterator[Rogue]:
    """Play a member."""
    playing = Rogue()
    yield playing
    playing.close()


GOOD = Header(FrameKind.CONTRIBUTION, epoch=EPOCH, call=0, round=ROUND, bucket=0, part=0)
WHOLE = torch.ones(HALF // 4).numpy().tobytes()
NAN = struct.pack("<f", math.nan) + WHOLE[4:]


def frame(header: Header, payload: bytes) -> bytes:
    # By TLS, the checksum is that of the header.
    return pack_header(header._replace(length=len(payload)), b"") + payload


FAULTS: dict[str, tuple[Callable[[Rogue], None], str]] = {
    "shorter than the part": (lambda r: r.send(GOOD, WHOLE[:-4]), "has 12284 bytes"),
    "longer than the bucket": (lambda r: r.send(GOOD, WHOLE + bytes(4)), "has 12292 bytes"),
    "announced gigabyte": (lambda r: r.send_raw(pack_header(GOOD._replace(length=2**30), b"")), "1073741824 bytes"),
    "epoch": (lambda r: r.send(GOOD._replace(epoch=EPOCH - 1), WHOLE), "epoch 2 came in epoch 3"),
    "round": (lambda r: r.send(GOOD._replace(round=ROUND + 1), WHOLE), "no bucket 0 of round 8"),
    "bucket": (lambda r: r.send(GOOD._replace(bucket=1), WHOLE), "no bucket 1"),
    "part": (lambda r: r.send(GOOD._replace(part=1), WHOLE), "part 1 of 12288 bytes"),
    "largest part": (lambda r: r.send(GOOD._replace(part=2**32 - 1), WHOLE), "part 4294967295"),
    "kind": (lambda r: r.send(GOOD._replace(kind=77), WHOLE), "kind 77"),
    "control frame on a data lane": (lambda r: r.send(GOOD._replace(kind=FrameKind.PING), b""), "kind 4"),
    "data frame on the control lane": (lambda r: r.send(GOOD, WHOLE, lane=0), "kind 8 came on the control lane"),
    "checksum": (lambda r: r.send_raw(pack_header(GOOD._replace(length=len(WHOLE)), b"x") + WHOLE), "checksum differs"),
    "garbage": (lambda r: r.send_raw(b"GET / HTTP/1.1\r\n" * 3), "begins with b'BTN1'"),
    "twice": (lambda r: r.send_raw(2 * frame(GOOD, WHOLE)), "came twice"),
    "not a number": (lambda r: r.send(GOOD, NAN), "a contribution: a value is NaN"),
    "not a number in an average": (
        lambda r: r.send(GOOD._replace(kind=FrameKind.AVERAGE), NAN[: 4 * (LENGTH - 3072)]),
        "an average: a value is NaN",
    ),
    "payload of a later exchange": (
        lambda r: r.send(Header(FrameKind.EXCHANGE, epoch=EPOCH, call=2), b"", lane=0),
        "payload 2 came in exchange 0",
    ),
    "too long a payload": (
        lambda r: r.send(Header(FrameKind.EXCHANGE, epoch=EPOCH), bytes(65537), lane=0),
        "at most 65536",
    ),
    "loss of a stranger": (lambda r: r.send(Header(FrameKind.LOST, epoch=EPOCH), b"silent x", lane=0), "not those of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_frame_names_its_sender(rogue: Rogue, fault: str) -> None:
    commit, message = FAULTS[fault]
    commit(rogue)
    error = rogue.outcome.exception(TIMEOUT_S)
    assert isinstance(error, PeerLostError)
    assert (error.nodes, error.cause) == ((rogue.peers[1].node,), "protocol")
    assert message in error.message


def test_a_member_that_takes_no_averages_is_named() -> None:
    playing = Rogue(buckets=16, length=1 << 20, own_weight=0.0, timeout_s=1.0)
    error = playing.outcome.exception(TIMEOUT_S)
    assert isinstance(error, PeerLostError)
    assert (error.nodes, error.cause) == ((playing.peers[1].node,), "silent")
    playing.close()


@pytest.mark.parametrize("lane", [0, 1])
def test_a_closed_lane_names_its_owner(rogue: Rogue, lane: int) -> None:
    rogue.lanes[lane, True].interrupt()
    error = rogue.outcome.exception(TIMEOUT_S)
    assert isinstance(error, PeerLostError)
    assert (error.nodes, error.cause) == ((rogue.peers[1].node,), "connection_reset")


def test_a_peer_that_has_lost_this_member_is_lost(rogue: Rogue) -> None:
    rogue.send(Header(FrameKind.LOST, epoch=EPOCH), f"silent {rogue.peers[0].node}".encode(), lane=0)
    error = rogue.outcome.exception(TIMEOUT_S)
    assert isinstance(error, PeerLostError)
    assert (error.nodes, error.cause) == ((rogue.peers[1].node,), "silent")


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"lane": 0, "sends": True}, b"closed"),
        ({"lane": 9, "sends": True}, b"closed"),
        ({"lane": 0, "sends": True, "epoch": EPOCH - 1}, b"stale_epoch"),
        ({"lane": 0, "sends": True, "node": "9.9.99999999"}, b"not_a_member"),
        ({"lane": 0, "sends": True, "node": "0.1.00000000"}, b"not_a_member"),
    ],
)
def test_a_wrong_hello_costs_its_connection_only(rogue: Rogue, hello: dict[str, object], reason: bytes) -> None:
    connection = rogue.hello(**hello)  # type: ignore[arg-type]
    assert (rogue.answer.header.kind, rogue.answer.payload) == (FrameKind.REFUSED, reason)
    with pytest.raises((EOFError, OSError)):
        connection.receive(1000, TIMEOUT_S)
    connection.close()
    rogue.send(GOOD, WHOLE)
    rogue.send(GOOD._replace(kind=FrameKind.AVERAGE), WHOLE[: 4 * (LENGTH - 3072)])
    assert rogue.outcome.result(TIMEOUT_S) is None
