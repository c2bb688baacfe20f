"""Share archives of class images with later jobs, and with later attempts of a job, on any machine.

A complete job publishes one archive of all its images. During the generation, an attempt publishes parts as artifacts,
so that a preemption loses only the last images. The control plane selects archives by parameters and job. The key in
each archive is more precise and covers the files of the base model; readers ignore archives with another key.
"""

from __future__ import annotations

import logging
import lzma
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.contract.names import SHARED_DIR, SHARED_PARTS
from gpu_client.training.session.session import Session

SHARED_FILE = "class_images.zip"
PART_EVERY_S = 30.0
"""Interval of parts in seconds; a preemption loses at most the images of an interval and of an upload."""
PART_SHARE = 50
"""Divisor of the elapsed time: the interval grows to this fraction, which limits the number of parts."""
PART_BYTES = 32 * 1024**2
"""Size of a part in bytes, half of the agent's limit for artifacts before the end."""
_NO_DATE = (1980, 1, 1, 0, 0, 0)
_UNREADABLE = (
    zipfile.BadZipFile,
    *(OSError, EOFError, KeyError, ValueError, RuntimeError),
    *(zlib.error, lzma.LZMAError, struct.error),
)
"""Errors of Python's zipfile for damaged archives."""

log = logging.getLogger("baton.training")


class SharedImageArchive:
    """Archive of images; empty for a missing or damaged archive, or an archive of another key."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self.names: frozenset[str] = frozenset()
        try:
            with zipfile.ZipFile(self._path) as archive:
                if archive.comment == key.encode():
                    self.names = frozenset(archive.namelist())
                else:
                    log.info("the class images in %s have another key: ignored", path.name)
        except FileNotFoundError:
            pass
        except _UNREADABLE as error:
            log.warning("the class images in %s cannot be read (%s)", path.name, error)

    def read(self, name: str) -> bytes | None:
        """Read the image file `name`; None for a missing or damaged file."""
        if name not in self.names:
            return None
        try:
            with zipfile.ZipFile(self._path) as archive:
                return archive.read(name)
        except _UNREADABLE as error:
            log.warning("the class image %s in %s cannot be read (%s)", name, self._path.name, error)
            return None


def open_shared_images(data_dir: Path, key: str) -> SharedImageArchive:
    """Open the archive of an earlier job."""
    return SharedImageArchive(data_dir / SHARED_DIR / SHARED_FILE, key)


class EarlierImages:
    """Stored parts of earlier attempts at this job."""

    def __init__(self, data_dir: Path, key: str) -> None:
        folder = data_dir / SHARED_DIR / f"{SHARED_FILE}{SHARED_PARTS}"
        self._parts = [SharedImageArchive(path, key) for path in sorted(folder.rglob("*.zip"))]

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the readable image files `name`, at most one for each part."""
        for part in self._parts:
            encoded = part.read(name)
            if encoded is not None:
                yield encoded


class ImageParts:
    """Publisher of this attempt's images for the next attempt. `clock`: monotonic seconds."""

    def __init__(self, session: Session, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._key = key
        self._clock = clock
        self._begun_at = self._shown_at = clock()
        self._waiting: list[tuple[str, bytes]] = []

    def add(self, name: str, encoded: bytes) -> None:
        """Add a new image; a no-op without an agent."""
        if self._session.job_id:
            self._waiting.append((name, encoded))

    def show_if_due(self) -> None:
        """Publish the new images if they are many, or the interval has passed."""
        pause_s = max(PART_EVERY_S, (self._shown_at - self._begun_at) / PART_SHARE)
        waiting_bytes = sum(len(encoded) for _, encoded in self._waiting)
        if waiting_bytes >= PART_BYTES or self._clock() - self._shown_at >= pause_s:
            self.show()

    def show(self) -> None:
        """Publish all new images. After a write error, the next attempt generates the images again."""
        self._shown_at = self._clock()
        if not self._waiting:
            return
        folder = self._session.output_dir / f"{SHARED_FILE}{SHARED_PARTS}"
        try:
            folder.mkdir(exist_ok=True)
            for images in _portions(self._waiting):
                path = folder / f"{Path(images[0][0]).stem}.zip"
                _write(path, self._key, images)
                self._session.artifact(path)
        except OSError as error:
            log.warning("class images cannot be published before all are generated (%s)", error)
        self._waiting.clear()


def write_shared(output_dir: Path, key: str, images: Sequence[tuple[str, bytes]]) -> None:
    """Write the archive for later jobs; equal images make equal bytes."""
    _write(output_dir / SHARED_FILE, key, images)


def _portions(images: Sequence[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Split the images in order into portions of at most PART_BYTES, or of one image."""
    portion: list[tuple[str, bytes]] = []
    size_bytes = 0
    for name, encoded in images:
        if portion and size_bytes + len(encoded) > PART_BYTES:
            yield portion
            portion, size_bytes = [], 0
        portion.append((name, encoded))
        size_bytes += len(encoded)
    if portion:
        yield portion


def _write(path: Path, key: str, images: Sequence[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = key.encode()
        for name, encoded in images:
            archive.writestr(zipfile.ZipInfo(name, date_time=_NO_DATE), encoded)
