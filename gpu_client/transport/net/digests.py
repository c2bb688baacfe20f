"""Compute size, BLAKE3 and CRC-64/NVME of a file in one pass, for manifests and the object store's verification.

For a large file, the pass also computes the checksum of each upload part and combines the file's checksum from them.
"""

from __future__ import annotations

import base64
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from awscrt import checksums
from blake3 import blake3

from baton.contract.objects.parts import PARTS_FROM_BYTES, Parts, part_bytes_of
from gpu_client.transport.errors import FileChanged, TransferError
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set

READ_BYTES = 1024 * 1024


@dataclass(frozen=True)
class FileDigest:
    """Digest of a file's bytes: `blake3` as lower-case hex, `crc64nvme` as base64 of the big-endian u64."""

    size_bytes: int
    blake3: str
    crc64nvme: str
    parts: Parts | None = field(default=None, compare=False, repr=False)
    """Upload parts of a large file; equal bytes have equal parts."""


class Digester:
    """Digester of bytes, piece by piece. `part_bytes`: size of the parts whose checksums the digester keeps."""

    def __init__(self, *, part_bytes: int | None = None) -> None:
        self._blake3 = blake3()
        self._size_bytes = 0
        self._part_bytes = part_bytes
        self._part_crc = 0
        self._part_size_bytes = 0
        self._parts: list[tuple[int, int]] = []
        """Checksum and size in bytes of each complete part."""

    def update(self, piece: bytes | memoryview) -> None:
        """Add the next bytes to the digests."""
        self._blake3.update(piece)
        self._size_bytes += len(piece)
        view = memoryview(piece)
        while view:
            taken = view if self._part_bytes is None else view[: self._part_bytes - self._part_size_bytes]
            self._part_crc = checksums.crc64nvme(taken, self._part_crc)
            self._part_size_bytes += len(taken)
            if self._part_size_bytes == self._part_bytes:
                self._parts.append((self._part_crc, self._part_size_bytes))
                self._part_crc = self._part_size_bytes = 0
            view = view[len(taken) :]

    @property
    def digest(self) -> FileDigest:
        """Return the digest of all added bytes."""
        found = [*self._parts, (self._part_crc, self._part_size_bytes)]
        parts = [(crc, size_bytes) for crc, size_bytes in found if size_bytes]
        whole = 0
        for crc, size_bytes in parts:
            whole = checksums.combine_crc64nvme(whole, crc, size_bytes)
        cut = None
        if self._part_bytes is not None and len(parts) > 1:
            cut = Parts(part_bytes=self._part_bytes, crc64nvme=[_encoded(crc) for crc, _ in parts])
        return FileDigest(self._size_bytes, self._blake3.hexdigest(), _encoded(whole), cut)


def _encoded(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def digest_bytes(data: bytes) -> FileDigest:
    """Return the digest of bytes in memory."""
    digester = Digester()
    digester.update(data)
    return digester.digest


def hash_file(path: Path, *, cancel: CancelEvent | None = None) -> FileDigest:
    """Return the digest of the file at `path`, following symlinks.

    Raises FileChanged if a process writes, replaces or removes the file during the call, TransferError for an
    unreadable file, TransferCanceled.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise TransferError(f"{path} is not a regular file")
            digest = _hash_open_file(descriptor, cancel)
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        at_path = path.stat()
    except FileNotFoundError as error:
        raise FileChanged(f"{path} does not exist (any more)") from error
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error.strerror}") from error
    if not _version(before) == _version(after) == _version(at_path) or digest.size_bytes != after.st_size:
        raise FileChanged(f"{path} changed while it was hashed")
    return digest


def _hash_open_file(descriptor: int, cancel: CancelEvent | None) -> FileDigest:
    size_bytes = os.fstat(descriptor).st_size
    part_bytes = part_bytes_of(size_bytes) if size_bytes >= PARTS_FROM_BYTES else None
    digester = Digester(part_bytes=part_bytes)
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    while size := os.readv(descriptor, [buffer]):
        if cancel is not None:
            stop_if_set(cancel)
        digester.update(view[:size])
    return digester.digest


def _version(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
