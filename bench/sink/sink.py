"""A fast S3 on loopback for measuring clients: `python -m bench.sink.sink DIRECTORY [--tls PEM]`.

It prints its port, serves until its standard input ends, and does as little as can be done: bytes go from the socket to
files and back inside the kernel (on TLS through one buffer), no signature and no checksum is looked at, an ETag is a
random number. What it knows of S3 is in `sink_objects.py`; each connection has a thread.

Bodies may come by length, in HTTP's chunks, in those of S3 (`aws-chunked`, with trailers, which are dropped), or in
both. Of a chunk only the line before it is read here; its bytes go the same way as all others.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import socket
import ssl
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from bench.sink.sink_objects import Answer, Objects, Request

_BLOCK_BYTES = 1024 * 1024
_HEAD_BYTES = 64 * 1024
_LINE_BYTES = 256


class Sink:
    """S3 server: accepts connections and serves each in a thread."""

    def __init__(self, directory: Path, *, tls: ssl.SSLContext | None = None) -> None:
        """Store objects in `directory`, which must be empty."""
        self.objects = Objects(directory)
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def serve(self) -> None:
        """Accept connections until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._connection, args=(sock,), daemon=True).start()

    def close(self) -> None:
        """Stop accepting."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _connection(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ssl.SSLError), contextlib.ExitStack() as stack:
            stack.callback(sock.close)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                stack.callback(sock.close)
            connection = _Connection(self.objects, sock)
            stack.callback(connection.close)
            while connection.serve_one():
                pass


class _Source(Protocol):
    """Source of the bytes of a body."""

    def take(self, most_bytes: int) -> bytes:
        """Read at least one and at most that many bytes; empty at the end."""
        ...

    def move(self, descriptor: int, most_bytes: int) -> int:
        """Write some of the next bytes to a file; returns their number, 0 at the end."""
        ...


class _Wire:
    """Body of known length from the socket; ConnectionError if the client closes before its end."""

    def __init__(self, sock: socket.socket, ahead: bytes, pipe: _Pipe | None, size_bytes: int | None) -> None:
        """Wrap a connection; `ahead` was received before. Without a size, the body itself marks its end."""
        self.ahead = ahead
        self._sock = sock
        self._pipe = pipe
        self._left = sys.maxsize if size_bytes is None else size_bytes

    def take(self, most_bytes: int) -> bytes:
        if not self._left:
            return b""
        if not self.ahead:
            self.ahead = self._sock.recv(min(_LINE_BYTES, self._left))
            _require(len(self.ahead))
        piece, self.ahead = self.ahead[: min(most_bytes, self._left)], self.ahead[min(most_bytes, self._left) :]
        self._left -= len(piece)
        return piece

    def move(self, descriptor: int, most_bytes: int) -> int:
        wanted_bytes = min(most_bytes, self._left)
        if not wanted_bytes:
            return 0
        if self.ahead:
            return _written(descriptor, memoryview(self.take(wanted_bytes)))
        if self._pipe is not None:
            got = self._pipe.splice(self._sock.fileno(), descriptor, wanted_bytes)
        else:
            got = _written(descriptor, memoryview(self._sock.recv(min(wanted_bytes, _BLOCK_BYTES))))
        self._left -= _require(got)
        return got


class _Chunked:
    """Content of chunks: HTTP's and S3's, which share their form."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._left = 0
        self._begun = self._ended = False

    def take(self, most_bytes: int) -> bytes:
        if not self._more():
            return b""
        piece = self._source.take(min(most_bytes, self._left))
        self._left -= _require(len(piece))
        return piece

    def move(self, descriptor: int, most_bytes: int) -> int:
        if not self._more():
            return 0
        moved = self._source.move(descriptor, min(most_bytes, self._left))
        self._left -= _require(moved)
        return moved

    def _more(self) -> bool:
        """Find more bytes: after a chunk the next chunk's line is read, after the last one the trailers."""
        if self._left or self._ended:
            return not self._ended
        if self._begun:
            self._line()
        self._begun = True
        self._left = int(self._line().split(b";")[0], 16)
        if not self._left:
            self._ended = True
            while self._line():
                pass
        return not self._ended

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            byte = self._source.take(1)
            _require(len(byte))
            line += byte
        return line[:-2]


def _require(size_bytes: int) -> int:
    if not size_bytes:
        raise ConnectionError("ended within a body")
    return size_bytes


def _written(descriptor: int, piece: memoryview) -> int:
    size_bytes = len(piece)
    while piece:
        piece = piece[os.write(descriptor, piece) :]
    return size_bytes


class _Pipe:
    """Pipe between a socket and a file inside the kernel."""

    def __init__(self) -> None:
        self._ends = os.pipe()
        fcntl.fcntl(self._ends[1], fcntl.F_SETPIPE_SZ, _BLOCK_BYTES)

    def splice(self, source: int, target: int, most_bytes: int) -> int:
        """Splice bytes; returns their number, 0 at the end of the source."""
        got = os.splice(source, self._ends[1], min(most_bytes, _BLOCK_BYTES))
        left = got
        while left:
            left -= os.splice(self._ends[0], target, left)
        return got

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


class _Connection:
    def __init__(self, objects: Objects, sock: socket.socket) -> None:
        self._objects = objects
        self._sock = sock
        self._ahead = b""
        self._pipe = None if isinstance(sock, ssl.SSLSocket) else _Pipe()

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    def serve_one(self) -> bool:
        """Answer one request; False once the client has closed or asks to close."""
        while b"\r\n\r\n" not in self._ahead:
            piece = self._sock.recv(_HEAD_BYTES)
            if not piece:
                return False
            self._ahead += piece
        head, self._ahead = self._ahead.split(b"\r\n\r\n", 1)
        line, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        request = Request.parse(method, target, headers)
        if headers.get("expect", "").lower() == "100-continue":
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.stores:
            with self._objects.incoming() as (path, descriptor):
                size_bytes = self._receive(headers, descriptor)
                answer = self._objects.store(request, path, size_bytes)
        else:
            answer = self._objects.answer(request, self._content(headers))
        self._send(answer, body=method != "HEAD")
        return headers.get("connection", "").lower() != "close"

    def _body(self, headers: Mapping[str, str]) -> tuple[_Wire, _Source]:
        """Interpret the body on the wire."""
        in_chunks = headers.get("transfer-encoding", "").lower() == "chunked"
        size_bytes = None if in_chunks else int(headers.get("content-length", 0))
        wire = _Wire(self._sock, self._ahead, self._pipe, size_bytes)
        body: _Source = _Chunked(wire) if in_chunks else wire
        if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            body = _Inner(body)
        return wire, body

    def _receive(self, headers: Mapping[str, str], descriptor: int) -> int:
        """Receive a body into a file; returns its size."""
        wire, body = self._body(headers)
        size_bytes = 0
        while moved := body.move(descriptor, _BLOCK_BYTES):
            size_bytes += moved
        self._ahead = wire.ahead
        return size_bytes

    def _content(self, headers: Mapping[str, str]) -> bytes:
        """Read a small body."""
        wire, body = self._body(headers)
        content = b""
        while piece := body.take(_HEAD_BYTES):
            content += piece
        self._ahead = wire.ahead
        return content

    def _send(self, answer: Answer, *, body: bool) -> None:
        with answer:
            lines = [f"HTTP/1.1 {answer.status} -", *(f"{name}: {value}" for name, value in answer.headers.items())]
            if answer.status != 204:
                lines.append(f"Content-Length: {answer.size_bytes}")
            head = "\r\n".join([*lines, "", ""]).encode()
            self._sock.sendall(head + answer.content if body else head)
            if body:
                for file, offset, size_bytes in answer.pieces:
                    self._send_file(file, offset, size_bytes)

    def _send_file(self, file: BinaryIO, offset: int, size_bytes: int) -> None:
        end = offset + size_bytes
        while offset < end:
            if self._pipe is not None:
                sent = os.sendfile(self._sock.fileno(), file.fileno(), offset, end - offset)
            else:
                piece = os.pread(file.fileno(), min(end - offset, _BLOCK_BYTES), offset)
                self._sock.sendall(piece)
                sent = len(piece)
            offset += sent


class _Inner(_Chunked):
    """S3's chunks within a body with an end of its own, which is read too."""

    def _more(self) -> bool:
        more = super()._more()
        while not more and self._source.take(_LINE_BYTES):
            pass
        return more


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tls", type=Path, help="file with key and certificate")
    arguments = parser.parse_args()
    tls = None
    if arguments.tls is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(arguments.tls)
    sink = Sink(arguments.directory, tls=tls)
    threading.Thread(target=sink.serve, daemon=True).start()
    print(sink.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
