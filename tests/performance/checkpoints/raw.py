"""The limits of the machine: bytes between files and sockets with nothing around them, to and from the sink.

Each of `THREADS` threads keeps one connection and takes the next part when it has finished one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

THREADS = 4
"""Of 1, 2, 4 and 8 the fastest on two processors, if by little; ours may use up to 8."""
_PIPE_BYTES = 2**20

Part = tuple[int, int]
"""Offset and size."""


class Raw:
    """Copies, by connections that are kept from one to the next, as `Transfer` keeps its own: on one that has been used
    for a while the kernel has more under way, which takes more processor time."""

    def __init__(self) -> None:
        self._idle: list[socket.socket] = []

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()

    def put(self, url: str, name: str, source: Path, parts: Iterable[Part]) -> None:
        """Send the parts of a file to objects of their own, each by one sendfile loop."""
        with source.open("rb") as file:

            def send(sock: socket.socket, part: Part) -> None:
                offset, size_bytes = part
                sock.sendall(_request("PUT", url, f"{name}-{offset}", f"Content-Length: {size_bytes}\r\n"))
                end = offset + size_bytes
                while offset < end:
                    offset += os.sendfile(sock.fileno(), file.fileno(), offset, end - offset)
                _require_success(sock)

            self._in_threads(url, parts, send)

    def get(self, url: str, name: str, target: Path, parts: Iterable[Part]) -> None:
        """Bring the objects of the parts to their places in a new file, through pipes, so inside the kernel."""
        parts = list(parts)
        with target.open("xb") as file:
            file.truncate(max(offset + size_bytes for offset, size_bytes in parts))

            def receive(sock: socket.socket, part: Part) -> None:
                offset, left = part
                sock.sendall(_request("GET", url, f"{name}-{offset}"))
                _require_success(sock)
                into, out = os.pipe()
                fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                try:
                    while left:
                        got = os.splice(sock.fileno(), out, min(left, _PIPE_BYTES))
                        if not got:
                            raise ConnectionError(f"{left} bytes are missing")
                        left -= got
                        while got:
                            moved = os.splice(into, file.fileno(), got, offset_dst=offset)
                            offset += moved
                            got -= moved
                finally:
                    os.close(into)
                    os.close(out)

            self._in_threads(url, parts, receive)

    def _in_threads(self, url: str, parts: Iterable[Part], act: Callable[[socket.socket, Part], None]) -> None:
        waiting, lock = iter(parts), threading.Lock()
        place = urlsplit(url)
        while len(self._idle) < THREADS:
            sock = socket.create_connection((str(place.hostname), int(place.port or 0)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._idle.append(sock)

        def work(sock: socket.socket) -> None:
            while True:
                with lock:
                    part = next(waiting, None)
                if part is None:
                    return
                act(sock, part)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, self._idle))


def _request(method: str, url: str, name: str, headers: str = "") -> bytes:
    place = urlsplit(url)
    return f"{method} {place.path}/{name} HTTP/1.1\r\nHost: {place.netloc}\r\n{headers}\r\n".encode()


def _require_success(sock: socket.socket) -> None:
    """Read the head of an answer and nothing behind it."""
    head = b""
    while b"\r\n\r\n" not in head:
        ahead = sock.recv(4096, socket.MSG_PEEK)
        if not ahead:
            raise ConnectionError("no answer")
        end = (head + ahead).find(b"\r\n\r\n")
        head += sock.recv(len(ahead) if end < 0 else end + 4 - len(head))
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        raise RuntimeError(f"the sink answers {status}")
