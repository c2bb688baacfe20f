"""Store the ranks' pieces of sharded tensors (FSDP2's DTensor), and read tensors into another split.

Each rank stores its pieces in `<state>.rank<k>of<n>.safetensors`, whose metadata contains the offset of each piece in
the whole tensor. A read of a box of the whole tensor joins the overlapping parts of all pieces, so that another number
of processes, another mesh, or one process with a whole model can resume.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gpu_client.training.checkpoint.safetensors_file import DTYPE_NAMES, FileContents
from gpu_client.training.errors import CheckpointMismatchError, CheckpointWriteError

_FILE = re.compile(r"(.+)\.rank(\d+)of(\d+)\.safetensors")
_OFFSETS = "offsets"


def is_sharded(value: object) -> bool:
    """Return True if this process has only a piece of the tensor."""
    return hasattr(value, "device_mesh")


def file_name(state: str, rank: int, size: int) -> str:
    """Return the name of the file with a rank's pieces of a state."""
    return f"{state}.rank{rank}of{size}.safetensors"


def collect_local(state: str, shards: dict[str, Any]) -> FileContents:
    """Collect this rank's pieces. Raises CheckpointWriteError for a tensor whose pieces are not boxes."""
    pieces: dict[str, torch.Tensor] = {}
    offsets: dict[str, list[int]] = {}
    for key, value in shards.items():
        offsets[key] = _box(f"{state}.{key}", value)[1]
        pieces[key] = value.to_local().detach()
        if pieces[key].dtype not in DTYPE_NAMES:
            raise CheckpointWriteError(
                f"{state}.{key} is sharded and of type {pieces[key].dtype}, which safetensors cannot hold",
                "Keep it in another type, or gather it in state_dict()",
            )
    return FileContents(pieces, {_OFFSETS: json.dumps(offsets, separators=(",", ":"))})


def _box(name: str, value: Any) -> tuple[list[int], list[int]]:
    """Return shape and offset of this rank's piece of a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    odd = [placement for placement in value.placements if type(placement) not in (Shard, Replicate)]
    if odd:
        raise CheckpointWriteError(
            f"{name} is placed as {type(odd[0]).__name__}, which cannot be stored piece by piece",
            "Let the library that shards the model write its state: session.checkpoint(step, accelerator=accelerator)",
        )
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return list(shape), list(offset)


class ShardReader:
    """Reader of all ranks' pieces of one state in a checkpoint directory; a context manager."""

    def __init__(self, directory: Path, state: str) -> None:
        self._directory = directory
        self._state = state
        self._files = ExitStack()
        self._boxes: dict[str, list[tuple[list[int], Any]]] | None = None

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, key: str, shape: list[int], like: Any) -> torch.Tensor:
        """Read this rank's part of a tensor: the piece for `like` if `like` is a DTensor, else the whole tensor.

        Raises KeyError or ValueError if the files lack a part.
        """
        if not is_sharded(like):
            return self._fill(key, [0] * len(shape), shape)
        local_shape, offset = _box(f"{self._state}.{key}", like)
        return _make_piece(self._fill(key, offset, local_shape), like)

    def _open(self) -> dict[str, list[tuple[list[int], Any]]]:
        """Open the files. Returns the offset and file of each piece, by key."""
        if self._boxes is not None:
            return self._boxes
        matches = [_FILE.fullmatch(path.name) for path in self._directory.iterdir()]
        own = [match for match in matches if match is not None and match[1] == self._state]
        sizes = {int(match[3]) for match in own}
        if len(sizes) != 1 or {int(match[2]) for match in own} != set(range(*sizes)):
            raise ValueError(f"not all processes' pieces of {self._state!r} are there")
        self._boxes = {}
        for match in sorted(own, key=lambda match: int(match[2])):
            file = self._files.enter_context(safe_open(str(self._directory / match[0]), framework="pt"))
            for key, offset in json.loads(file.metadata()[_OFFSETS]).items():
                self._boxes.setdefault(key, []).append((offset, file))
        return self._boxes

    def _fill(self, key: str, offset: list[int], shape: list[int]) -> torch.Tensor:
        """Read the box of the whole tensor at `offset`."""
        result: torch.Tensor | None = None
        missing = math.prod(shape)
        seen: set[tuple[int, ...]] = set()
        for piece_offset, file in self._open()[key]:
            piece = file.get_tensor(key)
            if result is None:
                result = torch.empty(shape, dtype=piece.dtype)
            here, there, count = _overlap(offset, shape, piece_offset, piece.shape)
            if count and tuple(piece_offset) not in seen:  # Replicas store equal pieces.
                seen.add(tuple(piece_offset))
                result[here] = piece[there]
                missing -= count
        if result is None or missing:
            raise ValueError(f"{self._state}.{key} is not complete: {missing} elements are missing")
        return result


def _make_piece(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a DTensor that is split as `like` and has these values in this process."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(like.device), like.device_mesh, like.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip


def has_shards(holder: object) -> bool:
    """Return True for a model with sharded parameters, and for the optimizer of such a model."""
    parameters: Iterable[Any] = ()
    if isinstance(holder, torch.nn.Module):
        parameters = holder.parameters()
    elif isinstance(holder, torch.optim.Optimizer):
        parameters = (parameter for group in holder.param_groups for parameter in group["params"])
    return any(map(is_sharded, parameters))


def cut(key: str, whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the piece for `like` of a tensor that was stored whole; the tensor itself if `like` is not sharded."""
    if not is_sharded(like) or like.shape != whole.shape:
        return whole
    shape, offset = _box(key, like)
    box = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
    return _make_piece(whole[box].clone(), like)


def _overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...], int]:
    """Return the overlap of two boxes as slices of each, and its number of elements."""
    here, there, count = [], [], 1
    for begin, length, other_begin, other_length in zip(offset, shape, other_offset, other_shape, strict=True):
        first = max(begin, other_begin)
        last = max(min(begin + length, other_begin + other_length), first)
        here.append(slice(first - begin, last - begin))
        there.append(slice(first - other_begin, last - other_begin))
        count *= last - first
    return tuple(here), tuple(there), count


def find_live(holder: Any, live: Any, path: tuple[Any, ...], shape: list[int]) -> Any:
    """Find the tensor that determines the split of a stored tensor.

    Returns the live tensor at the stored tensor's place; for an optimizer without state before its first step, the
    state's parameter; None without either.
    """
    found = live
    for part in path:
        try:
            found = found[part]
        except (KeyError, IndexError, TypeError):
            found = None
            break
    if isinstance(found, torch.Tensor):
        return found
    if isinstance(holder, torch.optim.Optimizer) and path[0] == "state":
        parameters = dict(enumerate(parameter for group in holder.param_groups for parameter in group["params"]))
        parameter = parameters.get(path[1])
        if parameter is not None and list(parameter.shape) == shape:
            return parameter
    return None


def find_counterpart(holder: Any, live: Any, path: tuple[Any, ...], shape: list[int]) -> Any:
    """Find the tensor that determines the split of a tensor that was stored in pieces; None in a single process.

    Raises CheckpointMismatchError if a process of several has no such tensor.
    """
    found = find_live(holder, live, path, shape)
    distributed = torch.distributed
    is_alone = not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1
    if found is not None or is_alone:
        return found
    raise CheckpointMismatchError(
        f"{'.'.join(map(str, path))} was stored in pieces, and no live tensor determines the piece of this process",
        "Shard the model (fully_shard) and make its optimizer before session.resume, as the checkpoint's script did",
    )
