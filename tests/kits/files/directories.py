"""Directories: write files, and read files by their relative path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_files(place: Path, files: Mapping[str, bytes]) -> Path:
    """Write files and their directories below `place`; returns `place`."""
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    return place


def files_below(place: Path) -> dict[str, bytes]:
    """Read every file below `place`."""
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Read the documents of a file with one on each line; a missing file has none."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
