"""Lock a directory for the life of an agent: the kernel drops the lock when the agent dies."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path


def is_own_directory(path: Path) -> bool:
    """Return True for a directory of this user, and not for a link to one."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def lock_directory(path: Path) -> int | None:
    """Lock a directory without waiting. Returns the descriptor, or None if the lock is held or the directory gone."""
    try:
        lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The directory may have been removed before the lock.
        if os.path.samestat(os.fstat(lock_fd), path.lstat()):
            return lock_fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock_fd)
        raise
    os.close(lock_fd)
    return None
