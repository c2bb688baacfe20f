"""The files of a directory, each accounted for: followed, or refused with its name. Nothing is skipped silently."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from baton.contract.base import MAX_OBJECT_BYTES, MAX_PATH_BYTES, MAX_STEP, path_problem
from baton.contract.checkpoint_marker import MARKER_MAX_BYTES, CheckpointMarker, parse_marker
from gpu_client.checkpoints.local.sanitizer import usable_metrics, usable_tag
from gpu_client.transport.errors import BatonError

logger = logging.getLogger(__name__)


class BadDirectory(BatonError):  # noqa: N818 - named after what is wrong
    """A directory cannot become a manifest. The message names the entry and says why."""


def files_of(directory: Path, *, within: Path | None = None) -> dict[str, Path]:
    """All files below `directory` by '/'-separated relative path, sorted; paths are resolved.

    Symlinks are followed if they stay inside (inside `within`, if given). Raises BadDirectory for links that lead
    outside or nowhere, special files and names that no manifest can carry. Empty directories are logged: a manifest has
    only files.
    """
    start = directory.resolve()
    root = within.resolve() if within else start
    if not start.is_dir():
        raise BadDirectory(f"{directory} is not a directory")
    found: dict[str, Path] = {}
    try:
        _collect(root, start, "", found, ancestors=(start,))
    except OSError as error:
        raise BadDirectory(f"cannot read {error.filename or directory}: {error.strerror}") from error
    return dict(sorted(found.items()))


def _collect(root: Path, directory: Path, prefix: str, found: dict[str, Path], *, ancestors: tuple[Path, ...]) -> None:
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries)
    if not names and prefix:
        logger.warning("the empty directory %s is not part of the checkpoint", prefix)
    for name in names:
        relative = prefix + name
        problem = path_problem(relative)
        if problem:
            raise BadDirectory(f"{relative!a} {problem}")
        path = directory / name
        if path.is_symlink():
            path = inside(root, path, relative)
        if path.is_dir():
            if path in ancestors:
                raise BadDirectory(f"{relative!r} is a link to a directory that it lies in")
            _collect(root, path, relative + "/", found, ancestors=(*ancestors, path))
        elif path.is_file():
            found[relative] = path
        else:
            raise BadDirectory(f"{relative!r} is neither a file nor a directory")


def require_storable(files: Mapping[str, Path], *, max_path_bytes: int, max_bytes: int = MAX_OBJECT_BYTES) -> None:
    """Raise BadDirectory if a path or a file (by relative path) is larger than what can be stored. Reads no bytes."""
    for relative, path in files.items():
        problem = path_problem(relative, max_bytes=max_path_bytes)
        if problem:
            raise BadDirectory(f"{relative[:80]!a} {problem}")
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise BadDirectory(f"cannot read {relative!r}: {error.strerror}") from error
        if size_bytes > max_bytes:
            raise BadDirectory(f"{relative!r} has {size_bytes} bytes; at most {max_bytes} are allowed in one file")


def inside(root: Path, path: Path, relative: str) -> Path:
    """`path` with its links resolved; BadDirectory if it leads outside `root` or nowhere."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise BadDirectory(f"{relative!r} is a link that leads nowhere") from error
    if not target.is_relative_to(root):
        raise BadDirectory(f"{relative!r} is a link that leads outside the directory")
    return target


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A file of a checkpoint as it was seen: its path inside the directory, size and modification time."""

    path: str
    size_bytes: int
    modified_ns: int


def list_files(directory: Path) -> tuple[FileSeen, ...]:
    """All files below ``directory``, by path. Links count as themselves.

    Raises OSError, FileNotFoundError if something is removed meanwhile.
    """
    files: list[FileSeen] = []
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                relative = Path(entry.path).relative_to(directory).as_posix()
                if entry.is_dir(follow_symlinks=False):
                    if len(os.fsencode(relative)) > MAX_PATH_BYTES:
                        raise OSError(errno.ENAMETOOLONG, f"a path longer than {MAX_PATH_BYTES} bytes cannot be stored")
                    waiting.append(Path(entry.path))
                    continue
                info = entry.stat(follow_symlinks=False)
                files.append(FileSeen(relative, info.st_size, info.st_mtime_ns))
    return tuple(sorted(files, key=lambda file: file.path))


def read_marker(path: Path) -> CheckpointMarker | None:
    """Read the `baton.json` at `path` without following a link; None if there is none.

    Metrics and tag are reduced to those that a manifest can carry. Raises ValueError for an unreadable marker.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(str(error)) from error
    with os.fdopen(fd, "rb") as file:
        try:
            marker = parse_marker(file.read(MARKER_MAX_BYTES))
        except OSError as error:
            raise ValueError(str(error)) from error
    if marker.step > MAX_STEP:
        raise ValueError(f"the step is {marker.step}, larger than {MAX_STEP}")
    return replace(marker, metrics=usable_metrics(marker.metrics), tag=usable_tag(marker.tag))
