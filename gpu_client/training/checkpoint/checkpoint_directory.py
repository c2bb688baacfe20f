"""Complete checkpoint directories: their marker, the commit, and what happens to old and half-written ones.

A session checkpoint is written into `<output>/.checkpoint-<step>.tmp/`, every file is synced to disk, `baton.json` is
added last, and one rename to `<output>/checkpoint-<step>/` commits it. What carries that name is therefore complete,
whenever the process died. The marker lists size and BLAKE3 of every file, so that damage is found before any of it is
loaded; one that was staged in shared memory lists sizes only, for the agent digests what it stores. No torch in here.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from baton.contract.checkpoint_marker import (
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
# Threads cost more than they save below this size.
_PARALLEL_HASH_BYTES = 64 * 1024 * 1024
_DAMAGE_REMEDY = (
    "Resume from an older checkpoint (delete or rename this directory), or start afresh in an empty output directory"
)


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is committed."""
    return output_dir / f"checkpoint-{step}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says; 0 for another name."""
    name = _NAME.fullmatch(path.name)
    return int(name.group(1)) if name is not None else 0


def staging_path(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before its commit."""
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
    """Hash every file in `directory` (if `digests`), then add the marker (atomically: it may be added in place).

    With `durable` all of it is on disk when this returns. Without, it survives the death of processes but not of the
    machine.
    """
    files: dict[str, tuple[int, str]] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != MARKER:
            name = path.relative_to(directory).as_posix()
            files[name] = digest_of(path, sync=durable) if digests else (path.stat().st_size, "")
    content = CheckpointMarker(step, metrics, created_by, states, files, tag).encode()
    if len(content) > MARKER_MAX_BYTES:
        raise CheckpointWriteError(
            f"a checkpoint of {len(files)} files is more than {MARKER} can list", "Write fewer, larger files"
        )
    # Beside the directory: nobody who looks into it sees anything but finished files.
    unfinished = directory.with_name(f".{MARKER}.tmp")
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        if durable:
            os.fsync(stream.fileno())
    unfinished.rename(directory / MARKER)


def read_marker(directory: Path) -> CheckpointMarker:
    """The marker of a complete checkpoint. Raises CheckpointDamagedError when there is none or it is unreadable."""
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
    """Check every listed file's size, and its digest if it has one.

    Raises CheckpointDamagedError naming the first file that differs.
    """
    marker = read_marker(directory)
    for name, (size_bytes, digest) in marker.files.items():
        try:
            if digest:
                found_bytes, found_digest = digest_of(directory / name, sync=False)
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
    """The commit point: `staged` becomes `final`. An earlier directory of that name gives way.

    The files are on disk by now; journals keep the order of their creation and this rename, so the folder above is the
    only one to sync.
    """
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    staged.rename(final)
    if durable:
        _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def complete_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """All directories `checkpoint-<step>` that carry a marker, oldest step first."""
    found = []
    for path in output_dir.glob("checkpoint-*"):
        name = _NAME.fullmatch(path.name)
        if name is not None and (path / MARKER).is_file():
            found.append((int(name.group(1)), path))
    return sorted(found)


def created_by_session(directory: Path) -> bool:
    """Whether the session wrote this checkpoint; one whose marker cannot be read belongs to nobody."""
    try:
        return read_marker(directory).created_by == "session"
    except CheckpointDamagedError as error:
        log.warning("left alone: %s", error)
        return False


def clear_leftovers(output_dir: Path) -> None:
    """Remove what a process that died while writing has left behind."""
    (output_dir / f".{MARKER}.tmp").unlink(missing_ok=True)
    for path in output_dir.glob(".checkpoint-*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)


def digest_of(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Size in bytes and BLAKE3 of a file; with `sync` its bytes are on disk when this returns."""
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
