"""Send calls to the control plane: pooled connections, timeouts, retries, typed errors, counters by kind.

Every call has a time budget over all its tries. The client never follows a redirect, so that the API key goes only to
the configured URL. The key appears in no log line, message or `repr`.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.cookiejar import DefaultCookiePolicy
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import requests
from pydantic import ValidationError
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies
from urllib3.exceptions import HTTPError

from baton.contract.error_body import ErrorBody
from baton.contract.errors import ErrorCode, Fault
from gpu_client.transport.errors import ApiError, UnexpectedAnswer, Unreachable, api_error_class, without_query
from gpu_client.transport.limits.stats import CallStats
from gpu_client.transport.net.connections import shared_tls, user_agent
from gpu_client.transport.retry import (
    RETRIED_STATUSES,
    Failure,
    GaveUp,
    RetryLater,
    RetryPolicy,
    call_with_retry,
    parse_retry_after,
)

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 35.0
"""Read timeout in seconds, longer than API Gateway's limit of 30 s for a handler."""

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Maximum size of an answer. Lambda answers at most 6 MB, therefore a larger answer comes from another server."""

_PLAIN_CODES = {401: ErrorCode.UNAUTHORIZED, 404: ErrorCode.NOT_FOUND, 413: ErrorCode.PAYLOAD_TOO_LARGE}


@dataclass(frozen=True, kw_only=True)
class Call:
    """Request to the API. `kind`: name in counters and log lines."""

    kind: str
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    """True for an idempotent call: a read, a fenced write, a call with an idempotency key."""


@dataclass(frozen=True)
class Answer:
    """Answer with a status below 300."""

    status: int
    data: Any


class _Refused(RetryLater):
    """Failure of a try to which the server answered with an error."""

    def __init__(self, failure: Failure, error: ApiError) -> None:
        self.error = error
        super().__init__(failure)


class HttpClient:
    """Sender of calls. Thread-safe; `sleep`, `clock` and `draw` are for tests."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        policy: RetryPolicy | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        sent: Callable[[int], None] = lambda _size_bytes: None,
    ) -> None:
        """`sent` receives the size of each body in bytes. Raises ValueError for an invalid URL or key."""
        self.url = _checked_url(url)
        self.policy = policy or RetryPolicy()
        self.stats = CallStats()
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._sleep = sleep
        self._clock = clock
        self._draw = draw
        self._sent = sent
        self._session = _session(_checked_key(api_key))

    def __repr__(self) -> str:
        return f"HttpClient({self.url!r})"

    def close(self) -> None:
        """Close idle connections."""
        self._session.close()

    def call(self, call: Call, *, budget_s: float | None = None) -> Answer:
        """Send `call` and return the answer, with the retries that the policy and `budget_s` allow.

        Raises ApiError (refused), Unreachable (no usable answer), UnexpectedAnswer (an answer of another server).
        """
        policy = self.policy if budget_s is None else replace(self.policy, budget_s=budget_s)
        started = self._clock()
        earlier_tries = count()

        def once() -> Answer:
            self.stats.count(call.kind, retry=next(earlier_tries) > 0)
            return self._try(call, remaining_s=policy.budget_s - (self._clock() - started))

        try:
            return call_with_retry(
                once,
                policy,
                name=call.kind,
                pause=self._sleep,
                draw=self._draw,
                clock=self._clock,
                repeatable=call.repeatable,
            )
        except GaveUp as error:
            raise self._final(call, error) from None

    def _try(self, call: Call, *, remaining_s: float) -> Answer:
        url = self.url + call.path
        limit_s = max(0.1, remaining_s)
        until = self._clock() + limit_s
        if call.body is not None:
            self._sent(len(call.body))
        try:
            with self._session.request(
                call.method,
                url,
                params=dict(call.query),
                data=call.body.encode() if call.body is not None else None,
                headers={
                    **({"Content-Type": "application/json"} if call.body is not None else {}),
                    **call.headers,
                },
                timeout=(min(self._connect_timeout_s, limit_s), min(self._read_timeout_s, limit_s)),
                allow_redirects=False,
                stream=True,
                proxies=get_environ_proxies(url),
            ) as response:
                body = self._read(response, until=until)
        except (requests.ConnectionError, requests.Timeout, HTTPError) as error:
            # A read of the raw body raises urllib3's HTTPError, which requests does not wrap.
            raise RetryLater(Failure(reason=_reason(error))) from error
        return self._understood(call, response, body)

    def _read(self, response: requests.Response, *, until: float) -> bytes:
        """Return the body. A body that outlasts the call's budget is a timeout, even if bytes still arrive."""
        body = bytearray()
        for piece in _pieces(response):
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise UnexpectedAnswer(
                    f"{without_query(response.url)} answered with more than {MAX_ANSWER_BYTES} bytes"
                )
            if self._clock() > until and response.raw.length_remaining != 0:
                raise requests.ReadTimeout("the answer took longer than the call may take")
        return bytes(body)

    def _understood(self, call: Call, response: requests.Response, body: bytes) -> Answer:
        status = response.status_code
        if status >= 400:
            error = parse_error(status, body)
            retry_after_s = parse_retry_after(response.headers.get("Retry-After"), date=response.headers.get("Date"))
            raise _Refused(
                Failure(reason=f"{status} {error}", status=status, code=error.code, retry_after_s=retry_after_s), error
            )
        if status >= 300:
            raise UnexpectedAnswer(f"{call.kind}: a redirect, which the control plane never answers with")
        if not body:
            return Answer(status, None)
        try:
            return Answer(status, json.loads(body))
        except ValueError as error:
            raise RetryLater(Failure(reason=f"{status} with a body that is not JSON: {_snippet(body)}")) from error

    def _final(self, call: Call, gave_up: GaveUp) -> Exception:
        error = gave_up.last.error if isinstance(gave_up.last, _Refused) else None
        if error is not None and error.status < 500 and error.status not in RETRIED_STATUSES:
            self.stats.refused(error.code)
            # The server may have executed an earlier try whose answer was lost.
            error.after_retry = any(one.status is None or one.status >= 500 for one in gave_up.failures[:-1])
            return error
        tries = len(gave_up.failures)
        return Unreachable(
            f"{call.kind}: no usable answer from {self.url} after {tries} {'try' if tries == 1 else 'tries'} "
            f"in {gave_up.elapsed_s:.0f} s (last: {gave_up.last})"
        )


class _OneContextAdapter(HTTPAdapter):
    """Adapter that uses the shared TLS context, unchanged, for every connection of the session."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, ssl_context=shared_tls(), **kwargs)

    def proxy_manager_for(self, proxy: str, **proxy_kwargs: Any) -> Any:
        return super().proxy_manager_for(proxy, ssl_context=shared_tls(), **proxy_kwargs)

    def cert_verify(self, conn: Any, url: str, verify: bool | str, cert: Any) -> None:
        """Keep the context's root certificates; requests would read its bundle again for each connection."""
        conn.cert_reqs = "CERT_REQUIRED"


def _session(api_key: str) -> requests.Session:
    session = requests.Session()
    # With trust_env, requests would also send ~/.netrc passwords. Each call finds its proxies instead.
    session.trust_env = False
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    session.headers.clear()
    session.headers.update(
        {"x-api-key": api_key, "User-Agent": user_agent(), "Accept": "application/json", "Accept-Encoding": "identity"}
    )
    adapter = _OneContextAdapter(pool_connections=4, pool_maxsize=16, max_retries=0)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session


def _pieces(response: requests.Response) -> Iterator[bytes]:
    """Yield body pieces on arrival; requests' own iterator would wait for full pieces."""
    while piece := response.raw.read1(64 * 1024):
        yield piece


def parse_error(status: int, body: bytes) -> ApiError:
    """Return the error of an answer of 400 or more: from the API's body, API Gateway's `{"message"}`, or other text."""
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    try:
        detail = ErrorBody.model_validate(data).error
    except ValidationError:
        code = _PLAIN_CODES[status].value if status in _PLAIN_CODES else f"http_{status}"
        message = _plain_message(data) or _snippet(body) or "no explanation"
        return api_error_class(code, status)(code=code, status=status, message=message, foreign=True)
    return api_error_class(detail.code, status)(
        code=detail.code,
        status=status,
        message=detail.message,
        field=detail.field,
        request_id=detail.request_id,
        problems=[Fault(**problem.model_dump()) for problem in detail.problems or ()],
    )


def _plain_message(data: Any) -> str:
    """Return the text of API Gateway's `{"message"}` or of the original orchestrator's `{"error", "message"}`."""
    if not isinstance(data, dict):
        return ""
    found = data.get("message") or data.get("Message") or data.get("error")
    return found if isinstance(found, str) else ""


def _snippet(body: bytes) -> str:
    """Return the beginning of a foreign body as one line of text, without markup."""
    text = re.sub(
        r"<(script|style)\b.*?(</\1>|$)|<[^>]*>", " ", body[:4096].decode("utf-8", "replace"), flags=re.S | re.I
    )
    return " ".join(text.split())[:200]


def _reason(error: BaseException) -> str:
    """Return the most informative line of a connection error that requests and urllib3 have wrapped."""
    cause = error.args[0] if error.args and isinstance(error.args[0], BaseException) else error
    cause = getattr(cause, "reason", None) or cause
    root = cause.__cause__
    # `strerror` is a text such as "Connection refused", without the names of urllib3's objects.
    text = root.strerror if isinstance(root, OSError) and root.strerror else str(cause)
    return f"{type(error).__name__}: {text[:200]}"


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # The URL has brackets without an address, or an invalid port.
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise ValueError("the API's URL must look like https://host or https://host/stage")
    return url.strip().rstrip("/")


def _checked_key(api_key: str) -> str:
    key = api_key.strip()
    if not key or any(not "\x21" <= char <= "\x7e" for char in key):
        raise ValueError("the API key is empty or has characters that no key has")
    return key
