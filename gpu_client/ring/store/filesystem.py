"""A ring in a directory: on a disk, on NFS, or in memory (`/dev/shm`).

Objects are written beside and linked into their place, which fails where there is one already. Records are replaced
under a lock. What is read is mapped, not copied.
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
from gpu_client.ring.format.objects import Encoded
from gpu_client.ring.format.records import Versioned

_FIXED = 0x10
"""MAP_FIXED, which Linux, macOS and the BSDs have alike."""
_LARGE_PAGE_BYTES = 2 * 1024 * 1024
"""Where a file's bytes lie in memory at multiples of this, as in the file, the system maps so many at a time."""
_FAILED = ctypes.c_void_p(-1).value

_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def mapped(fd: int, size_bytes: int) -> memoryview:
    """The first bytes of a file, as they are on the disk; writing to them alters this process's memory alone. They live
    as long as the view, however many there are: where the system maps no more, they are copied. Raises OSError."""
    if not size_bytes:
        return memoryview(b"")
    private, may = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        # Python's own mapping of no file is what gives the memory back. The file is mapped over it.
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


BESIDE = "tmp"
"""Objects and records are made there before they get their names."""
_LOCK = "lock"
_WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_PIECES = 512
"""In one call of the system, which takes 1024."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_RECORD_BYTES = 64 * 1024
"""Read at a time: most records are smaller."""
_beside_names = itertools.count()
_lock_fds: set[int] = set()
"""Of this process: what it has open to hold locks, or to wait for them."""


class _StoreFullRaised:
    """Raise StoreFull instead of an OSError that says that a file system is full. Each `put` enters it twice."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise StoreFull(f"there is no room in {self._root}", "Free some, or lower the ring's cap") from error


class DirectoryStore:
    """Any number of processes, and threads, may use the same directory."""

    def __init__(self, root: Path, *, make: bool = True) -> None:
        """Makes the directory, unless it has to be there. Raises RingMismatch where there is none that can be used."""
        self._root = root
        self._path = f"{root}/"
        """What keys are added to: paths as text take a fraction of the time that `Path` takes."""
        self._mark = secrets.token_hex(12)
        """With the process's id, which forks change, and a count: names that no other process or thread takes."""
        self._full = _StoreFullRaised(root)
        self._syncs = False
        self._lasting: set[str] = set()
        """Directories whose own names were flushed to the disk."""
        if not make and not root.is_dir():
            raise RingMissing(
                f"there is no directory {root}", "Make a ring with make_ring, or name the place where it is"
            )
        try:
            (root / BESIDE).mkdir(parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise RingMismatch(
                f"{root} cannot hold a ring: {error.strerror}", "Name a directory to write to"
            ) from error

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    def sync_writes(self) -> None:
        """As in the protocol."""
        self._syncs = True
        try:
            # Another process may have made the directory, and those above it, a moment ago and not have flushed them.
            for directory in (self._root.absolute(), *self._root.absolute().parents):
                _sync_directory(str(directory))
                if os.path.ismount(directory):
                    break
        except PermissionError:
            pass  # such a directory was not made for the ring: the ring's processes could read it
        except OSError as error:
            raise RingMismatch(
                f"{self._root} cannot be flushed to the disk: {error.strerror}",
                "Leave fsync out, or name a directory of a local file system",
            ) from error

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """As in the protocol."""
        path = self._path + key
        if not isinstance(pieces, Encoded) and not any(pieces):
            # Nothing to be written before it can be seen.
            with self._full:
                made = self._made(path, lambda: self._make_empty(path))
                self._sync_name(path)
                return made
        with self._written(pieces) as beside:
            try:
                # NFS tells of one's own link, too, that it is there: when the answer was lost, and it was asked again.
                made = self._made(path, lambda: os.link(beside, path)) or _is_one(Path(beside), Path(path))
            except OSError as error:
                if error.errno not in _WITHOUT_LINKS:
                    raise
                made = self._renamed(beside, Path(path))
            # The caller relies on an object that was there already, too, and its maker may have died before the flush.
            self._sync_name(path)
            return made

    def read(self, key: str) -> memoryview | None:
        """As in the protocol."""
        try:
            fd = os.open(self._path + key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return mapped(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def record(self, key: str) -> Versioned | None:
        """As in the protocol."""
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
        """As in the protocol."""
        path = self._path + key
        with self._written([memoryview(data)]) as beside, self._locked():
            there = self.record(key)
            if (there.version if there else None) != seen:
                return None
            self._made(path, lambda: os.replace(beside, path))  # noqa: PTH105 - see `_path`
            # The lock is held until the record is flushed: otherwise a process could swap the record again, remove
            # what the two swaps replaced, and a loss of power would bring back the record that needs it.
            self._sync_name(path)
        return _version(data)

    def keys(self, prefix: str) -> list[str]:
        """As in the protocol."""
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
        """As in the protocol."""
        if self._syncs and keys:
            # Another process may have swapped the pointer, which made these superfluous, and not have flushed it yet.
            _sync_directory(str(self._root))
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path + key)  # noqa: PTH108 - see `_path`

    def tidy(self, older_than_s: float) -> int:
        """As in the protocol. Compares with the time of the file system, which may be another machine's."""
        gone = 0
        with self._written([]) as fresh:
            now = os.stat(fresh).st_mtime  # noqa: PTH116 - see `_path`
            for entry in list(os.scandir(self._root / BESIDE)):
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode) and now - info.st_mtime > older_than_s:
                        Path(entry.path).unlink()
                        gone += 1
        return gone

    def stored_bytes(self) -> int:
        """As in the protocol: the lengths of all files."""
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
        """Nothing is held."""

    @contextlib.contextmanager
    def _written(self, pieces: Sequence[memoryview]) -> Iterator[str]:
        """A file with these bytes beside all others, removed at the end if it is still there."""
        beside = f"{self._path}{BESIDE}/{self._mark}-{os.getpid()}-{next(_beside_names)}"
        try:
            with self._full:
                fd = os.open(beside, _NEW, 0o666)
                try:
                    _write_object(fd, pieces)
                    if self._syncs and pieces:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                yield beside
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)  # noqa: PTH108 - see `_path`

    def _make_empty(self, path: str) -> None:
        """Make an empty file. Raises FileExistsError, FileNotFoundError for a missing directory.

        A link to the lock file, which is empty for ever, needs no inode of its own: a busy journal delays it less than
        a new file.
        """
        try:
            os.link(self._path + _LOCK, path)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in (*_WITHOUT_LINKS, errno.ENOENT, errno.EACCES):
                raise
            os.close(os.open(path, _NEW, 0o666))

    def _made(self, path: str, make: Callable[[], object]) -> bool:
        """False if it is there. Its directory is made when it is missed, which is seldom."""
        for _ in range(2):
            try:
                make()
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                self._lasting.clear()
                Path(path).parent.mkdir(parents=True, exist_ok=True)
        raise OSError(errno.ENOENT, "the directory is being removed", path)

    def _sync_name(self, path: str) -> None:
        """Flush the name of a file to the disk, behind its content, if the ring asks for it."""
        if not self._syncs:
            return
        directory = os.path.dirname(path)  # noqa: PTH120 - see `_path`
        if directory not in self._lasting:
            # Another process may have made the directories above a moment ago, and not have flushed their names.
            above = Path(directory)
            while above != self._root:
                above = above.parent
                _sync_directory(str(above))
            self._lasting.add(directory)
        _sync_directory(directory)

    def _renamed(self, beside: str, path: Path) -> bool:
        """The same where files cannot be linked."""
        with self._locked():
            if path.exists():
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            Path(beside).rename(path)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # A file of its own: threads of one process that share a descriptor would share the lock.
        process = os.getpid()
        fd = os.open(self._path + _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _lock_fds.add(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            if os.getpid() == process:  # not one that was forked in here
                # To close it is not enough: a process that was forked meanwhile may have it open, too.
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
                _lock_fds.discard(fd)
                os.close(fd)


def _close_inherited() -> None:
    """The lock is the parent's: if that one dies, a child that had it open would keep it."""
    while _lock_fds:
        os.close(_lock_fds.pop())


os.register_at_fork(after_in_child=_close_inherited)


def _read_all(fd: int) -> bytes:
    pieces = []
    while piece := os.read(fd, _RECORD_BYTES):
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _sync_directory(path: str) -> None:
    """Flush the entries of a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_one(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except FileNotFoundError:
        return False


def _version(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _write_object(fd: int, pieces: Sequence[memoryview]) -> None:
    """Into a file that is new, and that nobody sees before it has a name."""
    if isinstance(pieces, Encoded) and not pieces.head_is_known:
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
