"""HTTP proxy on 127.0.0.1 that forwards requests, or fails those that a test names."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.kits.network.http_server import HttpServer, QuietHandler
from tests.kits.waiting import until

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
UPSTREAM_TIMEOUT_S = 60


@dataclass(eq=False)
class Fault:
    """Fault of the requests whose "METHOD /path" or "METHOD /path?partNumber=N" matches `pattern`."""

    pattern: re.Pattern[str]
    status: int | None = None
    """Answer with this instead of passing the request on."""
    drop: bool = False
    """Hang up without an answer."""
    lose: bool = False
    """Pass the request on, then hang up: it is carried out, and nobody is told."""
    gate: threading.Event | None = None
    """Wait for this first."""
    reached: threading.Event = field(default_factory=threading.Event)
    """Set by the first request that met the trouble."""
    met: int = 0

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait until a request has met the fault."""
        assert self.reached.wait(timeout_s), f"no request like {self.pattern.pattern} came within {timeout_s} s"

    def wait_for(self, times: int, timeout_s: float = 60.0) -> None:
        """Wait until that many requests have met the fault."""
        until(lambda: self.met >= times, timeout_s, what=f"{times} requests like {self.pattern.pattern}")


class FaultyProxy(HttpServer):
    """Proxy with faults; `upstream` may be set after the proxy has begun to listen."""

    def __init__(self, upstream: tuple[str, int] | None = None) -> None:
        self.upstream = upstream
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._requests: list[str] = []
        self.header_names: set[str] = set()
        """Names of the headers of all requests so far, in lower case."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        super().__init__(Handler)

    def requests(self, pattern: str = "") -> list[str]:
        """List the matching requests so far as "METHOD /path", in order."""
        with self._lock:
            return [request for request in self._requests if re.search(pattern, request)]

    @contextmanager
    def failing(self, pattern: str, status: int) -> Iterator[Fault]:
        """Answer matching requests with `status` inside the block."""
        with self._trouble(Fault(re.compile(pattern), status=status)) as trouble:
            yield trouble

    @contextmanager
    def dropping(self, pattern: str = "") -> Iterator[Fault]:
        """Hang up on matching requests inside the block, as if the server were down."""
        with self._trouble(Fault(re.compile(pattern), drop=True)) as trouble:
            yield trouble

    @contextmanager
    def losing(self, pattern: str) -> Iterator[Fault]:
        """Forward matching requests inside the block and lose their answers."""
        with self._trouble(Fault(re.compile(pattern), lose=True)) as trouble:
            yield trouble

    @contextmanager
    def holding(self, pattern: str, *, drop: bool = False) -> Iterator[Fault]:
        """Hold matching requests inside the block, then forward them, or hang up with `drop`."""
        gate = threading.Event()
        trouble = Fault(re.compile(pattern), gate=gate, drop=drop)
        try:
            with self._trouble(trouble):
                yield trouble
        finally:
            gate.set()

    def forget(self, trouble: Fault) -> None:
        """End a fault early."""
        with self._lock:
            if trouble in self._faults:
                self._faults.remove(trouble)

    @contextmanager
    def _trouble(self, trouble: Fault) -> Iterator[Fault]:
        with self._lock:
            self._faults.append(trouble)
        try:
            yield trouble
        finally:
            self.forget(trouble)

    def note(self, request: str) -> Fault | None:
        """Record a request; returns the fault that it meets."""
        with self._lock:
            self._requests.append(request)
            found = next((trouble for trouble in self._faults if trouble.pattern.search(request)), None)
            if found:
                found.met += 1
                found.reached.set()
            return found


class _Handler(QuietHandler):
    owner: FaultyProxy
    timeout = 30

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        part = re.search(r"\bpartNumber=\d+", query)
        self.owner.header_names.update(name.lower() for name in self.headers)
        trouble = self.owner.note(f"{self.command} {path}{'?' + part[0] if part else ''}")
        if trouble and trouble.gate:
            trouble.gate.wait(UPSTREAM_TIMEOUT_S)
        if trouble and trouble.drop:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if trouble and trouble.status:
            self._answer(trouble.status, b"<Error><Code>SlowDown</Code><Message>trouble</Message></Error>", [])
            return
        assert self.owner.upstream, "the proxy does not know where to pass requests on to"
        upstream = http.client.HTTPConnection(*self.owner.upstream, timeout=UPSTREAM_TIMEOUT_S)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "keep-alive"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            response = upstream.getresponse()
            if trouble and trouble.lose:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self._answer(response.status, response.read(), response.getheaders())
        finally:
            upstream.close()

    def _answer(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self._relay()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815 - the base class looks for these names
