"""Send and receive frames on a connection: TCP in plain text or with TLS, or the relay (`engines/relay`)."""

from __future__ import annotations

import base64
import contextlib
import math
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Collection

from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.wire.frames import (
    HEADER_BYTES,
    FrameError,
    Header,
    Payload,
    WireFrame,
    check_payload,
    pack_header,
    parse_header,
)
from gpu_client.elastic.engines.wire.identity import NodeIdentity, label_of
from gpu_client.elastic.errors import PeerLostError

CONNECT_S = 5.0
FRAME_S = 10.0
SLOWEST_BYTES_PER_S = 16 * 1024
"""Rate of a payload after FRAME_S, at least."""
TICK_S = 1.0
"""Interval at which a waiting thread looks at its deadline."""
UNACKNOWLEDGED_MS = 15_000
TCP_INFO_BYTES = 72
TCP_INFO_RTT = struct.Struct("I")
"""Last field of Linux's `tcp_info` within these bytes: microseconds."""
UNKNOWN_S = 1.1
"""Pause before another call to a peer that did not know the caller."""


class Connection(ABC):
    """Connection to a node. One thread may send while another one receives, except by TLS."""

    is_relayed = False
    """True for a connection through the object store."""
    is_sealed = False
    """True for a connection by TLS, which proves each byte: the checksums of frames then leave out the payloads."""
    ping_s = 0.5
    """Pause after which a control lane sends a sign of life."""
    silence_s = 5.0
    """Silence after which a peer is lost, whatever the time limit of a call."""
    flush_s = 0.5
    """Time for a last frame to leave this node."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = 0
        self.heard_at = time.monotonic()

    def send(self, header: Header, payload: Payload = b"", timeout_s: float | None = None) -> None:
        """Send one frame; the header's length is the payload's. Raises OSError, also TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        checked = b"" if self.is_sealed else payload
        self._send_all(memoryview(pack_header(header._replace(length=len(payload)), checked)), deadline)
        self._send_all(memoryview(payload), deadline)

    def receive_header(self, timeout_s: float | None = None) -> bytes:
        """Wait for a frame, and return the header's bytes. Raises EOFError, OSError, also TimeoutError."""
        data = bytearray(HEADER_BYTES)
        self._receive_all(memoryview(data), None if timeout_s is None else time.monotonic() + timeout_s)
        return bytes(data)

    def receive_payload(self, header_data: bytes, out: memoryview) -> None:
        """Receive the payload of exactly the length of `out`. Raises FrameError, EOFError, OSError."""
        self._receive_all(out, time.monotonic() + FRAME_S + len(out) / SLOWEST_BYTES_PER_S)
        check_payload(header_data, b"" if self.is_sealed else out)

    def receive(self, limit_bytes: int, timeout_s: float | None = None) -> WireFrame:
        """Return the next frame, whose payload has at most `limit_bytes`. Raises FrameError, EOFError, OSError."""
        header, payload = self.receive_buffer(limit_bytes, timeout_s)
        return WireFrame(header, bytes(payload))

    def receive_buffer(self, limit_bytes: int, timeout_s: float | None = None) -> tuple[Header, bytearray]:
        """Return the next frame as `receive` does, without a copy of a long payload."""
        header_data = self.receive_header(timeout_s)
        header = parse_header(header_data)
        if header.length > limit_bytes:
            raise FrameError(f"the payload has {header.length} bytes, at most {limit_bytes} are allowed here")
        payload = bytearray(header.length)
        self.receive_payload(header_data, memoryview(payload))
        return header, payload

    @abstractmethod
    def is_from(self, peer: Peer) -> bool:
        """Return whether the connection's other end has proved to be the peer."""

    @property
    def excused_at(self) -> float:
        """Return the newest time at which the peer may have been silent without a fault; -inf for none."""
        return -math.inf

    @property
    @abstractmethod
    def round_trip_s(self) -> float:
        """Return an estimate of the time to the peer and back; 0 if unknown."""

    @abstractmethod
    def flush(self) -> None:
        """Send the frames that wait for more frames. Raises OSError."""

    @abstractmethod
    def interrupt(self) -> None:
        """Let the calls of other threads fail."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection, which no other thread uses any more."""

    @abstractmethod
    def _send_all(self, data: memoryview, deadline: float | None) -> None: ...

    @abstractmethod
    def _receive_all(self, out: memoryview, deadline: float | None) -> None: ...


class SocketConnection(Connection):
    """Connection by TCP. certificate: the peer's, DER in base64; empty without TLS."""

    def __init__(self, sock: socket.socket, certificate: str = "") -> None:
        super().__init__()
        self._socket = sock
        self.certificate = certificate
        self.is_sealed = isinstance(sock, ssl.SSLSocket)
        sock.settimeout(TICK_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)

    def is_from(self, peer: Peer) -> bool:
        """Compare the certificates."""
        return self.certificate == peer.certificate

    @property
    def round_trip_s(self) -> float:
        """Return TCP's estimate."""
        with contextlib.suppress(OSError, AttributeError):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            return float(TCP_INFO_RTT.unpack_from(info, TCP_INFO_BYTES - TCP_INFO_RTT.size)[0]) / 1e6
        return 0.0

    def flush(self) -> None:
        """Do nothing: each frame leaves at once."""

    def interrupt(self) -> None:
        """Shut the socket down."""
        interrupt(self._socket)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send_all(self, data: memoryview, deadline: float | None) -> None:
        while data:
            with contextlib.suppress(TimeoutError):
                sent = self._socket.send(data)
                self.sent_bytes += sent
                data = data[sent:]
                continue
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("the peer takes no data")

    def _receive_all(self, out: memoryview, deadline: float | None) -> None:
        while out:
            with contextlib.suppress(TimeoutError):
                received = self._socket.recv_into(out)
                if not received:
                    raise EOFError("the peer has closed the connection")
                self.heard_at = time.monotonic()
                self.received_bytes += received
                out = out[received:]
            if out and deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("the peer sends no data, or too slowly")


def dial(peer: Peer, identity: NodeIdentity | None, timeout_s: float, connect_s: float = CONNECT_S) -> SocketConnection:
    """Connect to a peer at the first of its addresses that answers within `connect_s`. Raises PeerLostError."""
    deadline = time.monotonic() + timeout_s
    causes = [("refused", "the node has no address")]
    while True:
        for place, address in enumerate(peer.addresses):
            try:
                limit_s = max(0.1, min(connect_s, deadline - time.monotonic()))
                return _dial(address, peer.certificate, identity, limit_s)
            except (OSError, ValueError) as error:
                causes[place:] = [(_cause(error), f"{address}: {error}")]
        if all(cause != "unknown" for cause, _ in causes) or time.monotonic() + UNKNOWN_S > deadline:
            break
        # The peer asks the control plane for unknown callers once in a while.
        time.sleep(UNKNOWN_S)
    # A refusal at one address proves nothing while another one may be cut off.
    cause = next((cause for cause, _ in causes if cause != "refused"), "refused")
    raise PeerLostError([peer.node], cause, "; ".join(text for _, text in causes))


def _dial(address: str, certificate: str, identity: NodeIdentity | None, timeout_s: float) -> SocketConnection:
    host, port = split_address(address)
    if identity is None or not certificate:
        check_loopback(host)
    sock = socket.create_connection((host, port), timeout_s)
    try:
        if identity is None or not certificate:
            return SocketConnection(sock)
        context = identity.client_context(certificate)
        sock = context.wrap_socket(sock, server_hostname=label_of(identity.certificate))
        return SocketConnection(sock, pinned(sock, [certificate]))
    except BaseException:
        sock.close()
        raise


def _cause(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ssl.SSLError):
        return "unknown" if error.reason == "TLSV1_UNRECOGNIZED_NAME" else "protocol"
    return "silent"


def interrupt(sock: socket.socket) -> None:
    """Let the calls of other threads on a socket fail."""
    # The method of `ssl.SSLSocket` would turn the connection into one without TLS.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def pinned(sock: ssl.SSLSocket, certificates: Collection[str]) -> str:
    """Return the peer's certificate, which must be one of the certificates. Raises ssl.SSLCertVerificationError."""
    found = base64.b64encode(sock.getpeercert(binary_form=True) or b"").decode()
    if found not in certificates:
        raise ssl.SSLCertVerificationError("the peer's certificate is not the pinned one")
    return found


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; the host may have brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_loopback(host: str) -> None:
    """Refuse connections in plain text to other machines. Raises ValueError."""
    if host not in ("localhost", "::1") and not host.startswith("127."):
        raise ValueError(f"{host} is not a loopback address; nodes on other machines need certificates")
