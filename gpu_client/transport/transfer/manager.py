"""Transfer objects by presigned URL: parallel, streamed, verified, retried, cancelable at once.

A transfer needs one small buffer for each connection, and a budget for ranges in memory. Every failure raises; a
permanent failure of one object stops the rest of its batch first. An interrupted PUT starts again, therefore large
files are uploaded in parts (`upload_rounds`); an interrupted range or large download resumes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gpu_client.transport.errors import UrlExpired
from gpu_client.transport.limits.stats import TransferStats
from gpu_client.transport.limits.thread_batch import run_batch
from gpu_client.transport.limits.transfer_channel import Meter, Pause, Progress, TransferChannel
from gpu_client.transport.net.buffers import BufferPool
from gpu_client.transport.net.cancellation import CancelEvent, Flight, stop_if_set
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.net.files import safe_destination
from gpu_client.transport.net.s3_responses import url_life_s
from gpu_client.transport.retry import RetryPolicy
from gpu_client.transport.transfer.download import Downloads
from gpu_client.transport.transfer.download_parts import PARTS_FROM_BYTES, PartedFile
from gpu_client.transport.transfer.retry import TransferRetry
from gpu_client.transport.transfer.transfer_requests import Download, RangeDownload, Segment, Upload
from gpu_client.transport.transfer.upload import Uploads

__all__ = ["Download", "Progress", "RangeDownload", "Segment", "Transfer", "TransferSpeed", "Upload"]

DEFAULT_WORKERS = 4
RANGES_BYTES = 256 * 1024**2
_USED_WITHIN = 0.9
"""Share of a URL's lifetime after which no request uses the URL, because the store would refuse the request."""

TRANSFER_POLICY = RetryPolicy(max_tries=8, budget_s=300.0, first_delay_s=0.5, max_delay_s=20.0)
"""Retry policy of transfers. `budget_s` limits the pauses between tries, not the time of transfers."""


class TransferSpeed:
    """Recent bytes per second during transfers; None before the first measurement."""

    def __init__(
        self, uploads: TransferChannel, downloads: TransferChannel, max_upload_bytes_per_s: float | None
    ) -> None:
        self._uploads = uploads
        self._downloads = downloads
        self._max_upload_bytes_per_s = max_upload_bytes_per_s

    def upload_bytes_per_s(self) -> float | None:
        """Return the bytes per second of all uploads together; before a measurement the cap."""
        measured = self._uploads.speed.bytes_per_s()
        return self._max_upload_bytes_per_s if measured is None else measured

    def download_bytes_per_s(self) -> float | None:
        """Return the bytes per second of all downloads together."""
        return self._downloads.speed.bytes_per_s()


class Transfer:
    """Manager of uploads and downloads. Thread-safe; `pause`, `draw` and `clock` are for tests.

    Each direction uses at most `workers` connections, and fewer if more do not raise the speed. Ranges use up to
    `memory_bytes`. All methods raise TransferError and its kinds, DiskFull, Unreachable (after all retries),
    TransferCanceled.
    """

    def __init__(
        self,
        *,
        workers: int = DEFAULT_WORKERS,
        policy: RetryPolicy = TRANSFER_POLICY,
        connections: Connections | None = None,
        memory_bytes: int = RANGES_BYTES,
        max_upload_bytes_per_s: float | None = None,
        max_download_bytes_per_s: float | None = None,
        pause: Pause = lambda cancel, delay_s: cancel.wait(delay_s),
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}, but must be at least 1")
        self.stats = TransferStats()
        self._connections = connections or Connections(max_idle=workers)
        self._buffers = BufferPool(memory_bytes)
        self._sending = TransferChannel(workers, cap_bytes_per_s=max_upload_bytes_per_s, pause=pause, clock=clock)
        self._receiving = TransferChannel(workers, cap_bytes_per_s=max_download_bytes_per_s, pause=pause, clock=clock)
        self.speed = TransferSpeed(self._sending, self._receiving, max_upload_bytes_per_s)
        tries = TransferRetry(policy, self.stats, pause=pause, draw=draw)
        self._uploads = Uploads(self._connections, tries, self._sending, self.stats, clock=clock)
        self._downloads = Downloads(self._connections, tries, self._receiving, self.stats, self._buffers)
        self._pause = pause
        self._clock = clock
        self._lock = threading.Lock()
        self._unfinished: dict[Path, PartedFile] = {}

    def close(self) -> None:
        """Close idle connections and remove the parts of unfinished files."""
        self._connections.close()
        with self._lock:
            unfinished, self._unfinished = self._unfinished, {}
        for file in unfinished.values():
            file.discard()

    def count_upload(self, size_bytes: int) -> None:
        """Count bytes of an API call, for which uploads under a cap wait."""
        if self._sending.cap is not None:
            self._sending.cap.spend(size_bytes)

    def wait(self, delay_s: float, cancel: CancelEvent | None = None) -> None:
        """Pause for `delay_s` seconds before a retry. Raises TransferCanceled."""
        event = cancel if cancel is not None else threading.Event()
        self._pause(event, delay_s)
        stop_if_set(event)

    def upload(
        self,
        items: Sequence[Upload],
        *,
        cancel: CancelEvent | None = None,
        progress: Progress | None = None,
        stored: Callable[[Upload], object] | None = None,
    ) -> None:
        """PUT all items by fresh URLs. An existing object (412 to a create-only PUT) is a success.

        After UrlExpired the uploads in progress have finished; request URLs of the missing items. The method raises
        UrlExpired shortly before the expiry of an unused URL. Worker threads call `stored` with each item.
        """
        meter = Meter(progress)
        channel = self._sending
        now = self._clock()

        def put(item: Upload, flight: Flight) -> None:
            life_s = url_life_s(item.url)
            self._uploads.put(item, flight, meter, begin_by=None if life_s is None else now + _USED_WITHIN * life_s)
            if stored is not None:
                stored(item)

        run_batch(
            items,
            put,
            workers=channel.most,
            cancel=cancel,
            slot=channel.slot,
        )

    def download(
        self, items: Sequence[Download], *, cancel: CancelEvent | None = None, progress: Progress | None = None
    ) -> None:
        """GET all items. A file under its final name is complete and verified, also after an error.

        After UrlExpired the downloads in progress have finished; request URLs of the missing items. Several connections
        fetch the parts of an object with a known, large `size_bytes`.
        """
        meter = Meter(progress)
        files: list[PartedFile] = []
        with self._parted(files):
            pieces: list[_Piece] = []
            for item in items:
                if item.size_bytes is None or item.size_bytes < PARTS_FROM_BYTES:
                    pieces.append(partial(self._downloads.whole, item, meter=meter))
                else:
                    file = self._parted_file(item, item.size_bytes)
                    files.append(file)
                    pieces += [partial(self._downloads.part, file, part, meter=meter) for part in file.begin()]
            self._receive(pieces, cancel)

    def fetch_ranges(
        self, items: Sequence[RangeDownload], *, cancel: CancelEvent | None = None, progress: Progress | None = None
    ) -> None:
        """GET all ranges and deliver each range, in any order, several at a time.

        After UrlExpired the ranges in progress have been delivered; request URLs of the other ranges.
        """
        meter = Meter(progress)
        try:
            self._receive([partial(self._downloads.range, item, meter=meter) for item in items], cancel)
        finally:
            self._buffers.clear()

    def read(self, url: str, *, name: str, max_bytes: int, cancel: CancelEvent | None = None) -> bytes:
        """Return a small object's bytes. Raises ChecksumMismatch if the object has more than `max_bytes`."""
        found: list[bytes] = []

        def fetch(_: str, flight: Flight) -> None:
            found.append(self._downloads.read(url, name=name, max_bytes=max_bytes, flight=flight))

        run_batch([name], fetch, workers=1, cancel=cancel)
        return found[0]

    def _receive(self, pieces: Sequence[_Piece], cancel: CancelEvent | None) -> None:
        channel = self._receiving
        run_batch(pieces, lambda piece, flight: piece(flight), workers=channel.most, cancel=cancel, slot=channel.slot)

    @contextmanager
    def _parted(self, files: list[PartedFile]) -> Iterator[None]:
        """Close all files at the end: each file is complete, parked because of expired URLs, or removed."""
        expired = False
        try:
            yield
        except UrlExpired:
            expired = True
            raise
        finally:
            for file in files:
                if not expired or file.spoiled or file.complete:
                    file.discard()
                else:
                    file.park()
                    with self._lock:
                        self._unfinished[file.destination] = file

    def _parted_file(self, item: Download, size_bytes: int) -> PartedFile:
        destination = safe_destination(item.root, item.path)
        with self._lock:
            unfinished = self._unfinished.pop(destination, None)
        if unfinished is not None:
            if unfinished.resume(item):
                return unfinished
            unfinished.discard()
        return PartedFile(item, destination, size_bytes)


_Piece = Callable[[Flight], None]
"""Work of a thread within one connection slot."""
