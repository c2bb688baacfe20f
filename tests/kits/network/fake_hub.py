"""A strict Hugging Face Hub: an origin with the API, and a second origin with the large files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.kits.network.http_server import HttpServer, QuietHandler

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_" + "S" * 34
_RESOLVE = re.compile(r"/(?:datasets|api/resolve-cache/datasets)/([\w.-]+/[\w.-]+)/resolve/([0-9a-f]{40})/(.+)")
_API = re.compile(r"/api/datasets/([\w.-]+/[\w.-]+)/(revision|tree)/([\w.%-]+)(?:/(.+))?")

Act = Callable[["_Handler"], None]


@dataclass
class FakeHub:
    """Hub with data sets: files by path, by `ORG/NAME`. Files from `lfs_from_bytes` on lie at the second origin."""

    data_sets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    page_files: int = 2
    next_page_host: str = ""
    """Origin in the links to next pages; "" for the Hub's own."""
    lfs_from_bytes: int = 100
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Host (`hub` or `cdn`), method with path, and Range of each request."""
    leaks: list[str] = field(default_factory=list)
    """Requests that carry a token to the wrong origin, or break a rule of the Hub."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.signature = 0
        self._acts: dict[str, deque[Act]] = defaultdict(deque)

    def __enter__(self) -> Self:
        self._servers = [HttpServer(type("BoundHandler", (kind,), {"hub": self})) for kind in (_Api, _Cdn)]
        self.url, cdn = (server.url for server in self._servers)
        self.cdn_url = cdn.replace("127.0.0.1", "localhost")
        return self

    def __exit__(self, *_exception: object) -> None:
        for server in self._servers:
            server.close()

    def script(self, path: str, *acts: Act) -> None:
        """Answer the next requests whose path ends with `path` by the acts."""
        self._acts[path].extend(acts)

    def next_act(self, path: str) -> Act | None:
        with self.lock:
            found = next((acts for ending, acts in self._acts.items() if acts and path.endswith(ending)), None)
            return found.popleft() if found else None

    def served(self, host: str) -> list[str]:
        """List the requests of one host, with their Range."""
        return [f"{call} {requested}".strip() for at, call, requested in self.requests if at == host]

    def blob(self, path: str) -> bytes | None:
        return next((d for files in self.data_sets.values() for p, d in files.items() if sha256(d) in path), None)


class _Handler(QuietHandler):
    hub: FakeHub
    host: str

    def do_GET(self) -> None:
        self.place = urlsplit(self.path)
        with self.hub.lock:
            called = f"{self.command} {unquote(self.place.path)}"
            self.hub.requests.append((self.host, called, self.headers.get("Range", "")))
        act = self.hub.next_act(unquote(self.place.path))
        (act or type(self).behave)(self)

    do_HEAD = do_GET  # noqa: N815

    def behave(self) -> None:
        raise NotImplementedError

    def answer(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, sent: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:sent])
        self.close_connection = self.close_connection or sent is not None

    def send_data(self, data: bytes, sent: int | None = None, headers: Mapping[str, str] | None = None) -> None:
        """Send the data or the requested range."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self.answer(200, data, headers, sent)
            return
        first, last = int(asked[1]), int(asked[2])
        if not first <= last < len(data):
            self.hub.leaks.append(f"Range {asked[0]} of {len(data)} bytes")
        self.answer(206, data[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, sent)


class _Api(_Handler):
    host = "hub"

    def behave(self) -> None:
        hub = self.hub
        token = self.headers.get("Authorization")
        if token not in (None, f"Bearer {TOKEN}"):
            self.answer(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
            return
        path = unquote(self.place.path)
        found = _API.fullmatch(path) or _RESOLVE.fullmatch(path)
        files = hub.data_sets.get(found[1]) if found else None
        if found is None or files is None or (hub.private and token is None):
            self.answer(401, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif found.re is _API:
            self._api(found, files)
        elif hub.gated:
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            self._resolve(path, found[2], files.get(found[3]))

    def _api(self, found: re.Match[str], files: Mapping[str, bytes]) -> None:
        if found[3] not in ("main", COMMIT):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        if found[2] == "revision":
            self.answer(200, json.dumps({"id": found[1], "sha": COMMIT}).encode())
            return
        folder = f"{found[4]}/" if found[4] else ""
        names = sorted(name for name in files if name.startswith(folder))
        if not names:
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        query = parse_qs(self.place.query)
        if query.pop("recursive", None) != ["true"] or query.keys() - {"cursor", "expand"}:
            self.hub.leaks.append(f"query {self.place.query}")
        begin = int(query.get("cursor", ["0"])[0])
        page = [self._entry(name, files[name]) for name in names[begin : begin + self.hub.page_files]]
        if not begin:
            page.append({"type": "directory", "oid": "d" * 40, "size": 0, "path": "data"})
        end = begin + self.hub.page_files
        link = f'<{self.hub.next_page_host or self.hub.url}{self.place.path}?recursive=true&cursor={end}>; rel="next"'
        self.answer(200, json.dumps(page).encode(), {"Link": link} if end < len(names) else {})

    def _entry(self, name: str, data: bytes) -> dict[str, object]:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, object] = {"type": "file", "oid": blob, "size": len(data), "path": name}
        if len(data) >= self.hub.lfs_from_bytes:
            lfs = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
            entry |= {"oid": "0" * 40, "lfs": lfs, "xetHash": "e" * 64}
        return entry

    def _resolve(self, path: str, commit: str, data: bytes | None) -> None:
        if data is None or commit != COMMIT:
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        elif len(data) >= self.hub.lfs_from_bytes:
            signed = f"{self.hub.cdn_url}/{sha256(data)}?Signature={self.hub.signature}"
            self.answer(302, headers={**_about(data), "Location": signed})
        elif path.startswith("/datasets/"):
            self.answer(307, headers={**_about(data), "Location": f"/api/resolve-cache{quote(path)}"})
        else:
            self.send_data(data, headers=_about(data))


def _about(data: bytes) -> dict[str, str]:
    etag = f'"{sha256(data)}"'
    return {"X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(data)), "X-Linked-Etag": etag, "ETag": etag}


class _Cdn(_Handler):
    host = "cdn"

    def behave(self) -> None:
        if self.headers.get("Authorization") or self.headers.get("Cookie") or TOKEN in str(self.headers):
            self.hub.leaks.append(f"{self.command} {self.path} with a token")
        data = self.hub.blob(self.place.path)
        if parse_qs(self.place.query).get("Signature") != [str(self.hub.signature)]:
            self.answer(403, b"<Error><Code>AccessDenied</Code><Message>Access denied</Message></Error>")
        elif data is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.send_data(data)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def busy(**headers: str) -> Act:
    """Refuse a request for a while."""
    return lambda handler: handler.answer(429, b"slow", {name.replace("_", "-"): v for name, v in headers.items()})
