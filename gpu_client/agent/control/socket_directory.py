"""Make the private directory of a Unix socket, and remove the directories of killed agents.

The agent holds a lock on its directory. The kernel drops the lock when the agent dies, therefore an unlocked directory
belongs to nobody, and the next agent removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from gpu_client.agent.workspace.directory_lock import is_own_directory, lock_directory

# The kernel's limit is 108 bytes (104 on macOS), the terminating zero included.
MAX_SOCKET_PATH_BYTES = 100
_PREFIX = "baton-socket-"
_LONGEST_PATH = f"/{_PREFIX}xxxxxxxx/channel"


class SocketDirectory:
    """Directory for this user only, whose path is short enough for a socket, from construction to `remove`."""

    def __init__(self) -> None:
        parent = _find_parent()
        _remove_dead(parent)
        lock_fd = None
        while lock_fd is None:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            # Another agent that started between the two calls has removed the still unlocked directory.
            lock_fd = lock_directory(self.path)
        self._lock_fd: int | None = lock_fd

    def remove(self) -> None:
        """Remove the directory and its contents. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _find_parent() -> Path:
    for parent in (tempfile.gettempdir(), "/tmp"):  # noqa: S108 (mkdtemp makes a private directory in it)
        if len(os.fsencode(parent)) + len(_LONGEST_PATH) <= MAX_SOCKET_PATH_BYTES:
            return Path(parent)
    raise OSError(f"the temporary directory's path is too long for a socket: {tempfile.gettempdir()}")


def _remove_dead(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        # Anybody can create any entry in a temporary directory, therefore the agent removes directories of this user.
        with contextlib.suppress(OSError):
            lock_fd = lock_directory(path) if is_own_directory(path) else None
            if lock_fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock_fd)
