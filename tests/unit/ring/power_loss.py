"""Model a disk after a loss of power: effects that were flushed, and any part of those that were not.

`recorded` watches the system calls of this process below one directory. `Disk.after` builds the directory as it could
be found after a loss of power behind any of them.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Names = dict[str, int]
"""The entries of a directory: what they name, by number."""


class Change(NamedTuple):
    """Change an entry of a directory without a flush. `node` None: the entry is gone."""

    name: str
    node: int | None


@dataclass
class Moment:
    """Hold the state of the disk, and of the memory that was not flushed, behind one system call."""

    flushed: dict[int, bytes] = field(default_factory=dict)
    """Contents of files."""
    entries: dict[str, Names] = field(default_factory=dict)
    """Flushed entries, by the directory's path."""
    changes: dict[str, list[Change]] = field(default_factory=dict)
    """Unflushed changes of entries in order, by the directory's path."""


class Disk:
    """Keep all moments of a run, in their order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[tuple[str, str]] = []
        """Name of the system call, and what it was about: a path below the root."""
        self.moments: list[Moment] = []
        self._nodes: dict[int, int] = {}
        self._count = 0
        self._now = Moment(entries={".": {}}, changes={".": []})

    def after(self, place: int, target: Path, chance: random.Random | None, *, all_names: bool = False) -> None:
        """Build the directory as a loss of power behind call number `place` could leave it.

        Without `chance` nothing that was not flushed is there; with `all_names` all entries are, with no content of
        files; with `chance` any part of the entries is.
        """
        found = self.moments[place]
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        pending = ["."]
        while pending:
            directory = pending.pop()
            names = dict(found.entries.get(directory, {}))
            for change in found.changes.get(directory, []):
                if all_names or (chance is not None and chance.random() < 0.5):
                    if change.node is None:
                        names.pop(change.name, None)
                    else:
                        names[change.name] = change.node
            for name, node in names.items():
                path = os.path.normpath(f"{directory}/{name}")
                if path in found.entries:
                    (target / path).mkdir()
                    pending.append(path)
                else:
                    (target / path).write_bytes(found.flushed.get(node, b""))

    def node(self, info: os.stat_result, *, new: bool = False) -> int:
        """Return a number of a file or directory that is never used again, unlike the numbers of inodes."""
        if new or info.st_ino not in self._nodes:
            self._count += 1
            self._nodes[info.st_ino] = self._count
        return self._nodes[info.st_ino]

    def called(self, call: str, path: str) -> None:
        """Note the call and the moment behind it."""
        self.calls.append((call, path))
        now = self._now
        entries = {directory: dict(names) for directory, names in now.entries.items()}
        self.moments.append(Moment(dict(now.flushed), entries, {d: list(c) for d, c in now.changes.items()}))

    def named(self, path: str, node: int | None) -> None:
        """Note that an entry was made, replaced, or removed."""
        directory, name = os.path.split(path)
        self._now.changes.setdefault(directory or ".", []).append(Change(name, node))

    def made_directory(self, path: str) -> None:
        """Note a directory that is empty, and not flushed."""
        self._now.entries[path], self._now.changes[path] = {}, []

    def flush(self, fd: int, path: str) -> None:
        """Put the content of a file, or the entries of a directory, on the disk."""
        info = os.fstat(fd)
        if not stat.S_ISDIR(info.st_mode):
            with Path(f"/proc/self/fd/{fd}").open("rb") as file:
                self._now.flushed[self.node(info)] = file.read()
            return
        entries = self._now.entries.setdefault(path, {})
        for change in self._now.changes.get(path, []):
            if change.node is None:
                entries.pop(change.name, None)
            else:
                entries[change.name] = change.node
        self._now.changes[path] = []


class _Calls:
    """Stand in for the system calls of `os`, and note on the disk what they do below its root."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._real = {name: getattr(os, name) for name in ("open", "link", "replace", "rename", "unlink", "mkdir")}
        self._paths: dict[int, str] = {}

    def _below(self, path: Any) -> str | None:
        full, root = Path.cwd() / path, self._disk.root
        return str(full.relative_to(root)) if full.is_relative_to(root) else None

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        fd: int = self._real["open"](path, flags, *args, **kwargs)
        name = self._below(path)
        self._paths[fd] = name or ""
        if name is not None and flags & os.O_EXCL:
            self._disk.named(name, self._disk.node(os.fstat(fd), new=True))
            self._disk.called("open", name)
        return fd

    def moving(self, call: str) -> Callable[..., None]:
        def move(source: Any, target: Any, **kwargs: Any) -> None:
            self._real[call](source, target, **kwargs)
            before, name = self._below(source), self._below(target)
            assert before is not None, "a ring keeps to its directory"
            assert name is not None, "a ring keeps to its directory"
            self._disk.named(name, self._disk.node(Path(target).stat()))
            if call != "link":
                self._disk.named(before, None)
            self._disk.called(call, name)

        return move

    def unlink(self, path: Any, **kwargs: Any) -> None:
        self._real["unlink"](path, **kwargs)
        name = self._below(path)
        if name is not None:
            self._disk.named(name, None)
            self._disk.called("unlink", name)

    def mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._real["mkdir"](path, *args, **kwargs)
        name = self._below(path)
        if name is not None and name != ".":
            self._disk.made_directory(name)
            self._disk.named(name, self._disk.node(Path(path).stat(), new=True))
            self._disk.called("mkdir", name)

    def fsync(self, fd: int) -> None:
        # The model is the disk: the machine's own would only take time.
        if self._paths.get(fd):
            self._disk.flush(fd, self._paths[fd])
            self._disk.called("fsync", self._paths[fd])


@contextmanager
def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Record what this process does below `root`, which is empty, or not there yet."""
    disk = Disk(root)
    calls = _Calls(disk)
    with monkeypatch.context() as patched:
        for name in ("open", "unlink", "mkdir", "fsync"):
            patched.setattr(os, name, getattr(calls, name))
        for name in ("link", "replace", "rename"):
            patched.setattr(os, name, calls.moving(name))
        yield disk
