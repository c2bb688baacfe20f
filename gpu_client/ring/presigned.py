"""Objects in memory by presigned URL, and the URLs: many are asked for at a time, ahead of their use."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPResponse
from typing import NamedTuple, TypeVar

from gpu_client.transport.errors import ChecksumMismatch, ObjectMissing, TransferError, UrlExpired
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
