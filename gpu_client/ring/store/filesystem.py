"""A ring in a directory: on a disk, on NFS, or in memory (`/dev/shm`).

Objects are written to a temporary file and linked into place, which fails if the name exists; small objects of samples,
which do not count before their claim exists, are written in place. Records are replaced under a lock. Reads map the
file.

Mappings hold no file descriptor. `mmap.mmap` keeps a descriptor as long as the mapping lives (until Python 3.13), so a
process that holds a thousand samples could open no more files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from gpu_client.ring.errors import RingMismatch, RingMissing, StoreFull
from gpu_client.ring.format.objects import EncodedObject
from gpu_client.ring.format.records import Versioned
from gpu_client.transport.net.files import sync_directory

_FIXED = 0x10
"""MAP_FIXED on Linux, macOS and the BSDs."""
_LARGE_PAGE_BYTES = 2 * 1024 * 1024
"""Alignment at which the kernel maps large pages."""
_FAILED = ctypes.c_void_p(-1).value

_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def map_file(fd: int, size_bytes: int) -> memoryview:
    """Map the first bytes of a file copy-on-write; copies them if the kernel has no mappings left. Raises OSError."""
    if not size_bytes:
        return memoryview(b"")
    private, may = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        # The anonymous mapping of Python owns the memory and frees it; the file is mapped over it.
        room_bytes = size_bytes + (_LARGE_PAGE_BYTES if size_bytes >= _LARGE_PAGE_BYTES else 0)
        memory = mmap.mmap(-1, room_bytes, flags=private | mmap.MAP_ANONYMOUS, prot=may)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        skipped_bytes = -address % _LARGE_PAGE_BYTES if room_bytes > size_bytes else 0
        if _map(address + skipped_bytes, size_bytes, may, private | _FIXED, fd, 0) == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return _copied(fd, size_bytes)
    return memoryview(memory)[skipped_bytes : skipped_bytes + size_bytes]


def _copied(fd: int, size_bytes: int) -> memoryview:
    memory = memoryview(bytearray(size_bytes))
    filled = 0
    while filled < size_bytes:
        got = os.preadv(fd, [memory[filled:]], filled)
        if not got:
            raise OSError(errno.EIO, f"the file ends after {filled} of {size_bytes} bytes")
        filled += got
    return memory


TEMPORARY = "tmp"
"""Directory of objects and records before they get their names."""
_LOCK = "lock"
_WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IN_PLACE_BYTES = 4 * 1024 * 1024
"""Maximum size of an object that is written under its own name. The name of a larger one would exist without a claim
for so long that collections could count the object of a living writer as an orphan.
"""
_MAX_PIECES = 512
"""Buffers in one `writev`; the kernel accepts 1024."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_RECORD_BYTES = 64 * 1024
"""Read at a time: most records are smaller."""
_temporary_names = itertools.count()
_lock_fds: set[int] = set()
"""Descriptors of this process that hold the lock or wait for it."""


class _StoreFullRaised:
    """Convert the OSError of a full file system to StoreFull. Each `put` enters it twice."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise StoreFull(
                f"there is no space in {self._root}", "Free space, or make a ring with a smaller cap"
            ) from error


class DirectoryStore:
    """Store in a directory that any number of processes and threads share."""

    def __init__(self, root: Path, *, make: bool = True) -> None:
        """Open the directory; `make` creates it. Raises RingMismatch for an unusable directory."""
        self._root = root
        self._path = f"{root}/"
        """Prefix of keys: paths as text take a fraction of the time of `Path`."""
        self._mark = secrets.token_hex(12)
        """Part of unique temporary names, beside the process id, which a fork changes, and a counter."""
        self._full = _StoreFullRaised(root)
        self._syncs = False
        self._synced_directories: set[str] = set()
        """Directories whose own names were flushed to the disk."""
        if not make and not root.is_dir():
            raise RingMissing(
                f"there is no directory {root}", "Make a ring with make_ring, or name the place of a ring"
            )
        try:
            (root / TEMPORARY).mkdir(parents=True, exist_ok=True)
            with self._lock():
                pass
        except OSError as error:
            raise RingMismatch(f"{root} cannot hold a ring: {error.strerror}", "Name a writable directory") from error

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    def sync_writes(self) -> None:
        """Implement the protocol."""
        self._syncs = True
        try:
            # Another process may have made the directory and its parents a moment ago, without a flush.
            for directory in (self._root.absolute(), *self._root.absolute().parents):
                sync_directory(directory)
                if os.path.ismount(directory):
                    break
        except PermissionError:
            pass  # not made for the ring, whose processes could read it
        except OSError as error:
            raise RingMismatch(
                f"{self._root} cannot be flushed to the disk: {error.strerror}",
                "Omit fsync, or name a directory of a local file system",
            ) from error

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """Implement the protocol."""
        path = self._path + key
        if isinstance(pieces, EncodedObject):
            if pieces.size_bytes <= IN_PLACE_BYTES:
                return self._create_in_place(path, pieces)
        elif not any(pieces):
            # An empty file needs no temporary file.
            with self._full:
                made = self._make_once(path, lambda: self._make_empty(path))
                self._sync_name(path)
                return made
        with self._temporary_file(pieces) as temporary:
            try:
                # A retried NFS link may report EEXIST for our own link, because the first answer was lost.
                made = self._make_once(path, lambda: os.link(temporary, path)) or _is_same_file(
                    Path(temporary), Path(path)
                )
            except OSError as error:
                if error.errno not in _WITHOUT_LINKS:
                    raise
                made = self._rename_into_place(temporary, Path(path))
            # The caller also relies on an object that existed already, whose maker may have died before the flush.
            self._sync_name(path)
            return made

    def read(self, key: str) -> memoryview | None:
        """Implement the protocol."""
        try:
            fd = os.open(self._path + key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return map_file(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def record(self, key: str) -> Versioned | None:
        """Implement the protocol."""
        try:
            fd = os.open(self._path + key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            data = _read_all(fd)
        finally:
            os.close(fd)
        return Versioned(data, _version(data))

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        """Implement the protocol."""
        path = self._path + key
        with self._temporary_file([memoryview(data)]) as temporary, self._lock():
            there = self.record(key)
            if (there.version if there else None) != seen:
                return None
            self._make_once(path, lambda: os.replace(temporary, path))  # noqa: PTH105 - see `_path`
            # The lock covers the flush. Otherwise another process could swap the record again and delete what both
            # swaps replaced, and a loss of power would restore the record that needs the deleted objects.
            self._sync_name(path)
        return _version(data)

    def keys(self, prefix: str) -> list[str]:
        """Implement the protocol."""
        found: list[str] = []
        pending = [prefix.rstrip("/")]
        while pending:
            directory = pending.pop()
            try:
                with os.scandir(self._root / directory) as entries:
                    for entry in entries:
                        key = f"{directory}/{entry.name}"
                        (pending if entry.is_dir(follow_symlinks=False) else found).append(key)
            except FileNotFoundError:
                continue
        return sorted(found)

    def delete(self, keys: Sequence[str]) -> None:
        """Implement the protocol."""
        if self._syncs and keys:
            # Another process may have swapped the pointer, which made these keys garbage, without a flush yet.
            sync_directory(self._root)
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path + key)  # noqa: PTH108 - see `_path`

    def tidy(self, older_than_s: float) -> int:
        """Implement the protocol. Compares with the clock of the file system, which may be another machine."""
        gone = 0
        with self._temporary_file([]) as fresh:
            now = os.stat(fresh).st_mtime  # noqa: PTH116 - see `_path`
            for entry in list(os.scandir(self._root / TEMPORARY)):
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode) and now - info.st_mtime > older_than_s:
                        Path(entry.path).unlink()
                        gone += 1
        return gone

    def stored_bytes(self) -> int:
        """Implement the protocol: sum up the lengths of all files."""
        found, pending = 0, [str(self._root)]
        while pending:
            with contextlib.suppress(FileNotFoundError), os.scandir(pending.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
                        else:
                            found += entry.stat(follow_symlinks=False).st_size
        return found

    def close(self) -> None:
        """Do nothing."""

    def _create_in_place(self, path: str, pieces: EncodedObject) -> bool:
        """Write an object of samples under its own name, and remove what a failure leaves of the object.

        A link and a removal of a temporary name take as long as writing 64 KiB. A writer that is killed meanwhile
        leaves an incomplete object without a claim: garbage, which no manifest lists.
        """
        fd = -1

        def open_new() -> None:
            nonlocal fd
            fd = os.open(path, _NEW, 0o666)

        with self._full:
            if not self._make_once(path, open_new):
                return False
            try:
                try:
                    _write_object(fd, pieces)
                    if self._syncs:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                self._sync_name(path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108 - see `_path`
                raise
        return True

    @contextlib.contextmanager
    def _temporary_file(self, pieces: Sequence[memoryview]) -> Iterator[str]:
        """Write a temporary file; removes the file at the end if it was not renamed."""
        temporary = f"{self._path}{TEMPORARY}/{self._mark}-{os.getpid()}-{next(_temporary_names)}"
        try:
            with self._full:
                fd = os.open(temporary, _NEW, 0o666)
                try:
                    _write_object(fd, pieces)
                    if self._syncs and pieces:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)  # noqa: PTH108 - see `_path`

    def _make_empty(self, path: str) -> None:
        """Make an empty file. Raises FileExistsError, FileNotFoundError for a missing directory.

        A link to the lock file, which stays empty, needs no inode: a busy journal delays a link less than a new file.
        """
        try:
            os.link(self._path + _LOCK, path)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in (*_WITHOUT_LINKS, errno.ENOENT, errno.EACCES):
                raise
            os.close(os.open(path, _NEW, 0o666))

    def _make_once(self, path: str, make: Callable[[], object]) -> bool:
        """Call `make`; False if the file exists. Makes the directory first where it is missing."""
        for _ in range(2):
            try:
                make()
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                self._synced_directories.clear()
                Path(path).parent.mkdir(parents=True, exist_ok=True)
        raise OSError(errno.ENOENT, "the directory is being removed", path)

    def _sync_name(self, path: str) -> None:
        """Flush the name of a file to the disk if the ring demands flushes."""
        if not self._syncs:
            return
        directory = os.path.dirname(path)  # noqa: PTH120 - see `_path`
        if directory not in self._synced_directories:
            # Another process may have made the parents a moment ago, without a flush.
            above = Path(directory)
            while above != self._root:
                above = above.parent
                sync_directory(above)
            self._synced_directories.add(directory)
        sync_directory(Path(directory))

    def _rename_into_place(self, temporary: str, path: Path) -> bool:
        """Create without links: rename under the lock."""
        with self._lock():
            if path.exists():
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            Path(temporary).rename(path)
        return True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        # Each caller opens the lock file: threads that share a descriptor would share the lock.
        process = os.getpid()
        fd = os.open(self._path + _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _lock_fds.add(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            if os.getpid() == process:  # not in a process that was forked inside the block
                # Closing does not release the lock where a forked process has inherited the descriptor, therefore
                # unlock first.
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
                _lock_fds.discard(fd)
                os.close(fd)


def _close_inherited() -> None:
    """Close the parent's lock descriptors: an open one would keep the lock after the parent's death."""
    while _lock_fds:
        os.close(_lock_fds.pop())


os.register_at_fork(after_in_child=_close_inherited)


def _read_all(fd: int) -> bytes:
    pieces = []
    while piece := os.read(fd, _RECORD_BYTES):
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_same_file(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except FileNotFoundError:
        return False


def _version(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _write_object(fd: int, pieces: Sequence[memoryview]) -> None:
    """Write pieces to a new file that has no name yet; the header last if its digests are unknown."""
    if isinstance(pieces, EncodedObject) and not pieces.head_is_known:
        os.lseek(fd, pieces.head_bytes, os.SEEK_SET)
        for some in pieces.behind_head():
            _write_all(fd, some)
        os.lseek(fd, 0, os.SEEK_SET)
        pieces = [pieces.head()]
    _write_all(fd, pieces)


def _write_all(fd: int, pieces: Sequence[memoryview]) -> None:
    left = [piece for piece in pieces if len(piece)]
    while left:
        written = os.writev(fd, left[:_MAX_PIECES])
        while left and written >= len(left[0]):
            written -= len(left[0])
            del left[0]
        if left and written:
            left[0] = left[0][written:]
