"""Delete the files of an untrusted job, at any depth and with any permissions, without following links."""

import contextlib
import logging
import os
import stat
import uuid
from pathlib import Path

_log = logging.getLogger(__name__)

# Dying processes of the job may create files during the removal, therefore the removal is repeated.
PURGE_TRIES = 3


def delete_once(trash: Path) -> tuple[Path, ...]:
    """Delete the contents of ``trash``; returns the entries that stay. Links are deleted, not followed."""
    waiting = list(trash.iterdir())
    while waiting:
        entry = waiting.pop()
        # The function returns undeletable entries as leftovers.
        with contextlib.suppress(OSError):
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink(missing_ok=True)
            else:
                waiting += _flatten(entry, trash)
                entry.rmdir()
    return tuple(trash.rglob("*"))


def _flatten(directory: Path, trash: Path) -> list[Path]:
    """Delete the files of a directory and move its directories up into ``trash``; returns the moved directories.

    The function works level by level, because a job can nest directories beyond the limits of recursion and of path
    lengths. Names are relative to the open directory, so that the function never follows a link that appears meanwhile.
    """
    moved: list[Path] = []
    make_accessible(directory)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with os.scandir(fd) as found:
            entries = list(found)
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    make_accessible(directory / entry.name)  # Moving a directory also requires write permission.
                    place = trash / uuid.uuid4().hex
                    os.rename(entry.name, place, src_dir_fd=fd)
                    moved.append(place)
                else:
                    os.unlink(entry.name, dir_fd=fd)
    finally:
        os.close(fd)
    return moved


def make_accessible(path: Path) -> None:
    """Grant the owner all permissions on a directory (not on the target of a link)."""
    # The directory is gone or belongs to another user; a later deletion reports the problem.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
            path.chmod(stat.S_IRWXU)


def empty_trash(trash: Path) -> tuple[Path, ...]:
    """Delete the contents of the trash; returns (and logs) the entries that stay."""
    for _ in range(PURGE_TRIES):
        leftovers = delete_once(trash)
        if not leftovers:
            return ()
    _log.warning("%d files cannot be removed, first: %s", len(leftovers), leftovers[0])
    return leftovers


def ensure_directory(path: Path) -> None:
    """Make a directory, after removing any other entry in its place (links are not followed)."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        path.mkdir(mode=0o700)
        return
    if not stat.S_ISDIR(mode):
        path.unlink()
        path.mkdir(mode=0o700)
