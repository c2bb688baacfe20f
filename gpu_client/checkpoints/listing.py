"""What lies in a checkpoint directory: its files, and the marker of our session."""

import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path

from baton.contract.base import MAX_PATH_BYTES, MAX_STEP
from baton.contract.checkpoint_marker import MARKER_MAX_BYTES, CheckpointMarker, parse_marker
from gpu_client.checkpoints.metrics import usable_metrics, usable_tag


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A file of a checkpoint as it was seen: its path inside the directory, size and modification time."""

    path: str
    size_bytes: int
    modified_ns: int


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


def read_marker(path: Path) -> CheckpointMarker | None:
    """Read the `baton.json` at `path` without following a link; None if there is none.

    Metrics and tag are reduced to those that a manifest can carry. Raises ValueError for an unreadable marker.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(str(error)) from error
    with os.fdopen(fd, "rb") as file:
        try:
            marker = parse_marker(file.read(MARKER_MAX_BYTES))
        except OSError as error:
            raise ValueError(str(error)) from error
    if marker.step > MAX_STEP:
        raise ValueError(f"the step is {marker.step}, larger than {MAX_STEP}")
    return replace(marker, metrics=usable_metrics(marker.metrics), tag=usable_tag(marker.tag))
