"""Size, BLAKE3 and CRC-64/NVME of a file in one pass: what a manifest promises and the object store checks."""

from __future__ import annotations

import base64
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from awscrt import checksums
from blake3 import blake3

from gpu_client.transport.cancel import CancelEvent, stop_if_set
from gpu_client.transport.errors import FileChanged, TransferError

READ_BYTES = 1024 * 1024


@dataclass(frozen=True)
class FileDigest:
    """What identifies the bytes of a file: `blake3` as lower-case hex, `crc64nvme` as base64 of the big-endian u64."""

    size_bytes: int
    blake3: str
    crc64nvme: str


class Digester:
    """Takes bytes piece by piece."""

    def __init__(self) -> None:
        self._blake3 = blake3()
        self._crc = 0
        self._size_bytes = 0

    def update(self, piece: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._blake3.update(piece)
        self._crc = checksums.crc64nvme(piece, self._crc)
        self._size_bytes += len(piece)

    @property
    def digest(self) -> FileDigest:
        """Of everything added so far."""
        crc = base64.b64encode(self._crc.to_bytes(8, "big")).decode()
        return FileDigest(self._size_bytes, self._blake3.hexdigest(), crc)


def digest_bytes(data: bytes) -> FileDigest:
    """Of bytes in memory."""
    digester = Digester()
    digester.update(data)
    return digester.digest


def hash_file(path: Path, *, cancel: CancelEvent | None = None) -> FileDigest:
    """Of the file at `path`; symlinks are followed.

    Raises FileChanged if it is written, replaced or removed meanwhile, TransferError if it cannot be read,
    TransferCanceled.
    """
    try:
        # non-blocking: opening a FIFO would otherwise wait for a writer
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
    digester = Digester()
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    while size := os.readv(descriptor, [buffer]):
        if cancel is not None:
            stop_if_set(cancel)
        digester.update(view[:size])
    return digester.digest


def _version(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
