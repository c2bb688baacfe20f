"""Unpack an untrusted zip that a client of the original orchestrator uploaded."""

from __future__ import annotations

import errno
import lzma
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from baton.contract.base import path_problem
from gpu_client.transport.errors import DiskFull, TransferError, UnsafePath, disk_full
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set
from gpu_client.transport.net.files import CHUNK_BYTES, StagedFile, local_errors, safe_destination

MAX_ENTRIES = 10_000
MAX_ENTRY_BYTES = 1024
"""Bound of an entry's mean size in the central directory, in bytes; a name has at most 900 bytes."""
_ENTRY_BEGINS = b"PK\1\2"
_LONGEST_END_BYTES = 22 + 65_536
"""Maximum size in bytes of the last record and its comment, which `zipfile` reads at once."""
MAX_UNPACKED_BYTES = 256 * 1024**3
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


class BadZip(Exception):  # noqa: N818 - a finding about stored bytes, reported as damage
    """Error of a damaged zip, or of an entry that must not be unpacked."""


def unpack(
    archive: Path,
    directory: Path,
    *,
    cancel: CancelEvent | None = None,
    available_bytes: int | None = None,
    max_bytes: int = MAX_UNPACKED_BYTES,
    max_entries: int = MAX_ENTRIES,
) -> int:
    """Unpack all files of `archive` below `directory`. Returns the number of their bytes.

    The function checks all entries before the first write, and the CRC-32 of each file during its write. Raises BadZip
    (damaged, encrypted, paths or links that lead outside, larger than `max_bytes`), DiskFull (larger than the
    `available_bytes` of this machine), TransferCanceled.
    """
    with local_errors(f"opening {archive.name}"):
        stream = archive.open("rb")
    with stream:
        bounded = _BoundedReader(stream, max_entries)
        with _damage(archive.name):
            opened = zipfile.ZipFile(bounded)
        bounded.list_is_read = True
        with opened:
            entries = _checked_entries(opened, max_bytes=max_bytes, max_entries=max_entries)
            total_bytes = sum(entry.file_size for entry in entries)
            if available_bytes is not None and total_bytes > available_bytes:
                raise DiskFull(f"{archive.name} unpacks to {total_bytes} bytes; {available_bytes} are available")
            for entry in entries:
                _unpack_one(opened, entry, directory, cancel)
    return total_bytes


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Convert the errors of Python's zip reader and decompressors to BadZip. Use the context for their calls only.

    An impossible offset raises OSError with EINVAL, damaged bzip2 data OSError without errno, an offset beyond any file
    and a name that is not UTF-8 ValueError, truncated data EOFError, an unknown zip version NotImplementedError.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):
            raise disk_full(error, f"writing {name}") or TransferError(f"reading {name}: {error.strerror}") from error
        raise BadZip(f"{name}: {error}") from error
    except (zipfile.BadZipFile, NotImplementedError, zlib.error, lzma.LZMAError, EOFError, ValueError) as error:
        raise BadZip(f"{name}: {error}") from error


class _BoundedReader:
    """Reader of an archive for `zipfile` that refuses a too large central directory.

    `zipfile` reads the central directory in one piece and makes an object of each entry with the entry signature.
    Several records declare the directory's place and length and can contradict each other. Therefore the reader counts
    the entry signatures in the bytes themselves.
    """

    def __init__(self, stream: BinaryIO, max_entries: int) -> None:
        self._stream = stream
        self._max_entries = max_entries
        self._max_bytes = max(max_entries * MAX_ENTRY_BYTES, _LONGEST_END_BYTES)
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable
        self.list_is_read = False
        """True once the central directory has been read; then reads of file data are unbounded."""

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes. Raises BadZip for a too long central directory."""
        if self.list_is_read:
            return self._stream.read(size)
        data = self._stream.read(size if 0 <= size <= self._max_bytes else self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise BadZip(f"its list of files has more than {self._max_bytes} bytes, the most that are allowed")
        # A short piece may be the end of the archive, whose data and comment may contain signatures by chance. A short
        # central directory has few entries and needs no check.
        entries = data.count(_ENTRY_BEGINS) if len(data) > _LONGEST_END_BYTES else 0
        if entries > self._max_entries:
            raise BadZip(f"has {entries} entries; at most {self._max_entries} are allowed")
        return data


def _checked_entries(archive: zipfile.ZipFile, *, max_bytes: int, max_entries: int) -> list[zipfile.ZipInfo]:
    # `is_dir` fails for an empty name; the check below refuses empty names.
    entries = [entry for entry in archive.infolist() if not entry.filename or not entry.is_dir()]
    if not 1 <= len(entries) <= max_entries:
        raise BadZip(f"has {len(entries)} files; 1 to {max_entries} are allowed")
    total_bytes = sum(entry.file_size for entry in entries)
    if total_bytes > max_bytes:
        raise BadZip(f"would unpack to {total_bytes} bytes; at most {max_bytes} are allowed")
    seen: set[str] = set()
    for entry in entries:
        # zipfile cleans `filename`; `orig_filename` is the name in the archive.
        problem = path_problem(entry.orig_filename)
        mode = entry.external_attr >> 16
        if problem is None and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            problem = "is not a regular file"
        if problem is None and entry.flag_bits & 0x1:
            problem = "is encrypted"
        if problem is None and entry.compress_type not in _METHODS:
            problem = f"is compressed by an unknown method ({entry.compress_type})"
        if problem is None and entry.orig_filename in seen:
            problem = "occurs twice"
        if problem:
            raise BadZip(f"{entry.orig_filename[:80]!r} {problem}")
        seen.add(entry.orig_filename)
    return entries


def _unpack_one(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, directory: Path, cancel: CancelEvent | None) -> None:
    name = ascii(entry.orig_filename[:80])
    try:
        destination = safe_destination(directory, entry.orig_filename)
    except UnsafePath as error:
        raise BadZip(str(error)) from error
    left_bytes = entry.file_size
    with _damage(name):
        packed = archive.open(entry)
    with packed, StagedFile(destination, fsync=True) as file:
        while True:
            with _damage(name):
                piece = packed.read(CHUNK_BYTES)
            if not piece:
                break
            if cancel is not None:
                stop_if_set(cancel)
            left_bytes -= len(piece)
            if left_bytes < 0:
                raise BadZip(f"{name} unpacks to more than its declared {entry.file_size} bytes")
            file.write(memoryview(piece))
        if left_bytes:
            raise BadZip(f"{name} unpacks to less than its declared {entry.file_size} bytes")
        file.commit()
