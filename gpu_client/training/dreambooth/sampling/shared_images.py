"""Class images that jobs leave for later ones, and attempts for later ones at the same job, on whatever machine: in
archives with the key of how they were made.

A job leaves one archive of all. While they are being made, an attempt shows what there is in parts, so that no death in
the middle costs more than the last moments. The control plane hands both on by what it knows: parameters and the job.
The key says more, such as what is in the files of the base model; images of another key are not touched.
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
"""So much of what was made may be lost with a machine, and what an upload takes."""
PART_SHARE = 50
"""Or one part in so many of what there is, if that is more: then there are few parts, however long it takes."""
PART_BYTES = 32 * 1024**2
"""The agent sends nothing before the end that has more than twice as many."""
_NO_DATE = (1980, 1, 1, 0, 0, 0)
_UNREADABLE = (
    zipfile.BadZipFile,
    *(OSError, EOFError, KeyError, ValueError, RuntimeError),
    *(zlib.error, lzma.LZMAError, struct.error),
)
"""What Python's zipfile raises for damaged archives, beside its own error."""

log = logging.getLogger("baton.training")


class SharedImageArchive:
    """One archive. Where there is none, or it is of another key, or damaged: no images."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self.names: frozenset[str] = frozenset()
        try:
            with zipfile.ZipFile(self._path) as archive:
                if archive.comment == key.encode():
                    self.names = frozenset(archive.namelist())
                else:
                    log.info("the class images in %s were made otherwise", path.name)
        except FileNotFoundError:
            pass
        except _UNREADABLE as error:
            log.warning("the class images in %s cannot be read (%s)", path.name, error)

    def read(self, name: str) -> bytes | None:
        """The image file of that name; None if there is none that can be read."""
        if name not in self.names:
            return None
        try:
            with zipfile.ZipFile(self._path) as archive:
                return archive.read(name)
        except _UNREADABLE as error:
            log.warning("the class image %s in %s cannot be read (%s)", name, self._path.name, error)
            return None


def of_other_jobs(data_dir: Path, key: str) -> SharedImageArchive:
    """What an earlier job has left for this one."""
    return SharedImageArchive(data_dir / SHARED_DIR / SHARED_FILE, key)


class EarlierImages:
    """What earlier attempts at this job have made, as far as it came to be stored."""

    def __init__(self, data_dir: Path, key: str) -> None:
        folder = data_dir / SHARED_DIR / f"{SHARED_FILE}{SHARED_PARTS}"
        self._parts = [SharedImageArchive(path, key) for path in sorted(folder.rglob("*.zip"))]

    def read(self, name: str) -> Iterator[bytes]:
        """The image files of that name that can be read; most often one or none."""
        for part in self._parts:
            encoded = part.read(name)
            if encoded is not None:
                yield encoded


class ImageParts:
    """Shows the images that an attempt makes, for the one after it. `clock`: monotonic seconds."""

    def __init__(self, session: Session, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._key = key
        self._clock = clock
        self._begun_at = self._shown_at = clock()
        self._waiting: list[tuple[str, bytes]] = []

    def add(self, name: str, encoded: bytes) -> None:
        """Take a new image. Without an agent there is nobody to show it to."""
        if self._session.job_id:
            self._waiting.append((name, encoded))

    def show_if_due(self) -> None:
        """Show what is new, if that is much, or a part was not shown for long."""
        pause_s = max(PART_EVERY_S, (self._shown_at - self._begun_at) / PART_SHARE)
        waiting_bytes = sum(len(encoded) for _, encoded in self._waiting)
        if waiting_bytes >= PART_BYTES or self._clock() - self._shown_at >= pause_s:
            self.show()

    def show(self) -> None:
        """Show all that is new. Where it cannot be written, the next attempt makes it again."""
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
            log.warning("class images cannot be shown before all are made (%s)", error)
        self._waiting.clear()


def write_shared(output_dir: Path, key: str, images: Sequence[tuple[str, bytes]]) -> None:
    """Write the archive for later jobs; equal images make equal bytes."""
    _write(output_dir / SHARED_FILE, key, images)


def _portions(images: Sequence[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """In order, each with at most PART_BYTES if it has more than one image."""
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
