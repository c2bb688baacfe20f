"""Write the local files of transfers atomically, to destinations that cannot leave their directory."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.contract.base import path_problem
from gpu_client.transport.errors import TransferError, UnsafePath, disk_full

CHUNK_BYTES = 256 * 1024
MAX_NAME_BYTES = 255
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{16}\.part")
"""Names of unfinished files."""


@contextmanager
def local_errors(operation: str) -> Iterator[None]:
    """Convert OSErrors of local files, which no retry repairs, to DiskFull or TransferError."""
    try:
        yield
    except OSError as error:
        raise disk_full(error, operation) or TransferError(f"{operation}: {error.strerror or error}") from error


def safe_destination(root: Path, relative: str) -> Path:
    """Return the path of `relative` ('/'-separated, from an untrusted source) below `root`, and make its directories.

    Raises UnsafePath if `relative` contains '..' or similar parts, or if a directory of the path is a symlink, which
    can lead outside `root`.
    """
    problem = path_problem(relative)
    if problem:
        raise UnsafePath(f"{relative[:80]!r} {problem}")
    if any(len(part.encode()) > MAX_NAME_BYTES for part in relative.split("/")):
        raise UnsafePath(f"{relative[:80]!r} has a part of more than {MAX_NAME_BYTES} bytes, which file systems refuse")
    *directories, name = relative.split("/")
    place = root
    with local_errors(f"making directories for {relative[:80]!r}"):
        root.mkdir(parents=True, exist_ok=True)
        for part in directories:
            place = place / part
            if place.is_symlink():
                raise UnsafePath(f"{relative[:80]!r} leads through the symlink {part!r}")
            if place.is_file():
                raise UnsafePath(f"{relative[:80]!r} leads through the file {part!r}")
            place.mkdir(exist_ok=True)
        destination = place / name
        if destination.is_dir() and not destination.is_symlink():
            raise UnsafePath(f"{relative[:80]!r} is a directory already")
    return destination


class StagedFile:
    """File written under a temporary name, which gets its final name complete or not at all."""

    def __init__(self, destination: Path, *, fsync: bool) -> None:
        self._destination = destination
        self._fsync = fsync
        self._aside = destination.with_name(f".{secrets.token_hex(8)}.part")
        self._descriptor = -1

    def __enter__(self) -> StagedFile:
        with local_errors(f"creating {self._destination}"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._aside, flags, 0o666)
        return self

    def write(self, piece: memoryview) -> None:
        """Append the bytes of `piece`."""
        with local_errors(f"writing {self._destination}"):
            while piece:
                piece = piece[os.write(self._descriptor, piece) :]

    def commit(self) -> None:
        """Rename the file to its destination; with `fsync`, after flushing its bytes to the disk."""
        with local_errors(f"writing {self._destination}"):
            if self._fsync:
                os.fsync(self._descriptor)
            # Some file systems report a full disk only at close, therefore the close precedes the rename.
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
            self._aside.replace(self._destination)

    def __exit__(self, *exception: object) -> None:
        """Remove the temporary file unless it was committed."""
        with local_errors(f"cleaning up after {self._destination}"):
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._aside.unlink(missing_ok=True)


def write_whole(destination: Path, data: bytes) -> None:
    """Write or replace a file atomically. Raises DiskFull or TransferError."""
    with StagedFile(destination, fsync=False) as file:
        file.write(memoryview(data))
        file.commit()


def allocate(descriptor: int, size_bytes: int) -> None:
    """Allocate the space of a file, so that a full disk fails before the first fetch. Raises OSError."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(descriptor, size_bytes)  # The file system or the kernel does not support allocation.


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
