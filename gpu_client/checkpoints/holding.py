"""Hard links to the files of a directory that its owner may delete at any moment."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path


class Hold:
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
        for link in [path for path in self.path.rglob("*") if not path.is_dir()]:
            if link.relative_to(self.path).as_posix() not in paths:
                link.unlink()

    def is_deleted(self, path: str) -> bool:
        """True if the link is the file's last one: nobody can open the file under its former name any more."""
        return (self.path / path).lstat().st_nlink == 1

    def release(self) -> None:
        """Give the links up."""
        shutil.rmtree(self.path, ignore_errors=True)
