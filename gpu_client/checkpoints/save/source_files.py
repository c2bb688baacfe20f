"""Read local files, detect their changes, and spool encoded chunks."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from gpu_client.transport.errors import FileChanged, TransferError
from gpu_client.transport.net.files import local_errors
from gpu_client.transport.transfer.transfer_requests import Segment

HASH_WORKERS = 2
"""Number of threads. One core hashes gigabytes per second, and more threads would take cores from the training."""

T = TypeVar("T")

_TRUSTED_WITH_HOLES = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630})
"""File systems that report holes reliably, by statfs number: ext4, XFS, Btrfs, tmpfs, overlay. Files of other file
systems are read in full, because a false hole loses bytes: OpenZFS before 2.2.2 reported holes for bytes that were not
on the disk yet, and a network file system reports the state of its server."""
_STATFS_BYTES = 256
"""Upper bound of the statfs structure on Linux; its first field, a long, is the file system's number."""


class SourceFile:
    """A file in its state at construction. Raises FileChanged after a change, TransferError for an unreadable file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = self._call(path.stat)
        if not stat.S_ISREG(found.st_mode):
            raise TransferError(f"{path} is not a regular file")
        self._version = _version_of(found)
        self.size_bytes = found.st_size
        self._is_sparse = found.st_blocks * 512 < found.st_size

    def pieces(self, offset: int, size_bytes: int, scratch: memoryview) -> Iterator[memoryview]:
        """Read `size_bytes` bytes from `offset` on into `scratch`, and yield them in pieces of the size of `scratch`.

        Yields nothing for a hole, whose bytes are zeros.
        """
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = self._call(lambda: os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            self._require(self._call(lambda: os.fstat(descriptor)))
            if self._is_sparse and _is_hole(descriptor, offset, size_bytes):
                return
            end = offset + size_bytes
            while offset < end:
                piece = scratch[: end - offset]
                self._fill(descriptor, offset, piece)
                yield piece
                offset += len(piece)
        finally:
            os.close(descriptor)

    def _fill(self, descriptor: int, offset: int, view: memoryview) -> None:
        while view:
            size_bytes = self._call(lambda: os.preadv(descriptor, [view], offset))  # noqa: B023 - called at once
            if not size_bytes:
                raise self._changed()
            view = view[size_bytes:]
            offset += size_bytes

    def require_unchanged(self) -> None:
        """Raise FileChanged if the file has changed since the construction. Call this method after the last read."""
        self._require(self._call(self.path.stat))

    def _require(self, found: os.stat_result) -> None:
        if _version_of(found) != self._version:
            raise self._changed()

    def _changed(self) -> FileChanged:
        return FileChanged(f"{self.path} changed while it was hashed")

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except FileNotFoundError as error:
            raise FileChanged(f"{self.path} does not exist") from error
        except OSError as error:
            raise TransferError(f"cannot read {self.path}: {error.strerror}") from error


class Spool:
    """A file of encoded chunks in `directory`, created with the first chunk; `close` removes the file."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f".spool-{uuid.uuid4().hex}"
        self._descriptor = -1
        self._size_bytes = 0

    def append(self, data: bytes) -> Segment:
        """Append an encoded chunk; return its segment. Raises DiskFull, TransferError."""
        offset, view = self._size_bytes, memoryview(data)
        with local_errors(f"{self._path}"):
            if self._descriptor < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
            while view:
                written = os.pwrite(self._descriptor, view, self._size_bytes)
                view = view[written:]
                self._size_bytes += written
        return Segment(self._path, offset, len(data))

    def close(self) -> None:
        """Remove the file."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with local_errors(f"removing {self._path}"):
                os.close(descriptor)
                self._path.unlink(missing_ok=True)


class SpanBuffers:
    """Pool of buffers of one size, because fresh pages cost as much as a copy of their content. Thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[bytearray] = []
        self._lock = threading.Lock()

    def take(self) -> bytearray:
        """Return a buffer with arbitrary content."""
        with self._lock:
            return self._free.pop() if self._free else bytearray(self._size_bytes)

    def give(self, buffer: bytearray) -> None:
        """Return a buffer to the pool after its last use."""
        with self._lock:
            self._free.append(buffer)


def _is_hole(descriptor: int, offset: int, size_bytes: int) -> bool:
    """Return True if a trusted file system reports a hole for the bytes."""
    if not _reports_holes(descriptor):
        return False
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) >= offset + size_bytes
    except OSError as error:
        return (
            error.errno == errno.ENXIO
        )  # ENXIO means a hole up to the end of the file. After any other error the caller reads the bytes.


def _reports_holes(descriptor: int) -> bool:
    if sys.platform != "linux":
        return False
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).fstatfs(descriptor, found) != 0:
        return False
    return int.from_bytes(found.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) in _TRUSTED_WITH_HOLES


def _version_of(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
