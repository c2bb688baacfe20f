"""Take a finished checkpoint out of the reach of the script that wrote it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpu_client.checkpoints.local.directory_files import FileState, list_files
from gpu_client.transport.errors import FileChanged

CreatedBy = Literal["session", "foreign"]


@dataclass(frozen=True, slots=True)
class ReadyCheckpoint:
    """A complete checkpoint directory, and its files at the time when the watcher found it complete."""

    step: int
    path: Path
    metrics: dict[str, float]
    created_by: CreatedBy
    files: tuple[FileState, ...]
    tag: str = ""
    links: Path | None = None
    """Directory of links to the files, if the script may have removed `path`."""


class StagingError(Exception):
    """Error of a failed staging. The script may have deleted the checkpoint; the next checkpoint replaces it."""


def stage(checkpoint: ReadyCheckpoint, staging_dir: Path) -> ReadyCheckpoint:
    """Stage all files by hard links (copies where links are impossible), and return the staged checkpoint.

    The script's rotation cannot delete staged files during an upload. The script can still write into them; see
    `require_unchanged`. The caller removes the returned directory. A checkpoint that the watcher has linked stays in
    the directory of its links.

    The function stages all files or raises: StagingError if the checkpoint has changed since the watcher's report, or
    contains entries other than regular files and links to regular files inside the output directory; OSError if the
    disk fails.
    """
    if checkpoint.links is not None:
        return replace(checkpoint, path=checkpoint.links)
    name = f"{checkpoint.path.name}-{uuid.uuid4().hex[:8]}"
    temporary = staging_dir / f".{name}.tmp"
    target = staging_dir / name
    temporary.mkdir(parents=True)
    try:
        for file in checkpoint.files:
            source = checkpoint.path / file.path
            copy = temporary / file.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            _take(source, copy, checkpoint.path.parent.resolve())
            info = copy.stat()
            if not source.is_symlink() and (info.st_size, info.st_mtime_ns) != (file.size_bytes, file.modified_ns):
                raise StagingError(f"{source} has changed since the checkpoint was complete")
        taken = list_files(temporary)
        if list_files(checkpoint.path) != checkpoint.files:
            raise StagingError(f"{checkpoint.path} has changed since it was complete")
        temporary.rename(target)
    except FileNotFoundError as error:
        raise StagingError(f"{checkpoint.path} was removed before it could be taken over") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return replace(checkpoint, path=target, files=taken)


def require_unchanged(directory: Path, files: tuple[FileState, ...]) -> None:
    """Raise FileChanged if a file of a staged checkpoint has changed since the staging.

    Call this function before each statement about all files together. A script that writes into its former checkpoint's
    files would otherwise store a mixture of two steps, in which each single file verifies.
    """
    try:
        found = list_files(directory)
    except OSError as error:
        raise FileChanged(f"{directory} cannot be read: {error}") from error
    if found != files:
        names = sorted({file.path for file in set(found) ^ set(files)})
        raise FileChanged(f"{names[0]} of the checkpoint in {directory} was written to after it was complete")


def find_added_file(found: ReadyCheckpoint) -> str:
    """Return a file that was added to or replaced in a foreign checkpoint since the watcher's report, or "".

    Returns "" for a directory that disappears or has disappeared.
    """
    try:
        new = set(list_files(found.path)) - set(found.files)
    except OSError:
        return ""
    return min((file.path for file in new), default="")


def _take(source: Path, target: Path, output_dir: Path) -> None:
    if source.is_symlink():
        source = source.resolve(strict=True)
        if output_dir not in source.parents:
            raise StagingError(f"{source} is a link to a file outside the output directory")
    if not stat.S_ISREG(source.lstat().st_mode):
        raise StagingError(f"{source} is not a regular file")
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        # These codes mean another file system, protected links, too many links, or a file system without links.
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


class LinkedFiles:
    """Hard links to the files of one checkpoint directory, in a separate directory on the same file system.

    A deleted file keeps its content while a link exists. The script can write into a linked file until `is_deleted`
    returns True.
    """

    def __init__(self, source: Path, holding_dir: Path) -> None:
        self._source = source
        self.path = holding_dir / f"{source.name}-held-{uuid.uuid4().hex[:8]}"

    def follow(self, paths: Iterable[str]) -> None:
        """Link the present files; link replaced files anew, and keep the links of removed files.

        Raises OSError if a file cannot be linked: another file system, protected links, too many links.
        """
        for path in paths:
            source, link = self._source / path, self.path / path
            with contextlib.suppress(FileNotFoundError):  # Removed since the listing: the old link stays.
                info = source.lstat()
                if not stat.S_ISREG(info.st_mode):
                    raise OSError(f"{source} is not a regular file")
                if link.exists():
                    if link.lstat().st_ino == info.st_ino:
                        continue
                    link.unlink()
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(source, link, follow_symlinks=False)

    def drop_others(self, paths: set[str]) -> None:
        """Remove the links to files that are not in `paths`: files that the script removed or renamed while writing."""
        for file in list_files(self.path):
            if file.path not in paths:
                (self.path / file.path).unlink()

    def is_deleted(self, path: str) -> bool:
        """Return True if the link is the only name of the file, so that no process can open the file by name."""
        return (self.path / path).lstat().st_nlink == 1

    def release(self) -> None:
        """Remove all links."""
        shutil.rmtree(self.path, ignore_errors=True)
