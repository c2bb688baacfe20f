"""Read and serve outer states over the wire's port: one request frame, one answer frame, any number of times.

The listener has authenticated the caller, which is a member of the world or a joining node.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from dataclasses import asdict, replace

import torch

from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.wire.connection import SLOWEST_BYTES_PER_S, Connection
from gpu_client.elastic.engines.wire.dialer import Dialer
from gpu_client.elastic.engines.wire.frames import FrameError, FrameKind, Header, WireFrame
from gpu_client.elastic.engines.wire.listener import Handler
from gpu_client.elastic.errors import PeerLostError
from gpu_client.elastic.recovery.state_transfer import PartRequest, PartUnavailableError, StateDescription, StateSource

DESCRIBE = FrameKind.REQUESTS
READ = FrameKind.REQUESTS + 1
"""Payload: a PartRequest as JSON."""
ANSWER = FrameKind.REQUESTS + 2
UNAVAILABLE = FrameKind.REQUESTS + 3
"""Payload: the reason."""
MAX_REQUEST_BYTES = 256
MAX_DESCRIPTION_BYTES = 1024 * 1024
IDLE_S = 120.0
"""Time without a request after which a server closes a connection."""
KEPT_S = IDLE_S / 2
"""Time in which a client uses an idle connection again: the end of a relayed connection is silent."""
ANSWER_S = 20.0
"""Time until the first byte of an answer."""


class StateServer:
    """Answers of one node. `source`: the node's outer state; None until the node has one."""

    def __init__(self) -> None:
        self.source: StateSource | None = None

    @property
    def handlers(self) -> dict[int, Handler]:
        """Return the handlers for the node's listener."""
        return {DESCRIBE: self._serve, READ: self._serve}

    def _serve(self, connection: Connection, frame: WireFrame) -> None:
        while True:
            try:
                payload = self._answer(frame)
            except PartUnavailableError as error:
                connection.send(Header(UNAVAILABLE), str(error).encode(), ANSWER_S)
            else:
                connection.send(Header(ANSWER), payload, ANSWER_S + len(payload) / SLOWEST_BYTES_PER_S)
            frame = connection.receive(MAX_REQUEST_BYTES, IDLE_S)

    def _answer(self, frame: WireFrame) -> bytes | memoryview:
        if self.source is None:
            raise PartUnavailableError("the node has no outer state yet")
        if frame.header.kind == DESCRIBE:
            return self.source.describe().encode()
        if frame.header.kind != READ:
            raise FrameError(f"kind {frame.header.kind} is no request for an outer state")
        try:
            request = PartRequest(**json.loads(frame.payload))
            values = self.source.read(request)
        except (ValueError, TypeError) as error:
            raise FrameError(f"no request for a part: {error!r}") from error
        return memoryview(values.numpy()).cast("B")


class WireTransfer:
    """Reads of peers' outer states, with idle connections kept for the next read.

    max_part_bytes: size of the largest bucket's parameters and momentum.
    """

    def __init__(self, dialer: Dialer, max_part_bytes: int) -> None:
        self._dialer = dialer
        self._max_part_bytes = max_part_bytes
        self._lock = threading.Lock()
        self._idle: defaultdict[Peer, list[Connection]] = defaultdict(list)
        self._used: set[Connection] = set()
        self._is_closed = False

    def describe(self, peer: Peer) -> StateDescription:
        """Return the peer's present state. Raises PeerLostError, PartUnavailableError."""
        payload = self._ask(peer, Header(DESCRIBE), b"", MAX_DESCRIPTION_BYTES)
        try:
            return replace(StateDescription.decode(bytes(payload)), relayed=self._dialer.is_relayed(peer))
        except ValueError as error:
            raise PeerLostError([peer.node], "protocol", str(error)) from error

    def read(self, peer: Peer, request: PartRequest) -> torch.Tensor:
        """Return the part, float32. Raises PeerLostError, PartUnavailableError."""
        payload = self._ask(peer, Header(READ), json.dumps(asdict(request)).encode(), self._max_part_bytes)
        if len(payload) % 4:
            raise PeerLostError([peer.node], "protocol", f"a part of {len(payload)} bytes")
        return torch.frombuffer(payload, dtype=torch.float32) if payload else torch.empty(0)

    def close(self) -> None:
        """Close all connections: the reads of other threads fail at once, and later reads fail, too."""
        with self._lock:
            self._is_closed = True
            idle = [one for connections in self._idle.values() for one in connections]
            self._idle.clear()
            for used in self._used:
                used.interrupt()
        for one in idle:
            one.close()
        if self._dialer.relay is not None:
            # A node that reads no more has left, and the control plane would refuse its calls.
            self._dialer.relay.close()

    def _ask(self, peer: Peer, header: Header, payload: bytes, limit_bytes: int) -> bytearray:
        connection = self._take_idle(peer)
        if connection is not None:
            try:
                return self._ask_on(connection, peer, header, payload, limit_bytes)
            except PeerLostError:
                pass  # The peer may have closed the idle connection; a new connection decides.
        return self._ask_on(self._dialer.dial_or_relay(peer, ANSWER_S), peer, header, payload, limit_bytes)

    def _take_idle(self, peer: Peer) -> Connection | None:
        """Return an idle connection to the peer, and close the idle connections of all peers that are too old."""
        oldest = time.monotonic() - KEPT_S
        with self._lock:
            stale = [one for kept in self._idle.values() for one in kept if one.heard_at <= oldest]
            for owner, kept in [*self._idle.items()]:
                self._idle[owner] = [one for one in kept if one not in stale]
                if not self._idle[owner]:
                    del self._idle[owner]
            found = self._idle[peer].pop() if peer in self._idle else None
        for one in stale:
            one.close()
        return found

    def _ask_on(
        self, connection: Connection, peer: Peer, header: Header, payload: bytes, limit_bytes: int
    ) -> bytearray:
        with self._lock:
            self._used.add(connection)
            if self._is_closed:
                connection.interrupt()
        try:
            connection.send(header, payload, ANSWER_S)
            answered, content = connection.receive_buffer(limit_bytes, ANSWER_S)
        except (OSError, EOFError, FrameError) as error:
            with self._lock:
                self._used.discard(connection)
            connection.close()
            cause = "protocol" if isinstance(error, FrameError) else "connection_reset"
            raise PeerLostError([peer.node], cause, str(error)) from error
        with self._lock:
            self._used.discard(connection)
            if self._is_closed:
                connection.close()
            else:
                self._idle[peer].append(connection)
        if answered.kind == UNAVAILABLE:
            raise PartUnavailableError(content.decode(errors="replace"))
        if answered.kind != ANSWER:
            raise PeerLostError([peer.node], "protocol", f"an answer of kind {answered.kind}")
        return content
