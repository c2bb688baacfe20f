"""Manage the agent's side of the shared memory in which a training process stages its checkpoints.

`gpu_client/training/checkpoint/shared_memory.py` defines the layout and the turns of the two sides. An arena belongs to
one attempt. The agent writes the arena's name into its slot before creating the arena, so that after a crash the next
agent in the slot can remove the arena.

The agent holds a lock (flock) on the directory during the attempt, and the kernel drops the lock when the agent dies.
Every starting agent removes all unlocked arenas of any slot or workspace. All containers that share the memory see the
lock; a process id, in contrast, is local to a container, and the kernel reuses process ids.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from baton.contract.checkpoints.marker import MARKER
from gpu_client.agent.workspace.directory_lock import is_own_directory, lock_directory
from gpu_client.agent.workspace.safe_delete import delete_once
from gpu_client.checkpoints.local.directory_files import read_marker
from gpu_client.training.protocol import ARENA_CHECKPOINT

logger = logging.getLogger("baton.job")

_NOTE = "arena"
_NAME = "baton-arena-locked-"
_TRIES = 3


@dataclass(frozen=True)
class ArenaCheckpoint:
    """A complete checkpoint in the arena."""

    step: int
    path: Path
    metrics: dict[str, float]
    version: tuple[int, int]
    """Key that distinguishes the checkpoint from earlier checkpoints."""
    tag: str = ""


@dataclass(frozen=True)
class LockedArena:
    """An arena, and the locked file descriptor that proves the life of its agent."""

    path: Path
    lock_fd: int


def make_arena(parent: Path, slot: Path) -> LockedArena | None:
    """Make and lock a private directory below `parent`; returns None (logged) after a failure."""
    try:
        for _ in range(_TRIES):
            path = parent / f"{_NAME}{secrets.token_hex(8)}"
            (slot / _NOTE).write_text(str(path), encoding="utf-8")
            path.mkdir(mode=0o700)
            lock_fd = lock_directory(path)
            if lock_fd is not None:
                return LockedArena(path, lock_fd)
            # Another agent that started between the two calls removes the still unlocked directory.
    except OSError as error:
        logger.warning("no shared memory for staging checkpoints: %s", error)
        return None
    logger.warning("no shared memory for staging checkpoints: other agents removed it %d times", _TRIES)
    return None


def remove_dead_arenas(parent: Path) -> None:
    """Remove the arenas of dead agents below `parent`, of any slot or container; logs arenas that stay."""
    for path in parent.glob(f"{_NAME}*"):
        try:
            # A job can create any entry below `parent`, therefore the agent removes only a directory of this user.
            lock_fd = lock_directory(path) if is_own_directory(path) else None
            if lock_fd is None:
                continue
            try:
                delete_once(path)
                path.rmdir()
            finally:
                os.close(lock_fd)
            logger.info("removed %s, shared memory of an agent that has died", path)
        except OSError as error:
            logger.warning("shared memory of an agent that has died stays behind: %s", error)


def remove_arena(slot: Path) -> bool:
    """Remove the slot's noted arena, and the note; returns False (logged) and keeps the note if the arena stays."""
    note = slot / _NOTE
    try:
        path = Path(note.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", note, error)
        return True
    try:
        # A job can write any path into the note, therefore the agent removes only a directory with an arena's name.
        if path.name.startswith(_NAME) and is_own_directory(path):
            delete_once(path)
            path.rmdir()
    except OSError as error:
        logger.warning("shared memory stays behind: %s", error)
        return False
    note.unlink(missing_ok=True)
    return True


def find_checkpoint(arena: Path) -> ArenaCheckpoint | None:
    """Return the complete checkpoint in the arena, or None."""
    directory = arena / ARENA_CHECKPOINT
    try:
        # The training may replace a released checkpoint during this call. `lstat` comes first, so that the version is
        # never newer than the marker.
        info = (directory / MARKER).lstat()
        marker = read_marker(directory / MARKER)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("the arena has a %s that is not usable: %s", MARKER, error)
        return None
    if marker is None:
        return None
    return ArenaCheckpoint(marker.step, directory, dict(marker.metrics), (info.st_ino, info.st_mtime_ns), marker.tag)


def release_checkpoint(arena: Path) -> None:
    """Permit the training process to overwrite the checkpoint in the arena."""
    (arena / ARENA_CHECKPOINT / MARKER).unlink(missing_ok=True)
