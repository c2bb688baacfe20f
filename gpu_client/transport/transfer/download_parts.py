"""Download a large file in parts by several concurrent connections.

The file gets its name after the verification of all parts. If URLs expire earlier, the parts stay in a temporary file,
from which the process's next download of the object resumes.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpu_client.transport.errors import ChecksumMismatch, TransferCanceled
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set
from gpu_client.transport.net.digests import READ_BYTES, Digester, FileDigest
from gpu_client.transport.net.files import allocate, local_errors
from gpu_client.transport.transfer.transfer_requests import Download

PARTS_FROM_BYTES = 32 * 1024**2
"""Minimum size of an object that is fetched in parts."""

_LEAST_PART_BYTES = 8 * 1024**2
_MOST_PARTS = 12
"""Maximum number of parts. A part whose request began in time arrives despite the expiry of its URL, therefore few and
large parts need few rounds of URLs even on the slowest network."""


class FilePart:
    """Part of a file: the bytes from `offset` up to `end`. The bytes before `reached` have arrived."""

    def __init__(self, offset: int, end: int) -> None:
        self.offset = self.reached = offset
        self.end = end


def parts_of(size_bytes: int) -> list[FilePart]:
    """Return the parts of an object of `size_bytes`, in order."""
    part_bytes = max(_LEAST_PART_BYTES, -(-size_bytes // _MOST_PARTS))
    return [FilePart(offset, min(size_bytes, offset + part_bytes)) for offset in range(0, size_bytes, part_bytes)]


class PartedFile:
    """Destination of one download's parts. Thread-safe."""

    def __init__(self, item: Download, destination: Path, size_bytes: int) -> None:
        """Create no file yet, because a batch may have more files than a process may have open."""
        self.item = item
        self.size_bytes = size_bytes
        self.parts: Sequence[FilePart] = parts_of(size_bytes)
        self.spoiled: ChecksumMismatch | None = None
        """Error of parts that cannot belong to one object, after which the download fetches the whole object."""
        self.complete = False
        self.destination = destination
        self._aside = destination.with_name(f".{secrets.token_hex(8)}.part")
        self._lock = threading.Lock()
        self._using = 0
        self._closed = False
        self._descriptor = -1
        self._etag: str | None = None
        self._left: set[FilePart] = set()

    def make(self) -> None:
        """Create a missing file with all of its space. Raises TransferCanceled if the file is closed."""
        with self._lock, local_errors(f"creating {self.destination}"):
            if self._closed:
                raise TransferCanceled("the batch has ended")
            if self._descriptor < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._aside, flags, 0o666)
                allocate(self._descriptor, self.size_bytes)

    def begin(self) -> list[FilePart]:
        """Return the missing parts; without missing parts, the last part."""
        left = [part for part in self.parts if part.reached < part.end]
        self._left = set(left) or {self.parts[-1]}  # A part has to complete the file.
        return [part for part in self.parts if part in self._left]

    def pin(self, etag: str | None) -> None:
        """Record the version (ETag) of a part's object. Raises ChecksumMismatch if another part has another version.

        The method accepts an answer without ETag if the download has digests, which also detect mixed versions.
        """
        with self._lock:
            if etag is None and not (self.item.blake3 or self.item.crc64nvme):
                raise ChecksumMismatch(f"{self.item.name}: the store does not say which version it sends")
            if etag is not None and self._etag not in (None, etag):
                raise ChecksumMismatch(f"{self.item.name}: was replaced while it was fetched")
            self._etag = self._etag or etag

    def write(self, part: FilePart, piece: memoryview) -> None:
        """Write the next bytes of a part. Raises TransferCanceled after the file is closed."""
        with self._used():
            while piece:
                written = os.pwrite(self._descriptor, piece, part.reached)
                part.reached += written
                piece = piece[written:]

    @contextmanager
    def _used(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise TransferCanceled("the batch has ended")
            self._using += 1
        try:
            with local_errors(f"writing {self.destination}"):
                yield
        finally:
            self._done_with()

    def finish(self, part: FilePart) -> bool:
        """Mark `part` as arrived or unnecessary. Returns True for the last part."""
        with self._lock:
            self._left.discard(part)
            return not self._left

    def digest(self, cancel: CancelEvent) -> FileDigest:
        """Return the digest of the whole file."""
        digester = Digester()
        view = memoryview(bytearray(READ_BYTES))
        offset = 0
        with local_errors(f"reading {self.destination}"):
            while size_bytes := os.preadv(self._descriptor, [view], offset):
                stop_if_set(cancel)
                digester.update(view[:size_bytes])
                offset += size_bytes
        return digester.digest

    def commit(self) -> None:
        """Rename the file to its destination; with `fsync`, after flushing its bytes to the disk."""
        with local_errors(f"writing {self.destination}"):
            if self.item.fsync:
                os.fsync(self._descriptor)
            self._close()
            self._aside.replace(self.destination)
        self.complete = True

    def park(self) -> None:
        """Close the file and keep its parts."""
        with local_errors(f"writing {self.destination}"):
            self._close()

    def resume(self, item: Download) -> bool:
        """Reopen the file for fresh URLs. Returns False for another object or a missing file."""
        promised = (item.name, item.size_bytes, item.blake3, item.crc64nvme)
        ours = (self.item.name, self.item.size_bytes, self.item.blake3, self.item.crc64nvme)
        if promised != ours or self.spoiled or self._using:
            return False
        if any(part.reached > part.offset for part in self.parts):
            try:
                self._descriptor = os.open(self._aside, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                return False
        self.item = item
        self._closed = False
        return True

    def discard(self) -> None:
        """Remove the temporary file, if any."""
        with local_errors(f"cleaning up after {self.destination}"):
            self._close()
            self._aside.unlink(missing_ok=True)

    def _close(self) -> None:
        """Close after the last user, because a late thread must not write to a reused descriptor."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._using += 1
        self._done_with()

    def _done_with(self) -> None:
        with self._lock:
            self._using -= 1
            if self._closed and not self._using and self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
