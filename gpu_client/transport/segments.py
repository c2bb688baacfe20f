"""What an upload consists of: pieces of local files, sent one behind the other by one buffer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu_client.transport.errors import FileChanged
from gpu_client.transport.files import CHUNK_BYTES, local_errors


@dataclass(frozen=True)
class Segment:
    """A piece of a local file."""

    path: Path
    offset: int
    size_bytes: int


class Pace(Protocol):
    """Whoever allows bytes to move and counts those that have."""

    def allow(self, wanted_bytes: int) -> int:
        """How many of the next `wanted_bytes` may move now: at least 1. Waits; raises TransferCanceled."""
        ...

    def moved(self, size_bytes: int) -> None:
        """So many have moved."""
        ...


def send_segments(
    sock: socket.socket, segments: Sequence[Segment], pace: Pace, *, file_bytes: int | None = None
) -> None:
    """Send the segments' bytes. `file_bytes`: how many bytes the file that they are of must have.

    Raises FileChanged if a file is gone or too short, TransferError if it cannot be read, OSError of the socket.
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
                    _send_all(sock, buffer, pace)
                    filled = 0
        _send_all(sock, buffer[:filled], pace)


class _Files:
    """The file that is being sent; one at a time is open."""

    def __init__(self, file_bytes: int | None) -> None:
        self._file_bytes = file_bytes
        self._path: Path | None = None
        self._descriptor = -1
        self._size_bytes = 0

    def descriptor(self, segment: Segment) -> int:
        """Of the segment's file, which has the segment's bytes."""
        if segment.path != self._path:
            self._close()
            with local_errors(f"reading {segment.path}"):
                try:
                    # non-blocking: opening a FIFO would otherwise wait for a writer
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
    """The file has not the bytes that were declared."""
    return FileChanged(f"{segment.path} has no longer the bytes that were declared")


def _send_all(sock: socket.socket, piece: memoryview, pace: Pace) -> None:
    while piece:
        size_bytes = pace.allow(len(piece))
        sock.sendall(piece[:size_bytes])
        pace.moved(size_bytes)
        piece = piece[size_bytes:]


def _joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same bytes in as few segments as can be."""
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
