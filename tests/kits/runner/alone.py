"""Turns: a test marked `alone` runs while no other worker of pytest-xdist runs a test.

The locks lie on two files of the sources, which are there anyway. They end with the run, however it ends.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__)
FLOOR, DOOR = HERE, HERE.with_name("reports.py")


@contextmanager
def turn(*, alone: bool, floor: Path = FLOOR, door: Path = DOOR) -> Iterator[None]:
    """Wait for this test's turn and release the locks afterwards.

    Everybody passes the door before the floor, which many share or one has. Who wants it alone stays in the door until
    the others have left, so that nobody comes in meanwhile.
    """
    with locked(floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, behind=door):
        yield


@contextmanager
def locked(path: Path, operation: int, *, behind: Path) -> Iterator[None]:
    """Hold a lock on a file, taken while holding the other file's."""
    with path.open("rb") as held, behind.open("rb") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        try:
            fcntl.flock(held, operation)
        finally:
            fcntl.flock(first, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Not by closing: a process that a test has forked holds the same open file.
            fcntl.flock(held, fcntl.LOCK_UN)
