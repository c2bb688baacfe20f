"""The agent's side of the shared memory in which a training process stages its checkpoints.

`gpu_client/training/arena.py` says what lies in it, and whose turn it is. An arena belongs to one attempt. Its name is
noted in the agent's slot before it is made: whatever dies, the next agent in that slot removes it.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from gpu_client.agent.clearing import empty
from gpu_client.checkpoints.watch import MARKER, read_marker
from gpu_client.training.protocol import ARENA_CHECKPOINT

logger = logging.getLogger("baton.job")

_NOTE = "arena"
_NAME = "baton-arena-"


@dataclass(frozen=True)
class StagedInArena:
    """A complete checkpoint in the arena."""

    step: int
    path: Path
    metrics: dict[str, float]
    version: tuple[int, int]
    """Tells it from any other that was there before."""
    tag: str = ""


def make_arena(parent: Path, slot: Path) -> Path | None:
    """A new private directory below `parent`; None (logged) where there can be none."""
    path = parent / f"{_NAME}{secrets.token_hex(8)}"
    try:
        (slot / _NOTE).write_text(str(path), encoding="utf-8")
        path.mkdir(mode=0o700)
    except OSError as error:
        logger.warning("no shared memory for staging checkpoints: %s", error)
        return None
    return path


def remove_arena(slot: Path) -> bool:
    """Remove what the note in this slot names, and the note; False (logged) if it stays behind, to be tried again."""
    note = slot / _NOTE
    try:
        path = Path(note.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", note, error)
        return True
    try:
        # A job can write what it likes into the note: nothing but a directory that looks like ours is touched.
        if path.name.startswith(_NAME) and _is_own_directory(path):
            empty(path)
            path.rmdir()
    except OSError as error:
        logger.warning("shared memory stays behind: %s", error)
        return False
    note.unlink(missing_ok=True)
    return True


def find_staged(arena: Path) -> StagedInArena | None:
    """The complete checkpoint that lies in the arena, if one does."""
    directory = arena / ARENA_CHECKPOINT
    try:
        # First: once given back, it may be replaced at any moment, and then the old one's version is known already.
        info = (directory / MARKER).lstat()
        marker = read_marker(directory / MARKER)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("the arena has a %s that is not usable: %s", MARKER, error)
        return None
    if marker is None:
        return None
    return StagedInArena(marker.step, directory, marker.metrics, (info.st_ino, info.st_mtime_ns), marker.tag)


def give_back(arena: Path) -> None:
    """The training process may overwrite what lies in the arena."""
    (arena / ARENA_CHECKPOINT / MARKER).unlink(missing_ok=True)


def _is_own_directory(path: Path) -> bool:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()
