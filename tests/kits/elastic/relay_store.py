"""Object store of relayed nodes on a port of this machine, with the control plane's relay call."""

from __future__ import annotations

import json
import threading
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from baton.contract.elastic.relay import MAX_DOWNLOADS, RelayAnswer, RelayCaller, RelayRequest, RelayTarget
from gpu_client.elastic.errors import WorldUnavailableError


class RelayStore:
    """Objects in memory, from construction to `close`.

    `is_down`: requests are answered 503. `is_cut_off`: members of this process do not reach the control plane.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.deleted = self.refused = 0
        """Objects that receivers deleted; requests that the store refused while down."""
        self.is_down = self.is_cut_off = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Requests)
        self._server.daemon_threads = True
        self._server.store = self  # type: ignore[attr-defined]
        self.call = StoreCall(f"http://127.0.0.1:{self._server.server_address[1]}")
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, request: RelayRequest) -> RelayAnswer:
        """Answer the relay call of a member of this process."""
        if self.is_cut_off:
            raise WorldUnavailableError("the control plane is away")
        return self.call(request)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        objects = self.server.store.objects
        self._answer(412 if self.path in objects else 200)
        objects.setdefault(self.path, data)

    def do_GET(self) -> None:
        objects: dict[str, bytes] = self.server.store.objects
        if self.path.endswith("*"):
            names = [name for name in sorted(objects) if name.startswith(self.path[:-1]) and name.endswith("/0")]
            self._answer(200, json.dumps(names).encode())
        else:
            self._answer(200 if self.path in objects else 404, objects.get(self.path, b""))

    def do_DELETE(self) -> None:
        self.server.store.deleted += self.server.store.objects.pop(self.path, None) is not None
        self._answer(200)

    def _answer(self, status: int, data: bytes = b"") -> None:
        if self.server.store.is_down:
            self.server.store.refused += 1
            status, data = 503, b""
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@dataclass(frozen=True)
class StoreCall:
    """The control plane's relay call, for members in any process."""

    url: str

    def __call__(self, request: RelayRequest) -> RelayAnswer:
        target, downloads, calls = None, [], []
        if request.upload is not None:
            one = request.upload
            url = f"{self.url}/{one.to}/{request.node}/{one.channel}/{one.number}"
            target = RelayTarget(url=url, headers={})
        if request.download is not None:
            wanted = request.download
            stream = f"{self.url}/{request.node}/{wanted.source}/{wanted.channel}"
            for number in range(max(0, wanted.number - MAX_DOWNLOADS), wanted.number):
                self._send(f"{stream}/{number}", "DELETE")
            downloads = [f"{stream}/{wanted.number + place}" for place in range(MAX_DOWNLOADS)]
        if request.calls:
            parts = [name.split("/") for name in json.loads(self._send(f"{self.url}/{request.node}/*", "GET"))]
            calls = [RelayCaller(node=one[2], channel=one[3]) for one in parts]
        return RelayAnswer(upload=target, downloads=downloads, calls=calls, life_s=60)

    @staticmethod
    def _send(url: str, method: str) -> bytes:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
                data: bytes = answer.read()
        except OSError as error:
            raise WorldUnavailableError(str(error)) from error
        return data
