"""Call a provider's HTTP API: reads are tried twice, a mutating call is sent exactly once.

No call follows a redirect, and no text of an error names a header, because a header holds the account's key.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import urllib3

from functions.fleet.drivers.protocol import ProviderRefused, ProviderThrottled, ProviderUnavailable, RefusalKind

TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_STREAM_BYTES = 256 * 1024
READ_TRIES = 2
QUIET_S = 2.0
STREAM_S = 5.0
"""Silence of a stream after which nothing more is read; longest time of a stream that never pauses."""


class AnswerLost(Exception):  # noqa: N818 - a normal outcome: the call may have taken effect
    """A mutating call was sent and its outcome is unknown: a time-out, a reset, a 5xx, an unreadable answer."""


class CallNotSent(Exception):  # noqa: N818 - a normal outcome: certainly nothing happened
    """The provider cannot be reached: no byte of the call was sent."""


@dataclass(frozen=True)
class ProviderAnswer:
    """Answer of a provider. `body`: parsed JSON; None for an empty body. `text`: the body as sent, for markers."""

    status: int
    body: Any
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True for a status of success."""
        return 200 <= self.status < 300


class ProviderHttp:
    """HTTP client of one provider. `headers`: sent with every call; they hold the account's key."""

    def __init__(self, address: str, headers: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> None:
        self._address = address.rstrip("/")
        self._headers = dict(headers)
        self._secrets = [value.rpartition(" ")[2] for value in headers.values()]
        self._quiet_s = min(QUIET_S, timeout_s)
        self._pool = urllib3.PoolManager(timeout=urllib3.Timeout(total=timeout_s), retries=False)

    def read(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: Any = None
    ) -> ProviderAnswer:
        """Send a call without side effects, a second time after a transient failure.

        Returns any answer below 500 but 401, 403 and 429. Raises ProviderUnavailable, ProviderRefused.
        """
        problem = ""
        for _ in range(READ_TRIES):
            try:
                answer = self._call(method, path, query, body, {})
            except (AnswerLost, CallNotSent) as error:
                problem = str(error)
                continue
            if answer.status == 429:
                raise ProviderThrottled(f"{method} {path}: the provider throttles its calls (429)")
            if answer.status in (401, 403):
                kind = RefusalKind.KEY if answer.status == 401 else RefusalKind.PERMISSION
                raise ProviderRefused(
                    kind,
                    f"{method} {path} was answered {answer.status}: {answer.text[:200]}. Store a valid key with "
                    "`baton fleet login`.",
                )
            if answer.status < 500:
                return answer
            problem = f"{method} {path} was answered {answer.status}"
        raise ProviderUnavailable(problem)

    def read_stream(self, path: str, *, query: Mapping[str, Any] | None = None) -> ProviderAnswer:
        """Read a stream of server-sent events until nothing comes for QUIET_S; return the events as `text`.

        Raises ProviderUnavailable, ProviderRefused.
        """
        self._require_sendable_key()
        url = f"{self._address}{path}" + (f"?{urlencode(query)}" if query else "")
        raw, until = b"", time.monotonic() + STREAM_S
        try:
            answer = self._pool.request(
                "GET",
                url,
                headers={**self._headers, "Accept": "text/event-stream"},
                redirect=False,
                preload_content=False,
                timeout=urllib3.Timeout(connect=self._quiet_s, read=self._quiet_s),
            )
            try:
                while len(raw) < MAX_STREAM_BYTES and time.monotonic() < until and (piece := answer.read1(65_536)):
                    raw += piece
            except urllib3.exceptions.ReadTimeoutError:
                # The provider has sent what it has; the stream stays open for lines to come.
                pass
            finally:
                answer.close()
        except urllib3.exceptions.HTTPError as error:
            # The query can hold a signature.
            place = f"GET {path.partition('?')[0]}"
            raise ProviderUnavailable(f"{place}: no usable answer ({type(error).__name__})") from error
        return ProviderAnswer(answer.status, None, self._readable(raw), dict(answer.headers))

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        secret: str = "",
    ) -> ProviderAnswer:
        """Send a mutating call exactly once; return any readable answer below 500. Raises AnswerLost, CallNotSent.

        secret: part of the body that the answer must not repeat.
        """
        answer = self._call(method, path, query, body, headers or {}, secret=secret)
        if answer.status >= 500:
            raise AnswerLost(f"{method} {path} was answered {answer.status}")
        return answer

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Any,
        headers: Mapping[str, str],
        *,
        secret: str = "",
    ) -> ProviderAnswer:
        self._require_sendable_key()
        url = f"{self._address}{path}" + (f"?{urlencode(query)}" if query else "")
        sent = None if body is None else json.dumps(body).encode()
        content = {} if body is None else {"Content-Type": "application/json"}
        place = f"{method} {path}"
        try:
            answer = self._pool.request(
                method,
                url,
                body=sent,
                headers={"Accept": "application/json", **self._headers, **content, **headers},
                redirect=False,
                preload_content=False,
            )
            try:
                raw = answer.read(MAX_ANSWER_BYTES + 1)
            finally:
                answer.release_conn()
        except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as error:
            raise CallNotSent(f"{place}: the provider cannot be reached") from error
        except urllib3.exceptions.HTTPError as error:
            raise AnswerLost(f"{place}: no usable answer ({type(error).__name__})") from error
        if len(raw) > MAX_ANSWER_BYTES:
            raise AnswerLost(f"{place}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
        text = self._readable(raw, secret)
        # Providers send errors as plain text or HTML as well; the status of such an error is clear without its body.
        parsed = None
        if text.strip():
            try:
                parsed = json.loads(text)
            except ValueError as error:
                if answer.status < 400:
                    raise AnswerLost(f"{place}: the answer {answer.status} is not JSON") from error
        return ProviderAnswer(answer.status, parsed, text, dict(answer.headers))

    def _require_sendable_key(self) -> None:
        """Refuse a key that HTTP cannot carry; the error of the HTTP library would repeat the key."""
        if not all(value.isascii() and value.isprintable() for value in self._headers.values()):
            raise ProviderRefused(RefusalKind.KEY, "the key has a line break or a character that no key has")

    def _readable(self, raw: bytes, secret: str = "") -> str:
        """Return an answer as text without the account's key and `secret`, which some providers repeat in errors."""
        text = raw.decode("utf-8", errors="replace")
        for one in self._secrets:
            text = text.replace(one, "[key]")
        # As text, in JSON, and in a body that a JSON answer quotes.
        forms = [secret]
        for _ in range(2):
            forms.append(json.dumps(forms[-1])[1:-1])
        for form in reversed(forms) if secret else ():
            text = text.replace(form, "[password]")
        return text
