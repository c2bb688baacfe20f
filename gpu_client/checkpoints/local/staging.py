"""Takes a finished checkpoint out of the reach of the script that wrote it."""

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
    """A complete checkpoint directory, and the files it had when it was found complete."""

    step: int
    path: Path
    metrics: dict[str, float]
    created_by: CreatedBy
    files: tuple[FileState, ...]
    tag: str = ""
    links: Path | None = None
    """The directory where its files are held by links, for one that the script may have removed from `path`."""


class StagingError(Exception):
    """The checkpoint could not be taken over. It may have been rotated away: then the next one will do."""


def stage(checkpoint: ReadyCheckpoint, staging_dir: Path) -> ReadyCheckpoint:
    """Take the files over at once, by hard links (copies where those are impossible), so that the script's rotation
    cannot pull them from under an upload. Returns the checkpoint where it lies now; the caller removes that directory.

    A link does not keep the script from writing into the file: see `require_unchanged`.

    All files or none: raises StagingError if the checkpoint is not as it was when it was found complete, or holds
    something other than regular files and links to some inside the output directory; OSError if the disk fails.
    A checkpoint that the watcher holds there by links already stays where these are.
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
    """Raise FileChanged unless the files of a staged checkpoint are as they were when it was taken over.

    To be asked each time before something is said of all of them together: a script that writes into its former
    checkpoint's files would otherwise have a mixture of two stored, each file sound by itself.
    """
    try:
        found = list_files(directory)
    except OSError as error:
        raise FileChanged(f"{directory} cannot be read (any more): {error}") from error
    if found != files:
        names = sorted({file.path for file in set(found) ^ set(files)})
        raise FileChanged(f"{names[0]} of the checkpoint in {directory} was written to after it was complete")


def find_added_file(found: ReadyCheckpoint) -> str:
    """Return a file that was added to a foreign checkpoint's directory since it was found, or replaced; "" if none.

    A directory that is being removed, or is gone, has got none.
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
            raise StagingError(f"{source} is outside the output directory, and is not followed")
    if not stat.S_ISREG(source.lstat().st_mode):
        raise StagingError(f"{source} is not a regular file")
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        # Another file system; a kernel that protects links to others' files; too many links; a system without them.
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


class LinkedFiles:
    """Links to the files of one checkpoint directory, in a directory of their own on the same file system.

    A deleted file keeps its content as long as a link exists. A link does not keep the owner from writing into the
    file: `is_deleted` tells whether the owner still can.
    """

    def __init__(self, source: Path, holding_dir: Path) -> None:
        self._source = source
        self.path = holding_dir / f"{source.name}-held-{uuid.uuid4().hex[:8]}"

    def follow(self, paths: Iterable[str]) -> None:
        """Link the files as they lie there now; a file that was replaced is linked anew, a removed one stays linked.

        Raises OSError where a file cannot be linked: another file system, a kernel that protects links, too many links.
        """
        for path in paths:
            source, link = self._source / path, self.path / path
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed: the link, if any, stays
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
        """Remove the links to files that are not named: the script removed them while it wrote, or renamed them."""
        for file in list_files(self.path):
            if file.path not in paths:
                (self.path / file.path).unlink()

    def is_deleted(self, path: str) -> bool:
        """True if the link is the file's last one: nobody can open the file under its former name any more."""
        return (self.path / path).lstat().st_nlink == 1

    def release(self) -> None:
        """Give the links up."""
        shutil.rmtree(self.path, ignore_errors=True)
