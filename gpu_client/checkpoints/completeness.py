"""Lengths that files of a checkpoint state themselves: a shorter file is still being written, or was cut off."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file, by the format's own bound."""
MAX_JSON_BYTES = 64 * 1024 * 1024
_ZIP = b"PK\x03\x04"


def missing_in(directory: Path, paths: Iterable[str]) -> str:
    """Return which part of which file is missing, by the file's own statement; "" if no file states that one is.

    Judged are safetensors files, zip archives (as `torch.save` writes them), indexes of shards (`*.index.json`) and
    `trainer_state.json`. Every other file counts as whole. Raises OSError.
    """
    names = set(paths)
    for path in sorted(names):
        try:
            reason = _judge(directory, path, names)
        except FileNotFoundError:
            reason = "was removed"
        if reason:
            return f"{path} {reason}"
    return ""


def _judge(directory: Path, path: str, names: set[str]) -> str:
    # Not blocking: a named pipe may lie there.
    fd = os.open(directory / path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return ""
        name = Path(path).name
        if name.endswith(".safetensors"):
            return _safetensors(file, info.st_size)
        if name.endswith(".index.json"):
            return _index(file, Path(path).parent, names)
        if name == "trainer_state.json":
            return "" if isinstance(_json(file), dict) else "is not complete JSON"
        if file.read(len(_ZIP)) == _ZIP:
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
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError):
        return "has no readable safetensors header"
    length_bytes = 8 + header_bytes + max(ends, default=0)
    return f"has {size_bytes} of {length_bytes} bytes" if size_bytes < length_bytes else ""


def _archive(file: BinaryIO) -> str:
    """Read the central directory, which is written last."""
    try:
        with zipfile.ZipFile(file):
            return ""
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        return f"is not a whole zip archive ({error})"


def _index(file: BinaryIO, folder: Path, names: set[str]) -> str:
    index = _json(file)
    if not isinstance(index, dict):
        return "is not complete JSON"
    shards = index.get("weight_map")
    if not isinstance(shards, dict):
        return ""
    lacking = sorted({str(shard) for shard in shards.values() if (folder / str(shard)).as_posix() not in names})
    return f"names {lacking[0]}, which is not there" if lacking else ""


def _json(file: BinaryIO) -> Any:
    """Return the document, None if the file holds none."""
    try:
        return json.loads(file.read(MAX_JSON_BYTES))
    except (ValueError, RecursionError):
        return None
