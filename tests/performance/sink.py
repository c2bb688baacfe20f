"""A fast store on loopback for measuring clients: `python -m tests.performance.sink DIRECTORY [--discard] [--tls PEM]`.

It prints its port, serves until its standard input ends, and does as little as can be done: bytes go from the socket to
files and back inside the kernel (on TLS through one buffer), nothing is signed or checked. PUT stores a file named by
path and `partNumber`, create-only with `If-None-Match: *`; GET answers all of it or the range asked for, with an ETag
that is the file's version; DELETE removes. With `--discard` what is PUT is counted and thrown away, and answers 200.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import secrets
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_BLOCK_BYTES = 1024 * 1024
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Sink:
    """Accepts connections, each served by a thread."""

    def __init__(self, directory: Path, *, discard: bool = False, tls: ssl.SSLContext | None = None) -> None:
        self.directory = directory
        self.discard = discard
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._connection, args=(sock,), daemon=True).start()

    def _connection(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ssl.SSLError), contextlib.ExitStack() as stack:
            stack.callback(sock.close)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                stack.callback(sock.close)
            connection = _Connection(self, sock)
            while connection.serve_one():
                pass

    def place(self, target: str) -> Path:
        """Where the object of a request lies."""
        parts = urlsplit(target)
        part = parse_qs(parts.query).get("partNumber", ["0"])[0]
        return self.directory / hashlib.sha256(f"{parts.path}#{part}".encode()).hexdigest()


class _Connection:
    def __init__(self, sink: Sink, sock: socket.socket) -> None:
        self._sink = sink
        self._sock = sock
        self._ahead = b""
        self._kernel = not isinstance(sock, ssl.SSLSocket)

    def serve_one(self) -> bool:
        """Answer one request; False when the client has closed."""
        while b"\r\n\r\n" not in self._ahead:
            piece = self._sock.recv(64 * 1024)
            if not piece:
                return False
            self._ahead += piece
        head, self._ahead = self._ahead.split(b"\r\n\r\n", 1)
        request, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = request.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if method in ("PUT", "POST"):
            self._put(target, headers, int(headers.get("content-length", 0)))
        elif method in ("GET", "HEAD"):
            self._get(target, headers, body=method == "GET")
        else:
            self._sink.place(target).unlink(missing_ok=True)
            self._answer(204)
        return True

    def _put(self, target: str, headers: dict[str, str], size_bytes: int) -> None:
        place = self._sink.place(target)
        if headers.get("expect", "").lower() == "100-continue":
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        there = headers.get("if-none-match") == "*" and place.exists()
        if self._sink.discard or there:
            self._receive(None, size_bytes)
        else:
            aside = place.with_name(secrets.token_hex(8))
            with aside.open("wb") as file:
                self._receive(file.fileno(), size_bytes)
            aside.replace(place)
        self._answer(412 if there else 200, {"ETag": '"0"'})

    def _receive(self, descriptor: int | None, size_bytes: int) -> None:
        early, self._ahead = self._ahead[:size_bytes], self._ahead[size_bytes:]
        if descriptor is not None:
            os.write(descriptor, early)
        left = size_bytes - len(early)
        move = self._spliced if descriptor is not None and self._kernel else self._copied
        for _ in move(descriptor, left):
            pass

    def _spliced(self, descriptor: int | None, left: int) -> Iterator[None]:
        assert descriptor is not None
        readable, writable = os.pipe()
        try:
            while left:
                got = os.splice(self._sock.fileno(), writable, min(left, _BLOCK_BYTES))
                if not got:
                    raise ConnectionError
                left -= got
                while got:
                    got -= os.splice(readable, descriptor, got)
                yield
        finally:
            os.close(readable)
            os.close(writable)

    def _copied(self, descriptor: int | None, left: int) -> Iterator[None]:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        # the kernel throws away what nobody wants to see
        flags = socket.MSG_TRUNC if descriptor is None and self._kernel else 0
        while left:
            got = self._sock.recv_into(buffer[: min(left, _BLOCK_BYTES)], 0, flags)
            if not got:
                raise ConnectionError
            left -= got
            if descriptor is not None:
                os.write(descriptor, buffer[:got])
            yield

    def _get(self, target: str, headers: dict[str, str], *, body: bool) -> None:
        try:
            file = self._sink.place(target).open("rb")
        except FileNotFoundError:
            self._answer(404)
            return
        with file:
            found = os.fstat(file.fileno())
            begin, end, status = 0, found.st_size, 200
            more = {"ETag": f'"{found.st_mtime_ns:x}"'}
            asked = _RANGE.fullmatch(headers.get("range", ""))
            if asked is not None:
                begin, status = int(asked[1]), 206
                end = min(end, int(asked[2]) + 1) if asked[2] else end
                more["Content-Range"] = f"bytes {begin}-{end - 1}/{found.st_size}"
            self._answer(status, more, length=end - begin)
            if body:
                self._sock.sendfile(file, begin, end - begin)

    def _answer(self, status: int, headers: dict[str, str] | None = None, *, length: int = 0) -> None:
        lines = [f"HTTP/1.1 {status} -", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        if status != 204:
            lines.append(f"Content-Length: {length}")
        self._sock.sendall("\r\n".join([*lines, "", ""]).encode())


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--discard", action="store_true")
    parser.add_argument("--tls", type=Path, help="file with key and certificate")
    arguments = parser.parse_args()
    tls = None
    if arguments.tls is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(arguments.tls)
    sink = Sink(arguments.directory, discard=arguments.discard, tls=tls)
    threading.Thread(target=sink.serve, daemon=True).start()
    print(sink.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
