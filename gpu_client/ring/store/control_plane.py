"""A ring with the control plane: records by API calls, sample objects and manifests by presigned URL.

No bucket credential is needed, so machines of strangers can generate. A put is one API call: the store requests many
URLs at a time, and the answer to a claim carries the record that the writer reads next. Only large objects take a
second call, for a URL that is valid for exactly their bytes.
"""

from __future__ import annotations

import base64
import errno
import logging
import os
import random
import re
import secrets
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any, NamedTuple, TypeVar

from awscrt import checksums
from pydantic import ValidationError

from baton.contract.names import RING_SETTINGS
from baton.contract.objects.rings import (
    MAX_DELETED,
    MAX_RECORD_BYTES,
    MAX_URLS,
    VERSION_PATTERN,
    DeclaredObject,
    DeleteRequest,
    RecordsAnswer,
    RecordsRequest,
    RecordWrite,
    RemovalAnswer,
    RingKeysQuery,
    UrlsRequest,
    is_object,
)
from gpu_client.ring.errors import RingMismatch, RingMissing
from gpu_client.ring.format.records import INBOX, MANIFESTS, WRITERS, Versioned
from gpu_client.ring.store.object_prefetcher import ObjectPrefetcher
from gpu_client.ring.store.uri import ControlPlaneAccess
from gpu_client.transport.api.admin import RingCalls
from gpu_client.transport.api.http import HttpClient
from gpu_client.transport.errors import (
    ApiError,
    BatonError,
    ChecksumMismatch,
    NotFound,
    ObjectMissing,
    TransferError,
    UrlExpired,
)
from gpu_client.transport.net.cancellation import Flight
from gpu_client.transport.net.connections import BrokenConnection, Connections, send_whole
from gpu_client.transport.net.s3_responses import read_to_end, require_success
from gpu_client.transport.retry import Failure, RetryLater, RetryPolicy, retry_delay_s

logger = logging.getLogger("baton.ring")

T = TypeVar("T")

MARGIN_S = 120.0
"""Minimum remaining life of a URL that is used: an upload takes time (s)."""
MAX_CACHED = 4096
_NUMBERED = re.compile(r"(.*?)([0-9]+)")


class ObjectUrl(NamedTuple):
    """Permission for one request."""

    url: str
    headers: Mapping[str, str]
    valid_until_s: float
    """Expiry by this process's clock."""


class UrlCache:
    """URLs by key. `request` gets several, the needed key first. Thread-safe."""

    def __init__(
        self,
        request: Callable[[Sequence[str]], Mapping[str, ObjectUrl]],
        following: Callable[[str, int], Iterable[str]],
        *,
        most_ahead: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`following`: predicts the keys that are needed after a key, at most the given number."""
        self._request, self._following, self._most_ahead, self._clock = request, following, most_ahead, clock
        self._ahead = 4
        self._decode_answer: OrderedDict[str, ObjectUrl] = OrderedDict()
        self._failures: tuple[int, str] = (0, "")
        """Number of failed calls, and the reason of the last one."""
        self._process = 0
        self._renew_locks()

    def get(self, key: str) -> ObjectUrl:
        """Return a URL with sufficient remaining life."""
        self._renew_locks()
        found = self._find_valid(key)
        if found is not None:
            return found
        failures_before, _ = self._failures
        with self._asking:
            # Another thread may have requested the URLs of the neighbors meanwhile.
            found = self._find_valid(key)
            if found is not None:
                return found
            failures, why = self._failures
            if failures > failures_before:  # a concurrent call has failed after all tries, and this one would too
                raise OSError(errno.EIO, why)
            ahead, self._ahead = self._ahead, min(2 * self._ahead, self._most_ahead)
            wanted = [key, *(one for one in self._following(key, ahead) if self._find_valid(one) is None)]
            try:
                made = self._request(wanted)
            except OSError as error:
                self._failures = failures + 1, error.strerror or str(error)
                raise
            with self._lock:
                for one, url in made.items():
                    self._decode_answer[one] = url
                    self._decode_answer.move_to_end(one)
                while len(self._decode_answer) > MAX_CACHED:
                    self._decode_answer.popitem(last=False)
        return made[key]

    def forget(self, key: str) -> None:
        """Drop a used or rejected URL."""
        self._renew_locks()
        with self._lock:
            self._decode_answer.pop(key, None)

    def _find_valid(self, key: str) -> ObjectUrl | None:
        with self._lock:
            found = self._decode_answer.get(key)
        return found if found is not None and found.valid_until_s - MARGIN_S > self._clock() else None

    def _renew_locks(self) -> None:
        """Replace the locks after a fork: the thread that held them is not in this process."""
        if self._process != os.getpid():
            self._lock, self._asking, self._process = threading.Lock(), threading.Lock(), os.getpid()


def following_keys(key: str, count: int) -> list[str]:
    """Predict a writer's next keys by incrementing the number at the end."""
    found = _NUMBERED.fullmatch(key)
    if found is None:
        return []
    width, number = len(found[2]), int(found[2])
    return [f"{found[1]}{number + one:0{width}d}" for one in range(1, count + 1) if len(str(number + one)) <= width]


class PresignedObjects:
    """PUT and GET of whole objects, with retries. Raises OSError after all tries, and UrlExpired."""

    def __init__(
        self,
        *,
        policy: RetryPolicy | None = None,
        pause: Callable[[float], object] = time.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._connections = Connections()
        self._policy = policy or RetryPolicy()
        self._pause, self._draw = pause, draw

    def put(self, name: str, url: ObjectUrl, pieces: Sequence[memoryview]) -> bool:
        """Store an object. Returns False if it exists."""
        size_bytes = sum(piece.nbytes for piece in pieces)
        signed = {header: value for header, value in url.headers.items() if header.lower() != "content-length"}
        headers = {**signed, "Content-Length": str(size_bytes)}

        def send_body(sock: socket.socket) -> None:
            for piece in pieces:
                send_whole(sock, piece)

        def attempt() -> bool:
            with self._connections.exchange("PUT", url.url, headers, Flight(), send_body) as response:
                stored = response.status != 412
                if stored:
                    require_success(response, name=name, method="PUT", url=url.url)
                read_to_end(response)
            return stored

        return self._run_with_retries(name, attempt)

    def get(self, name: str, url: ObjectUrl) -> memoryview | None:
        """Read an object into memory of the caller; None if there is none."""

        def attempt() -> memoryview | None:
            with self._connections.exchange("GET", url.url, url.headers, Flight()) as response:
                require_success(response, name=name, method="GET", url=url.url)
                return memoryview(_body(response))

        try:
            return self._run_with_retries(name, attempt)
        except ObjectMissing:
            return None

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    def _run_with_retries(self, name: str, attempt: Callable[[], T]) -> T:
        tries, waited_s = 0, 0.0
        while True:
            tries += 1
            try:
                return attempt()
            except BrokenConnection as error:
                if error.stale:
                    tries -= 1
                    continue
                failure = Failure(reason=str(error))
            except RetryLater as error:
                failure = error.failure
            except (ObjectMissing, UrlExpired):
                raise
            except ChecksumMismatch as error:  # damaged in transit
                failure = Failure(reason=str(error))
            except TransferError as error:
                raise OSError(errno.EIO, str(error)) from error
            delay_s = retry_delay_s(self._policy, failure, tries=tries, elapsed_s=waited_s, draw=self._draw())
            if delay_s is None:
                raise OSError(errno.EIO, f"{name}: not moved after {tries} tries (last: {failure.reason})")
            logger.info("%s: %s; trying again in %.1f s", name, failure.reason, delay_s)
            self._pause(delay_s)
            waited_s += delay_s


def _body(response: HTTPResponse) -> bytearray:
    announced = response.length
    if announced is None:
        return bytearray(response.read())
    body = bytearray(announced)
    view, received = memoryview(body), 0
    while received < announced:
        got = response.readinto(view[received:])
        if not got:
            raise BrokenConnection(f"cut short after {received} of {announced} bytes")
        received += got
    response.read()
    return body


DECLARED_BYTES = 1024 * 1024
"""Objects from this size on get a URL each with their checksum; the extra call is short next to the upload."""
_PUT_AHEAD, _GET_AHEAD = 64, 256
_PREFETCH_AHEAD = MAX_URLS - 1 - _GET_AHEAD
"""Number of prefetched keys whose URLs come with the first one."""
_PREFETCHED_S = 0.5
"""Maximum age of a record that came with an answer (s)."""


class _Connection:
    """Open connections of this process. A forked process opens its own."""

    def __init__(self, access: ControlPlaneAccess, policy: RetryPolicy | None) -> None:
        self.process = os.getpid()
        try:
            self.http = HttpClient(access.url, access.key, policy=policy)
        except ValueError as error:
            raise RingMismatch(str(error), "Correct BATON_API_URL and BATON_API_KEY") from error
        self.calls = RingCalls(self.http)
        self.objects = PresignedObjects(policy=policy)

    def close(self) -> None:
        if self.process == os.getpid():
            self.http.close()
            self.objects.close()


class ControlPlaneStore:
    """Store of one ring of a tenant, by name. Thread-safe and fork-safe."""

    def __init__(
        self,
        name: str,
        access: ControlPlaneAccess,
        *,
        policy: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`policy`: retries of calls and transfers. Sends no request."""
        self.name = name
        self._access, self._policy, self._clock = access, policy, clock
        self._ring_version: str | None = None
        self._connection: _Connection | None = None
        self._lock, self._process = threading.Lock(), os.getpid()
        self._prefetched = threading.local()
        self._expected = self._prefetching = _KeyOrder(())
        self._prefetcher = ObjectPrefetcher("ring-api-objects")
        self._puts = UrlCache(self._request_put_urls, following_keys, most_ahead=_PUT_AHEAD, clock=clock)
        self._gets = UrlCache(self._request_get_urls, self._keys_read_after, most_ahead=_GET_AHEAD, clock=clock)

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """Implement the protocol."""
        if not is_object(key):
            return self._write(key, b"".join(pieces), None, prefetch=_lease_key_of_claim(key)) is not None
        pieces = list(pieces)  # encode once: the pieces may be made on demand
        size_bytes = sum(piece.nbytes for piece in pieces)
        urls = self._puts if size_bytes < DECLARED_BYTES else self._declared(key, size_bytes, pieces)
        done = self._with_url(urls, key, lambda url: self._open_connection().objects.put(key, url, pieces))
        urls.forget(key)
        return done

    def read(self, key: str) -> memoryview | None:
        """Implement the protocol."""
        if not is_object(key):
            found = self.record(key)
            return None if found is None else memoryview(bytearray(found.data))
        return self._prefetcher.read(key, self._read)

    def prefetch(self, keys: Sequence[str]) -> None:
        """Implement the protocol. One call gets all URLs."""
        self._prefetching = _KeyOrder(keys)
        self._prefetcher.prefetch(keys, self._read)

    def _read(self, key: str) -> memoryview | None:
        return self._with_url(self._gets, key, lambda url: self._open_connection().objects.get(key, url))

    def record(self, key: str) -> Versioned | None:
        """Implement the protocol."""
        prefetched = getattr(self._prefetched, "record", None)
        self._prefetched.record = None
        if prefetched is not None and prefetched[0] == key and self._clock() - prefetched[2] < _PREFETCHED_S:
            found: Versioned | None = prefetched[1]
            return found
        with self._translate_errors():
            answer = self._open_connection().calls.ring_records(
                self.name, RecordsRequest(of=self._ring_version, read=[key])
            )
        return self._decode_answer(answer).get(key)

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        """Implement the protocol."""
        return self._write(key, data, seen)

    def keys(self, prefix: str) -> list[str]:
        """Implement the protocol."""
        found: list[str] = []
        cursor: str | None = None
        while True:
            with self._translate_errors():
                query = RingKeysQuery(prefix=prefix, of=self._ring_version, cursor=cursor)
                page = self._open_connection().calls.ring_keys(self.name, query)
            found += page.keys
            cursor = page.next_cursor
            if cursor is None:
                return found

    def delete(self, keys: Sequence[str]) -> None:
        """Implement the protocol."""
        for first in range(0, len(keys), MAX_DELETED):
            with self._translate_errors():
                request = DeleteRequest(of=self._ring_version, keys=list(keys[first : first + MAX_DELETED]))
                self._open_connection().calls.ring_delete(self.name, request)

    def tidy(self, older_than_s: float) -> int:
        """Do nothing: no write is ever incomplete."""
        return 0

    def expect(self, keys: Sequence[str]) -> None:
        """Implement the protocol: request the URLs of the objects together."""
        self._expected = _KeyOrder(keys)

    def remove(self) -> int:
        """Remove the ring. Returns the number of records and objects. Raises RingMissing if there is no ring."""
        removed, prefetched = 0, False
        while True:
            with self._translate_errors():
                try:
                    answer = self._open_connection().calls.remove_ring(self.name)
                except NotFound as error:
                    if error.foreign or not (prefetched or error.after_retry):
                        raise
                    # Removed by an earlier call whose answer was lost, or by a concurrent removal.
                    answer = RemovalAnswer(removed=0, done=True)
            prefetched = True
            removed += answer.removed
            if answer.done:
                self._ring_version = None
                return removed

    def close(self) -> None:
        """Implement the protocol."""
        self._prefetcher.close()
        with self._lock:
            line, self._connection = self._connection, None
        if line is not None:
            line.close()

    def _open_connection(self) -> _Connection:
        if self._process != os.getpid():  # the thread that held the lock is in the parent
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            if self._connection is None or self._connection.process != os.getpid():
                self._connection = _Connection(self._access, self._policy)
                # Rings are opened by place and often not closed, therefore the finalizer closes the connections.
                weakref.finalize(self, self._connection.close)
            return self._connection

    def _write(self, key: str, data: bytes, seen: str | None, *, prefetch: str = "") -> str | None:
        if len(data) > MAX_RECORD_BYTES:
            raise RingMismatch(
                f"{key} has {len(data)} bytes, and the control plane keeps records of up to {MAX_RECORD_BYTES}",
                "Keep the ring in a bucket or a directory, or pin fewer manifests",
            )
        if seen is not None and not re.fullmatch(VERSION_PATTERN, seen):
            return None
        version, of = secrets.token_hex(8), None if key == RING_SETTINGS else self._ring_version
        with self._translate_errors():
            write = RecordWrite(key=key, data=base64.b64encode(data).decode(), version=version, seen=seen)
            # The prefetched record is as of after the write and before this thread's next request.
            request = RecordsRequest(of=of, write=write, read=[prefetch] if prefetch else [])
            answer = self._open_connection().calls.ring_records(self.name, request)
        self._prefetched.record = (
            (prefetch, self._decode_answer(answer).get(prefetch), self._clock()) if prefetch else None
        )
        if not answer.written:
            return None
        if key == RING_SETTINGS:
            self._ring_version = version
        return version

    def _decode_answer(self, answer: RecordsAnswer) -> dict[str, Versioned]:
        found = {one.key: Versioned(base64.b64decode(one.data), one.version) for one in answer.records}
        if self._ring_version is None and RING_SETTINGS in found:
            self._ring_version = found[RING_SETTINGS].version
        return found

    def _with_url(self, urls: UrlCache, key: str, use: Callable[[ObjectUrl], T]) -> T:
        try:
            return use(urls.get(key))
        except UrlExpired:
            urls.forget(key)
        try:
            return use(urls.get(key))
        except UrlExpired as error:
            raise OSError(errno.EACCES, str(error)) from error

    def _declared(self, key: str, size_bytes: int, pieces: Sequence[memoryview]) -> UrlCache:
        """Make the cache for one object, whose URL is valid for exactly these bytes."""
        checksum = 0
        for piece in pieces:
            checksum = checksums.crc64nvme(piece, checksum)
        crc64nvme = base64.b64encode(checksum.to_bytes(8, "big")).decode()
        declared = DeclaredObject(key=key, size_bytes=size_bytes, crc64nvme=crc64nvme)
        return UrlCache(lambda _: self._put_urls(declared=[declared]), lambda *_: [], most_ahead=0, clock=self._clock)

    def _request_put_urls(self, keys: Sequence[str]) -> Mapping[str, ObjectUrl]:
        return self._put_urls(put=list(keys))

    def _put_urls(self, **wanted: Any) -> Mapping[str, ObjectUrl]:
        asked_at = self._clock()
        with self._translate_errors():
            answer = self._open_connection().calls.ring_urls(self.name, UrlsRequest(of=self._ring_version, **wanted))
        return {one.key: ObjectUrl(one.url, one.headers, asked_at + answer.life_s) for one in answer.put}

    def _request_get_urls(self, keys: Sequence[str]) -> Mapping[str, ObjectUrl]:
        asked_at = self._clock()
        with self._translate_errors():
            answer = self._open_connection().calls.ring_urls(
                self.name, UrlsRequest(of=self._ring_version, get=list(keys))
            )
        return {one.key: ObjectUrl(one.url, {}, asked_at + answer.life_s) for one in answer.get}

    def _keys_read_after(self, key: str, count: int) -> Sequence[str]:
        if key.startswith(MANIFESTS):
            return following_keys(key, min(count, _PUT_AHEAD))
        prefetched = self._prefetching.keys_after(key, _PREFETCH_AHEAD)
        # The read order of very many objects is unknown, and the cache would not keep their URLs.
        expected = self._expected.keys_after(key, count) if len(self._expected) <= MAX_CACHED else []
        return list(dict.fromkeys([*prefetched, *expected]))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate errors of the control plane to errors of a ring."""
        try:
            yield
        except NotFound as error:
            if error.foreign:  # for example a gateway during a deployment
                raise OSError(errno.EIO, str(error)) from error
            raise RingMissing(f"baton:{self.name} cannot be used: {error}", "Make the ring, or name another") from error
        except ApiError as error:
            if error.status >= 500 or error.foreign or error.status in (409, 429):
                raise OSError(errno.EIO, str(error)) from error
            raise RingMismatch(
                f"baton:{self.name} cannot be used: {error}",
                "See Places in docs/ring.md for the tokens and keys that open a ring",
            ) from error
        except BatonError as error:
            raise OSError(errno.EIO, str(error)) from error
        except ValidationError as error:
            fault = error.errors()[0]
            raise RingMismatch(
                f"baton:{self.name} cannot keep {fault['input']!r:.80}: {fault['msg']}",
                "Name writers, readers and groups with letters, digits and '-_.' alone",
            ) from error


class _KeyOrder:
    """Expected order of reads; the first key follows the last one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = list(dict.fromkeys(keys))
        self._places = {key: place for place, key in enumerate(self._keys)}

    def __len__(self) -> int:
        return len(self._keys)

    def keys_after(self, key: str, count: int) -> Sequence[str]:
        """Return the next `count` keys after a key; none for an unknown key."""
        place = self._places.get(key)
        return [] if place is None else [*self._keys[place + 1 :], *self._keys[:place]][:count]


def _lease_key_of_claim(key: str) -> str:
    """Key of the record that a writer reads after its claim: its own lease."""
    return f"{WRITERS}{key.removeprefix(INBOX).split('.')[0]}" if key.startswith(INBOX) else ""
