"""List the files of a directory without silent omissions, and read the session's marker."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from baton.contract.base import MAX_OBJECT_BYTES, MAX_PATH_BYTES, MAX_STEP, path_problem
from baton.contract.checkpoints.marker import MARKER_MAX_BYTES, CheckpointMarker, parse_marker
from gpu_client.checkpoints.local.sanitizer import sanitize_metrics, sanitize_tag
from gpu_client.transport.errors import BatonError

logger = logging.getLogger(__name__)


class BadDirectory(BatonError):  # noqa: N818 - named after what is wrong
    """Error of a directory that cannot become a manifest. The message names the entry and the reason."""


def enter_real(relative: str, entry: os.DirEntry[str]) -> Path | None:
    """Return the path of a real directory; None for other entries, links included."""
    return Path(entry.path) if entry.is_dir(follow_symlinks=False) else None


def walk(
    directory: Path, enter: Callable[[str, os.DirEntry[str]], Path | None] = enter_real
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield relative path and entry of all files and directories below `directory`, unsorted.

    `enter` is the link policy: it returns the directory to walk for an entry, or None. Raises OSError,
    FileNotFoundError if a directory disappears during the walk.
    """
    waiting = [("", directory)]
    while waiting:
        prefix, folder = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                relative = prefix + entry.name
                below = enter(relative, entry)
                if below is not None:
                    waiting.append((f"{relative}/", below))
                yield relative, entry


def resolve_files(directory: Path, *, within: Path | None = None) -> dict[str, Path]:
    """Return the resolved paths of all files below `directory` by '/'-separated relative path, sorted.

    The function follows symlinks whose targets are inside `directory` (inside `within`, if given). Raises BadDirectory
    for links to outside or absent targets, special files, and names that a manifest cannot store. Logs empty
    directories, because a manifest contains files only.
    """
    start = directory.resolve()
    root = within.resolve() if within else start
    if not start.is_dir():
        raise BadDirectory(f"{directory} is not a directory")
    directories, found = {"": start}, dict[str, Path]()

    def enter(relative: str, entry: os.DirEntry[str]) -> Path | None:
        if problem := path_problem(relative):
            raise BadDirectory(f"{relative!a} {problem}")
        path = resolve_inside(root, Path(entry.path), relative) if entry.is_symlink() else Path(entry.path)
        if path.is_dir():
            if path in (directories[above] for above in _directories_above(relative)):
                raise BadDirectory(f"{relative!r} is a link to a directory that contains the link")
            directories[relative] = path
            return path
        if not path.is_file():
            raise BadDirectory(f"{relative!r} is neither a file nor a directory")
        found[relative] = path
        return None

    try:
        filled = {relative.rpartition("/")[0] for relative, _ in walk(start, enter)}
    except OSError as error:
        raise BadDirectory(f"cannot read {error.filename or directory}: {error.strerror}") from error
    for empty in directories.keys() - filled - {""}:
        logger.warning("the empty directory %s/ is not part of the checkpoint", empty)
    return dict(sorted(found.items()))


def _directories_above(relative: str) -> list[str]:
    parts = relative.split("/")[:-1]
    return ["/".join(parts[:end]) for end in range(len(parts) + 1)]


def require_storable(files: Mapping[str, Path], *, max_path_bytes: int, max_bytes: int = MAX_OBJECT_BYTES) -> None:
    """Raise BadDirectory if a path or a file exceeds the store's limits. Reads no bytes."""
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


def resolve_inside(root: Path, path: Path, relative: str) -> Path:
    """Return `path` with its links resolved. Raises BadDirectory if the target is outside `root` or absent."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise BadDirectory(f"{relative!r} is a link that leads nowhere") from error
    if not target.is_relative_to(root):
        raise BadDirectory(f"{relative!r} is a link that leads outside the directory")
    return target


@dataclass(frozen=True, slots=True)
class FileState:
    """State of a file: its path inside the directory, size and modification time."""

    path: str
    size_bytes: int
    modified_ns: int


def list_files(directory: Path) -> tuple[FileState, ...]:
    """Return the files below `directory`, sorted by path. A link counts as a file.

    Raises OSError, FileNotFoundError if an entry disappears during the call.
    """

    def enter(relative: str, entry: os.DirEntry[str]) -> Path | None:
        below = enter_real(relative, entry)
        if below is not None and len(os.fsencode(relative)) > MAX_PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, f"a path longer than {MAX_PATH_BYTES} bytes cannot be stored")
        return below

    files: list[FileState] = []
    for relative, entry in walk(directory, enter):
        if not entry.is_dir(follow_symlinks=False):
            info = entry.stat(follow_symlinks=False)
            files.append(FileState(relative, info.st_size, info.st_mtime_ns))
    return tuple(sorted(files, key=lambda file: file.path))


def read_marker(path: Path) -> CheckpointMarker | None:
    """Read the `baton.json` at `path` without following a link; returns None without a marker.

    The function drops metrics and tags that a manifest cannot carry. Raises ValueError for an unreadable marker.
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
    return replace(marker, metrics=sanitize_metrics(marker.metrics), tag=sanitize_tag(marker.tag))
