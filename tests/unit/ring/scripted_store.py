"""A server that gives the answers of a script, one after the other, and keeps what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


@dataclass
class Scripted:
    """One answer. `cut`: so many bytes of the body are left out, and the connection ends."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int = 0


def refusal(status: int, code: str, more: str = "", **headers: str) -> Scripted:
    """As S3 says no."""
    body = f"<Error><Code>{code}</Code><Message>that is why</Message>{more}</Error>".encode()
    return Scripted(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


@dataclass
class Asked:
    """A request as it came."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    port: int
    """Of whoever asked: it tells connections apart."""

    @property
    def credential(self) -> str:
        """Who says to have signed it, and for which region."""
        return self.headers["authorization"].partition("Credential=")[2].partition(",")[0]


class ScriptedStore:
    """Listens from construction to `close`."""

    def __init__(self, *script: Scripted) -> None:
        self.script = list(script)
        self.asked: list[Asked] = []
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                store.asked.append(Asked(self.command, self.path, headers, body, self.client_address[1]))
                said = store.script.pop(0)
                self.send_response_only(said.status)
                for name, value in {"Content-Length": str(len(said.body)), **said.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said.body[: len(said.body) - said.cut] if self.command != "HEAD" else b"")
                self.close_connection = self.close_connection or said.cut > 0

            do_PUT = do_POST = do_HEAD = do_GET  # noqa: N815 - the base class looks for these names

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
