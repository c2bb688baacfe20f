"""Commit, verify and list checkpoint directories with their markers, and remove leftovers.

The session writes a checkpoint into `<output>/.checkpoint-<step>.tmp/`, syncs every file to disk, adds `baton.json`
last, and commits the checkpoint by a rename to `<output>/checkpoint-<step>/`. Therefore a directory of this name is
complete, whenever the process died. The marker lists size and BLAKE3 of every file, so that damage is detected before
the load. The marker of a checkpoint in shared memory lists sizes only, because the agent digests the stored bytes. The
module does not import torch.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from baton.contract.checkpoints.marker import (
    MARKER,
    MARKER_MAX_BYTES,
    CheckpointMarker,
    UnknownMarkerFormat,
    parse_marker,
)
from gpu_client.training.errors import CheckpointDamagedError, CheckpointWriteError

log = logging.getLogger("baton.training")
_NAME = re.compile(r"checkpoint-(0|[1-9]\d*)")
_LEFTOVER = re.compile(r"\.checkpoint-\d+\.(tmp|old)")
# Below this size, threads cost more than they save.
_PARALLEL_HASH_BYTES = 64 * 1024 * 1024
_DAMAGE_REMEDY = (
    "Resume from an older checkpoint (delete or rename this directory), or start afresh in an empty output directory"
)


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Return the committed path of the checkpoint of `step`."""
    return output_dir / f"checkpoint-{step}"


def parse_step(path: Path) -> int:
    """Return the step in a checkpoint's name; 0 for another name."""
    name = _NAME.fullmatch(path.name)
    return int(name.group(1)) if name is not None else 0


def staging_path(output_dir: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step` before its commit."""
    return output_dir / f".checkpoint-{step}.tmp"


def write_marker(
    directory: Path,
    step: int,
    metrics: Mapping[str, float],
    created_by: str,
    states: Mapping[str, str],
    *,
    tag: str = "",
    durable: bool = True,
    digests: bool = True,
) -> None:
    """Hash every file in `directory` (if `digests`), then add the marker atomically.

    With `durable` all files are on disk on return; otherwise the files survive the death of processes but not of the
    machine.
    """
    files: dict[str, tuple[int, str]] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != MARKER:
            name = path.relative_to(directory).as_posix()
            files[name] = hash_file(path, sync=durable) if digests else (path.stat().st_size, "")
    content = CheckpointMarker(step, metrics, created_by, states, files, tag).encode()
    if len(content) > MARKER_MAX_BYTES:
        raise CheckpointWriteError(
            f"a checkpoint of {len(files)} files is more than {MARKER} can list", "Write fewer, larger files"
        )
    # The unfinished file is beside the directory, so that the directory never contains unfinished files.
    unfinished = directory.with_name(f".{MARKER}.tmp")
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        if durable:
            os.fsync(stream.fileno())
    unfinished.rename(directory / MARKER)


def read_marker(directory: Path) -> CheckpointMarker:
    """Read the marker of a complete checkpoint. Raises CheckpointDamagedError without a readable marker."""
    path = directory / MARKER
    try:
        return parse_marker(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointDamagedError(
            f"{directory} is not a complete checkpoint: it has no {MARKER}", _DAMAGE_REMEDY
        ) from error
    except UnknownMarkerFormat as error:
        raise CheckpointDamagedError(f"{path}: {error}", "Resume with the release of Baton that wrote it") from error
    except (OSError, ValueError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read ({error})", _DAMAGE_REMEDY) from error


def verify(directory: Path) -> CheckpointMarker:
    """Check the size of every listed file, and its digest if the marker has one.

    Raises CheckpointDamagedError with the first file that differs.
    """
    marker = read_marker(directory)
    for name, (size_bytes, digest) in marker.files.items():
        try:
            if digest:
                found_bytes, found_digest = hash_file(directory / name, sync=False)
            else:
                found_bytes, found_digest = (directory / name).stat().st_size, ""
        except OSError as error:
            raise CheckpointDamagedError(
                f"{directory} lacks its file {name} ({error.strerror})", _DAMAGE_REMEDY
            ) from error
        if found_bytes != size_bytes:
            raise CheckpointDamagedError(
                f"{directory / name} has {found_bytes} bytes instead of {size_bytes}", _DAMAGE_REMEDY
            )
        if found_digest != digest:
            raise CheckpointDamagedError(f"{directory / name} has been altered (digest differs)", _DAMAGE_REMEDY)
    return marker


def publish(staged: Path, final: Path, *, durable: bool = True) -> None:
    """Commit a checkpoint: rename `staged` to `final`, and replace an earlier directory of the name.

    The files are already on disk. Journals keep the order of the files' creation and this rename, therefore only the
    parent folder needs a sync.
    """
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    staged.rename(final)
    if durable:
        _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """List the directories `checkpoint-<step>` with a marker, oldest step first."""
    found = []
    for path in output_dir.glob("checkpoint-*"):
        name = _NAME.fullmatch(path.name)
        if name is not None and (path / MARKER).is_file():
            found.append((int(name.group(1)), path))
    return sorted(found)


def is_session_checkpoint(directory: Path) -> bool:
    """Return True if the session wrote this checkpoint; False for an unreadable marker."""
    try:
        return read_marker(directory).created_by == "session"
    except CheckpointDamagedError as error:
        log.warning("left alone: %s", error)
        return False


def clear_leftovers(output_dir: Path) -> None:
    """Remove the leftovers of a process that died during a write."""
    (output_dir / f".{MARKER}.tmp").unlink(missing_ok=True)
    for path in output_dir.glob(".checkpoint-*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)


def hash_file(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Return size in bytes and BLAKE3 of a file; `sync` also flushes the file to disk."""
    with path.open("rb") as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        hasher = blake3(max_threads=blake3.AUTO if size_bytes >= _PARALLEL_HASH_BYTES else 1)
        if size_bytes:
            hasher.update_mmap(path)
        if sync:
            os.fsync(stream.fileno())
    return size_bytes, hasher.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
