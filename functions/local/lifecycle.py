"""Start, stop and background threads of the parts of the local stack."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Protocol, Self

HOST = "127.0.0.1"
"""The only address on which the local stack listens."""
THREAD_STOP_TIMEOUT_S = 30.0
LONGEST_PAUSE_S = 2.0
"""Longest pause between two polls of an idle loop."""


class Lifecycle(ABC):
    """A part that runs between `start` and `stop`; a context manager."""

    @abstractmethod
    def start(self) -> None:
        """Start the part; return when the part is ready."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the part gracefully."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class StopSignal(Protocol):
    """An interruptible wait; `threading.Event` implements the protocol."""

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; True if stopped."""

    def set(self) -> None:
        """End the present wait and all later waits."""


class BackgroundLoop(Lifecycle):
    """A loop in a thread called `name`; `run` returns once `self._stopper` is set. A stopped loop cannot restart."""

    def __init__(self, name: str, stopper: StopSignal | None) -> None:
        self._name = name
        self._stopper: StopSignal = stopper or threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def run(self) -> None:
        """Run the loop in the thread."""

    def start(self) -> None:
        """Start the thread. Raises RuntimeError on a second start."""
        if self._thread is not None:
            raise RuntimeError(f"the {self._name} was already started")
        self._thread = threading.Thread(target=self.run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the present call. Raises RuntimeError if the call does not return in time."""
        self._stopper.set()
        if self._thread is not None:
            self._thread.join(THREAD_STOP_TIMEOUT_S)
            if self._thread.is_alive():
                raise RuntimeError(f"the {self._name}'s handler did not return within {THREAD_STOP_TIMEOUT_S:.0f} s")


class PollingLoop(BackgroundLoop):
    """Loop that polls every `interval_s` seconds, and without a pause after a full batch of `full_batch` inputs.

    Each poll without input doubles the pause, up to `LONGEST_PAUSE_S`, because every poll costs 3 ms of a core.
    """

    full_batch: int

    def __init__(self, name: str, stopper: StopSignal | None, interval_s: float) -> None:
        super().__init__(name, stopper)
        self._interval_s = interval_s

    def run(self) -> None:
        """Poll until stopped."""
        pause_s = self._interval_s
        while not self._stopper.wait(pause_s):
            found = size = self.tick()
            while size >= self.full_batch and not self._stopper.wait(0):
                size = self.tick()
            pause_s = self._interval_s if found else min(2 * pause_s, LONGEST_PAUSE_S)

    @abstractmethod
    def tick(self) -> int:
        """Process one batch; return the number of processed inputs."""


def bind_socket(port: int) -> socket.socket:
    """Bind a TCP socket to `port` of this machine, without listening; 0 selects a free port.

    Raises OSError, which names the port, if the port is in use.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit TCP_NODELAY. asyncio sets the option on sockets with an explicit protocol number only;
        # without the option each answer on a persistent connection waits 40 ms for a delayed acknowledgement.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind((HOST, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"port {port} on {HOST} is not free: {error.strerror}") from error
    return bound
