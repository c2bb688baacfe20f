"""Relay for workers of the original Dreambooth orchestrator: carries their parts and files to and from object storage.

Those workers PUT parts of 10 MiB to the API and expect `{"etag", "partNumber"}`, and download files from it. Lambda
carries 6 MB at most. The relay runs beside the worker, in the same container, and listens on 127.0.0.1:

    export no_proxy="127.0.0.1,${no_proxy:-${NO_PROXY:-}}"
    export NO_PROXY="$no_proxy"
    BATON_API_URL=https://... python -m gpu_client.original_relay &
    API_URL=http://127.0.0.1:8788 exec python src/main.py

Without `no_proxy`, a worker that has HTTP_PROXY set would send its calls to the relay, and its key, to that proxy.

The relay asks the API for presigned URLs, sends parts there (`PUT /upload/...`), and streams objects back from there
(`GET /download/...`). Every other call passes to the API unchanged.

The object store sees neither `x-api-key` nor the upload and download tokens. The relay holds no key of its own, keeps
no data and follows no redirect. While the API or the object store is away, the relay holds a call back and tries again
for `PATIENCE_S` seconds, because the worker itself gives up after six, ends its training, or loses a checkpoint. An
upload that outlives its token goes on with a new one, which the relay asks for with the key of the worker's call.

This file can be copied into an image that has nothing else of Baton: it needs Python 3.8 and the worker's `requests`.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.cookiejar import DefaultCookiePolicy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import requests
from requests.adapters import HTTPAdapter

HOST = "127.0.0.1"
DEFAULT_PORT = 8788
PATIENCE_S = 300.0
LONGEST_PAUSE_S = 10.0
HEARTBEAT_PAUSE_S = 1.0
API_TIMEOUT_S = (10, 40)
"""To connect, and for the answer: API Gateway ends a call after 30 s."""
STORE_TIMEOUT_S = (10, 60)
BLOCK_BYTES = 256 * 1024
POOL_SIZE = 64
AWAY = frozenset((429, 502, 503, 504))
"""Statuses of an API that is away for a while; its calls may be repeated."""
DECIDED = frozenset((200, 206, 404, 412, 416))
"""Statuses of the object store that no other URL would change. 400 and 403 may mean that a URL has expired."""
NOT_PASSED_ON = frozenset(
    ("accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "te", "transfer-encoding")
)
"""Headers that belong to one connection. Bodies of the API pass uncompressed."""
T = TypeVar("T")
logger = logging.getLogger("original_relay")


class RelayError(Exception):
    """A call ends with an error: the worker gets `answer`, which is the API's refusal, or `status` and the message."""

    def __init__(self, status: int, message: str, answer: requests.Response | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


class AwayError(Exception):
    """A server has not dealt with a request, but may deal with the next try."""

    def __init__(self, request: str, problem: str, retry_after: str = "") -> None:
        super().__init__(f"{request}: no usable answer ({problem})")
        self.pause_s = min(float(retry_after), LONGEST_PAUSE_S) if retry_after.isdigit() else 0.0


class Patience:
    """Deadline of one call of the worker: `PATIENCE_S` from the call's first failure on, whichever servers fail."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        """Begin anew, because bytes have arrived."""
        self._until: float | None = None
        self._pause_s = 0.5

    def outlast(self, once: Callable[[], T]) -> T:
        """Return what `once` returns, when it no longer raises AwayError. Raises RelayError (503)."""
        while True:
            try:
                return once()
            except AwayError as error:
                self.wait(error)

    def wait(self, error: AwayError) -> None:
        """Pause before the next try. Raises RelayError (503) when none is left."""
        now = self._clock.monotonic()
        if self._until is None:
            self._until = now + PATIENCE_S
        pause_s = max(self._pause_s, error.pause_s)
        if now + pause_s > self._until:
            raise RelayError(503, f"{error}; the relay has tried for {PATIENCE_S:.0f} s.") from error
        logger.warning("%s; trying again in %.1f s", error, pause_s)
        self._clock.sleep(pause_s)
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Upstream:
    """The API at `url`, and the object store that its presigned URLs name. Safe from several threads."""

    def __init__(self, url: str, clock: Any = time) -> None:
        self.url = url.rstrip("/")
        self.clock = clock
        self.renewed: dict[str, str] = {}
        """Tokens of the API that replace the worker's, by the worker's: one for each upload that outlives its token."""
        self._http = requests.Session()
        # No header of one server may reach another: neither cookies nor the defaults of a session.
        self._http.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        # Without an `auth` of its own, a session adds logins of ~/.netrc. S3 refuses them beside a presigned URL.
        self._http.auth = lambda request: request
        for scheme in ("http://", "https://"):
            self._http.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=POOL_SIZE))

    def api(self, method: str, target: str, headers: dict[str, str], body: bytes = b"") -> requests.Response:
        """Return the API's answer to a call, read to its end. Raises AwayError."""
        # A function that fails may have written: only transfers may be repeated after that.
        away = AWAY | {500} if target.startswith(("/upload/", "/download/")) else AWAY
        more = {"headers": headers, "data": body, "timeout": API_TIMEOUT_S}
        answer = self._sent(method, self.url + target, away.__contains__, **more)
        if 300 <= answer.status_code < 400:  # the worker would follow the redirect with its key
            raise RelayError(502, f"{self.url} answered with a redirect: is BATON_API_URL the API's own address?")
        return answer

    def store(self, method: str, url: str, **more: Any) -> requests.Response:
        """Return the object store's answer, to GET with its body unread. Raises AwayError, also for an expired URL."""
        more.update(stream=method == "GET", timeout=STORE_TIMEOUT_S)
        return self._sent(method, url, lambda status: status not in DECIDED, **more)

    def _sent(self, method: str, url: str, is_away: Callable[[int], bool], **more: Any) -> requests.Response:
        request = f"{method} {_path(url)}"
        try:
            answer = self._http.request(method, url, allow_redirects=False, **more)
        except requests.RequestException as error:
            raise AwayError(request, type(error).__name__) from error
        if is_away(answer.status_code):
            answer.close()
            raise AwayError(request, f"status {answer.status_code}", answer.headers.get("Retry-After", ""))
        return answer


class Handler(BaseHTTPRequestHandler):
    """Connection of the worker."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream: Upstream

    def _handle(self) -> None:
        path = _path(self.path)
        try:
            # In memory: a container may have no room for temporary files, and a worker holds its parts in memory too.
            with io.BytesIO() as body:
                size_bytes = self._receive(body)
                if self.command == "PUT" and path.startswith("/upload/") and size_bytes:
                    self._upload_part(body)
                elif self.command == "GET" and path.startswith("/download/") and path != "/download/token":
                    self._download()
                else:
                    self._pass_on(body)
        except RelayError as error:
            logger.error("%s %s: %s", self.command, path, error)
            if error.answer is not None:
                self._forward(error.answer)
            else:
                self._answer_json(error.status, {"error": str(error)})
        except ConnectionError as error:
            # The worker has gone: there is no one to answer.
            logger.warning("%s %s: %s", self.command, path, error)
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815 - the base class looks for these names

    def _receive(self, body: IO[bytes]) -> int:
        """Read the worker's body into `body` and return its size in bytes: it may have to be sent several times."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdigit():
            self.close_connection = True
            raise RelayError(411, "A body needs a Content-Length.")
        left_bytes = int(length)
        while left_bytes:
            block = self.rfile.read(min(left_bytes, BLOCK_BYTES))
            if not block:
                raise ConnectionError("the worker hung up in the middle of a body")
            body.write(block)
            left_bytes -= len(block)
        body.seek(0)
        return int(length)

    def _upload_part(self, part: IO[bytes]) -> None:
        """Send one part to the object store, and answer as the original's API does."""
        query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        if query.get("action", "mpu-uploadpart") != "mpu-uploadpart":
            self._pass_on(part)
            return
        query["action"] = "mpu-presign"
        target = f"{_path(self.path)}?{urlencode(query)}"

        def once() -> str:
            # Each try has a URL of its own, because the last one may have expired during the pause.
            url = self._signed("POST", target)
            part.seek(0)
            answer = self.upstream.store("PUT", url, data=part)
            if answer.status_code == 404:
                raise RelayError(404, "No such multipart upload: it may have been completed or aborted.")
            etag = answer.headers.get("ETag", "").strip('"')
            if answer.status_code != 200 or not etag:
                raise AwayError(f"PUT {_path(url)}", f"status {answer.status_code}, ETag {etag!r}")
            return etag

        etag = Patience(self.upstream.clock).outlast(once)
        self._answer_json(200, {"etag": etag, "partNumber": int(query["partNumber"])})

    def _download(self) -> None:
        """Stream one object to the worker."""
        patience = Patience(self.upstream.clock)
        with patience.outlast(self._opened) as answer:
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
            for block in self._blocks(answer, patience):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block))
            self.wfile.write(b"0\r\n\r\n")

    def _opened(self, **headers: str) -> requests.Response:
        """Return the object store's answer to a download, its body unread. Raises AwayError, RelayError."""
        url = self._signed("GET", f"{self.path}{'&' if '?' in self.path else '?'}as=url")
        return self.upstream.store("GET", url, headers={"Accept-Encoding": "identity", **headers})

    def _blocks(self, answer: requests.Response, patience: Patience) -> Iterator[bytes]:
        """The bytes of an object; a broken connection is taken up where it broke. Raises ConnectionError."""
        size_bytes, etag, sent_bytes = int(answer.headers["Content-Length"]), answer.headers.get("ETag", ""), 0
        while True:
            problem = "end of the connection"
            try:
                for block in answer.iter_content(BLOCK_BYTES):
                    patience.renew()
                    sent_bytes += len(block)
                    yield block
            except requests.RequestException as error:
                problem = type(error).__name__
            finally:
                answer.close()
            if sent_bytes == size_bytes:
                return
            rest = {"Range": f"bytes={sent_bytes}-{size_bytes - 1}", "If-Match": etag}
            try:
                patience.wait(AwayError(f"download after {sent_bytes} of {size_bytes} bytes", problem))
                answer = patience.outlast(partial(self._opened, **rest))
            except RelayError as error:
                raise ConnectionError(str(error)) from error
            if answer.status_code != 206:
                answer.close()
                raise ConnectionError(f"the object store answered {answer.status_code} to the rest of an object")

    def _signed(self, method: str, target: str) -> str:
        """Return the presigned URL that the API answers with. Raises AwayError; RelayError with the API's refusal."""
        answer = self._call(method, target)
        if answer.status_code != 200:
            raise RelayError(answer.status_code, f"the API answered {answer.status_code}", answer)
        return _text_field(answer, "url")

    def _pass_on(self, body: IO[bytes]) -> None:
        data = body.read()
        self._forward(Patience(self.upstream.clock).outlast(lambda: self._call(self.command, self.path, data)))

    def _call(self, method: str, target: str, body: bytes = b"") -> requests.Response:
        """Return the API's answer to a call of this worker, whose transfer token is renewed on 401. Raises AwayError.

        An upload may outlive its token; a download may have used its token up in a try whose answer got lost.
        """
        headers, upstream = self._headers(), self.upstream
        kind, _, place = _path(target)[1:].partition("/")
        name = f"x-{kind}-token"
        given = headers.get(name)
        if given is not None:
            headers[name] = upstream.renewed.get(given, given)
        answer = upstream.api(method, target, headers, body)
        if answer.status_code != 401 or given is None:
            return answer
        bucket, _, key = unquote(place).partition("/")
        token = upstream.api("GET", f"/{kind}/token?{urlencode({'bucket': bucket, 'key': key})}", headers)
        if token.status_code != 200:
            return token
        headers[name] = upstream.renewed[given] = _text_field(token, "token")
        return upstream.api(method, target, headers, body)

    def _headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items() if name.lower() not in NOT_PASSED_ON}

    def _forward(self, answer: requests.Response) -> None:
        """Answer as the API has answered."""
        skipped = NOT_PASSED_ON | {"content-encoding", "date", "server"}
        passed_on = {name: value for name, value in answer.headers.items() if name.lower() not in skipped}
        self._answer(answer.status_code, passed_on, answer.content)

    def _answer_json(self, status: int, document: dict[str, Any]) -> None:
        self._answer(status, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        if status > 400 and self.command == "POST" and self.path.startswith("/heartbeat/"):
            # The worker sends its next heartbeat at once after any error but 400, which makes it stop.
            self.upstream.clock.sleep(HEARTBEAT_PAUSE_S)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request that went well."""


class Relay(ThreadingHTTPServer):
    """Listens from construction on, on 127.0.0.1 only. `port` 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 128  # a worker sends 25 parts at once

    def __init__(self, upstream: Upstream, port: int = 0) -> None:
        super().__init__((HOST, port), type("UpstreamHandler", (Handler,), {"upstream": upstream}))

    @property
    def url(self) -> str:
        """The worker's API_URL."""
        return f"http://{HOST}:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: tuple[Any, ...]) -> None:
        """Log what ended a connection; a worker that hung up needs no traceback."""
        error = sys.exc_info()[1]
        logger.error("a connection ended: %s", error, exc_info=not isinstance(error, ConnectionError))


def _path(target: str) -> str:
    return target.partition("?")[0]


def _text_field(answer: requests.Response, name: str) -> str:
    """Return a text of the API's JSON. Raises RelayError (502) for an answer that is not the API's."""
    try:
        return str(answer.json()[name])
    except (ValueError, LookupError, TypeError) as error:
        problem = f'{_path(answer.url)} answered 200 without the JSON field "{name}": this is not the API.'
        right = "BATON_API_URL must be the API's own address, with no login page before it."
        raise RelayError(502, f"{problem} {right}") from error


def main() -> int:
    """Serve until the container ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}; 0: a free one")
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
    with relay, suppress(KeyboardInterrupt):
        relay.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
