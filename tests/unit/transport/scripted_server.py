"""An HTTP server on loopback that serves and stores objects, and misbehaves as told.

`script(method, path, *acts)` queues what happens to the next requests for that path; afterwards the server behaves.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from gpu_client.transport.net.digests import digest_bytes

Act = Callable[["Handler"], None]


@dataclass
class Seen:
    """One request as it arrived; header names in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass
class ScriptedServer:
    """Use as a context manager."""

    objects: dict[str, bytes] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    routes: dict[tuple[str, str], Act] = field(default_factory=dict)
    most_at_once: int = 0
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.at_once = 0
        self._script: dict[tuple[str, str], deque[Act]] = defaultdict(deque)

    def __enter__(self) -> ScriptedServer:
        handler = type("BoundHandler", (Handler,), {"home": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.server_address[1]}"

    def script(self, method: str, path: str, *acts: Act) -> None:
        self._script[(method, path)].extend(acts)

    def next_act(self, method: str, path: str) -> Act | None:
        with self.lock:
            queue = self._script[(method, path)]
            return queue.popleft() if queue else self.routes.get((method, path))

    def settle(self) -> None:
        """Wait until no request is under way, including the last bytes of a client that gave up."""
        until, quiet = time.monotonic() + 30, 0
        while quiet < 5:
            assert time.monotonic() < until, "requests are under way for 30 s"
            time.sleep(0.02)
            with self.lock:
                quiet = quiet + 1 if self.at_once == 0 else 0

    def paths(self, method: str) -> list[str]:
        return [request.path for request in self.seen if request.method == method]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    home: ScriptedServer

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._handle()

    do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def _handle(self) -> None:
        home = self.home
        parts = urlsplit(self.path)
        with home.lock:
            home.at_once += 1
            home.most_at_once = max(home.most_at_once, home.at_once)
        try:
            act = home.next_act(self.command, parts.path)
            reads_body = getattr(act, "reads_body", True)
            announced = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(announced) if reads_body else b""
            if reads_body and len(body) < announced:
                self.close_connection = True  # the client gave up: half of a request is none
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.request_seen = Seen(self.command, parts.path, parts.query, headers, body)
            with home.lock:
                home.seen.append(self.request_seen)
            if act is not None:
                act(self)
            elif self.command == "GET":
                self._get(parts.path)
            elif self.command == "PUT":
                self._put(parts.path, headers, body)
            else:
                self.answer(404, {"message": "Not Found"})
        finally:
            with home.lock:
                home.at_once -= 1

    def _get(self, path: str) -> None:
        data = self.home.objects.get(path)
        if data is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
        else:
            self.send_object(data)

    def send_object(self, data: bytes, *, more: Mapping[str, str] | None = None, sent: int | None = None) -> None:
        """Send the data or the requested range; break the connection after `sent` bytes, if given."""
        headers = {"ETag": f'"{digest_bytes(data).blake3[:32]}"', **(more or {})}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        status, body = 200, data
        if asked is not None and int(asked[1]) >= len(data):
            self.answer(416, b"<Error><Code>InvalidRange</Code></Error>")
            return
        if asked is not None:
            status, body = 206, data[int(asked[1]) : int(asked[2]) + 1]
            last = int(asked[1]) + len(body) - 1
            headers = {"Content-Range": f"bytes {asked[1]}-{last}/{len(data)}", **headers}
        self.answer(status, body, headers, sent=sent)

    def _put(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        home = self.home
        digest = digest_bytes(body)
        if headers.get("x-amz-checksum-crc64nvme", digest.crc64nvme) != digest.crc64nvme:
            self.answer(400, b"<Error><Code>BadDigest</Code><Message>no match</Message></Error>")
            return
        with home.lock:
            there = path in home.objects and headers.get("if-none-match") == "*"
            if not there:
                home.objects[path] = body
        self.answer(412 if there else 200, b"<Error><Code>PreconditionFailed</Code></Error>" if there else b"")

    def answer(
        self,
        status: int,
        body: bytes | object = b"",
        headers: Mapping[str, str] | None = None,
        *,
        sent: int | None = None,
    ) -> None:
        data = body if isinstance(body, bytes) else _json(body)
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:sent])
        self.close_connection = self.close_connection or sent is not None


def _json(value: object) -> bytes:
    import json

    return json.dumps(value).encode()


def reply(status: int, body: bytes | object = b"", headers: Mapping[str, str] | None = None) -> Act:
    return lambda handler: handler.answer(status, body, headers)


def reset(handler: Handler) -> None:
    """Cut the connection with an RST, without an answer."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.connection.close()


def truncated(body: bytes, sent: int) -> Act:
    """Announce all of `body`, send a part, close."""

    def act(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[:sent])
        handler.close_connection = True

    return act


def without_length(body: bytes) -> Act:
    """HTTP/1.0 style: the end of the connection is the end of the body."""

    def act(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return act


def stalled(until: threading.Event, arrived: threading.Event) -> Act:
    """Announce a body of 700,000 bytes, send nothing until told."""

    def act(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "700000")
        handler.end_headers()
        handler.wfile.flush()
        arrived.set()
        until.wait(20)
        handler.close_connection = True

    return act


def sends(data: bytes, *, more: Mapping[str, str] | None = None, sent: int | None = None) -> Act:
    """The object, or its range, is `data`; see `send_object`."""
    return lambda handler: handler.send_object(data, more=more, sent=sent)


def silent_after(data: bytes, sent: int, until: threading.Event) -> Act:
    """Send the first `sent` bytes of what was asked for, then nothing more until told."""

    def act(handler: Handler) -> None:
        handler.send_object(data, sent=sent)
        handler.wfile.flush()
        until.wait(20)

    return act


def unread(until: threading.Event) -> Act:
    """Read nothing of the request's body until told, then close."""

    def act(handler: Handler) -> None:
        until.wait(20)
        handler.close_connection = True

    act.reads_body = False  # type: ignore[attr-defined]
    return act


def refuse_unread(status: int, body: bytes) -> Act:
    """Answer without reading the request's body, and close."""

    def act(handler: Handler) -> None:
        handler.answer(status, body, {"Connection": "close"})
        handler.close_connection = True

    act.reads_body = False  # type: ignore[attr-defined]
    return act
