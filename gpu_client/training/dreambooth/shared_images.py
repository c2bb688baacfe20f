"""Class images that jobs leave for later ones, on whatever machine: one archive, with the key of how they were made.

The control plane hands it on by the parameters that it knows. The key says more, such as what is in the files of the
base model; images of another key are not touched.
"""

from __future__ import annotations

import logging
import lzma
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from contract.names import SHARED_DIR

SHARED_FILE = "class_images.zip"
_NO_DATE = (1980, 1, 1, 0, 0, 0)
_UNREADABLE = (
    zipfile.BadZipFile,
    *(OSError, EOFError, KeyError, ValueError, RuntimeError),
    *(zlib.error, lzma.LZMAError, struct.error),
)
"""What Python's zipfile raises for damaged archives, beside its own error."""

log = logging.getLogger("baton.training")


class SharedImages:
    """The archive that came with the job. Without one, or with one of another key or one that is damaged: no images."""

    def __init__(self, data_dir: Path, key: str) -> None:
        self._path = data_dir / SHARED_DIR / SHARED_FILE
        self._names: frozenset[str] = frozenset()
        try:
            with zipfile.ZipFile(self._path) as archive:
                if archive.comment == key.encode():
                    self._names = frozenset(archive.namelist())
                else:
                    log.info("the class images that other jobs share were made otherwise")
        except FileNotFoundError:
            pass
        except _UNREADABLE as error:
            log.warning("the class images that other jobs share cannot be read (%s)", error)

    def read(self, name: str) -> bytes | None:
        """The image file of that name; None if there is none that can be read."""
        if name not in self._names:
            return None
        try:
            with zipfile.ZipFile(self._path) as archive:
                return archive.read(name)
        except _UNREADABLE as error:
            log.warning("the shared class image %s cannot be read (%s): it is made again", name, error)
            return None


def write_shared(output_dir: Path, key: str, images: Sequence[tuple[str, bytes]]) -> None:
    """Write the archive for later jobs; equal images make equal bytes."""
    with zipfile.ZipFile(output_dir / SHARED_FILE, "w") as archive:
        archive.comment = key.encode()
        for name, encoded in images:
            archive.writestr(zipfile.ZipInfo(name, date_time=_NO_DATE), encoded)
