"""A ring that lies with Baton's control plane: records there, samples and manifests in its bucket by presigned URL.

No credential of the bucket is needed here, so that machines of strangers can generate. A put is one call of the API:
URLs are asked for many at a time, and what a writer looks at after a claim comes with the claim's answer. Only large
objects take a second call, for a URL that is good for nothing but their bytes.
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
from baton.contract.rings import (
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
from gpu_client.ring.store.object_prefetcher import Fetching
from gpu_client.ring.store.uri import Access
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
"""A URL that runs out sooner is not used any more: an upload takes time."""
MOST_KEPT = 4096
_NUMBERED = re.compile(r"(.*?)([0-9]+)")


class Url(NamedTuple):
    """A right to one request."""

    url: str
    headers: Mapping[str, str]
    good_until_s: float
    """By this process's clock."""


class Urls:
    """URLs at hand, by key. `ask` gets some more, for the key that is needed first. Threads may share it."""

    def __init__(
        self,
        ask: Callable[[Sequence[str]], Mapping[str, Url]],
        following: Callable[[str, int], Iterable[str]],
        *,
        most_ahead: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`following`: which keys are likely to be needed after one, at most so many."""
        self._ask, self._following, self._most_ahead, self._clock = ask, following, most_ahead, clock
        self._ahead = 4
        self._kept: OrderedDict[str, Url] = OrderedDict()
        self._failures: tuple[int, str] = (0, "")
        """Calls that were not answered, and why the last one was not."""
        self._process = 0
        self._own_locks()

    def of(self, key: str) -> Url:
        """One that is good for a while."""
        self._own_locks()
        found = self._good(key)
        if found is not None:
            return found
        failures_before, _ = self._failures
        with self._asking:
            # Whoever was here before has asked for what its neighbours need.
            found = self._good(key)
            if found is not None:
                return found
            failures, why = self._failures
            if failures > failures_before:  # meanwhile, after all tries: another call would have to wait as long
                raise OSError(errno.EIO, why)
            ahead, self._ahead = self._ahead, min(2 * self._ahead, self._most_ahead)
            wanted = [key, *(one for one in self._following(key, ahead) if self._good(one) is None)]
            try:
                made = self._ask(wanted)
            except OSError as error:
                self._failures = failures + 1, error.strerror or str(error)
                raise
            with self._lock:
                for one, url in made.items():
                    self._kept[one] = url
                    self._kept.move_to_end(one)
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return made[key]

    def forget(self, key: str) -> None:
        """It was used, or is refused."""
        self._own_locks()
        with self._lock:
            self._kept.pop(key, None)

    def _good(self, key: str) -> Url | None:
        with self._lock:
            found = self._kept.get(key)
        return found if found is not None and found.good_until_s - MARGIN_S > self._clock() else None

    def _own_locks(self) -> None:
        """A thread that held them when this process was forked is not here."""
        if self._process != os.getpid():
            self._lock, self._asking, self._process = threading.Lock(), threading.Lock(), os.getpid()


def numbered_after(key: str, count: int) -> list[str]:
    """The keys that a writer uses next: what they end with is counted up."""
    found = _NUMBERED.fullmatch(key)
    if found is None:
        return []
    width, number = len(found[2]), int(found[2])
    return [f"{found[1]}{number + one:0{width}d}" for one in range(1, count + 1) if len(str(number + one)) <= width]


class PresignedObjects:
    """PUT and GET of whole objects. What may pass is waited out. Raises OSError after all tries, UrlExpired."""

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

    def put(self, name: str, url: Url, pieces: Sequence[memoryview]) -> bool:
        """False if there is an object already."""
        size_bytes = sum(piece.nbytes for piece in pieces)
        signed = {header: value for header, value in url.headers.items() if header.lower() != "content-length"}
        headers = {**signed, "Content-Length": str(size_bytes)}

        def send_body(sock: socket.socket) -> None:
            for piece in pieces:
                send_whole(sock, piece)

        def once() -> bool:
            with self._connections.exchange("PUT", url.url, headers, Flight(), send_body) as response:
                stored = response.status != 412
                if stored:
                    require_success(response, name=name, method="PUT", url=url.url)
                read_to_end(response)
            return stored

        return self._done(name, once)

    def get(self, name: str, url: Url) -> memoryview | None:
        """The bytes, which are the caller's; None if there is no object."""

        def once() -> memoryview | None:
            with self._connections.exchange("GET", url.url, url.headers, Flight()) as response:
                require_success(response, name=name, method="GET", url=url.url)
                return memoryview(_body(response))

        try:
            return self._done(name, once)
        except ObjectMissing:
            return None

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    def _done(self, name: str, once: Callable[[], T]) -> T:
        tries, waited_s = 0, 0.0
        while True:
            tries += 1
            try:
                return once()
            except BrokenConnection as error:
                if error.stale:
                    tries -= 1
                    continue
                failure = Failure(reason=str(error))
            except RetryLater as error:
                failure = error.failure
            except (ObjectMissing, UrlExpired):
                raise
            except ChecksumMismatch as error:  # damaged on its way
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
"""Objects of so many bytes get a URL each, with their checksum in it: next to their way the call is nothing."""
_PUT_AHEAD, _GET_AHEAD = 64, 256
_BEGUN_AHEAD = MAX_URLS - 1 - _GET_AHEAD
"""Of what is begun together, those whose URLs come with the first one's."""
_ALONG_S = 0.5
"""What came with an answer is taken only right behind it."""


class _Line:
    """What this process has open. A forked one opens its own."""

    def __init__(self, access: Access, policy: RetryPolicy | None) -> None:
        self.process = os.getpid()
        try:
            self.http = HttpClient(access.url, access.key, policy=policy)
        except ValueError as error:
            raise RingMismatch(str(error), "Set BATON_API_URL and BATON_API_KEY to what they should be") from error
        self.calls = RingCalls(self.http)
        self.objects = PresignedObjects(policy=policy)

    def close(self) -> None:
        if self.process == os.getpid():
            self.http.close()
            self.objects.close()


class ApiStore:
    """One ring of a tenant, by name. Threads may share it, and processes that are forked."""

    def __init__(
        self,
        name: str,
        access: Access,
        *,
        policy: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`policy`: how often a call or a transfer is tried. Nothing is asked yet."""
        self.name = name
        self._access, self._policy, self._clock = access, policy, clock
        self._of: str | None = None
        self._line: _Line | None = None
        self._lock, self._process = threading.Lock(), os.getpid()
        self._along = threading.local()
        self._expected = self._begun = _Order(())
        self._fetching = Fetching("ring-api-objects")
        self._puts = Urls(self._ask_put, numbered_after, most_ahead=_PUT_AHEAD, clock=clock)
        self._gets = Urls(self._ask_get, self._read_after, most_ahead=_GET_AHEAD, clock=clock)

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """As in the protocol."""
        if not is_object(key):
            return self._written(key, b"".join(pieces), None, along=_looked_at_after(key)) is not None
        pieces = list(pieces)  # made once, where they are made on demand
        size_bytes = sum(piece.nbytes for piece in pieces)
        urls = self._puts if size_bytes < DECLARED_BYTES else self._declared(key, size_bytes, pieces)
        done = self._with_url(urls, key, lambda url: self._opened().objects.put(key, url, pieces))
        urls.forget(key)
        return done

    def read(self, key: str) -> memoryview | None:
        """As in the protocol."""
        if not is_object(key):
            found = self.record(key)
            return None if found is None else memoryview(bytearray(found.data))
        return self._fetching.read(key, self._read)

    def begin(self, keys: Sequence[str]) -> None:
        """As in the protocol. Their URLs come with one call."""
        self._begun = _Order(keys)
        self._fetching.begin(keys, self._read)

    def _read(self, key: str) -> memoryview | None:
        return self._with_url(self._gets, key, lambda url: self._opened().objects.get(key, url))

    def record(self, key: str) -> Versioned | None:
        """As in the protocol."""
        kept = getattr(self._along, "kept", None)
        self._along.kept = None
        if kept is not None and kept[0] == key and self._clock() - kept[2] < _ALONG_S:
            found: Versioned | None = kept[1]
            return found
        with self._said():
            answer = self._opened().calls.ring_records(self.name, RecordsRequest(of=self._of, read=[key]))
        return self._kept(answer).get(key)

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        """As in the protocol."""
        return self._written(key, data, seen)

    def keys(self, prefix: str) -> list[str]:
        """As in the protocol."""
        found: list[str] = []
        cursor: str | None = None
        while True:
            with self._said():
                query = RingKeysQuery(prefix=prefix, of=self._of, cursor=cursor)
                page = self._opened().calls.ring_keys(self.name, query)
            found += page.keys
            cursor = page.next_cursor
            if cursor is None:
                return found

    def delete(self, keys: Sequence[str]) -> None:
        """As in the protocol."""
        for first in range(0, len(keys), MAX_DELETED):
            with self._said():
                request = DeleteRequest(of=self._of, keys=list(keys[first : first + MAX_DELETED]))
                self._opened().calls.ring_delete(self.name, request)

    def tidy(self, older_than_s: float) -> int:
        """Nothing is there in part."""
        return 0

    def expect(self, keys: Sequence[str]) -> None:
        """These objects are going to be read: their URLs are asked for together."""
        self._expected = _Order(keys)

    def remove(self) -> int:
        """Remove the ring; return how many records and objects were in it. Raises RingMissing if there is no ring."""
        removed, begun = 0, False
        while True:
            with self._said():
                try:
                    answer = self._opened().calls.remove_ring(self.name)
                except NotFound as error:
                    if error.foreign or not (begun or error.after_retry):
                        raise
                    # By an earlier call whose answer was lost, or by somebody who removes it too.
                    answer = RemovalAnswer(removed=0, done=True)
            begun = True
            removed += answer.removed
            if answer.done:
                self._of = None
                return removed

    def close(self) -> None:
        """As in the protocol."""
        self._fetching.close()
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            line.close()

    def _opened(self) -> _Line:
        if self._process != os.getpid():  # a thread that held the lock when this process was forked is not here
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            if self._line is None or self._line.process != os.getpid():
                self._line = _Line(self._access, self._policy)
                # Rings are opened all over, and not closed: what nobody uses any more gives its connections back.
                weakref.finalize(self, self._line.close)
            return self._line

    def _written(self, key: str, data: bytes, seen: str | None, *, along: str = "") -> str | None:
        if len(data) > MAX_RECORD_BYTES:
            raise RingMismatch(
                f"{key} has {len(data)} bytes, and the control plane keeps records of up to {MAX_RECORD_BYTES}",
                "Keep the ring in a bucket or a directory, or pin fewer manifests",
            )
        if seen is not None and not re.fullmatch(VERSION_PATTERN, seen):
            return None
        version, of = secrets.token_hex(8), None if key == RING_SETTINGS else self._of
        with self._said():
            write = RecordWrite(key=key, data=base64.b64encode(data).decode(), version=version, seen=seen)
            # What is read along is as it was after the write, and before whatever this thread asks next.
            request = RecordsRequest(of=of, write=write, read=[along] if along else [])
            answer = self._opened().calls.ring_records(self.name, request)
        self._along.kept = (along, self._kept(answer).get(along), self._clock()) if along else None
        if not answer.written:
            return None
        if key == RING_SETTINGS:
            self._of = version
        return version

    def _kept(self, answer: RecordsAnswer) -> dict[str, Versioned]:
        found = {one.key: Versioned(base64.b64decode(one.data), one.version) for one in answer.records}
        if self._of is None and RING_SETTINGS in found:
            self._of = found[RING_SETTINGS].version
        return found

    def _with_url(self, urls: Urls, key: str, use: Callable[[Url], T]) -> T:
        try:
            return use(urls.of(key))
        except UrlExpired:
            urls.forget(key)
        try:
            return use(urls.of(key))
        except UrlExpired as error:
            raise OSError(errno.EACCES, str(error)) from error

    def _declared(self, key: str, size_bytes: int, pieces: Sequence[memoryview]) -> Urls:
        """Of one object, good for exactly these bytes."""
        checksum = 0
        for piece in pieces:
            checksum = checksums.crc64nvme(piece, checksum)
        crc64nvme = base64.b64encode(checksum.to_bytes(8, "big")).decode()
        declared = DeclaredObject(key=key, size_bytes=size_bytes, crc64nvme=crc64nvme)
        return Urls(lambda _: self._put_urls(declared=[declared]), lambda *_: [], most_ahead=0, clock=self._clock)

    def _ask_put(self, keys: Sequence[str]) -> Mapping[str, Url]:
        return self._put_urls(put=list(keys))

    def _put_urls(self, **wanted: Any) -> Mapping[str, Url]:
        asked_at = self._clock()
        with self._said():
            answer = self._opened().calls.ring_urls(self.name, UrlsRequest(of=self._of, **wanted))
        return {one.key: Url(one.url, one.headers, asked_at + answer.life_s) for one in answer.put}

    def _ask_get(self, keys: Sequence[str]) -> Mapping[str, Url]:
        asked_at = self._clock()
        with self._said():
            answer = self._opened().calls.ring_urls(self.name, UrlsRequest(of=self._of, get=list(keys)))
        return {one.key: Url(one.url, {}, asked_at + answer.life_s) for one in answer.get}

    def _read_after(self, key: str, count: int) -> Sequence[str]:
        if key.startswith(MANIFESTS):
            return numbered_after(key, min(count, _PUT_AHEAD))
        begun = self._begun.behind(key, _BEGUN_AHEAD)
        # Which of very many are read next is not known, and their URLs would not be kept.
        expected = self._expected.behind(key, count) if len(self._expected) <= MOST_KEPT else []
        return list(dict.fromkeys([*begun, *expected]))

    @contextmanager
    def _said(self) -> Iterator[None]:
        """What the control plane says, in the words of rings."""
        try:
            yield
        except NotFound as error:
            if error.foreign:  # a gateway that is being changed, say
                raise OSError(errno.EIO, str(error)) from error
            raise RingMissing(f"baton:{self.name} cannot be used: {error}", "Make it, or name another") from error
        except ApiError as error:
            if error.status >= 500 or error.foreign or error.status in (409, 429):
                raise OSError(errno.EIO, str(error)) from error
            raise RingMismatch(
                f"baton:{self.name} cannot be used: {error}", "See gpu_client/ring/README.md for what lets one in"
            ) from error
        except BatonError as error:
            raise OSError(errno.EIO, str(error)) from error
        except ValidationError as error:
            said = error.errors()[0]
            raise RingMismatch(
                f"baton:{self.name} cannot keep {said['input']!r:.80}: {said['msg']}",
                "Name writers, readers and groups with letters, digits and '-_.' alone",
            ) from error


class _Order:
    """In which keys are read, as far as is known: behind the last one comes the first."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = list(dict.fromkeys(keys))
        self._places = {key: place for place, key in enumerate(self._keys)}

    def __len__(self) -> int:
        return len(self._keys)

    def behind(self, key: str, count: int) -> Sequence[str]:
        """So many that come after one; none if that is not among them."""
        place = self._places.get(key)
        return [] if place is None else [*self._keys[place + 1 :], *self._keys[:place]][:count]


def _looked_at_after(key: str) -> str:
    """What a writer looks at when it has claimed: its own lease."""
    return f"{WRITERS}{key.removeprefix(INBOX).split('.')[0]}" if key.startswith(INBOX) else ""
