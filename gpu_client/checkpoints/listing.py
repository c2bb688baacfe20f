"""What lies in a checkpoint directory: its files, and the marker of our session."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

from baton.contract.base import MAX_PATH_BYTES, MAX_STEP
from gpu_client.checkpoints.metrics import usable_metrics, usable_tag

MARKER = "baton.json"
MARKER_FORMATS = (1, 2)
MARKER_MAX_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A file of a checkpoint as it was seen: its path inside the directory, size and modification time."""

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Marker:
    """What the session says about a checkpoint that it has completed."""

    step: int
    metrics: dict[str, float]
    tag: str = ""
    """By which it is to be kept."""


def list_files(directory: Path) -> tuple[FileSeen, ...]:
    """All files below ``directory``, by path. Links count as themselves.

    Raises OSError, FileNotFoundError if something is removed meanwhile.
    """
    files: list[FileSeen] = []
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                relative = Path(entry.path).relative_to(directory).as_posix()
                if entry.is_dir(follow_symlinks=False):
                    if len(os.fsencode(relative)) > MAX_PATH_BYTES:
                        raise OSError(errno.ENAMETOOLONG, f"a path longer than {MAX_PATH_BYTES} bytes cannot be stored")
                    waiting.append(Path(entry.path))
                    continue
                info = entry.stat(follow_symlinks=False)
                files.append(FileSeen(relative, info.st_size, info.st_mtime_ns))
    return tuple(sorted(files, key=lambda file: file.path))


def read_marker(path: Path) -> Marker | None:
    """A ``baton.json``; None if there is none. Raises ValueError if it is none of a kind that is known."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(str(error)) from error
    with os.fdopen(fd, "rb") as file:
        try:
            marker = json.loads(file.read(MARKER_MAX_BYTES))
        except (OSError, RecursionError) as error:
            raise ValueError(str(error)) from error
    if not isinstance(marker, dict):
        raise ValueError("it is not an object")
    if marker.get("format") not in MARKER_FORMATS:
        raise ValueError(f"its format is {str(marker.get('format'))[:20]!r}, not one of {MARKER_FORMATS}")
    step = marker.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
        raise ValueError(f"its step is {str(step)[:20]!r}")
    return Marker(step, usable_metrics(marker.get("metrics")), usable_tag(marker.get("tag")))
