"""Compare files with their declared lengths: a shorter file is unfinished or truncated."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors header, defined by the format."""
MAX_JSON_BYTES = 64 * 1024 * 1024
"""Maximum size of a checked JSON document. Longer documents count as complete, because reading them takes memory."""
MAX_NAMED = 200
"""Maximum characters of a file-supplied name in a message."""
_LFS_POINTER = b"version https://git-lfs"
"""First bytes of a git-lfs pointer, which replaces a file that git-lfs has not fetched."""
_ZIP = b"PK\x03\x04"
_TRUNCATED = "is truncated: "


class MissingPart(NamedTuple):
    """Declared part of a file that the directory lacks."""

    path: str
    reason: str
    truncated: bool
    """True if the file's format is certain and its end is missing, so that no program can load the file."""

    def __str__(self) -> str:
        return f"{self.path} {self.reason}"


def find_missing_part(directory: Path, paths: Iterable[str]) -> MissingPart | None:
    """Return the first missing part of the files, by the files' own declarations, or None.

    The function checks safetensors files, zip archives (as `torch.save` writes them), indexes of shards
    (`*.index.json`) and `trainer_state.json`. Other files and git-lfs pointers count as complete. Raises OSError.
    """
    names = set(paths)
    for path in sorted(names):
        try:
            reason = _check_file(directory, path, names)
        except FileNotFoundError:
            reason = "was removed"
        if reason:
            return MissingPart(path, reason, reason.startswith(_TRUNCATED))
    return None


def _check_file(directory: Path, path: str, names: set[str]) -> str:
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    fd = os.open(directory / path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return ""
        start = file.read(len(_LFS_POINTER))
        file.seek(0)
        if start == _LFS_POINTER:
            return ""
        name = Path(path).name
        if name.endswith(".safetensors"):
            return _safetensors(file, info.st_size)
        if name == "trainer_state.json" or name.endswith(".index.json"):
            return "" if info.st_size > MAX_JSON_BYTES else _document(file, Path(path).parent, names)
        if start.startswith(_ZIP):
            return _archive(file)
    return ""


def _safetensors(file: BinaryIO, size_bytes: int) -> str:
    """Compare the size with the end of the last tensor: 8 bytes of header length, a JSON header, the tensors."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if size_bytes < 8 or header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > size_bytes:
        return f"has {size_bytes} bytes and no whole safetensors header"
    try:
        header = json.loads(file.read(header_bytes))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError, OverflowError):
        return "has no readable safetensors header"
    length_bytes = 8 + header_bytes + max(ends, default=0)
    return f"{_TRUNCATED}{size_bytes} of {length_bytes} bytes" if size_bytes < length_bytes else ""


def _archive(file: BinaryIO) -> str:
    """Read the central directory, the last part of an archive."""
    try:
        with zipfile.ZipFile(file):
            return ""
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        return f"{_TRUNCATED}no whole zip archive ({error})"


def _document(file: BinaryIO, folder: Path, names: set[str]) -> str:
    """Read the JSON object, and compare the shards of an index with the names."""
    try:
        document = json.load(file)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        return "is not complete JSON"
    shards = document.get("weight_map")
    if not isinstance(shards, dict):
        return ""
    lacking = sorted({str(shard) for shard in shards.values() if (folder / str(shard)).as_posix() not in names})
    return f"names {lacking[0][:MAX_NAMED]}, which is absent" if lacking else ""
