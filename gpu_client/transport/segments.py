"""What an upload consists of: pieces of local files, sent one behind the other.

On plain HTTP the kernel sends them (sendfile), so that no byte passes through this process. On TLS they are read into
one buffer, which is sent when it is full.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu_client.transport.errors import FileChanged
from gpu_client.transport.files import CHUNK_BYTES, local_errors

SENDFILE_BYTES = 1024 * 1024
MAX_SENDFILE_BYTES = 32 * 1024 * 1024
SENDFILE_S = 0.1
"""One call of the kernel's sends as much as takes about so long: progress is told behind it, and each call costs."""

_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSOCK})
_LOCAL = frozenset({errno.EIO, errno.ESTALE, errno.ENOMEM})
"""What sendfile reports of the file; the rest is about the connection."""


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
    joined = list(_joined(segments))
    with _Files(file_bytes) as files:
        if isinstance(sock, ssl.SSLSocket):
            _send_copies(sock, joined, files, pace)
            return
        with _blocking(sock), _corked(sock):
            for number, segment in enumerate(joined):
                left = _send_from_kernel(sock, segment, files.descriptor(segment), pace)
                if left is not None:
                    _send_copies(sock, [left, *joined[number + 1 :]], files, pace)
                    return


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


def _send_from_kernel(sock: socket.socket, segment: Segment, descriptor: int, pace: Pace) -> Segment | None:
    """None when all is sent, else what is left: some network file systems have no sendfile."""
    offset, end = segment.offset, segment.offset + segment.size_bytes
    step_bytes = SENDFILE_BYTES
    while offset < end:
        wanted_bytes = pace.allow(min(end - offset, step_bytes))
        began = time.monotonic()
        try:
            sent = os.sendfile(sock.fileno(), descriptor, offset, wanted_bytes)
        except OSError as error:
            if error.errno in _NO_SENDFILE:
                return Segment(segment.path, offset, end - offset)
            if error.errno in _LOCAL:
                with local_errors(f"reading {segment.path}"):
                    raise
            raise
        if sent == 0:
            raise changed(segment)
        offset += sent
        pace.moved(sent)
        if time.monotonic() - began > SENDFILE_S:
            step_bytes = max(SENDFILE_BYTES // 4, step_bytes // 2)
        elif sent == step_bytes:
            step_bytes = min(MAX_SENDFILE_BYTES, step_bytes * 4)
    return None


def _send_copies(sock: socket.socket, segments: Iterable[Segment], files: _Files, pace: Pace) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    filled = 0
    for segment in segments:
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


@contextmanager
def _blocking(sock: socket.socket) -> Iterator[None]:
    """The kernel waits by itself, as long as the socket's timeout says: else each call sends no more than fits into
    its buffer, and as many calls again are needed to wait."""
    timeout_s = sock.gettimeout()
    whole_s, fraction_s = divmod(timeout_s or 0.0, 1)
    sock.setblocking(True)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(whole_s), int(fraction_s * 1e6)))
        yield
    except BlockingIOError as error:
        raise TimeoutError(f"no byte could be sent for {timeout_s:g} s") from error
    finally:
        sock.settimeout(timeout_s)


@contextmanager
def _corked(sock: socket.socket) -> Iterator[None]:
    """Small segments share packets: http.client has switched off that the kernel waits for more by itself."""
    cork = getattr(socket, "TCP_CORK", None)
    if cork is None:
        yield
        return
    sock.setsockopt(socket.IPPROTO_TCP, cork, 1)
    yield
    # not after an error: then nothing more is sent
    sock.setsockopt(socket.IPPROTO_TCP, cork, 0)
