"""How a caller stops transfers at once: an event it sets, and the sockets that are shut when it does."""

from __future__ import annotations

import socket
import threading
from typing import Protocol

from gpu_client.transport.errors import TransferCanceled


class CancelEvent(Protocol):
    """What `threading.Event` offers and is used here."""

    def is_set(self) -> bool:
        """True once everything shall stop."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until set or until the timeout (seconds); true if set."""
        ...


def stop_if_set(cancel: CancelEvent) -> None:
    """Raise TransferCanceled if the event is set."""
    if cancel.is_set():
        raise TransferCanceled("canceled by the caller")


class Flight:
    """The sockets of one batch of transfers. Shutting them wakes threads that are blocked in them."""

    def __init__(self, cancel: CancelEvent | None = None) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._aborted = threading.Event()

    def is_set(self) -> bool:
        """True once the flight was aborted or its caller's event set: a Flight is itself a CancelEvent."""
        return self._aborted.is_set() or (self._cancel is not None and self._cancel.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until aborted or until the timeout (seconds)."""
        return self._aborted.wait(timeout)

    def enter(self, sock: socket.socket) -> None:
        """`sock` is about to be used. Raises TransferCanceled if the flight was aborted meanwhile."""
        with self._lock:
            if self.is_set():
                raise TransferCanceled("canceled by the caller")
            self._sockets.add(sock)

    def leave(self, sock: socket.socket) -> None:
        """`sock` is no longer used by this flight."""
        with self._lock:
            self._sockets.discard(sock)

    def abort(self) -> None:
        """Wake everything that is under way; nothing new starts."""
        with self._lock:
            self._aborted.set()
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # closed by the other side already: its thread is awake
