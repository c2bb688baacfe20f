"""Cancellation of transfers: the caller's event, and the sockets that the batch shuts when the event is set."""

from __future__ import annotations

import socket
import threading
from typing import Protocol

from gpu_client.transport.errors import TransferCanceled


class CancelEvent(Protocol):
    """The part of `threading.Event` that transfers use."""

    def is_set(self) -> bool:
        """Return True once every transfer shall stop."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set or `timeout` seconds have passed; return True if the event is set."""
        ...


def stop_if_set(cancel: CancelEvent) -> None:
    """Raise TransferCanceled if the event is set."""
    if cancel.is_set():
        raise TransferCanceled("canceled by the caller")


class Flight:
    """The sockets of one batch of transfers. Shutting a socket wakes the thread that is blocked in it."""

    def __init__(self, cancel: CancelEvent | None = None) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._aborted = threading.Event()

    def is_set(self) -> bool:
        """Return True once the flight is aborted or the caller's event is set. A Flight is itself a CancelEvent."""
        return self._aborted.is_set() or (self._cancel is not None and self._cancel.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flight is aborted or `timeout` seconds have passed; return True if it is aborted."""
        return self._aborted.wait(timeout)

    def enter(self, sock: socket.socket) -> None:
        """Register `sock` before its use. Raises TransferCanceled if the flight is aborted already."""
        with self._lock:
            if self.is_set():
                raise TransferCanceled("canceled by the caller")
            self._sockets.add(sock)

    def leave(self, sock: socket.socket) -> None:
        """Unregister `sock` after its use."""
        with self._lock:
            self._sockets.discard(sock)

    def abort(self) -> None:
        """Shut all registered sockets, which wakes their threads, and refuse new ones."""
        with self._lock:
            self._aborted.set()
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # The other side has closed the socket, therefore its thread is awake.
