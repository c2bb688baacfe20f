"""PUT segments of local files by presigned URL, one by one through one buffer."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from gpu_client.transport.errors import FileChanged, UrlExpired
from gpu_client.transport.limits.stats import TransferStats
from gpu_client.transport.limits.transfer_channel import Flow, Meter, TransferChannel
from gpu_client.transport.net.cancellation import Flight
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.net.files import CHUNK_BYTES, local_errors
from gpu_client.transport.net.s3_responses import read_to_end, require_success
from gpu_client.transport.transfer.retry import TransferRetry
from gpu_client.transport.transfer.transfer_requests import Segment, Upload


class Uploads:
    """Uploader of one object at a time, in the calling thread."""

    def __init__(
        self,
        connections: Connections,
        tries: TransferRetry,
        channel: TransferChannel,
        stats: TransferStats,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = connections
        self._tries = tries
        self._channel = channel
        self._stats = stats
        self._clock = clock

    def put(self, item: Upload, flight: Flight, meter: Meter, *, begin_by: float | None = None) -> None:
        """PUT `item`, with retries. Raises UrlExpired for a try that would begin after `begin_by` (s)."""

        def once() -> bool:
            if begin_by is not None and self._clock() >= begin_by:
                raise UrlExpired(f"{item.name}: the presigned URL is about to run out")
            return self._put_once(item, flight, meter)

        stored = self._tries.twice_if_altered(item.name, flight, self._channel, once)
        if stored and item.part:
            self._stats.add(uploaded_parts=1, uploaded_bytes=item.size_bytes)
        elif stored:
            self._stats.add(uploaded_objects=1, uploaded_bytes=item.size_bytes)
        else:
            self._stats.add(already_stored_objects=1)

    def _put_once(self, item: Upload, flight: Flight, meter: Meter) -> bool:
        """PUT once. Returns True for an uploaded object, False for an already existing object."""
        headers = {name: value for name, value in item.headers.items() if name.lower() != "content-length"}
        headers["Content-Length"] = str(item.size_bytes)
        with self._channel.attempt(flight, meter, self._stats, item.traffic) as flow:

            def send_body(sock: socket.socket) -> None:
                send_segments(sock, item.segments, flow, file_bytes=item.file_bytes)

            with self._connections.exchange("PUT", item.url, headers, flight, send_body) as response:
                create_only = any(name.lower() == "if-none-match" for name in headers)
                stored = not (response.status == 412 and create_only)
                if stored:
                    require_success(response, name=item.name, method="PUT", url=item.url)
                read_to_end(response)
        return stored


def send_segments(
    sock: socket.socket, segments: Sequence[Segment], flow: Flow, *, file_bytes: int | None = None
) -> None:
    """Send the segments' bytes. `file_bytes`: required size of the segments' file.

    Raises FileChanged for a missing or too short file, TransferError for an unreadable file, OSError of the socket.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    filled = 0
    with _Files(file_bytes) as files:
        for segment in _joined(segments):
            descriptor = files.descriptor(segment)
            offset, end = segment.offset, segment.offset + segment.size_bytes
            while offset < end:
                with local_errors(f"reading {segment.path}"):
                    got = os.preadv(descriptor, [buffer[filled : filled + end - offset]], offset)
                if got == 0:
                    raise changed(segment)
                offset += got
                filled += got
                if filled == len(buffer):
                    _send_all(sock, buffer, flow)
                    filled = 0
        _send_all(sock, buffer[:filled], flow)


class _Files:
    """Cache of one open file of the segments."""

    def __init__(self, file_bytes: int | None) -> None:
        self._file_bytes = file_bytes
        self._path: Path | None = None
        self._descriptor = -1
        self._size_bytes = 0

    def descriptor(self, segment: Segment) -> int:
        """Return a descriptor of the segment's file. Raises FileChanged if the file lacks the segment's bytes."""
        if segment.path != self._path:
            self._close()
            with local_errors(f"reading {segment.path}"):
                try:
                    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
                    self._descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                except FileNotFoundError as error:
                    raise FileChanged(f"{segment.path} does not exist (any more)") from error
                self._size_bytes = os.fstat(self._descriptor).st_size
            self._path = segment.path
        end = segment.offset + segment.size_bytes
        if self._size_bytes < end or self._file_bytes not in (None, self._size_bytes):
            raise changed(segment)
        return self._descriptor

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor, self._path = self._descriptor, -1, None
            os.close(descriptor)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()


def changed(segment: Segment) -> FileChanged:
    """Return the error for a file that lacks the declared bytes."""
    return FileChanged(f"{segment.path} has no longer the bytes that were declared")


def _send_all(sock: socket.socket, piece: memoryview, flow: Flow) -> None:
    while piece:
        size_bytes = flow.allow(len(piece))
        sock.sendall(piece[:size_bytes])
        flow.moved(size_bytes)
        piece = piece[size_bytes:]


def _joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Join adjacent segments of one file."""
    last: Segment | None = None
    for segment in segments:
        if last is not None and (segment.path, segment.offset) == (last.path, last.offset + last.size_bytes):
            last = Segment(last.path, last.offset, last.size_bytes + segment.size_bytes)
            continue
        if last is not None:
            yield last
        last = segment
    if last is not None:
        yield last
