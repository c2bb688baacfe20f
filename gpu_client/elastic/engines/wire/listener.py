"""Listen on a node's one port, authenticate callers, and pass each connection to the handler of its first frame."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from gpu_client.elastic.engines.engine import MAX_EXCHANGE_BYTES
from gpu_client.elastic.engines.wire.connection import (
    Connection,
    SocketConnection,
    check_loopback,
    interrupt,
    pinned,
)
from gpu_client.elastic.engines.wire.frames import FrameError, FrameKind, Header, WireFrame
from gpu_client.elastic.engines.wire.identity import NodeIdentity, label_of

logger = logging.getLogger(__name__)

Handler = Callable[[Connection, WireFrame], None]
"""Serve a connection from its first frame on; the listener closes the connection afterwards."""

GREETING_S = 10.0
"""Time from the connection to the end of the first frame."""
ASKING_S = 1.0
MAX_GREETING = 512
"""Connections that may be without a first frame at the same time."""


class Listener:
    """Port of a node. `port` is the bound one; the node's advertised addresses may differ.

    handlers: by the kind of the first frame. certificates: returns the certificates of all nodes that may connect, or
    None if the certificates cannot be read now; a caller with an unknown one causes another call, at most one in
    ASKING_S.
    """

    def __init__(
        self,
        identity: NodeIdentity | None,
        handlers: Mapping[int, Handler],
        certificates: Callable[[], Iterable[str] | None],
        host: str = "0.0.0.0",  # noqa: S104 - callers prove their identity
        port: int = 0,
    ) -> None:
        if identity is None:
            check_loopback(host)
        self._handlers = handlers
        self._certificates = certificates
        self._known: dict[str, str] = {}
        self._asked_at = -ASKING_S
        self._asking = threading.Lock()
        self._context = None if identity is None else identity.server_context(self._certificate)
        self._lock = threading.Lock()
        self._greeting: dict[socket.socket, float] = {}
        self._connections: set[socket.socket] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=MAX_GREETING)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="wire-accept", daemon=True).start()
        threading.Thread(target=self._end_slow_greetings, name="wire-greetings", daemon=True).start()

    def close(self) -> None:
        """Close the port and all connections."""
        with self._lock:
            self._closed = True
            sockets = [self._socket, *self._connections, *self._greeting]
        for sock in sockets:
            # A thread that waits for a socket does not notice that the socket is closed.
            interrupt(sock)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock = self._wrap(self._socket.accept()[0])
            except OSError:
                # The port is closed, no file descriptor is left, or the caller has gone.
                time.sleep(0.05)
                continue
            with self._lock:
                full = self._closed or len(self._greeting) >= MAX_GREETING
                if not full:
                    self._greeting[sock] = time.monotonic() + GREETING_S
            try:
                if full:
                    sock.close()
                else:
                    threading.Thread(target=self._serve, args=(sock,), name="wire-serve", daemon=True).start()
            except RuntimeError:
                # No thread is left: this caller goes, the listener stays.
                with self._lock:
                    self._greeting.pop(sock, None)
                sock.close()

    def _wrap(self, sock: socket.socket) -> socket.socket:
        if self._context is None:
            return sock
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _end_slow_greetings(self) -> None:
        while not self._closed:
            time.sleep(0.5)
            with self._lock:
                slow = [sock for sock, deadline in self._greeting.items() if deadline < time.monotonic()]
            for sock in slow:
                interrupt(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(GREETING_S)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
                connection = SocketConnection(sock, pinned(sock, self._known.values()))
            else:
                connection = SocketConnection(sock)
            frame = connection.receive(MAX_EXCHANGE_BYTES, GREETING_S)
            handler = self._handlers.get(frame.header.kind)
            if handler is None:
                connection.send(Header(FrameKind.REFUSED), b"unknown_kind", GREETING_S)
                return
            with self._lock:
                self._greeting.pop(sock, None)
                if self._closed:
                    return
                self._connections.add(sock)
            handler(connection, frame)
        except (OSError, EOFError, FrameError) as error:
            # A caller without identity or manners costs itself its connection.
            logger.info("closed a connection: %s", error)
        finally:
            with self._lock:
                self._greeting.pop(sock, None)
                self._connections.discard(sock)
            sock.close()

    def _certificate(self, label: str) -> str | None:
        found = self._known.get(label)
        if found is not None:
            # A known caller never waits for a question that a stranger causes.
            return found
        with self._asking:
            if label not in self._known and time.monotonic() - self._asked_at > ASKING_S:
                certificates = self._certificates()
                self._asked_at = time.monotonic()
                if certificates is not None:
                    self._known = _label(certificates)
            return self._known.get(label)


def _label(certificates: Iterable[str]) -> dict[str, str]:
    """Return the certificates by label, without those that cannot be read: their owners alone cannot connect."""
    found: dict[str, str] = {}
    for one in filter(None, certificates):
        with suppress(ValueError):
            found[label_of(one)] = one
    return found
