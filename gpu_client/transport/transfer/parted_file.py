"""One large file that is fetched in parts, by several connections at once, into its place.

It gets its name when all of it is there and verified. When URLs run out in between, what has arrived stays beside its
place and the next download of the same object goes on from there, as long as the process lives.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpu_client.transport.errors import ChecksumMismatch, TransferCanceled
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set
from gpu_client.transport.net.digests import READ_BYTES, Digester, FileDigest
from gpu_client.transport.net.files import local_errors
from gpu_client.transport.transfer.transfer_requests import Download

PARTS_FROM_BYTES = 32 * 1024**2
"""Smaller objects are fetched by one connection."""

_LEAST_PART_BYTES = 8 * 1024**2
_MOST_PARTS = 12
"""Few and large: a part whose request began in time arrives although its URL runs out meanwhile, so that even the
slowest line gets through in a few rounds of URLs."""


class Part:
    """The bytes from `offset` up to `end`; those before `reached` have arrived."""

    def __init__(self, offset: int, end: int) -> None:
        self.offset = self.reached = offset
        self.end = end


def parts_of(size_bytes: int) -> list[Part]:
    """The parts of an object, in order."""
    part_bytes = max(_LEAST_PART_BYTES, -(-size_bytes // _MOST_PARTS))
    return [Part(offset, min(size_bytes, offset + part_bytes)) for offset in range(0, size_bytes, part_bytes)]


class PartedFile:
    """Where the parts of one download go. Safe from several threads."""

    def __init__(self, item: Download, destination: Path, size_bytes: int) -> None:
        """Nothing is made yet: a batch may have more files than a process may have open."""
        self.item = item
        self.size_bytes = size_bytes
        self.parts: Sequence[Part] = parts_of(size_bytes)
        self.spoiled: ChecksumMismatch | None = None
        """Set when the parts cannot be those of one object: then it has to be fetched as a whole."""
        self.complete = False
        self.destination = destination
        self._aside = destination.with_name(f".{secrets.token_hex(8)}.part")
        self._lock = threading.Lock()
        self._using = 0
        self._closed = False
        self._descriptor = -1
        self._etag: str | None = None
        self._left: set[Part] = set()

    def make(self) -> None:
        """Make the file, with all of its space, unless that is done. TransferCanceled if it was given up meanwhile."""
        with self._lock, local_errors(f"creating {self.destination}"):
            if self._closed:
                raise TransferCanceled("the batch has ended")
            if self._descriptor < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._aside, flags, 0o666)
                _allocate(self._descriptor, self.size_bytes)

    def begin(self) -> list[Part]:
        """The parts that have not arrived."""
        left = [part for part in self.parts if part.reached < part.end]
        self._left = set(left) or {self.parts[-1]}  # somebody has to complete it
        return [part for part in self.parts if part in self._left]

    def pin(self, etag: str | None) -> None:
        """Say which version of the object a part is of: ChecksumMismatch if it is another than that of the others.

        Where digests are promised they tell too.
        """
        with self._lock:
            if etag is None and not (self.item.blake3 or self.item.crc64nvme):
                raise ChecksumMismatch(f"{self.item.name}: the store does not say which version it sends")
            if etag is not None and self._etag not in (None, etag):
                raise ChecksumMismatch(f"{self.item.name}: was replaced while it was fetched")
            self._etag = self._etag or etag

    def write(self, part: Part, piece: memoryview) -> None:
        """The next bytes of a part. TransferCanceled if the file was given up meanwhile."""
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

    def finish(self, part: Part) -> bool:
        """`part` has arrived, or is not needed any more; true for the last one."""
        with self._lock:
            self._left.discard(part)
            return not self._left

    def digest(self, cancel: CancelEvent) -> FileDigest:
        """Of all that has arrived."""
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
        """Give the file its name. With `fsync` its bytes are on the disk first."""
        with local_errors(f"writing {self.destination}"):
            if self.item.fsync:
                os.fsync(self._descriptor)
            self._close()
            self._aside.replace(self.destination)
        self.complete = True

    def park(self) -> None:
        """Keep what has arrived, without holding the file open."""
        with local_errors(f"writing {self.destination}"):
            self._close()

    def resume(self, item: Download) -> bool:
        """Go on with fresh URLs; False if that cannot be: another object is meant, or the file is gone."""
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
        """Remove it unless it has its name."""
        with local_errors(f"cleaning up after {self.destination}"):
            self._close()
            self._aside.unlink(missing_ok=True)

    def _close(self) -> None:
        """No thread that is late may write to a descriptor that belongs to another file by then."""
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


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Take the space now, so that a full disk is noticed before anything is fetched."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(descriptor, size_bytes)  # a file system, or a kernel, that cannot
