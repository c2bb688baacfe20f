"""The chunks that this machine has: the checkpoints of a job that were committed or restored here.

```
<root>/<job id>/<step>-<epoch>/manifest.json, files/...
```

It is a cache. What is found in it is verified by whoever uses it; what is damaged is removed; a full disk costs the
cache, never a commit or a restore. A job finds its own checkpoints only.
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

from baton.contract.manifest import Manifest, parse_manifest
from gpu_client.checkpoints.format.manifest_reader import MAX_MANIFEST_BYTES, count_written_bytes, map_places
from gpu_client.checkpoints.local.directory_files import walk
from gpu_client.transport.transfer.transfer_requests import Segment

logger = logging.getLogger(__name__)

SHARE = 4
"""All stores in one root use at most the fourth part of what would be free without them."""

_MANIFEST = "manifest.json"
_FILES = "files"
_ENTRY = re.compile(r"[0-9]{1,13}-[0-9]{1,10}")
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP)

_How = Literal["move", "link", "copy"]


@dataclass(frozen=True)
class _Entry:
    manifest: Manifest
    path: Path
    """Its directory; the checkpoint's files lie in `files` below it."""
    kept_bytes: int

    @property
    def files(self) -> Path:
        return self.path / _FILES

    @property
    def age(self) -> tuple[int, int]:
        """Rises with every commit of the job."""
        return self.manifest.epoch, self.manifest.step


class LocalChunkCache:
    """The store of one job below `root`; what an earlier agent left there is found again. Safe from several threads."""

    def __init__(self, root: Path, job_id: str) -> None:
        self._root = root
        self._job_id = job_id
        self._directory = root / job_id
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        """Oldest first."""
        self._manifests: tuple[Manifest, ...] = ()
        self._index: dict[str, Segment] | None = None
        try:
            self._entries = sorted(_read_entries(self._directory, job_id), key=lambda entry: entry.age)
        except OSError as error:
            logger.warning("the local store cannot be read: %s", error)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """What this attempt was resumed from and what it committed last, the newest last; also if its files are not
        kept."""
        with self._lock:
            return self._manifests

    def record_restored(self, manifest: Manifest, directory: Path) -> None:
        """The attempt begins with this checkpoint; its files are linked. What else the job has here is let go: it was
        older, damaged or not of this line."""
        with self._lock:
            self._manifests = (manifest,)
            kept = self._keep(manifest, directory, "link")
            self._remove_entries([entry for entry in self._entries if entry is not kept])

    def record_committed(self, manifest: Manifest, directory: Path, *, copy: bool = False) -> None:
        """The attempt has committed this checkpoint; `directory` is moved into the store, or left where that cannot be.

        `copy`: its files will be written to again, so that they are copied. Kept are this checkpoint, the one that the
        attempt was resumed from, and the one that has the bases of this one's deltas: the next one's are taken to them
        as well.
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
        """Where the bytes of a chunk should lie in a local file. They may have changed since: verify them."""
        with self._lock:
            if self._index is None:
                self._index = {}
                for entry in self._entries:
                    self._index |= _segments(entry)
            return self._index.get(blake3)

    def newest(self) -> tuple[Manifest, Path] | None:
        """The newest checkpoint whose files are here, and the directory that they are in."""
        with self._lock:
            return (self._entries[-1].manifest, self._entries[-1].files) if self._entries else None

    def clear(self) -> None:
        """Forget everything of this job."""
        with self._lock:
            self._manifests = ()
            self._entries, self._index = [], None
            _remove(self._directory)

    def free_space(self, is_enough: Callable[[], bool]) -> None:
        """Give the disk back until that is enough: first what other jobs have, then all of this one's files."""
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
        """Step and epoch of the kept checkpoint that has most of the deltas' bases; none if there are none."""
        bases = {manifest.chunks[chunk.base].blake3 for chunk in manifest.chunks if chunk.base is not None}
        held = [
            (sum(found.size_bytes for blake3, found in _segments(entry).items() if blake3 in bases), number)
            for number, entry in enumerate(self._entries)
            if entry.age != (manifest.epoch, manifest.step)
        ]
        most_bytes, number = max(held, default=(0, 0))
        found = self._entries[number].manifest if most_bytes else None
        return {(found.step, found.epoch)} if found else set()

    def _keep(self, manifest: Manifest, directory: Path, how: _How) -> _Entry | None:
        """A new entry; None if it cannot be had."""
        name = f"{manifest.step}-{manifest.epoch}"
        self._remove_entries([entry for entry in self._entries if entry.path.name == name])
        temporary = self._directory / f".{uuid.uuid4().hex}.tmp"
        try:
            # Before anything is linked: a manifest that does not fit is noticed without harm.
            temporary.mkdir(parents=True, mode=0o700)
            (temporary / _MANIFEST).write_bytes(manifest.canonical_bytes())
            _take_over(manifest, directory, temporary / _FILES, how)
            _remove(self._directory / name)
            temporary.rename(self._directory / name)
        except OSError as error:
            logger.warning("checkpoint of step %d is not kept on this machine: %s", manifest.step, error)
            _remove(temporary)
            return None
        entry = _Entry(manifest, self._directory / name, count_written_bytes(manifest))
        self._entries.append(entry)
        self._index = None
        self._bound()
        return entry

    def _bound(self) -> None:
        """Let go of the oldest until the rest fits its share of the disk, as far as that can be told."""
        while self._entries:
            kept_bytes = sum(entry.kept_bytes for entry in self._entries)
            try:
                fits = kept_bytes <= _share_bytes(self._root, kept_bytes)
            except OSError as error:
                logger.warning("the local store's share of the disk cannot be told: %s", error)
                return
            if fits:
                return
            logger.info("%s is not kept on this machine: the disk is too full", self._entries[0].path.name)
            self._remove_entries(self._entries[:1])

    def _remove_entries(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            self._entries.remove(entry)
            self._index = None
            _remove(entry.path)


def find_excess_caches(root: Path, *, keep: str | None = None) -> list[Path]:
    """What is to be removed below `root` so that the stores of all jobs take no more than their share of the disk:
    oldest first, that of job `keep` last. What is no store goes in any case. Raises OSError."""
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
    """Bytes on the disk of all files below."""
    return sum(
        entry.stat(follow_symlinks=False).st_blocks * 512
        for _, entry in walk(directory)
        if not entry.is_dir(follow_symlinks=False)
    )


def _read_entries(directory: Path, job_id: str) -> list[_Entry]:
    """What is sound below `directory`; the rest is removed."""
    if directory.is_symlink() or not directory.is_dir():
        return []
    found: list[_Entry] = []
    for path in directory.iterdir():
        try:
            found.append(_read_entry(path, job_id))
        except (OSError, ValueError) as error:
            # ValidationError is a ValueError too.
            logger.warning("%s in the local store is damaged and removed: %s", path.name, error)
            _remove(path)
    return found


def _read_entry(path: Path, job_id: str) -> _Entry:
    """Raises OSError or ValueError if it is not whole."""
    if not _ENTRY.fullmatch(path.name):
        raise ValueError("it was never finished")
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise ValueError("it is not a directory")
    data = _read_regular(path / _MANIFEST)
    try:
        manifest = parse_manifest(data)
    except ValidationError as error:
        raise ValueError(f"its manifest cannot be read: {error.errors()[0]['msg']}") from error
    if manifest.job_id != job_id or f"{manifest.step}-{manifest.epoch}" != path.name:
        raise ValueError("its manifest is that of another checkpoint")
    for file in manifest.files:
        info = (path / _FILES / file.path).lstat()
        if not stat.S_ISREG(info.st_mode) or info.st_size != file.size_bytes:
            raise ValueError(f"{file.path!r} is not as the manifest says")
    return _Entry(manifest, path, count_written_bytes(manifest))


def _read_regular(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("its manifest is not a regular file")
        return file.read(MAX_MANIFEST_BYTES + 1)


def _segments(entry: _Entry) -> dict[str, Segment]:
    """Where the chunks lie, by digest."""
    chunks, files = entry.manifest.chunks, entry.manifest.files
    paths = [entry.files / file.path for file in files]
    return {
        chunks[index].blake3: Segment(paths[places[0].file], places[0].offset, chunks[index].size_bytes)
        for index, places in map_places(entry.manifest).items()
    }


def _take_over(manifest: Manifest, directory: Path, target: Path, how: _How) -> None:
    """The files of `directory` as `target`. Raises OSError."""
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
        raise OSError(errno.ENOSPC, "it would have to be copied, and the disk is too full")
    for file in manifest.files:
        place = target / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        source = (directory / file.path).resolve(strict=True)
        if copied:
            shutil.copyfile(source, place)
        else:
            _link(source, place)


def _link(source: Path, target: Path) -> None:
    """A hard link, a copy where that is impossible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    """Remove a directory or whatever is in its place, as far as that is possible."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
