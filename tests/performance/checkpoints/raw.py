"""The limits of the machine: bytes through sockets with nothing around them, to and from the sink."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

THREADS = 4
_BUFFER_BYTES = 2**20


@contextmanager
def server(directory: Path) -> Iterator[str]:
    """The sink as a process of its own; gives its address."""
    command = [sys.executable, "-m", "tests.performance.sink", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.communicate()


def put(url: str, name: str, source: Path, parts: list[tuple[int, int]]) -> None:
    """Send the parts of a file, each by one sendfile loop."""

    def send(part: tuple[int, int]) -> None:
        offset, size_bytes = part
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.putrequest("PUT", f"/{name}-{offset}")
        connection.putheader("Content-Length", str(size_bytes))
        connection.endheaders()
        with source.open("rb") as file:
            end = offset + size_bytes
            while offset < end:
                offset += os.sendfile(connection.sock.fileno(), file.fileno(), offset, end - offset)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status not in (200, 201):
            raise RuntimeError(f"the sink answers {answer.status}")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(send, parts))


def get(url: str, name: str, parts: list[tuple[int, int]]) -> None:
    """Receive the parts into one buffer for each thread, and drop them."""

    def receive(part: tuple[int, int]) -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.request("GET", f"/{name}-{part[0]}")
        answer = connection.getresponse()
        buffer = bytearray(_BUFFER_BYTES)
        received = 0
        while count := answer.readinto(buffer):
            received += count
        connection.close()
        if received != part[1]:
            raise RuntimeError(f"{received} of {part[1]} bytes came")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(receive, parts))
