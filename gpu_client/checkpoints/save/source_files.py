"""Local bytes that become a checkpoint: files that must not change meanwhile, and what was encoded of them."""

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
"""Threads; one core hashes gigabytes per second, therefore more threads would only take cores from the training."""

T = TypeVar("T")

_TRUSTED_WITH_HOLES = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630})
"""File systems by their number (statfs): ext4, XFS, Btrfs, tmpfs, overlay. Files of others are read: bytes taken for a
hole are lost, and ZFS has told of holes where bytes were not on the disk yet (OpenZFS before 2.2.2), while a network
file system answers what its server knows."""
_STATFS_BYTES = 256
"""More than the structure has anywhere on Linux; its first field, a long, is the file system's number."""


class SourceFile:
    """A file as it was when this was made. Raises FileChanged as soon as it is another; TransferError (unreadable)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = self._look(path.stat)
        if not stat.S_ISREG(found.st_mode):
            raise TransferError(f"{path} is not a regular file")
        self._version = _version_of(found)
        self.size_bytes = found.st_size
        self._is_sparse = found.st_blocks * 512 < found.st_size

    def pieces(self, offset: int, size_bytes: int, scratch: memoryview) -> Iterator[memoryview]:
        """The bytes from `offset` on, as many at a time as fit into `scratch`, which they are read into; none if they
        are a hole: all zero, and known to be without being read."""
        # non-blocking: opening a FIFO would otherwise wait for a writer
        descriptor = self._look(lambda: os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            self._require(self._look(lambda: os.fstat(descriptor)))
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
            size_bytes = self._look(lambda: os.preadv(descriptor, [view], offset))  # noqa: B023 - called at once
            if not size_bytes:
                raise self._changed()
            view = view[size_bytes:]
            offset += size_bytes

    def require_unchanged(self) -> None:
        """Once everything was read."""
        self._require(self._look(self.path.stat))

    def _require(self, found: os.stat_result) -> None:
        if _version_of(found) != self._version:
            raise self._changed()

    def _changed(self) -> FileChanged:
        return FileChanged(f"{self.path} changed while it was hashed")

    def _look(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except FileNotFoundError as error:
            raise FileChanged(f"{self.path} does not exist (any more)") from error
        except OSError as error:
            raise TransferError(f"cannot read {self.path}: {error.strerror}") from error


class Spool:
    """A file of encoded chunks in `directory`, made when the first one comes; `close` removes it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f".spool-{uuid.uuid4().hex}"
        self._descriptor = -1
        self._size_bytes = 0

    def append(self, data: bytes) -> Segment:
        """Raises DiskFull, TransferError."""
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
        """Remove what was written."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with local_errors(f"removing {self._path}"):
                os.close(descriptor)
                self._path.unlink(missing_ok=True)


class SpanBuffers:
    """Memory that is used again: fresh pages cost as much as copying into them. Any thread may take and give."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[bytearray] = []
        self._lock = threading.Lock()

    def take(self) -> bytearray:
        """Of the size that was asked for; its content is whatever it was."""
        with self._lock:
            return self._free.pop() if self._free else bytearray(self._size_bytes)

    def give(self, buffer: bytearray) -> None:
        """Back, when nobody looks at it any more."""
        with self._lock:
            self._free.append(buffer)


def _is_hole(descriptor: int, offset: int, size_bytes: int) -> bool:
    """True if the open file has no data in these bytes, which it has; False also where that cannot be told."""
    if not _tells_of_holes(descriptor):
        return False
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) >= offset + size_bytes
    except OSError as error:
        return error.errno == errno.ENXIO  # no data from there to the end; what cannot be asked is read


def _tells_of_holes(descriptor: int) -> bool:
    if sys.platform != "linux":
        return False
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).fstatfs(descriptor, found) != 0:
        return False
    return int.from_bytes(found.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) in _TRUSTED_WITH_HOLES


def _version_of(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
