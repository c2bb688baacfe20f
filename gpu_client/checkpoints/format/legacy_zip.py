"""Unpacking a zip that a client of the original orchestrator uploaded. Nothing in it is trusted."""

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
"""Of an entry in the list of files at the end, on average: its name takes 900 at most."""
_ENTRY_BEGINS = b"PK\1\2"
_LONGEST_END_BYTES = 22 + 65_536
"""The last record and its comment, as far as `zipfile` reads them at once."""
MAX_UNPACKED_BYTES = 256 * 1024**3
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


class BadZip(Exception):  # noqa: N818 - a finding about stored bytes, reported as damage
    """The zip is damaged, or holds what may not be unpacked."""


def unpack(
    archive: Path,
    directory: Path,
    *,
    cancel: CancelEvent | None = None,
    available_bytes: int | None = None,
    max_bytes: int = MAX_UNPACKED_BYTES,
    max_entries: int = MAX_ENTRIES,
) -> int:
    """Unpack all files of `archive` below `directory`; returns their bytes.

    Everything is checked before anything is written, and zip's own CRC-32 of every file while it is. Raises BadZip
    (damaged, encrypted, paths or links that lead outside, too large for anybody), DiskFull (too large for this machine,
    which has `available_bytes`), TransferCanceled.
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
                raise DiskFull(f"{archive.name} unpacks to {total_bytes} bytes; {available_bytes} can be used")
            for entry in entries:
                _unpack_one(opened, entry, directory, cancel)
    return total_bytes


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Turn what Python's zip reader and decompressors raise for damaged bytes into BadZip. Nothing else runs in here.

    They say it in many ways: an offset that leads nowhere is an OSError with EINVAL, bad bzip2 data one without, an
    offset that no file has and a name that is not UTF-8 are ValueErrors, data that end too soon an EOFError, a version
    from the future a NotImplementedError.
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
    """Hand the bytes of an archive to `zipfile`, but no list of files that is larger than allowed.

    `zipfile` reads the list in one piece, then makes an object of each entry. Where the list lies and how long it is,
    several records say, and they may contradict each other. So this class looks at the bytes that `zipfile` takes,
    whichever record `zipfile` believes: `zipfile` makes no object of an entry without its signature.
    """

    def __init__(self, stream: BinaryIO, max_entries: int) -> None:
        self._stream = stream
        self._max_entries = max_entries
        self._max_bytes = max(max_entries * MAX_ENTRY_BYTES, _LONGEST_END_BYTES)
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable
        self.list_is_read = False
        """From then on everything may be read: data of files."""

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes. Raises BadZip for what may be too long a list of files."""
        if self.list_is_read:
            return self._stream.read(size)
        data = self._stream.read(size if 0 <= size <= self._max_bytes else self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise BadZip(f"its list of files takes more than the {self._max_bytes} bytes that are allowed")
        # A shorter piece may be the archive's end, with data and a comment in which the signature proves nothing; a
        # list that is so short has few entries.
        entries = data.count(_ENTRY_BEGINS) if len(data) > _LONGEST_END_BYTES else 0
        if entries > self._max_entries:
            raise BadZip(f"has {entries} entries; at most {self._max_entries} are allowed")
        return data


def _checked_entries(archive: zipfile.ZipFile, *, max_bytes: int, max_entries: int) -> list[zipfile.ZipInfo]:
    # `is_dir` fails for a name of no letter, which is refused below.
    entries = [entry for entry in archive.infolist() if not entry.filename or not entry.is_dir()]
    if not 1 <= len(entries) <= max_entries:
        raise BadZip(f"has {len(entries)} files; 1 to {max_entries} are allowed")
    total_bytes = sum(entry.file_size for entry in entries)
    if total_bytes > max_bytes:
        raise BadZip(f"would unpack to {total_bytes} bytes; at most {max_bytes} are allowed")
    seen: set[str] = set()
    for entry in entries:
        # `filename` has been cleaned by zipfile; what the archive says is `orig_filename`
        problem = path_problem(entry.orig_filename)
        mode = entry.external_attr >> 16
        if problem is None and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            problem = "is not a regular file"
        if problem is None and entry.flag_bits & 0x1:
            problem = "is encrypted"
        if problem is None and entry.compress_type not in _METHODS:
            problem = f"is compressed by an unknown method ({entry.compress_type})"
        if problem is None and entry.orig_filename in seen:
            problem = "is in it twice"
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
                raise BadZip(f"{name} unpacks to more than it says")
            file.write(memoryview(piece))
        if left_bytes:
            raise BadZip(f"{name} unpacks to less than it says")
        file.commit()
