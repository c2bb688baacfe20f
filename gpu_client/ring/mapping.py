"""Files as memory that hold no descriptor.

`mmap.mmap` keeps a descriptor of its own as long as the mapping lives (until Python 3.13 lets one say that it should
not): whoever holds a thousand samples could open nothing more.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

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
