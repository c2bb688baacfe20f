"""Cancel transfers: watch the caller's event, and shut the batch's sockets when the event is set."""

from __future__ import annotations

import socket
import threading
from typing import Protocol

from gpu_client.transport.errors import TransferCanceled


class CancelEvent(Protocol):
    """Event that cancels transfers; `threading.Event` is one."""

    def is_set(self) -> bool:
        """Return True after the cancellation."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set or `timeout` seconds have passed. Returns True if the event is set."""
        ...


def stop_if_set(cancel: CancelEvent) -> None:
    """Raise TransferCanceled if the event is set."""
    if cancel.is_set():
        raise TransferCanceled("canceled by the caller")


class Flight:
    """Sockets of one batch of transfers. The shutdown of a socket wakes the thread that waits for the socket."""

    def __init__(self, cancel: CancelEvent | None = None) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._aborted = threading.Event()

    def is_set(self) -> bool:
        """Return True after an abort or the caller's event, which makes a Flight a CancelEvent."""
        return self._aborted.is_set() or (self._cancel is not None and self._cancel.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the abort or for `timeout` seconds. Returns True after an abort."""
        return self._aborted.wait(timeout)

    def enter(self, sock: socket.socket) -> None:
        """Register `sock` before its use. Raises TransferCanceled after an abort."""
        with self._lock:
            if self.is_set():
                raise TransferCanceled("canceled by the caller")
            self._sockets.add(sock)

    def leave(self, sock: socket.socket) -> None:
        """Unregister `sock` after its use."""
        with self._lock:
            self._sockets.discard(sock)

    def abort(self) -> None:
        """Shut all registered sockets, which wakes their threads, and refuse new sockets."""
        with self._lock:
            self._aborted.set()
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # The peer has closed the socket, which woke the thread.
