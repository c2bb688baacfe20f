"""Relay for workers of the original Dreambooth orchestrator: carries their parts and files to and from object storage.

Those workers PUT parts of 10 MiB to the API and expect `{"etag", "partNumber"}`, and download files from it. Lambda
carries 6 MB at most. The relay runs beside the worker, in the same container, and listens on 127.0.0.1:

    BATON_API_URL=https://... python -m gpu_client.original_relay &
    API_URL=http://127.0.0.1:8788 exec python src/main.py

- `PUT /upload/...`: the relay asks the API for a presigned URL and streams the part there.
- `GET /download/...`: the relay asks the API for a presigned URL and streams the object back.
- Every other call passes to the API unchanged.

The object store sees neither `x-api-key` nor the upload and download tokens. The relay holds no key of its own, keeps
nothing and follows no redirect. While the API or the object store is away, the relay holds a call back and tries again
for `PATIENCE_S` seconds, because the worker itself gives up after six, ends its training, or loses a checkpoint.

This file stands alone, so that it can be copied into an image that has nothing else of Baton: it needs Python 3.8 and
`requests`, which the worker brings along.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from http.cookiejar import DefaultCookiePolicy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import requests
from requests.adapters import HTTPAdapter

HOST = "127.0.0.1"
DEFAULT_PORT = 8788
PATIENCE_S = 300.0
LONGEST_PAUSE_S = 10.0
API_TIMEOUT_S = (10, 40)
"""To connect, and for the answer: API Gateway ends a call after 30 s."""
STORE_TIMEOUT_S = (10, 60)
BLOCK_BYTES = 256 * 1024
POOL_SIZE = 64
AWAY = frozenset((429, 502, 503, 504))
"""Statuses of an API that is away for a while; its calls may be repeated."""
AWAY_STORE = AWAY | {500}
NOT_PASSED_ON = frozenset(
    ("accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "te", "transfer-encoding")
)
"""Headers that belong to one connection. Bodies of the API pass uncompressed."""

logger = logging.getLogger("original_relay")


class RelayError(Exception):
    """A call cannot be answered; `status` and the message go to the worker."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Body:
    """The body of a request, read from the connection while the next server reads from it."""

    def __init__(self, stream: Any, size_bytes: int) -> None:
        self._stream = stream
        self._left = size_bytes
        self.size_bytes = size_bytes

    @property
    def untouched(self) -> bool:
        """True while a request with this body can be sent again."""
        return self._left == self.size_bytes

    def __len__(self) -> int:
        return self.size_bytes

    def __iter__(self) -> Iterator[bytes]:
        return iter(lambda: self.read(BLOCK_BYTES), b"")

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes; b"" at the end. Raises ConnectionError when the worker hangs up."""
        wanted = self._left if size is None or size < 0 else min(size, self._left)
        data = self._stream.read(wanted) if wanted else b""
        if len(data) < wanted:
            raise ConnectionError("the worker hung up in the middle of a body")
        self._left -= len(data)
        return data

    def drain(self) -> None:
        """Read what is left, so that the worker reads the answer instead of a reset connection."""
        for _ in self:
            pass


class Upstream:
    """The API at `url`, and the object store that its presigned URLs name.

    Safe from several threads. `sleep` and `clock` are for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url.rstrip("/")
        self._sleep = sleep
        self._clock = clock
        self._http = requests.Session()
        # No header of one server may reach another: neither cookies nor the defaults of a session.
        self._http.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        for scheme in ("http://", "https://"):
            self._http.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=POOL_SIZE))

    def call(self, method: str, target: str, headers: dict[str, str], body: bytes) -> requests.Response:
        """Return the API's answer to a call, read to its end. Raises RelayError (503) when the API stays away."""

        def once() -> requests.Response:
            url = self.url + target
            return self._http.request(
                method, url, headers=headers, data=body, timeout=API_TIMEOUT_S, allow_redirects=False
            )

        answer = self._patiently(once, f"{method} {_path(target)}", AWAY)
        if 300 <= answer.status_code < 400:
            # The worker would follow it with its key.
            raise RelayError(502, f"{self.url} answered with a redirect: is BATON_API_URL the API's own address?")
        return answer

    def put(self, url: str, body: Body) -> requests.Response:
        """Return the object store's answer to a part. Raises RelayError (503); the worker then sends the part again."""

        def once() -> requests.Response:
            return self._http.put(url, data=body, timeout=STORE_TIMEOUT_S, allow_redirects=False)

        what = f"PUT to {urlsplit(url).netloc}"
        return self._patiently(once, what, AWAY_STORE, repeatable=lambda: body.untouched)

    def get(self, url: str, **headers: str) -> requests.Response:
        """Return the object store's answer, its body unread."""
        headers["Accept-Encoding"] = "identity"

        def once() -> requests.Response:
            return self._http.get(url, headers=headers, stream=True, timeout=STORE_TIMEOUT_S, allow_redirects=False)

        return self._patiently(once, f"GET from {urlsplit(url).netloc}", AWAY_STORE)

    def _patiently(
        self,
        once: Callable[[], requests.Response],
        what: str,
        away: frozenset[int],
        repeatable: Callable[[], bool] = lambda: True,
    ) -> requests.Response:
        """Send a request until a server has dealt with it. Raises RelayError (503)."""
        until, pause_s = self._clock() + PATIENCE_S, 0.5
        while True:
            try:
                answer = once()
            except requests.RequestException as error:
                problem = type(error).__name__
            else:
                if answer.status_code not in away:
                    return answer
                problem = f"status {answer.status_code}"
                pause_s = max(pause_s, _retry_after_s(answer))
                answer.close()
            if not repeatable() or self._clock() + pause_s > until:
                raise RelayError(503, f"{what}: no usable answer ({problem}).")
            logger.warning("%s: %s; trying again in %.1f s", what, problem, pause_s)
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Handler(BaseHTTPRequestHandler):
    """One connection of the worker."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream: Upstream

    def _handle(self) -> None:
        body: Body | None = None
        try:
            body = self._received()
            path = _path(self.path)
            if self.command == "PUT" and path.startswith("/upload/"):
                self._upload_part(body)
            elif self.command == "GET" and path.startswith("/download/") and path != "/download/token":
                self._download()
            else:
                self._pass_on(body)
        except RelayError as error:
            logger.error("%s %s: %s", self.command, _path(self.path), error)
            self._answer_json(error.status, {"error": str(error)}, body)
        except ConnectionError as error:
            # The worker has gone: there is no one to answer.
            logger.warning("%s %s: %s", self.command, _path(self.path), error)
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815 - the base class looks for these names

    def _received(self) -> Body:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdigit():
            self.close_connection = True
            raise RelayError(411, "A body needs a Content-Length.")
        return Body(self.rfile, int(length))

    def _upload_part(self, body: Body) -> None:
        """Stream one part to the object store, and answer as the original's API does."""
        query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        if not body.size_bytes or query.get("action", "mpu-uploadpart") != "mpu-uploadpart":
            self._pass_on(body)
            return
        query["action"] = "mpu-presign"
        target = f"{_path(self.path)}?{urlencode(query)}"
        url = self._url_in(self.upstream.call("POST", target, self._headers(), b""), body)
        if url is None:
            return
        answer = self.upstream.put(url, body)
        etag = answer.headers.get("ETag", "").strip('"')
        if answer.status_code == 404:
            raise RelayError(404, "No such multipart upload: it may have been completed or aborted.")
        if answer.status_code != 200 or not etag:
            # 503 makes the worker send the part again, for which the API signs another URL.
            raise RelayError(503, f"The object store answered {answer.status_code} to a part.")
        self._answer_json(200, {"etag": etag, "partNumber": int(query["partNumber"])}, body)

    def _download(self) -> None:
        """Stream one object to the worker."""
        target, headers = f"{self.path}{'&' if '?' in self.path else '?'}as=url", self._headers()
        signed = self.upstream.call("GET", target, headers, b"")
        if signed.status_code == 401:
            # An earlier try used the token up and lost its answer. On a 401 the worker would die, and beat on.
            bucket, _, key = unquote(_path(self.path))[len("/download/") :].partition("/")
            query = urlencode({"bucket": bucket, "key": key})
            token = self.upstream.call("GET", f"/download/token?{query}", headers, b"")
            if token.status_code == 200:
                headers["x-download-token"] = token.json()["token"]
                signed = self.upstream.call("GET", target, headers, b"")
        url = self._url_in(signed, None)
        if url is None:
            return
        answer = self.upstream.get(url)
        with answer:
            if answer.status_code == 404:
                raise RelayError(404, "Object Not Found")
            if answer.status_code != 200 or "Content-Length" not in answer.headers:
                raise RelayError(502, f"The object store answered {answer.status_code} to a download.")
            self.send_response(200)
            for name in ("Content-Type", "ETag"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            # In chunks: old versions of `requests` take a file that ends early for a whole one, but no missing chunk.
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for block in self._blocks(url, answer):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block))
            self.wfile.write(b"0\r\n\r\n")

    def _blocks(self, url: str, answer: requests.Response) -> Iterator[bytes]:
        """The bytes of an object; a broken connection is taken up where it broke. Raises ConnectionError."""
        size_bytes, etag, sent_bytes = int(answer.headers["Content-Length"]), answer.headers.get("ETag", ""), 0
        while True:
            before_bytes = sent_bytes
            try:
                for block in answer.iter_content(BLOCK_BYTES):
                    sent_bytes += len(block)
                    yield block
            except requests.RequestException as error:
                logger.warning("download: %s after %d of %d bytes", type(error).__name__, sent_bytes, size_bytes)
            finally:
                answer.close()
            if sent_bytes == size_bytes:
                return
            if sent_bytes == before_bytes:
                raise ConnectionError(f"the object ended after {sent_bytes} of {size_bytes} bytes")
            try:
                rest = {"Range": f"bytes={sent_bytes}-{size_bytes - 1}", "If-Match": etag}
                answer = self.upstream.get(url, **rest)
            except RelayError as error:
                raise ConnectionError(str(error)) from error
            if answer.status_code != 206:
                answer.close()
                raise ConnectionError(f"the object store answered {answer.status_code} to the rest of an object")

    def _url_in(self, answer: requests.Response, body: Body | None) -> str | None:
        """The presigned URL that the API answered with; None when the worker has been given the API's refusal."""
        if answer.status_code == 200:
            url: str = answer.json()["url"]
            return url
        self._forward(answer, body)
        return None

    def _pass_on(self, body: Body) -> None:
        self._forward(self.upstream.call(self.command, self.path, self._headers(), body.read()), None)

    def _headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items() if name.lower() not in NOT_PASSED_ON}

    def _forward(self, answer: requests.Response, body: Body | None) -> None:
        """Answer as the API has answered, once the worker's body is read to its end."""
        if body is not None:
            body.drain()
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name.lower() not in NOT_PASSED_ON and name.lower() not in ("content-encoding", "date", "server"):
                self.send_header(name, value)
        if answer.status_code != 204:
            self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def _answer_json(self, status: int, said: dict[str, Any], body: Body | None) -> None:
        if body is not None:
            body.drain()
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request that went well."""


class Relay(ThreadingHTTPServer):
    """Listens from construction on, on 127.0.0.1 only. `port` 0 takes a free one."""

    daemon_threads = True
    # A worker sends 25 parts at once.
    request_queue_size = 128

    def __init__(self, upstream: Upstream, port: int = 0) -> None:
        handler = type("UpstreamHandler", (Handler,), {"upstream": upstream})
        super().__init__((HOST, port), handler)

    @property
    def url(self) -> str:
        """The worker's API_URL."""
        return f"http://{HOST}:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: tuple[Any, ...]) -> None:
        """Log in one line what ended a connection."""
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError):
            logger.warning("the worker hung up: %s", error)
        else:
            logger.error("a call failed", exc_info=error)


def _path(target: str) -> str:
    return target.partition("?")[0]


def _retry_after_s(answer: requests.Response) -> float:
    said = answer.headers.get("Retry-After", "")
    return min(float(said), LONGEST_PAUSE_S) if said.isdigit() else 0.0


def main() -> int:
    """Serve until the container ends."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_client.original_relay", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"on {HOST}; default {DEFAULT_PORT}, 0: a free one"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s original_relay: %(message)s")
    url = os.environ.get("BATON_API_URL", "")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        logger.error("BATON_API_URL must be the address of the API, https://...; it is %r", url)
        return 2
    try:
        relay = Relay(Upstream(url), options.port)
    except OSError as error:
        logger.error("port %d on %s is not free: %s", options.port, HOST, error)
        return 1
    logger.info("passing on to %s; give the worker API_URL=%s", url, relay.url)
    try:
        relay.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        relay.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
