"""What the parts of the local stack have in common."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
"""Everything listens here only."""


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
