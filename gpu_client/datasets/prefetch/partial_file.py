"""Write a file in units that survive the end of the process, and verify the complete file.

The partial file lies beside its destination. Its name contains a digest of the file's checksum, so that no process
resumes another version. After the data, one byte for each unit records the unit's arrival.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Protocol, Self

from blake3 import blake3

from gpu_client.datasets.prefetch.selection import FileLink, ListedFile
from gpu_client.transport.errors import ChecksumMismatch, TransferCanceled, TransferError
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set
from gpu_client.transport.net.files import allocate, local_errors
from gpu_client.transport.transfer.transfer_requests import RangeDownload

UNIT_BYTES = 1024 * 1024
RANGE_UNITS = 32
"""Units of one request."""


class PartialFile:
    """Unfinished file. Thread-safe; only one process may use the file."""

    def __init__(self, destination: Path, file: ListedFile) -> None:
        self._destination = destination
        self._file = file
        self._path = partial_path(destination, file)
        self._lock = threading.Lock()
        self._closed = False
        units = -(-file.size_bytes // UNIT_BYTES)
        with local_errors(f"creating {destination}"):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            size_bytes = os.fstat(self._descriptor).st_size
            if size_bytes == file.size_bytes:
                # A process ended between the removal of the record and the rename.
                self._arrived = bytearray(b"\x01" * units)
                return
            if size_bytes != file.size_bytes + units:
                self._make(file.size_bytes + units)
            self._arrived = bytearray(os.pread(self._descriptor, units, file.size_bytes))

    def _make(self, size_bytes: int) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
            allocate(self._descriptor, size_bytes)
        except OSError:
            self._path.unlink()
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file and keep its units; remove a file without a unit."""
        with self._lock:
            self._closed = True
            os.close(self._descriptor)
        if not any(self._arrived):
            with local_errors(f"removing {self._path}"):
                self._path.unlink(missing_ok=True)

    @property
    def arrived_bytes(self) -> int:
        """Return the number of arrived bytes."""
        return self._file.size_bytes - sum(size_bytes for _, size_bytes in self.missing())

    def missing(self) -> list[tuple[int, int]]:
        """Return offset and size in bytes of the missing ranges, each of at most `RANGE_UNITS` units."""
        ranges = []
        unit = 0
        while (unit := self._arrived.find(0, unit)) >= 0:
            limit = min(unit + RANGE_UNITS, len(self._arrived))
            arrived = self._arrived.find(1, unit, limit)
            end = limit if arrived < 0 else arrived
            ranges.append((unit * UNIT_BYTES, min(end * UNIT_BYTES, self._file.size_bytes) - unit * UNIT_BYTES))
            unit = end
        return ranges

    def request(self, link: FileLink, offset: int, size_bytes: int) -> RangeDownload:
        """Make the request for one missing range."""
        position = offset

        def begin() -> None:
            nonlocal position
            position = offset

        def deliver(piece: memoryview) -> None:
            nonlocal position
            self._write(position, piece)
            position += len(piece)

        return RangeDownload(
            name=self._file.path,
            url=link.url,
            headers=link.headers,
            offset=offset,
            size_bytes=size_bytes,
            object_bytes=self._file.size_bytes,
            begin=begin,
            deliver=deliver,
            piece_bytes=UNIT_BYTES,
        )

    def _write(self, offset: int, unit: memoryview) -> None:
        number = offset // UNIT_BYTES
        with self._lock, local_errors(f"writing {self._destination}"):
            if self._closed:
                raise TransferCanceled("the file is closed")
            while unit:
                written = os.pwrite(self._descriptor, unit, offset)
                offset, unit = offset + written, unit[written:]
            os.pwrite(self._descriptor, b"\x01", self._file.size_bytes + number)
            self._arrived[number] = 1

    def commit(self, cancel: CancelEvent) -> None:
        """Verify the file and rename it to its destination. Raises ChecksumMismatch and removes a wrong file."""
        with local_errors(f"writing {self._destination}"):
            if _checksum(self._descriptor, self._file, cancel) != self._file.checksum:
                self._path.unlink()
                raise ChecksumMismatch(f"{self._file.path}: the bytes differ from {self._file.checksum}")
            os.ftruncate(self._descriptor, self._file.size_bytes)
            os.fsync(self._descriptor)
            self._path.replace(self._destination)


def partial_path(destination: Path, file: ListedFile) -> Path:
    """Return the path of the partial file; the name matches TEMPORARY_NAME."""
    version = f"{file.path}\0{file.size_bytes}\0{file.checksum}"
    return destination.with_name(f".{blake3(version.encode()).hexdigest()[:16]}.part")


def is_complete(destination: Path, file: ListedFile, cancel: CancelEvent) -> bool:
    """Return True if the destination is a file with the right size and checksum."""
    with local_errors(f"reading {destination}"):
        try:
            descriptor = os.open(destination, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            same_size = os.fstat(descriptor).st_size == file.size_bytes
            return same_size and _checksum(descriptor, file, cancel) == file.checksum
        finally:
            os.close(descriptor)


class _Hasher(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


def _checksum(descriptor: int, file: ListedFile, cancel: CancelEvent) -> str:
    """Compute the checksum of the file's bytes, by the algorithm of the file's checksum."""
    algorithm = file.checksum.partition(":")[0]
    hasher: _Hasher
    if algorithm == "blake3":
        hasher = blake3()
    elif algorithm == "sha256":
        hasher = hashlib.sha256()
    elif algorithm == "git-blob":
        hasher = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
    else:
        raise TransferError(f"{file.path}: {algorithm[:20]!r} is no known checksum")
    buffer = memoryview(bytearray(UNIT_BYTES))
    offset = 0
    while offset < file.size_bytes:
        stop_if_set(cancel)
        read_bytes = os.preadv(descriptor, [buffer[: file.size_bytes - offset]], offset)
        if not read_bytes:
            break
        hasher.update(buffer[:read_bytes])
        offset += read_bytes
    return f"{algorithm}:{hasher.hexdigest()}"
