"""Moving objects by presigned URL: parallel, streamed, verified, tried again, stopped at once when told to.

Memory in flight is `workers` times CHUNK_BYTES, whatever the size of the objects. Every failure is raised; when one
object fails for good, the rest of its batch is stopped first. An object is moved as a whole: one that breaks off starts
again (single PUTs cannot be continued).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import TypeVar

from gpu_client.transport.batch import run_batch
from gpu_client.transport.cancel import CancelEvent, Flight, stop_if_set
from gpu_client.transport.connections import BrokenConnection, Connections
from gpu_client.transport.digests import Digester, FileDigest
from gpu_client.transport.errors import ChecksumMismatch, Unreachable
from gpu_client.transport.files import CHUNK_BYTES, StagedFile, safe_destination, send_file
from gpu_client.transport.retry import Failure, RetryPolicy, retry_delay_s
from gpu_client.transport.stats import TransferStats
from gpu_client.transport.store_answers import MAX_ERROR_BYTES, RefusedRequest, judge_refusal

logger = logging.getLogger(__name__)

DEFAULT_WORKERS = 4
TRANSFER_POLICY = RetryPolicy(max_tries=8, budget_s=300.0, first_delay_s=0.5, max_delay_s=20.0)
"""Here `budget_s` bounds the time spent waiting between tries, not the time that bytes take to move."""

T = TypeVar("T")
Progress = Callable[[int], None]
"""Told how many more bytes have moved; a negative number when a transfer starts again. Called from worker threads."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One PUT. `headers` are signed: they are sent exactly as given. `name` stands for the object in messages."""

    name: str
    path: Path
    size_bytes: int
    url: str
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Download:
    """One GET to the file `path` below `root`. What is given of size and digests is verified before it appears.

    `fsync` can be left out where a crash of the machine loses the directory anyway.
    """

    name: str
    url: str
    root: Path
    path: str
    size_bytes: int | None = None
    blake3: str | None = None
    crc64nvme: str | None = None
    fsync: bool = True


class Transfer:
    """Uploads and downloads. Safe from several threads; `pause` and `draw` are for tests.

    Raises of all methods: TransferError and its kinds, DiskFull, Unreachable (after all retries), TransferCanceled.
    """

    def __init__(
        self,
        *,
        workers: int = DEFAULT_WORKERS,
        policy: RetryPolicy = TRANSFER_POLICY,
        connections: Connections | None = None,
        pause: Callable[[CancelEvent, float], object] = lambda cancel, delay_s: cancel.wait(delay_s),
        draw: Callable[[], float] = random.random,
    ) -> None:
        if workers < 1:
            raise ValueError("at least one worker is needed")
        self.stats = TransferStats()
        self._workers = workers
        self._policy = policy
        self._connections = connections or Connections(max_idle=workers)
        self._pause = pause
        self._draw = draw

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    def upload(
        self, items: Sequence[Upload], *, cancel: CancelEvent | None = None, progress: Progress | None = None
    ) -> None:
        """PUT all items. An object that is there already (412 to a create-only PUT) is a success.

        UrlExpired leaves the other uploads under way to finish; ask for URLs of what is still missing.
        """
        meter = _Meter(progress)
        run_batch(items, lambda item, flight: self._put(item, flight, meter), workers=self._workers, cancel=cancel)

    def download(
        self, items: Sequence[Download], *, cancel: CancelEvent | None = None, progress: Progress | None = None
    ) -> None:
        """GET all items. A file that exists under its name afterwards is complete and verified, also after an error.

        UrlExpired leaves the other downloads under way to finish; ask for URLs of what does not exist yet.
        """
        meter = _Meter(progress)
        run_batch(items, lambda item, flight: self._get(item, flight, meter), workers=self._workers, cancel=cancel)

    def read(self, url: str, *, name: str, max_bytes: int, cancel: CancelEvent | None = None) -> bytes:
        """A small object's bytes. ChecksumMismatch if it has more than `max_bytes`: it cannot be what it should be."""
        found: list[bytes] = []

        def fetch(_: str, flight: Flight) -> None:
            found.append(self._until_done(name, flight, lambda: self._read_once(url, name, max_bytes, flight)))

        run_batch([name], fetch, workers=1, cancel=cancel)
        return found[0]

    def _put(self, item: Upload, flight: Flight, meter: _Meter) -> None:
        stored = self._twice_if_altered(item.name, flight, lambda: self._put_once(item, flight, meter))
        if stored:
            self.stats.add(uploaded_objects=1, uploaded_bytes=item.size_bytes)
        else:
            self.stats.add(already_stored_objects=1)

    def _put_once(self, item: Upload, flight: Flight, meter: _Meter) -> bool:
        """True if stored, False if it was there."""
        headers = {name: value for name, value in item.headers.items() if name.lower() != "content-length"}
        headers["Content-Length"] = str(item.size_bytes)
        with self._attempt(meter) as moved:

            def send_body(write: Callable[[bytes], None]) -> None:
                def checked_write(piece: bytes) -> None:
                    stop_if_set(flight)
                    write(piece)
                    moved(len(piece))

                send_file(item.path, item.size_bytes, checked_write)

            with self._connections.exchange("PUT", item.url, headers, flight, send_body) as response:
                create_only = any(name.lower() == "if-none-match" for name in headers)
                stored = not (response.status == 412 and create_only)
                if stored:
                    _require_success(response, name=item.name, method="PUT", url=item.url)
                response.read(MAX_ERROR_BYTES)  # to its end, so that the connection can be used again
        return stored

    def _get(self, item: Download, flight: Flight, meter: _Meter) -> None:
        destination = safe_destination(item.root, item.path)
        size_bytes = self._twice_if_altered(item.name, flight, lambda: self._get_once(item, destination, flight, meter))
        self.stats.add(downloaded_objects=1, downloaded_bytes=size_bytes)

    def _get_once(self, item: Download, destination: Path, flight: Flight, meter: _Meter) -> int:
        with self._attempt(meter) as moved, self._connections.exchange("GET", item.url, {}, flight) as response:
            _require_success(response, name=item.name, method="GET", url=item.url)
            if item.size_bytes is not None and response.length not in (None, item.size_bytes):
                raise ChecksumMismatch(f"{item.name}: has {response.length} bytes instead of {item.size_bytes}")
            digester = Digester() if item.blake3 or item.crc64nvme else None
            with StagedFile(destination, fsync=item.fsync) as file:
                size_bytes = 0
                for piece in _pieces(response, flight):
                    size_bytes += len(piece)
                    if item.size_bytes is not None and size_bytes > item.size_bytes:
                        raise ChecksumMismatch(f"{item.name}: has more than {item.size_bytes} bytes")
                    file.write(piece)
                    if digester:
                        digester.update(piece)
                    moved(len(piece))
                if item.size_bytes is not None and size_bytes < item.size_bytes:
                    # without Content-Length the end of the connection is the only end there is
                    raise BrokenConnection(f"ended after {size_bytes} of {item.size_bytes} bytes")
                if digester:
                    _verify(item, digester.digest)
                stop_if_set(flight)
                file.commit()
        return size_bytes

    def _read_once(self, url: str, name: str, max_bytes: int, flight: Flight) -> bytes:
        with self._connections.exchange("GET", url, {}, flight) as response:
            _require_success(response, name=name, method="GET", url=url)
            data = bytearray()
            for piece in _pieces(response, flight):
                data += piece
                if len(data) > max_bytes:
                    raise ChecksumMismatch(f"{name}: has more than {max_bytes} bytes")
        self.stats.add(downloaded_objects=1, downloaded_bytes=len(data))
        return bytes(data)

    @contextmanager
    def _attempt(self, meter: _Meter) -> Iterator[Progress]:
        """Count the bytes of one try; if it fails, take them back from the progress and count them as wasted."""
        total_bytes = 0

        def moved(size_bytes: int) -> None:
            nonlocal total_bytes
            total_bytes += size_bytes
            meter.add(size_bytes)

        complete = False
        try:
            yield moved
            complete = True
        finally:
            if not complete:
                meter.add(-total_bytes)
                self.stats.add(wasted_bytes=total_bytes)

    def _twice_if_altered(self, name: str, flight: Flight, once: Callable[[], T]) -> T:
        """Bytes can be altered on the way: only a second mismatch means that they are wrong at their source."""
        try:
            return self._until_done(name, flight, once)
        except ChecksumMismatch as error:
            logger.warning("%s; moving it once more", error)
            self.stats.add(retries=1)
            return self._until_done(name, flight, once)

    def _until_done(self, name: str, flight: Flight, once: Callable[[], T]) -> T:
        tries, waited_s = 0, 0.0
        while True:
            stop_if_set(flight)
            tries += 1
            try:
                return once()
            except BrokenConnection as error:
                failure = Failure(reason=str(error))
            except _NotNow as error:
                failure = error.failure
            stop_if_set(flight)
            delay_s = retry_delay_s(self._policy, failure, tries=tries, elapsed_s=waited_s, draw=self._draw())
            if delay_s is None:
                raise Unreachable(f"{name}: not moved after {tries} tries (last: {failure.reason})")
            logger.info("%s: %s; trying again in %.1f s", name, failure.reason, delay_s)
            self.stats.add(retries=1)
            self._pause(flight, delay_s)
            waited_s += delay_s


class _NotNow(Exception):  # noqa: N818 - a normal outcome, tried again
    """The store asked to come back later."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.reason)


class _Meter:
    """Passes progress on from several threads, one at a time."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        if self._progress is not None and size_bytes:
            with self._lock:
                self._progress(size_bytes)


def _require_success(response: HTTPResponse, *, name: str, method: str, url: str) -> None:
    """Raise what the answer means unless it is a success (S3 says 200; look-alikes 201 or 204 to a PUT)."""
    if response.status in (200, 201, 204):
        return
    outcome = judge_refusal(
        RefusedRequest(
            name=name,
            method=method,
            url=url,
            status=response.status,
            body=response.read(MAX_ERROR_BYTES),
            retry_after=response.headers.get("Retry-After"),
            date=response.headers.get("Date"),
        )
    )
    if isinstance(outcome, Failure):
        raise _NotNow(outcome)
    raise outcome


def _pieces(response: HTTPResponse, flight: Flight) -> Iterator[memoryview]:
    """The body, piece by piece (valid until the next one). BrokenConnection if it is shorter than announced."""
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    announced = response.length
    received = 0
    while size := response.readinto(buffer):
        stop_if_set(flight)
        received += size
        yield view[:size]
    if announced is not None and received < announced:
        raise BrokenConnection(f"cut short after {received} of {announced} bytes")


def _verify(item: Download, found: FileDigest) -> None:
    if item.blake3 is not None and found.blake3 != item.blake3:
        raise ChecksumMismatch(f"{item.name}: BLAKE3 is {found.blake3} instead of {item.blake3}")
    if item.crc64nvme is not None and found.crc64nvme != item.crc64nvme:
        raise ChecksumMismatch(f"{item.name}: CRC-64/NVME is {found.crc64nvme} instead of {item.crc64nvme}")
