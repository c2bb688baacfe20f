"""Requests to one bucket: signed, tried again where that helps, and answers told apart.

Any process may use it at any time, also one that was forked: connections and threads are each process's own.
"""

from __future__ import annotations

import configparser
import logging
import os
import random
import re
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from awscrt import auth, http, io
from awscrt.exceptions import AwsCrtError

from gpu_client.ring.errors import RingMismatch, StoreFull
from gpu_client.transport.net.cancellation import Flight
from gpu_client.transport.net.connections import BrokenConnection, Connections, send_whole
from gpu_client.transport.retry import RETRIED_STATUSES, Failure, RetryPolicy, parse_retry_after, retry_delay_s

logger = logging.getLogger("baton.ring")

_CREDENTIALS_TIMEOUT_S = 30.0
_LOOKED_UP_AFTER_S = 900.0
"""Credentials are asked for again after so long, since profiles are edited and roles change."""
_BEFORE_THE_END_S = 300.0
_TRIED_AGAIN_AFTER_S = 10.0
_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class Endpoint:
    """One bucket's origin, and what paths begin with there."""

    origin: str
    """Without a slash at its end."""
    path: str
    """The bucket where it is named in the path, as other stores than AWS's want it; ends with `/`."""

    @property
    def host(self) -> str:
        """As it is signed, and as http.client sends it: without a port that is the scheme's own."""
        parts = urlsplit(self.origin)
        own = {"http": 80, "https": 443}[parts.scheme]
        name = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        return name if parts.port in (None, own) else f"{name}:{parts.port}"

    @classmethod
    def of_bucket(cls, bucket: str, region: str, environment: Mapping[str, str]) -> Endpoint:
        """Raises RingMismatch for an endpoint that is none."""
        own = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        if own:
            wrong = RingMismatch(
                f"the endpoint {own[:100]!r} is no URL of a store", "Set AWS_ENDPOINT_URL_S3 like https://host:port"
            )
            try:
                parts = urlsplit(own)
                _ = parts.port
            except ValueError:
                raise wrong from None
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise wrong
            return cls(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", f"{parts.path.rstrip('/')}/{bucket}/")
        suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        if "." in bucket:  # no certificate is good for it as a name of a host
            return cls(f"https://s3.{region}.{suffix}", f"/{bucket}/")
        return cls(f"https://{bucket}.s3.{region}.{suffix}", "/")


def region_of(environment: Mapping[str, str]) -> str:
    """As the environment or the profile says; where neither does, the one that AWS itself begins with."""
    said = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if said:
        return said
    name = environment.get("AWS_PROFILE") or "default"
    path = Path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
    profiles = configparser.RawConfigParser(strict=False)
    try:
        profiles.read(path, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise RingMismatch(f"{path} cannot be read ({error})", "Mend it, or set AWS_REGION") from error
    for section in ("default",) if name == "default" else (f"profile {name}", name):
        if profiles.has_option(section, "region"):
            return profiles.get(section, "region").strip()
    return _DEFAULT_REGION


class Signer:
    """Signs requests of one process. Threads may share it; a forked process needs its own."""

    def __init__(self, region: str, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix time, for the signatures."""
        self.region = region
        self._clock = clock
        self._ahead_s = 0.0
        self._lock = threading.Lock()
        self._chain: Any = None
        self._kept: Any = None
        self._good_until = 0.0

    def signed(self, method: str, target: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers with those that prove who asks. `headers` name the `Host`; `target`: path and query, encoded.

        The body is not part of it. Raises PermissionError without credentials.
        """
        request = http.HttpRequest(method, target, http.HttpHeaders(list(headers.items())))
        at = datetime.fromtimestamp(self._clock(), UTC) + timedelta(seconds=self._ahead_s)
        config = auth.AwsSigningConfig(
            credentials_provider=self._credentials(),
            region=self.region,
            service="s3",
            date=at,
            use_double_uri_encode=False,
            should_normalize_uri_path=False,
            signed_body_value=auth.AwsSignedBodyValue.UNSIGNED_PAYLOAD,
            signed_body_header_type=auth.AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
        )
        auth.aws_sign_request(request, config).result(_CREDENTIALS_TIMEOUT_S)
        return dict(request.headers)

    def forget_credentials(self) -> None:
        """The store does not take them any more: look them up again."""
        with self._lock:
            self._kept = self._chain = None

    def set_time(self, store_at: datetime) -> None:
        """Sign by the store's clock, which differs from this machine's."""
        self._ahead_s = store_at.timestamp() - self._clock()

    def _credentials(self) -> Any:
        """Of the kind that needs no thread to be asked: signing waits for nothing."""
        with self._lock:
            now = time.monotonic()
            if self._kept is None or now >= self._good_until:
                try:
                    found = self._looked_up()
                except PermissionError:
                    if self._kept is None:
                        raise
                    # The last ones may be good for some time yet; the store tells when they are not.
                    self._good_until = now + _TRIED_AGAIN_AFTER_S
                else:
                    self._kept = auth.AwsCredentialsProvider.new_static(
                        found.access_key_id, found.secret_access_key, found.session_token
                    )
                    left_s = _LOOKED_UP_AFTER_S
                    if found.expiration is not None:
                        left_s = (found.expiration - datetime.now(UTC)).total_seconds() - _BEFORE_THE_END_S
                    self._good_until = now + min(max(left_s, _TRIED_AGAIN_AFTER_S), _LOOKED_UP_AFTER_S)
            return self._kept

    def _looked_up(self) -> Any:
        try:
            if self._chain is None:
                # Not awscrt's own shared threads: a forked process would wait for its parent's for ever.
                threads = io.EventLoopGroup(1)
                bootstrap = io.ClientBootstrap(threads, io.DefaultHostResolver(threads))
                self._chain = auth.AwsCredentialsProvider.new_default_chain(bootstrap)
            return self._chain.get_credentials().result(_CREDENTIALS_TIMEOUT_S)
        except (AwsCrtError, TimeoutError) as error:
            raise PermissionError(
                f"there are no AWS credentials ({getattr(error, 'name', 'timed out')}): set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role"
            ) from error


POLICY = RetryPolicy(max_tries=12, budget_s=90.0, first_delay_s=0.1, max_delay_s=10.0)
_TOLD_FROM_TRY = 4
"""So often is tried in silence, as it were."""
THREADS = 8
"""Parts of objects that are read at a time."""
_JOINED_BYTES = 256 * 1024
"""Smaller pieces are sent together."""
_MAX_ERROR_BYTES = 64 * 1024
_PASSING = frozenset({"RequestTimeout", "SlowDown", "OperationAborted", "ConditionalRequestConflict"})
_OLD_CREDENTIALS = frozenset({"ExpiredToken", "TokenRefreshRequired", "InvalidToken", "ExpiredTokenException"})
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. `key`: in the bucket; none is about the bucket itself."""

    method: str
    key: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[memoryview] = ()
    expected: frozenset[int] = frozenset()
    """Statuses of 400 and above that are answers."""
    receive: Callable[[HTTPResponse], Any] | None = None
    """Reads the body of a success."""


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """By names in small letters."""
    body: bytes
    received: Any
    """What `receive` made of a success."""
    repeated: bool
    """Whether an earlier try went unanswered: it may have been carried out."""

    @property
    def code(self) -> str:
        """Of a refusal."""
        return _said(self.body, "Code")


class Bucket:
    """Sends requests to one bucket. `sent` counts them by method, tries again among them."""

    def __init__(
        self,
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        policy: RetryPolicy = POLICY,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Nothing is asked of the store yet. Raises RingMismatch for settings that cannot be right."""
        self.name = name
        self._environment = os.environ if environment is None else environment
        self._policy, self._clock, self._pause = policy, clock, pause
        self._region = region_of(self._environment)
        self.sent: Counter[str] = Counter()
        self._of_parents: list[Signer] = []
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._connections = Connections()
        # Whoever opens rings by their places need not close them.
        weakref.finalize(self, self._connections.close)
        self._signer = Signer(self._region, clock=self._clock)
        self._endpoint = Endpoint.of_bucket(self.name, self._region, self._environment)
        self._threads: ThreadPoolExecutor | None = None

    def part_threads(self) -> ThreadPoolExecutor:
        """For parts of one object. Others than those for objects: who waits for a part must not keep it from being
        read."""
        self._check_process()
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ring-s3-parts")
            return self._threads

    def close(self) -> None:
        """End what this process holds."""
        if self._process == os.getpid():
            if self._threads is not None:
                self._threads.shutdown(cancel_futures=True)
            self._threads = None
            self._connections.close()

    def send(self, request: Request) -> Reply:
        """The answer, as soon as there is one.

        Raises ConnectionError after all tries, PermissionError, RingMismatch where there is no such bucket, StoreFull,
        and OSError for any other refusal.
        """
        self._check_process()
        began_at = time.monotonic()
        tries = mended = 0
        repeated = False
        while True:
            tries += 1
            try:
                reply = self._once(request, repeated)
                if reply.status < 300 or (reply.status in request.expected and reply.code != "NoSuchBucket"):
                    return reply
                if mended < 3 and self._mended(reply):
                    mended += 1
                    continue
                failure = self._judged(request, reply)
            except BrokenConnection as error:
                if error.stale:
                    # Stores close connections that were idle for long. The next one is new, or as old: at most all.
                    repeated, tries = True, tries - 1
                    continue
                failure = Failure(reason=str(error))
            repeated = repeated or failure.status is None or failure.status >= 500
            elapsed_s = time.monotonic() - began_at
            delay_s = retry_delay_s(
                self._policy,
                failure,
                tries=tries,
                elapsed_s=elapsed_s,
                draw=random.random(),  # noqa: S311
            )
            if delay_s is None:
                raise ConnectionError(
                    f"{self._endpoint.origin} did not do the {request.method} of {request.key or self.name} "
                    f"in {tries} tries ({failure.reason})"
                )
            level = logging.INFO if tries < _TOLD_FROM_TRY else logging.WARNING
            logger.log(level, "%s of %s: %s; again in %.1f s", request.method, request.key, failure.reason, delay_s)
            self._pause(delay_s)

    def _once(self, request: Request, repeated: bool) -> Reply:
        endpoint = self._endpoint
        path = endpoint.path + quote(request.key, safe="/-_.~")
        query = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(request.query.items()))
        target = f"{path}?{query}" if query else path
        size_bytes = sum(map(len, request.body))
        signed = self._signer.signed(request.method, target, {**request.headers, "host": endpoint.host})
        if request.method in ("PUT", "POST"):
            signed["Content-Length"] = str(size_bytes)
        self.sent[request.method] += 1
        send_body = _sender(request.body) if size_bytes else None
        with self._connections.exchange(
            request.method, endpoint.origin + target, signed, Flight(), send_body
        ) as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            if response.status < 300 and request.receive is not None:
                return Reply(response.status, headers, b"", request.receive(response), repeated)
            announced = response.length
            body = response.read() if response.status < 300 else response.read(_MAX_ERROR_BYTES)
            if announced is not None and len(body) < min(announced, _MAX_ERROR_BYTES) and request.method != "HEAD":
                raise BrokenConnection(f"cut short after {len(body)} of {announced} bytes")
            return Reply(response.status, headers, body, None, repeated)

    def _mended(self, reply: Reply) -> bool:
        """Whether the request can be right at the next try, with what the answer has told."""
        region = reply.headers.get("x-amz-bucket-region") or _said(reply.body, "Region")
        if reply.status in (301, 307, 400) and region and region != self._signer.region:
            logger.info("the bucket %s is in %s", self.name, region)
            self._region = self._signer.region = region
            self._endpoint = Endpoint.of_bucket(self.name, region, self._environment)
            return True
        if reply.code in _OLD_CREDENTIALS:
            self._signer.forget_credentials()
            return True
        if reply.code == "RequestTimeTooSkewed" and "date" in reply.headers:
            try:
                at = parsedate_to_datetime(reply.headers["date"])
            except ValueError:
                return False
            logger.warning("this machine's clock is wrong: requests are signed by the store's, %s", at)
            self._signer.set_time(at if at.tzinfo else at.replace(tzinfo=UTC))
            return True
        return False

    def _judged(self, request: Request, reply: Reply) -> Failure:
        """What a refusal means: a Failure if it may pass by itself."""
        code, status = reply.code, reply.status
        said = " ".join(f"{status} {code} {_said(reply.body, 'Message')[:300]}".split())
        what = f"the {request.method} of {request.key or 'its keys'} in the bucket {self.name}"
        if code in _FULL or status == 507:
            raise StoreFull(
                f"there is no room in the bucket {self.name} ({said})", "Free some, or lower the ring's cap"
            )
        if status in RETRIED_STATUSES or status == 409 or code in _PASSING:
            # 409: somebody else changes the same key at the same moment.
            status = 503 if status not in RETRIED_STATUSES else status
            after_s = parse_retry_after(reply.headers.get("retry-after"), date=reply.headers.get("date"))
            return Failure(reason=said, status=status, code=code, retry_after_s=after_s)
        if code == "NoSuchBucket":
            raise RingMismatch(f"there is no bucket {self.name}", "Make it, or name the one where the ring is")
        if status in (401, 403):
            raise PermissionError(f"{what} was refused ({said})")
        if status in (301, 307):
            raise RingMismatch(f"the bucket {self.name} is elsewhere ({said})", "Set AWS_REGION")
        raise OSError(f"{what} was refused ({said})")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            # Kept for ever: to end a signer is to wait for its threads, which are only there in the process before.
            self._of_parents.append(self._signer)
            self._begin()


def _sender(body: Sequence[memoryview]) -> Callable[[socket.socket], None]:
    def send(sock: socket.socket) -> None:
        joined = bytearray()
        for piece in body:
            if len(piece) < _JOINED_BYTES:
                joined += piece
            if len(joined) >= _JOINED_BYTES or (joined and len(piece) >= _JOINED_BYTES):
                send_whole(sock, memoryview(joined))
                joined = bytearray()
            if len(piece) >= _JOINED_BYTES:
                send_whole(sock, piece)
        if joined:
            send_whole(sock, memoryview(joined))

    return send


def _said(body: bytes, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", body[:_MAX_ERROR_BYTES].decode("utf-8", "replace"))
    return found[1] if found else ""
