"""What the parts of the local stack have in common."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Protocol, Self

HOST = "127.0.0.1"
"""Everything listens here only."""
THREAD_STOP_TIMEOUT_S = 30.0


class Running(ABC):
    """Something that runs between `start` and `stop`; a context manager."""

    @abstractmethod
    def start(self) -> None:
        """Begin, and return when it is ready."""

    @abstractmethod
    def stop(self) -> None:
        """End in good order."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class Stopper(Protocol):
    """Waiting that can be cut short; `threading.Event` is one."""

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; True when stopped."""

    def set(self) -> None:
        """Stop."""


class Background(Running):
    """A loop in a thread called `name`: `run` returns when `self._stopper` says so. Once stopped it stays stopped."""

    def __init__(self, name: str, stopper: Stopper | None) -> None:
        self._name = name
        self._stopper: Stopper = stopper or threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def run(self) -> None:
        """The thread's loop."""

    def start(self) -> None:
        """Begin. Raises RuntimeError if it was started before."""
        if self._thread is not None:
            raise RuntimeError(f"the {self._name} was already started")
        self._thread = threading.Thread(target=self.run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, after the call under way. Raises RuntimeError when that call does not come back."""
        self._stopper.set()
        if self._thread is not None:
            self._thread.join(THREAD_STOP_TIMEOUT_S)
            if self._thread.is_alive():
                raise RuntimeError(f"the {self._name}'s handler did not return within {THREAD_STOP_TIMEOUT_S:.0f} s")


class Poller(Background):
    """Looks every `interval_s` seconds whether there is something, and takes all that there is."""

    def __init__(self, name: str, stopper: Stopper | None, interval_s: float) -> None:
        super().__init__(name, stopper)
        self._interval_s = interval_s

    def run(self) -> None:
        """The thread's loop; returns when stopped."""
        while not self._stopper.wait(self._interval_s):
            while self.tick() and not self._stopper.wait(0):
                pass

    @abstractmethod
    def tick(self) -> bool:
        """Take some; True if more may be waiting."""


def bound_socket(port: int) -> socket.socket:
    """A TCP socket bound to `port` of this machine, not yet listening; 0 takes a free port.

    Raises OSError, which names the port, if it is taken.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. asyncio sets it only on sockets made with an explicit protocol number; without it
        # each answer on a kept-alive connection waits 40 ms for a delayed acknowledgement.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind((HOST, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"port {port} on {HOST} is not free: {error.strerror}") from error
    return bound
