"""GET by presigned URL: whole objects to files, large objects in parts, ranges to memory."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_client.transport.errors import ChecksumMismatch, FalseDigest
from gpu_client.transport.limits.bandwidth import Traffic
from gpu_client.transport.limits.stats import TransferStats
from gpu_client.transport.limits.transfer_channel import Meter, TransferChannel
from gpu_client.transport.net.buffers import BufferPool
from gpu_client.transport.net.cancellation import Flight, stop_if_set
from gpu_client.transport.net.connections import BrokenConnection, Connections
from gpu_client.transport.net.digests import Digester, FileDigest
from gpu_client.transport.net.files import CHUNK_BYTES, StagedFile, safe_destination
from gpu_client.transport.net.s3_responses import begins_at, pieces, range_headers, require_end, require_success, skip
from gpu_client.transport.transfer.download_parts import FilePart, PartedFile
from gpu_client.transport.transfer.retry import TransferRetry
from gpu_client.transport.transfer.transfer_requests import Download, RangeDownload

logger = logging.getLogger(__name__)

_TRAFFIC: Traffic = "data"

MAX_READ_BYTES = 4 * 1024 * 1024
READ_S = 0.05
"""Target duration of one read of a range in seconds; longer reads delay the progress, shorter reads cost calls."""


class Downloads:
    """Downloader of one object, part or range at a time, in the calling thread."""

    def __init__(
        self,
        connections: Connections,
        tries: TransferRetry,
        channel: TransferChannel,
        stats: TransferStats,
        buffers: BufferPool,
    ) -> None:
        self._connections = connections
        self._tries = tries
        self._channel = channel
        self._stats = stats
        self._buffers = buffers

    def whole(self, item: Download, flight: Flight, meter: Meter) -> None:
        """Fetch a whole object by one connection, and verify the bytes on arrival."""
        destination = safe_destination(item.root, item.path)
        size_bytes = self._tries.twice_if_altered(
            item.name, flight, self._channel, lambda: self._whole_once(item, destination, flight, meter)
        )
        self._stats.add(downloaded_objects=1, downloaded_bytes=size_bytes)

    def _whole_once(self, item: Download, destination: Path, flight: Flight, meter: Meter) -> int:
        with (
            self._channel.attempt(flight, meter, self._stats, _TRAFFIC) as flow,
            self._connections.exchange("GET", item.url, {}, flight) as response,
        ):
            require_success(response, name=item.name, method="GET", url=item.url)
            if item.size_bytes is not None and response.length not in (None, item.size_bytes):
                raise ChecksumMismatch(f"{item.name}: has {response.length} bytes instead of {item.size_bytes}")
            digester = Digester() if item.blake3 or item.crc64nvme else None
            with StagedFile(destination, fsync=item.fsync) as file:
                size_bytes = 0
                for piece in pieces(response, flow):
                    size_bytes += len(piece)
                    if item.size_bytes is not None and size_bytes > item.size_bytes:
                        raise ChecksumMismatch(f"{item.name}: has more than {item.size_bytes} bytes")
                    file.write(piece)
                    if digester:
                        digester.update(piece)
                if item.size_bytes is not None and size_bytes < item.size_bytes:
                    # A body without Content-Length ends with its connection, therefore a short body is a broken
                    # connection.
                    raise BrokenConnection(f"ended after {size_bytes} of {item.size_bytes} bytes")
                if digester:
                    _verify(item, digester.digest)
                stop_if_set(flight)
                file.commit()
        return size_bytes

    def part(self, file: PartedFile, part: FilePart, flight: Flight, meter: Meter) -> None:
        """Fetch one part of a file. The last part to arrive verifies and completes the file."""
        if file.spoiled is None and part.reached < part.end:
            file.make()
            try:
                self._tries.until_done(
                    file.item.name, flight, self._channel, lambda: self._part_once(file, part, flight, meter)
                )
            except ChecksumMismatch as error:
                file.spoiled = error
        if file.finish(part):
            self._complete(file, flight, meter)

    def _part_once(self, file: PartedFile, part: FilePart, flight: Flight, meter: Meter) -> None:
        item = file.item
        headers = range_headers(part.reached, part.end, file.size_bytes)
        with (
            self._channel.attempt(flight, meter, self._stats, _TRAFFIC) as flow,
            self._connections.exchange("GET", item.url, headers, flight) as response,
        ):
            begin = begins_at(
                response,
                name=item.name,
                url=item.url,
                offset=part.reached,
                end=part.end,
                object_bytes=file.size_bytes,
            )
            if begin != part.reached:
                raise ChecksumMismatch(f"{item.name}: the store ignores the Range header of a GET")
            file.pin(response.headers.get("ETag"))
            for piece in pieces(response, flow):
                if len(piece) > part.end - part.reached:
                    raise ChecksumMismatch(f"{item.name}: the store sends more bytes than were asked for")
                file.write(part, piece)
                flow.mark_kept()
            if part.reached < part.end:
                raise BrokenConnection(f"ended {part.end - part.reached} bytes too early")

    def _complete(self, file: PartedFile, flight: Flight, meter: Meter) -> None:
        item = file.item
        try:
            if file.spoiled is not None:
                raise file.spoiled
            if item.blake3 or item.crc64nvme:
                _verify(item, file.digest(flight))
            stop_if_set(flight)
        except FalseDigest:
            file.discard()
            raise
        except ChecksumMismatch as error:
            logger.warning("%s; fetching it once more, as a whole", error)
            arrived_bytes = sum(part.reached - part.offset for part in file.parts)
            meter.add(-arrived_bytes)
            self._stats.add(retries=1, wasted_bytes=arrived_bytes)
            file.discard()
            destination = safe_destination(item.root, item.path)
            size_bytes = self._tries.until_done(
                item.name, flight, self._channel, lambda: self._whole_once(item, destination, flight, meter)
            )
        else:
            file.commit()
            size_bytes = file.size_bytes
        self._stats.add(downloaded_objects=1, downloaded_bytes=size_bytes)

    def range(self, item: RangeDownload, flight: Flight, meter: Meter) -> None:
        """Fetch a range and pass it to `item.deliver`."""
        with self._buffers.buffer(min(item.size_bytes, item.piece_bytes or item.size_bytes), flight) as view:
            arrived = _RangeProgress()

            def once() -> None:
                try:
                    if not arrived.size_bytes:
                        item.begin()
                    self._range_once(item, view, arrived, flight, meter)
                    item.deliver(view[: arrived.waiting_bytes])
                except ChecksumMismatch:
                    meter.add(-arrived.size_bytes)
                    self._stats.add(wasted_bytes=arrived.size_bytes)
                    arrived.size_bytes = arrived.waiting_bytes = 0
                    raise

            self._tries.twice_if_altered(item.name, flight, self._channel, once)
        self._stats.add(downloaded_ranges=1, downloaded_bytes=item.size_bytes)

    def _range_once(
        self, item: RangeDownload, view: memoryview, arrived: _RangeProgress, flight: Flight, meter: Meter
    ) -> None:
        """Fetch the missing bytes. The last piece stays in `view`, for a delivery without a connection."""
        offset, end = item.offset + arrived.size_bytes, item.offset + item.size_bytes
        headers = {**item.headers, **range_headers(offset, end, item.object_bytes)}
        with (
            self._channel.attempt(flight, meter, self._stats, _TRAFFIC) as flow,
            self._connections.exchange("GET", item.url, headers, flight) as response,
        ):
            begin = begins_at(
                response, name=item.name, url=item.url, offset=offset, end=end, object_bytes=item.object_bytes
            )
            skip(response, offset - begin, flow)
            step_bytes = CHUNK_BYTES
            while left := item.size_bytes - arrived.size_bytes:
                if arrived.waiting_bytes == len(view):
                    item.deliver(view)
                    arrived.waiting_bytes = 0
                wanted_bytes = flow.allow(min(left, len(view) - arrived.waiting_bytes, step_bytes))
                began = time.monotonic()
                got = response.readinto(view[arrived.waiting_bytes :][:wanted_bytes])
                if not got:
                    raise BrokenConnection(f"ended {left} bytes too early")
                step_bytes = CHUNK_BYTES if time.monotonic() - began > READ_S else MAX_READ_BYTES
                flow.moved(got)
                flow.mark_kept()
                arrived.size_bytes += got
                arrived.waiting_bytes += got
            if end == item.object_bytes or begin == offset:
                require_end(response, name=item.name)

    def read(self, url: str, *, name: str, max_bytes: int, flight: Flight) -> bytes:
        """Return a small object's bytes. Raises ChecksumMismatch if the object has more than `max_bytes`."""
        return self._tries.until_done(
            name, flight, self._channel, lambda: self._read_once(url, name, max_bytes, flight)
        )

    def _read_once(self, url: str, name: str, max_bytes: int, flight: Flight) -> bytes:
        with (
            self._channel.attempt(flight, Meter(None), self._stats, _TRAFFIC) as flow,
            self._connections.exchange("GET", url, {}, flight) as response,
        ):
            require_success(response, name=name, method="GET", url=url)
            data = bytearray()
            for piece in pieces(response, flow):
                data += piece
                if len(data) > max_bytes:
                    raise ChecksumMismatch(f"{name}: has more than {max_bytes} bytes")
        self._stats.add(downloaded_objects=1, downloaded_bytes=len(data))
        return bytes(data)


@dataclass
class _RangeProgress:
    """Progress of a range over all its tries: arrived bytes, and arrived but undelivered bytes."""

    size_bytes: int = 0
    waiting_bytes: int = 0


def _verify(item: Download, found: FileDigest) -> None:
    if item.crc64nvme is not None and found.crc64nvme != item.crc64nvme:
        raise ChecksumMismatch(f"{item.name}: CRC-64/NVME is {found.crc64nvme} instead of {item.crc64nvme}")
    if item.blake3 is not None and found.blake3 != item.blake3:
        # The CRC matches the stored bytes, therefore the network altered no byte and the declared BLAKE3 is false.
        kind = ChecksumMismatch if item.crc64nvme is None else FalseDigest
        raise kind(f"{item.name}: BLAKE3 is {found.blake3} instead of {item.blake3}")
