"""Check the outputs and inputs of a step, and deliver the outputs of a finished job."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from baton.contract.jobs.job import FailureClass
from baton.contract.names import SHARED_DIR
from baton.contract.recipes.plan import OutputCheck
from baton.contract.worker.calls import WorkItem
from gpu_client.agent.io.step_ledger import get_plan
from gpu_client.agent.process.failures import AttemptFailure
from gpu_client.agent.workspace.slots import JobDirectories
from gpu_client.checkpoints.local.directory_files import BadDirectory, resolve_files, resolve_inside
from gpu_client.checkpoints.save.artifacts import collect_outputs
from gpu_client.transport.errors import DigestMismatch, NotStoredYet, TransferError

logger = logging.getLogger("baton.job")

COMPLETE_TRIES = 5
COMPLETE_RETRY_S = 2.0

MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_HEADER_BYTES = 100 * 1024 * 1024
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"

Inputs = dict[str, tuple[int, int]]
"""Size and modification time (ns) of each input, by path."""


def check_outputs(
    output_dir: Path, checks: Iterable[OutputCheck], optional: Iterable[OutputCheck] = ()
) -> AttemptFailure | None:
    """Return the failure that lists missing or bad outputs, or None. `optional` outputs may be missing."""
    root = output_dir.resolve()
    wanted = [*checks, *(check for check in optional if (root / check.path).exists())]
    problems = [f"{check.path} {problem}" for check in wanted if (problem := _find_problem(root, check))]
    return AttemptFailure(FailureClass.MISSING_OUTPUT, f"outputs: {'; '.join(problems)}") if problems else None


def collect_declared_outputs(
    item: WorkItem, directories: JobDirectories, *, on_left_out: Callable[[str], object]
) -> dict[str, Path]:
    """Return the declared outputs, and the existing files among optional outputs and files for later jobs.

    Raises the errors of `collect_outputs`.
    """
    plan = get_plan(item)
    optional = [*(one.path for one in plan.shared), *(check.path for check in plan.optional_outputs)]
    return collect_outputs(directories.output, item.outputs, optional, on_left_out=on_left_out)


def deliver_until_stored(
    item: WorkItem, deliver: Callable[[], None], pause: Callable[[float], object]
) -> AttemptFailure | None:
    """Call `deliver` (upload and report) again, up to five times, while the store lacks an output.

    Returns None after a delivery. Other errors of `deliver` propagate. `pause` waits for the given seconds or less.
    """
    tries = 0
    while True:
        tries += 1
        try:
            deliver()
        except (NotStoredYet, DigestMismatch, TransferError) as error:
            logger.warning("job %s: %s", item.id, error)
            if tries >= COMPLETE_TRIES:
                reason = f"after {tries} uploads the outputs are still refused: {error}"
                return AttemptFailure(FailureClass.TRANSFER_FAILED, reason)
            pause(COMPLETE_RETRY_S)
            continue
        return None


def snapshot_inputs(data_dir: Path) -> Inputs:
    """Return the job's own inputs in their present state, without the files that other jobs have shared."""
    shared = data_dir / SHARED_DIR
    return {
        path.relative_to(data_dir).as_posix(): (info.st_size, info.st_mtime_ns)
        for path in data_dir.rglob("*")
        if (info := path.lstat()) and path.is_file() and not path.is_symlink() and not path.is_relative_to(shared)
    }


def check_inputs(data_dir: Path, before: Inputs) -> AttemptFailure | None:
    """Return the failure that names a changed or removed input, or None. New files are permitted.

    A changed input is a failure, because another attempt would read other bytes.
    """
    now = snapshot_inputs(data_dir)
    changed = sorted(name for name, seen in before.items() if now.get(name) != seen)
    if not changed:
        return None
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    reason = f"the step wrote outside its directories: it changed or removed its input {changed[0]!r}{more}"
    return AttemptFailure(FailureClass.SCRIPT_ERROR, reason)


def _find_problem(root: Path, check: OutputCheck) -> str | None:
    place = root / check.path
    if not place.exists():
        return "is missing"
    try:
        place = resolve_inside(root, place, check.path)
        files = list(resolve_files(place, within=root).values()) if place.is_dir() else [place]
        size_bytes = sum(file.stat().st_size for file in files)
        if size_bytes < check.min_bytes:
            return f"has {size_bytes} bytes; at least {check.min_bytes} are expected"
        if len(files) < check.min_files:
            return f"has {len(files)} files; at least {check.min_files} are expected"
        check_format = _FORMATS.get(check.format or "")
        if check_format is None:
            return None
        return "is not a file" if place.is_dir() else check_format(place)
    except BadDirectory as error:
        return f"cannot be used: {error}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _check_json(path: Path) -> str | None:
    size_bytes = path.stat().st_size
    if size_bytes > MAX_JSON_BYTES:
        return f"has {size_bytes} bytes; at most {MAX_JSON_BYTES} are read as JSON"
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return None


def _check_safetensors(path: Path) -> str | None:
    """Compare the header with the length of the file."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 or length > min(size_bytes - 8, MAX_HEADER_BYTES):
            return "is not a safetensors file, or is cut off"
        try:
            header = json.loads(file.read(length))
            ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
            return "is not a safetensors file: its header cannot be read"
    if 8 + length + max(ends, default=0) != size_bytes:
        return f"is cut off, or has more than its tensors: {size_bytes} bytes"
    return None


def _starts_with(start: bytes, kind: str) -> Callable[[Path], str | None]:
    def check_format(path: Path) -> str | None:
        with path.open("rb") as file:
            return None if file.read(len(start)) == start else f"is not a {kind} file"

    return check_format


_FORMATS: dict[str, Callable[[Path], str | None]] = {
    "json": _check_json,
    "safetensors": _check_safetensors,
    "png": _starts_with(_PNG, "PNG"),
    "jpeg": _starts_with(_JPEG, "JPEG"),
}
