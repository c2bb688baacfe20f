"""An HTTP server that answers by a script and records the requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.kits.network.http_server import HttpServer, QuietHandler


@dataclass
class Scripted:
    """A scripted answer. `cut`: bytes of the body to omit before closing the connection."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int = 0


def refusal(status: int, code: str, more: str = "", **headers: str) -> Scripted:
    """Format a refusal as S3 does."""
    body = f"<Error><Code>{code}</Code><Message>that is why</Message>{more}</Error>".encode()
    return Scripted(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


@dataclass
class Asked:
    """A received request."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    port: int
    """Port of the client, which identifies the connection."""

    @property
    def credential(self) -> str:
        """Key and region of the signature."""
        return self.headers["authorization"].partition("Credential=")[2].partition(",")[0]


class ScriptedStore(HttpServer):
    """Answer requests by the script and record them."""

    def __init__(self, *script: Scripted) -> None:
        self.script = list(script)
        self.asked: list[Asked] = []
        store = self

        class Handler(QuietHandler):
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

        super().__init__(Handler)
