"""Client of one bucket: addresses, signs and repeats requests, and classifies answers.

Credentials and the region come from the sources of the AWS tools: `AWS_ACCESS_KEY_ID`, profiles (`AWS_PROFILE`), a web
identity, or the role of the machine. `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL` names a store other than S3.
Fork-safe: connections and threads belong to one process.
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
_REFRESH_AFTER_S = 900.0
"""Maximum age of credentials, because profiles are edited and roles change (s)."""
_REFRESH_BEFORE_EXPIRY_S = 300.0
_RETRY_AFTER_S = 10.0
_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class BucketEndpoint:
    """Origin of a bucket, and the prefix of its paths."""

    origin: str
    """URL without a final slash."""
    path: str
    """Path prefix, ends with `/`; contains the bucket for path-style stores."""

    @property
    def host(self) -> str:
        """Host header, as signed and as http.client sends it: without the default port."""
        parts = urlsplit(self.origin)
        own = {"http": 80, "https": 443}[parts.scheme]
        name = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        return name if parts.port in (None, own) else f"{name}:{parts.port}"

    @classmethod
    def of_bucket(cls, bucket: str, region: str, environment: Mapping[str, str]) -> BucketEndpoint:
        """Choose the endpoint. Raises RingMismatch for an invalid endpoint URL."""
        own = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        if own:
            wrong = RingMismatch(
                f"the endpoint {own[:100]!r} is not the URL of a store",
                "Set AWS_ENDPOINT_URL_S3 like https://host:port",
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


def find_region(environment: Mapping[str, str]) -> str:
    """Find the region in the environment or the profile; else the default of AWS."""
    detail = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if detail:
        return detail
    name = environment.get("AWS_PROFILE") or "default"
    path = Path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
    profiles = configparser.RawConfigParser(strict=False)
    try:
        profiles.read(path, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise RingMismatch(f"{path} cannot be read ({error})", "Correct the file, or set AWS_REGION") from error
    for section in ("default",) if name == "default" else (f"profile {name}", name):
        if profiles.has_option(section, "region"):
            return profiles.get(section, "region").strip()
    return _DEFAULT_REGION


class RequestSigner:
    """Sign requests by AWS Signature Version 4. Thread-safe; a forked process needs a signer of its own."""

    def __init__(self, region: str, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix time for the signatures."""
        self.region = region
        self._clock = clock
        self._clock_offset_s = 0.0
        self._lock = threading.Lock()
        self._chain: Any = None
        self._provider: Any = None
        self._valid_until = 0.0

    def signed(self, method: str, target: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers with a signature. `headers` contain `Host`; `target` is the encoded path and query. The
        signature does not cover the body. Raises PermissionError without credentials.
        """
        request = http.HttpRequest(method, target, http.HttpHeaders(list(headers.items())))
        at = datetime.fromtimestamp(self._clock(), UTC) + timedelta(seconds=self._clock_offset_s)
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
        """Fetch new credentials at the next request, after a rejection."""
        with self._lock:
            self._provider = self._chain = None

    def set_time(self, store_at: datetime) -> None:
        """Sign by the store's clock from now on."""
        self._clock_offset_s = store_at.timestamp() - self._clock()

    def _credentials(self) -> Any:
        """Return a static provider, so that signing never waits for a thread."""
        with self._lock:
            now = time.monotonic()
            if self._provider is None or now >= self._valid_until:
                try:
                    found = self._fetch_credentials()
                except PermissionError:
                    if self._provider is None:
                        raise
                    # The old credentials may still be valid; the store rejects them otherwise.
                    self._valid_until = now + _RETRY_AFTER_S
                else:
                    self._provider = auth.AwsCredentialsProvider.new_static(
                        found.access_key_id, found.secret_access_key, found.session_token
                    )
                    left_s = _REFRESH_AFTER_S
                    if found.expiration is not None:
                        left_s = (found.expiration - datetime.now(UTC)).total_seconds() - _REFRESH_BEFORE_EXPIRY_S
                    self._valid_until = now + min(max(left_s, _RETRY_AFTER_S), _REFRESH_AFTER_S)
            return self._provider

    def _fetch_credentials(self) -> Any:
        try:
            if self._chain is None:
                # A forked process would wait for the parent's shared awscrt threads for ever, therefore own threads.
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
_WARN_FROM_TRY = 4
"""First try that is logged as WARNING; earlier ones are INFO."""
THREADS = 8
"""Number of concurrent reads of parts."""
_JOINED_BYTES = 256 * 1024
"""Smaller pieces are joined into one send."""
_MAX_ERROR_BYTES = 64 * 1024
_TRANSIENT = frozenset({"RequestTimeout", "SlowDown", "OperationAborted", "ConditionalRequestConflict"})
_EXPIRED_CREDENTIALS = frozenset({"ExpiredToken", "TokenRefreshRequired", "InvalidToken", "ExpiredTokenException"})
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})


@dataclass(frozen=True, kw_only=True)
class BucketRequest:
    """Request to the store. An empty `key` addresses the bucket."""

    method: str
    key: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[memoryview] = ()
    expected: frozenset[int] = frozenset()
    """Statuses of 400 and above that are answers, not errors."""
    receive: Callable[[HTTPResponse], Any] | None = None
    """Reads the body of a success."""


@dataclass(frozen=True)
class BucketReply:
    """Answer of the store."""

    status: int
    headers: Mapping[str, str]
    """Headers by lower-case name."""
    body: bytes
    received: Any
    """Result of `receive` for a success."""
    repeated: bool
    """True if an earlier try had no answer, and may have been executed."""

    @property
    def code(self) -> str:
        """Error code of the store."""
        return _xml_text(self.body, "Code")


class BucketClient:
    """Send requests to one bucket. `sent` counts requests by method, retries included."""

    def __init__(
        self,
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        policy: RetryPolicy = POLICY,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Prepare without a request. Raises RingMismatch for invalid settings."""
        self.name = name
        self._environment = os.environ if environment is None else environment
        self._policy, self._clock, self._pause = policy, clock, pause
        self._region = find_region(self._environment)
        self.sent: Counter[str] = Counter()
        self._inherited_signers: list[RequestSigner] = []
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._connections = Connections()
        # Rings are opened by place and often not closed, therefore the finalizer closes the connections.
        weakref.finalize(self, self._connections.close)
        self._signer = RequestSigner(self._region, clock=self._clock)
        self._endpoint = BucketEndpoint.of_bucket(self.name, self._region, self._environment)
        self._threads: ThreadPoolExecutor | None = None

    def part_threads(self) -> ThreadPoolExecutor:
        """Return the threads for parts of an object. Separate from the threads for objects, which wait for parts."""
        self._check_process()
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ring-s3-parts")
            return self._threads

    def close(self) -> None:
        """Release connections and threads of this process."""
        if self._process == os.getpid():
            if self._threads is not None:
                self._threads.shutdown(cancel_futures=True)
            self._threads = None
            self._connections.close()

    def send(self, request: BucketRequest) -> BucketReply:
        """Send until there is an answer.

        Raises ConnectionError after all tries, PermissionError, RingMismatch for a missing bucket, StoreFull, and
        OSError for any other refusal.
        """
        self._check_process()
        began_at = time.monotonic()
        tries = corrections = 0
        repeated = False
        while True:
            tries += 1
            try:
                reply = self._send_once(request, repeated)
                if reply.status < 300 or (reply.status in request.expected and reply.code != "NoSuchBucket"):
                    return reply
                if corrections < 3 and self._corrected(reply):
                    corrections += 1
                    continue
                failure = self._classify(request, reply)
            except BrokenConnection as error:
                if error.stale:
                    # Stores close idle connections. The next one is new or equally old: at most all of them fail.
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
            level = logging.INFO if tries < _WARN_FROM_TRY else logging.WARNING
            logger.log(level, "%s of %s: %s; again in %.1f s", request.method, request.key, failure.reason, delay_s)
            self._pause(delay_s)

    def _send_once(self, request: BucketRequest, repeated: bool) -> BucketReply:
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
                return BucketReply(response.status, headers, b"", request.receive(response), repeated)
            announced = response.length
            body = response.read() if response.status < 300 else response.read(_MAX_ERROR_BYTES)
            if announced is not None and len(body) < min(announced, _MAX_ERROR_BYTES) and request.method != "HEAD":
                raise BrokenConnection(f"cut short after {len(body)} of {announced} bytes")
            return BucketReply(response.status, headers, body, None, repeated)

    def _corrected(self, reply: BucketReply) -> bool:
        """Apply what the answer says about region, credentials or time. Returns True if a retry can succeed."""
        region = reply.headers.get("x-amz-bucket-region") or _xml_text(reply.body, "Region")
        if reply.status in (301, 307, 400) and region and region != self._signer.region:
            logger.info("the bucket %s is in %s", self.name, region)
            self._region = self._signer.region = region
            self._endpoint = BucketEndpoint.of_bucket(self.name, region, self._environment)
            return True
        if reply.code in _EXPIRED_CREDENTIALS:
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

    def _classify(self, request: BucketRequest, reply: BucketReply) -> Failure:
        """Return a Failure for a transient refusal; raise for others."""
        code, status = reply.code, reply.status
        detail = " ".join(f"{status} {code} {_xml_text(reply.body, 'Message')[:300]}".split())
        operation = f"the {request.method} of {request.key or 'its keys'} in the bucket {self.name}"
        if code in _FULL or status == 507:
            raise StoreFull(
                f"there is no space in the bucket {self.name} ({detail})",
                "Free space, or make a ring with a smaller cap",
            )
        if status in RETRIED_STATUSES or status == 409 or code in _TRANSIENT:
            # 409: another process changes the same key at the same moment.
            status = 503 if status not in RETRIED_STATUSES else status
            after_s = parse_retry_after(reply.headers.get("retry-after"), date=reply.headers.get("date"))
            return Failure(reason=detail, status=status, code=code, retry_after_s=after_s)
        if code == "NoSuchBucket":
            raise RingMismatch(f"there is no bucket {self.name}", "Make the bucket, or name the bucket of the ring")
        if status in (401, 403):
            raise PermissionError(f"{operation} was refused ({detail})")
        if status in (301, 307):
            raise RingMismatch(f"the bucket {self.name} is elsewhere ({detail})", "Set AWS_REGION")
        raise OSError(f"{operation} was refused ({detail})")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            # A signer waits for its threads when it ends, and they exist only in the parent, therefore keep it.
            self._inherited_signers.append(self._signer)
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


def _xml_text(body: bytes, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", body[:_MAX_ERROR_BYTES].decode("utf-8", "replace"))
    return found[1] if found else ""
