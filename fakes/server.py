"""Serve a fake provider over HTTP on loopback, with injected faults of the connection and of the answers.

A fault applies to the next calls whose method and path begin with a given text. The faults are those of a real network:
an answer that is lost after the effect, a connection that is reset before the effect, a server that answers too late,
a burst of 500 or 429, HTML or half a JSON document in place of the answer, and a key that is refused for a while.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from fakes.meter import BillingMeter

FaultKind = Literal["lost", "reset", "slow", "500", "429", "html", "truncated", "401"]
AFTER_THE_EFFECT = ("lost", "slow", "html", "truncated")
SLOWEST_S = 30.0
"""Real seconds until a slow answer to a client without a time-out."""

HTML = "<html><body><h1>502 Bad Gateway</h1></body></html>"


@dataclass(frozen=True)
class FakeCall:
    """HTTP call that a client made."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Headers with names in lower case."""
    raw: bytes

    def json(self) -> Any:
        """Return the parsed body. Raises ValueError for a body that is not JSON."""
        return json.loads(self.raw)


@dataclass(frozen=True)
class FakeAnswer:
    """Answer of the provider. `body`: a value sent as JSON, a text sent as plain text, or None for an empty body."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    open_s: float = 0.0
    """Real seconds in which the connection stays open after the body, as of a stream of events."""


@dataclass
class InjectedFault:
    """Fault of the next `count` calls whose `METHOD /path` begins with `calls`."""

    kind: FaultKind
    calls: str = ""
    count: int = 1


class FakeProvider:
    """HTTP server of a fake provider; a subclass implements `answer`.

    now: the provider's clock in seconds. `answer` runs under one lock, therefore a subclass needs no lock of its own.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.meter = BillingMeter(now)
        self.faults: list[InjectedFault] = []
        self.calls: list[FakeCall] = []
        self.lock = threading.RLock()
        self._server: ThreadingHTTPServer | None = None

    def answer(self, call: FakeCall) -> FakeAnswer:
        """Carry out one call and return the answer."""
        raise NotImplementedError

    def throttled(self) -> FakeAnswer:
        """Return the provider's answer to a call that comes too early."""
        return FakeAnswer(429, "API requests too frequent")

    def refused(self) -> FakeAnswer:
        """Return the provider's answer to an invalid key."""
        return FakeAnswer(401, {"error": "auth_error"})

    def inject(self, kind: FaultKind, calls: str = "", count: int = 1) -> None:
        """Let the next suitable calls meet a fault."""
        self.faults.append(InjectedFault(kind, calls, count))

    @property
    def url(self) -> str:
        """Address of the running server."""
        assert self._server is not None, "the fake is not running"
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeProvider:
        self._server = _FakeServer(self)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def take_fault(self, call: FakeCall) -> InjectedFault | None:
        """Return the fault that the call meets, and count the fault down."""
        for fault in self.faults:
            if fault.count and f"{call.method} {call.path}".startswith(fault.calls):
                fault.count -= 1
                return fault
        return None


class _FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, provider: FakeProvider) -> None:
        super().__init__(("127.0.0.1", 0), _FakeHandler)
        self.provider = provider


class _FakeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes; otherwise the second one waits 40 ms for the client's acknowledgement.
    disable_nagle_algorithm = True
    server: _FakeServer

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        call = FakeCall(
            method=self.command,
            path=parts.path,
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in self.headers.items()},
            raw=self.rfile.read(length),
        )
        provider = self.server.provider
        with provider.lock:
            provider.calls.append(call)
            fault = provider.take_fault(call)
            if fault is None or fault.kind in AFTER_THE_EFFECT:
                answer = provider.answer(call)
            else:
                answer = {"429": provider.throttled, "401": provider.refused}.get(
                    fault.kind, lambda: FakeAnswer(500, "Internal Server Error")
                )()
        if fault is not None and fault.kind in ("lost", "reset"):
            # Linger 0: the client sees a reset connection instead of an orderly end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        if fault is not None and fault.kind == "slow":
            # The client's end of the connection makes the socket readable, so a slow answer is late for any time-out.
            select.select([self.connection], [], [], SLOWEST_S)
        self._send(answer, fault.kind if fault else None)

    def _send(self, answer: FakeAnswer, fault: FaultKind | None) -> None:
        content_type, text = "application/json", ""
        if isinstance(answer.body, str):
            content_type, text = "text/plain", answer.body
        elif answer.body is not None:
            text = json.dumps(answer.body)
        status = answer.status
        if fault == "html":
            status, content_type, text = 502, "text/html", HTML
        elif fault == "truncated":
            text = text[: len(text) // 2]
        raw = text.encode()
        self.send_response(status)
        headers = {"Content-Type": content_type, "Content-Length": str(len(raw)), **answer.headers}
        if answer.open_s:
            del headers["Content-Length"]
            self.close_connection = True
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)
        time.sleep(answer.open_s)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _serve  # noqa: N815 - names of the base class

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing; `FakeProvider.calls` holds the calls."""
