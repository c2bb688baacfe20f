"""Cache the checkpoints of a job that were committed or restored on this machine, as a source of chunks.

```
<root>/<job id>/<step>-<epoch>/manifest.json, files/...
```

The reader of a chunk verifies its bytes; the cache removes damaged entries. A full disk costs the cache, never a commit
or a restore. A job finds only its own checkpoints.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from baton.contract.checkpoints.manifest import Manifest, parse_manifest
from gpu_client.checkpoints.format.manifest_reader import MAX_MANIFEST_BYTES, count_written_bytes, map_places
from gpu_client.checkpoints.local.directory_files import walk
from gpu_client.transport.transfer.transfer_requests import Segment

logger = logging.getLogger(__name__)

SHARE = 4
"""Divisor of the disk space: the caches of a root use at most a quarter of the space that is free without caches."""

_MANIFEST = "manifest.json"
_FILES = "files"
_ENTRY = re.compile(r"[0-9]{1,13}-[0-9]{1,10}")
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP)

_Transfer = Literal["move", "link", "copy"]


@dataclass(frozen=True)
class _Entry:
    manifest: Manifest
    path: Path
    """The directory of the entry; the checkpoint's files are in `files` below it."""
    kept_bytes: int

    @property
    def files(self) -> Path:
        return self.path / _FILES

    @property
    def age(self) -> tuple[int, int]:
        """Return a sort key that grows with each commit of the job."""
        return self.manifest.epoch, self.manifest.step


class LocalChunkCache:
    """The cache of one job below `root`, with the entries of an earlier agent. Thread-safe."""

    def __init__(self, root: Path, job_id: str) -> None:
        self._root = root
        self._job_id = job_id
        self._directory = root / job_id
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        """Cached checkpoints, oldest first."""
        self._manifests: tuple[Manifest, ...] = ()
        self._index: dict[str, Segment] | None = None
        try:
            self._entries = sorted(_read_entries(self._directory, job_id), key=lambda entry: entry.age)
        except OSError as error:
            logger.warning("the local cache cannot be read: %s", error)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Return the manifests of this attempt's first (restored) and last checkpoint, newest last, cached or not."""
        with self._lock:
            return self._manifests

    def record_restored(self, manifest: Manifest, directory: Path) -> None:
        """Record the attempt's restored checkpoint, and link its files.

        Removes all other entries of the job, which are older, damaged or of another branch.
        """
        with self._lock:
            self._manifests = (manifest,)
            kept = self._keep(manifest, directory, "link")
            self._remove_entries([entry for entry in self._entries if entry is not kept])

    def record_committed(self, manifest: Manifest, directory: Path, *, copy: bool = False) -> None:
        """Record a committed checkpoint, and move `directory` into the cache where possible.

        `copy`: copy the files instead, because the training will write to the files again. The cache keeps this
        checkpoint, the restored checkpoint, and the checkpoint with the bases of this checkpoint's deltas, because the
        next deltas use the same bases.
        """
        with self._lock:
            resumed = [one for one in self._manifests if one.epoch < manifest.epoch]
            self._manifests = (*resumed, manifest)
            kept = self._keep(manifest, directory, "copy" if copy else "move")
            wanted = {(one.step, one.epoch) for one in resumed} | self._holder_of_bases(self._manifests[-1])
            self._remove_entries(
                [
                    entry
                    for entry in self._entries
                    if entry is not kept and (entry.manifest.step, entry.manifest.epoch) not in wanted
                ]
            )

    def find(self, blake3: str) -> Segment | None:
        """Return the file segment with a chunk's bytes. The caller verifies the bytes, because files can change."""
        with self._lock:
            if self._index is None:
                self._index = {}
                for entry in self._entries:
                    self._index |= _segments(entry)
            return self._index.get(blake3)

    def newest(self) -> tuple[Manifest, Path] | None:
        """Return the manifest and the directory of the newest cached checkpoint."""
        with self._lock:
            return (self._entries[-1].manifest, self._entries[-1].files) if self._entries else None

    def clear(self) -> None:
        """Remove all entries of the job."""
        with self._lock:
            self._manifests = ()
            self._entries, self._index = [], None
            _remove(self._directory)

    def free_space(self, is_enough: Callable[[], bool]) -> None:
        """Remove files until `is_enough`: first the caches of other jobs, then all files of this job."""
        with self._lock:
            with suppress(OSError):
                for path in self._root.iterdir():
                    if path != self._directory:
                        _remove(path)
            if is_enough():
                return
            self._entries, self._index = [], None
            _remove(self._directory)

    def _holder_of_bases(self, manifest: Manifest) -> set[tuple[int, int]]:
        """Return step and epoch of the cached checkpoint with most of the deltas' bases, or an empty set."""
        bases = {manifest.chunks[chunk.base].blake3 for chunk in manifest.chunks if chunk.base is not None}
        held = [
            (sum(found.size_bytes for blake3, found in _segments(entry).items() if blake3 in bases), number)
            for number, entry in enumerate(self._entries)
            if entry.age != (manifest.epoch, manifest.step)
        ]
        most_bytes, number = max(held, default=(0, 0))
        found = self._entries[number].manifest if most_bytes else None
        return {(found.step, found.epoch)} if found else set()

    def _keep(self, manifest: Manifest, directory: Path, how: _Transfer) -> _Entry | None:
        """Add an entry; return None (logged) if the disk refuses."""
        name = f"{manifest.step}-{manifest.epoch}"
        self._remove_entries([entry for entry in self._entries if entry.path.name == name])
        temporary = self._directory / f".{uuid.uuid4().hex}.tmp"
        try:
            # A full disk shows at the manifest, before the first link.
            temporary.mkdir(parents=True, mode=0o700)
            (temporary / _MANIFEST).write_bytes(manifest.canonical_bytes())
            _take_over(manifest, directory, temporary / _FILES, how)
            _remove(self._directory / name)
            temporary.rename(self._directory / name)
        except OSError as error:
            logger.warning("checkpoint of step %d is not cached on this machine: %s", manifest.step, error)
            _remove(temporary)
            return None
        entry = _Entry(manifest, self._directory / name, count_written_bytes(manifest))
        self._entries.append(entry)
        self._index = None
        self._bound()
        return entry

    def _bound(self) -> None:
        """Remove the oldest entries until the rest fits the share of the disk, if the disk reports its space."""
        while self._entries:
            kept_bytes = sum(entry.kept_bytes for entry in self._entries)
            try:
                fits = kept_bytes <= _share_bytes(self._root, kept_bytes)
            except OSError as error:
                logger.warning("the local cache's share of the disk is unknown: %s", error)
                return
            if fits:
                return
            logger.info("%s is removed from the local cache: the disk is too full", self._entries[0].path.name)
            self._remove_entries(self._entries[:1])

    def _remove_entries(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            self._entries.remove(entry)
            self._index = None
            _remove(entry.path)


def find_excess_caches(root: Path, *, keep: str | None = None) -> list[Path]:
    """Return the paths to remove below `root`, so that the caches of all jobs fit their share of the disk.

    The order is oldest first, the cache of job `keep` last. The result contains every entry that is no directory.
    Raises OSError.
    """
    entries = list(root.iterdir()) if root.is_dir() else []
    jobs = [path for path in entries if not path.is_symlink() and path.is_dir()]
    excess = [path for path in entries if path not in jobs]
    ages = {path: (path.name == keep, path.stat().st_mtime_ns) for path in jobs}
    sizes = {path: _used_bytes(path) for path in jobs}
    allowed_bytes = _share_bytes(root, sum(sizes.values())) if jobs else 0
    for path in sorted(jobs, key=ages.__getitem__):
        if sum(sizes.values()) <= allowed_bytes:
            break
        excess.append(path)
        del sizes[path]
    return excess


def _share_bytes(root: Path, used_bytes: int) -> int:
    return (shutil.disk_usage(root).free + used_bytes) // SHARE


def _used_bytes(directory: Path) -> int:
    """Return the disk space of all files below `directory`, in bytes."""
    # A directory may vanish, or a trainer may have made it unreadable. os.walk and `suppress` skip its files, so that
    # the trimming of the other caches continues.
    used_bytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                used_bytes += (Path(folder) / name).lstat().st_blocks * 512
    return used_bytes


def _read_entries(directory: Path, job_id: str) -> list[_Entry]:
    """Read the intact entries below `directory`; remove damaged entries."""
    if directory.is_symlink() or not directory.is_dir():
        return []
    found: list[_Entry] = []
    for path in directory.iterdir():
        try:
            found.append(_read_entry(path, job_id))
        except (OSError, ValueError) as error:
            logger.warning("%s in the local cache is damaged and removed: %s", path.name, error)
            _remove(path)
    return found


def _read_entry(path: Path, job_id: str) -> _Entry:
    """Read one entry. Raises OSError or ValueError if the entry is incomplete or damaged."""
    if not _ENTRY.fullmatch(path.name):
        raise ValueError("the name is not that of a finished entry")
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise ValueError("the entry is not a directory")
    data = _read_regular(path / _MANIFEST)
    try:
        manifest = parse_manifest(data)
    except ValidationError as error:
        raise ValueError(f"the manifest cannot be read: {error.errors()[0]['msg']}") from error
    if manifest.job_id != job_id or f"{manifest.step}-{manifest.epoch}" != path.name:
        raise ValueError("the manifest belongs to another checkpoint")
    for file in manifest.files:
        info = (path / _FILES / file.path).lstat()
        if not stat.S_ISREG(info.st_mode) or info.st_size != file.size_bytes:
            raise ValueError(f"{file.path!r} is not a regular file of the {file.size_bytes} bytes in the manifest")
    return _Entry(manifest, path, count_written_bytes(manifest))


def _read_regular(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("the manifest is not a regular file")
        return file.read(MAX_MANIFEST_BYTES + 1)


def _segments(entry: _Entry) -> dict[str, Segment]:
    """Return the file segment of each chunk, by digest."""
    chunks, files = entry.manifest.chunks, entry.manifest.files
    paths = [entry.files / file.path for file in files]
    return {
        chunks[index].blake3: Segment(paths[places[0].file], places[0].offset, chunks[index].size_bytes)
        for index, places in map_places(entry.manifest).items()
    }


def _take_over(manifest: Manifest, directory: Path, target: Path, how: _Transfer) -> None:
    """Move, link or copy the files of `directory` to `target`. Raises OSError."""
    if how == "move" and not any(entry.is_symlink() for _, entry in walk(directory)):
        try:
            directory.rename(target)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
        else:
            return
    target.mkdir()
    copied = how == "copy" or directory.stat().st_dev != target.stat().st_dev
    if copied and count_written_bytes(manifest) > _share_bytes(target, 0):
        raise OSError(errno.ENOSPC, "the copy would exceed the share of the disk")
    for file in manifest.files:
        place = target / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        source = (directory / file.path).resolve(strict=True)
        if copied:
            shutil.copyfile(source, place)
        else:
            _link(source, place)


def _link(source: Path, target: Path) -> None:
    """Make a hard link, or a copy where a link is impossible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    """Remove a directory, file or link; log a failure."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
