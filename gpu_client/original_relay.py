"""Relay parts and files between workers of the original Dreambooth orchestrator and the object store.

Such a worker PUTs parts of 10 MiB to the API, expects `{"etag", "partNumber"}`, and downloads files from the API, while
Lambda carries 6 MB at most. The relay runs beside the worker, in the worker's container, and listens on 127.0.0.1:

    export no_proxy="127.0.0.1,${no_proxy:-${NO_PROXY:-}}"
    export NO_PROXY="$no_proxy"
    BATON_API_URL=https://... python -m gpu_client.original_relay &
    API_URL=http://127.0.0.1:8788 exec python src/main.py

Without `no_proxy`, a worker with HTTP_PROXY would send the relay's calls, and the API key, to the proxy.

The relay requests presigned URLs from the API, sends parts to these URLs (`PUT /upload/...`), and streams objects from
them (`GET /download/...`). The relay forwards every other call to the API unchanged.

The object store receives neither `x-api-key` nor the upload and download tokens. The relay has no key, stores no data
and follows no redirect. During an outage of the API or the object store, the relay repeats a call for `PATIENCE_S`
seconds, because the worker itself gives up after six seconds and then ends its training or loses a checkpoint. An
upload that outlives its token continues with a new token, which the relay requests with the key of the worker's call.

The relay needs only this file, Python 3.8 and the worker's `requests`, and can be copied into any image.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import re
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
"""Limits in seconds for the connection and the answer; API Gateway ends a call after 30 s."""
STORE_TIMEOUT_S = (10, 60)
BLOCK_BYTES = 256 * 1024
POOL_SIZE = 64
AWAY = frozenset((429, 502, 503, 504))
"""Statuses of a temporarily unavailable API; the relay may repeat its calls."""
DECIDED = frozenset((200, 206, 404, 412, 416))
"""Final statuses of the object store. 400 and 403 are final, too, if the answer has a code and matches no `PASSING`."""
PASSING = re.compile(
    "[Ee]xpired|not valid yet|IncompleteBody|RequestTimeout|RequestTimeTooSkewed|SlowDown|Throttling"
    "|TokenRefreshRequired"
)
"""Codes and messages of the object store's 400 and 403 after which another try, by a new URL, may succeed."""
NOT_PASSED_ON = frozenset(
    ("accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "te", "transfer-encoding")
)
"""Headers of a single connection. The relay forwards bodies of the API uncompressed."""
T = TypeVar("T")
logger = logging.getLogger("original_relay")


class RelayError(Exception):
    """Error that ends a call: the worker gets `answer`, which is the API's refusal, or `status` and the message."""

    def __init__(self, status: int, message: str, answer: requests.Response | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


class AwayError(Exception):
    """Error of a temporarily unavailable server; another try may succeed."""

    def __init__(self, request: str, problem: str, retry_after: str = "") -> None:
        super().__init__(f"{request}: no usable answer ({problem})")
        self.pause_s = min(float(retry_after), LONGEST_PAUSE_S) if retry_after.isdigit() else 0.0


class Patience:
    """Deadline of one call of the worker: `PATIENCE_S` after the call's first failure, of any server."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        """Reset the deadline, because bytes have arrived."""
        self._until: float | None = None
        self._pause_s = 0.5

    def outlast(self, once: Callable[[], T]) -> T:
        """Return the result of `once`, repeated while `once` raises AwayError. Raises RelayError (503)."""
        while True:
            try:
                return once()
            except AwayError as error:
                self.wait(error)

    def wait(self, error: AwayError) -> None:
        """Pause before the next try. Raises RelayError (503) after the deadline."""
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
    """Client of the API at `url` and of the object store of its presigned URLs. Thread-safe."""

    def __init__(self, url: str, clock: Any = time) -> None:
        self.url = url.rstrip("/")
        self.clock = clock
        self.renewed: dict[str, str] = {}
        """Replacement of each expired transfer token of the worker, by the expired token."""
        self._http = requests.Session()
        # No header of one server may reach another server: neither cookies nor the defaults of a session.
        self._http.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        # A session without `auth` adds logins of ~/.netrc, which S3 refuses beside a presigned URL.
        self._http.auth = lambda request: request
        for scheme in ("http://", "https://"):
            self._http.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=POOL_SIZE))

    def api(self, method: str, target: str, headers: dict[str, str], body: bytes = b"") -> requests.Response:
        """Return the API's complete answer to a call. Raises AwayError."""
        # A failed function (500) may have written, therefore the relay repeats only transfers after a 500.
        away = AWAY | {500} if target.startswith(("/upload/", "/download/")) else AWAY
        more = {"headers": headers, "data": body, "timeout": API_TIMEOUT_S}
        answer = self._sent(method, self.url + target, lambda answer: answer.status_code in away, **more)
        if 300 <= answer.status_code < 400:  # The worker would follow the redirect with its key.
            raise RelayError(502, f"{self.url} answered with a redirect: is BATON_API_URL the API's own address?")
        return answer

    def store(self, method: str, url: str, **more: Any) -> requests.Response:
        """Return the object store's answer; the body of a GET is unread.

        Raises AwayError, also for an expired URL, and RelayError (403) for a permanent refusal.
        """
        more.update(stream=method == "GET", timeout=STORE_TIMEOUT_S)
        return self._sent(method, url, _is_store_away, **more)

    def _sent(
        self, method: str, url: str, is_away: Callable[[requests.Response], bool], **more: Any
    ) -> requests.Response:
        request = f"{method} {_path(url)}"
        try:
            answer = self._http.request(method, url, allow_redirects=False, **more)
            if not is_away(answer):
                return answer
        except requests.RequestException as error:
            raise AwayError(request, type(error).__name__) from error
        answer.close()
        raise AwayError(request, f"status {answer.status_code}", answer.headers.get("Retry-After", ""))


class Handler(BaseHTTPRequestHandler):
    """Connection of the worker."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream: Upstream

    def _handle(self) -> None:
        path = _path(self.path)
        try:
            # A container may have no disk space for temporary files, and a worker holds its parts in memory, too,
            # therefore the body stays in memory.
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
            # The worker has closed the connection, therefore the relay sends no answer.
            logger.warning("%s %s: %s", self.command, path, error)
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815 - the base class looks for these names

    def _receive(self, body: IO[bytes]) -> int:
        """Read the worker's body into `body`, for repeated sends, and return the size in bytes."""
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
        """Send one part to the object store, and answer in the format of the original's API."""
        query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        if query.get("action", "mpu-uploadpart") != "mpu-uploadpart":
            self._pass_on(part)
            return
        query["action"] = "mpu-presign"
        target = f"{_path(self.path)}?{urlencode(query)}"

        def once() -> str:
            # A URL may expire during a pause, therefore each try gets a new URL.
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
            # Old versions of `requests` accept a truncated body as complete but detect a missing chunk, therefore the
            # relay sends chunks.
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for block in self._blocks(answer, patience):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block))
            self.wfile.write(b"0\r\n\r\n")

    def _opened(self, **headers: str) -> requests.Response:
        """Return the object store's answer to a download, with an unread body. Raises AwayError, RelayError."""
        url = self._signed("GET", f"{self.path}{'&' if '?' in self.path else '?'}as=url")
        return self.upstream.store("GET", url, headers={"Accept-Encoding": "identity", **headers})

    def _blocks(self, answer: requests.Response, patience: Patience) -> Iterator[bytes]:
        """Yield the bytes of an object; resume after a broken connection. Raises ConnectionError."""
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
        """Return the presigned URL in the API's answer. Raises AwayError; RelayError with the API's refusal."""
        answer = self._call(method, target)
        if answer.status_code != 200:
            raise RelayError(answer.status_code, f"the API answered {answer.status_code}", answer)
        return _text_field(answer, "url")

    def _pass_on(self, body: IO[bytes]) -> None:
        data = body.read()
        self._forward(Patience(self.upstream.clock).outlast(lambda: self._call(self.command, self.path, data)))

    def _call(self, method: str, target: str, body: bytes = b"") -> requests.Response:
        """Return the API's answer to a call of this worker; renew the transfer token after a 401. Raises AwayError.

        An upload may outlive its token, and a lost answer to a download has used up the download's token.
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
        """Forward an answer of the API to the worker."""
        skipped = NOT_PASSED_ON | {"content-encoding", "date", "server"}
        passed_on = {name: value for name, value in answer.headers.items() if name.lower() not in skipped}
        self._answer(answer.status_code, passed_on, answer.content)

    def _answer_json(self, status: int, document: dict[str, Any]) -> None:
        self._answer(status, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        if status > 400 and self.command == "POST" and self.path.startswith("/heartbeat/"):
            # After any error except 400, which stops the worker, the worker sends its next heartbeat at once, therefore
            # the relay delays the error.
            self.upstream.clock.sleep(HEARTBEAT_PAUSE_S)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log lines of successful requests."""


class Relay(ThreadingHTTPServer):
    """HTTP server on 127.0.0.1, which listens from its construction on. `port` 0: any free port."""

    daemon_threads = True
    request_queue_size = 128  # A worker sends 25 parts at once.

    def __init__(self, upstream: Upstream, port: int = 0) -> None:
        super().__init__((HOST, port), type("UpstreamHandler", (Handler,), {"upstream": upstream}))

    @property
    def url(self) -> str:
        """Return the worker's API_URL."""
        return f"http://{HOST}:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: tuple[Any, ...]) -> None:
        """Log the error that ended a connection, without a traceback if the worker closed the connection."""
        error = sys.exc_info()[1]
        logger.error("a connection ended: %s", error, exc_info=not isinstance(error, ConnectionError))


def _path(target: str) -> str:
    return target.partition("?")[0]


def _is_store_away(answer: requests.Response) -> bool:
    """Return True if another try may succeed.

    Raises RelayError for a permanent refusal, and RequestException if the connection breaks in the body.
    """
    if answer.status_code not in (400, 403):
        return answer.status_code not in DECIDED
    # The other elements contain the object's key, which may contain any word.
    reason = ": ".join(re.findall("<(?:Code|Message)>([^<]+)", answer.content.decode("utf-8", "replace")))
    if not reason or PASSING.search(reason):
        return True
    # The worker sends a part four times if the answer is 400, and once if the answer is 403.
    raise RelayError(403, f"The object store refuses the {answer.request.method}: {answer.status_code} {reason}")


def _text_field(answer: requests.Response, name: str) -> str:
    """Return the text field `name` of the API's JSON. Raises RelayError (502) for an answer of another server."""
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
