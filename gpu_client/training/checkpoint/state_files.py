"""Store state dictionaries and random states in files that load without executing code.

The tensors of each state become `<name>.safetensors` (tied weights are stored once), sharded tensors
`<name>.rank<k>of<n>.safetensors`. The structures of all states, tensors that safetensors cannot represent, and the
random states go into one small `state.pt`, which `torch.load(weights_only=True)` reads. An object with
`save_state(directory)` and `load_state(directory)` (accelerate's Accelerator) gets a directory of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from gpu_client.training.checkpoint import safetensors_file, sharding
from gpu_client.training.checkpoint.safetensors_file import FileContents
from gpu_client.training.checkpoint.state_tree import put_together, take_apart
from gpu_client.training.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointWriteError

BUNDLE = "state.pt"
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_RESERVED = frozenset({"state", "baton"})
_READ_ERRORS = (OSError, RuntimeError, EOFError, KeyError, ValueError, BadZipFile, UnpicklingError, SafetensorError)
# Errors of a write besides SessionError. torch reports a full disk as RuntimeError, safetensors has its own error.
WRITE_ERRORS = (OSError, RuntimeError, ValueError, SafetensorError)


@dataclass
class CollectedStates:
    """Part of a checkpoint that one rank stores, without copies of tensors."""

    forms: dict[str, str] = field(default_factory=dict)
    """Form of each state, by name: "tensors", or "directory" for a library's own files."""
    files: dict[str, FileContents] = field(default_factory=dict)
    structures: dict[str, Any] = field(default_factory=dict)
    directories: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    """True if other ranks have pieces of a tensor."""


def is_self_writing(holder: object) -> bool:
    """Return True if a state's own library (accelerate) writes the state into a directory."""
    return hasattr(holder, "save_state") and not hasattr(holder, "state_dict")


def collect(states: Mapping[str, object], *, rank: int = 0, size: int = 1) -> CollectedStates:
    """Take every state apart. The first rank stores the parts that are equal on all ranks.

    Raises CheckpointWriteError for an object without a state, or a sharded tensor that cannot be stored in pieces.
    """
    collected = CollectedStates()
    for name, holder in states.items():
        if is_self_writing(holder):
            _check_name(name)
            collected.directories[name] = holder
            collected.forms[name] = "directory"
            continue
        parts = take_apart(_state_of(name, holder))
        collected.forms[name] = "tensors"
        if parts.shards:
            collected.sharded = True
            collected.files[sharding.file_name(name, rank, size)] = sharding.collect_local(name, parts.shards)
        if rank == 0:
            collected.structures[name] = parts.structure
            if parts.tensors:
                collected.files[f"{name}.safetensors"] = FileContents(parts.tensors, {})
    return collected


def save_states(directory: Path, collected: CollectedStates, randoms: list[dict[str, Any]] | None) -> None:
    """Write the collected states into `directory`.

    randoms: the random states of all ranks, from `capture_random`; None on every rank except the first. Raises
    CheckpointWriteError for a state that cannot be stored as plain data.
    """
    for name, holder in collected.directories.items():
        _save_directory(directory / name, name, holder)
    for file, contents in collected.files.items():
        safetensors_file.write(directory / file, contents)
    if randoms is not None:
        save_bundle(directory, collected, randoms)


def save_bundle(directory: Path, collected: CollectedStates, randoms: list[dict[str, Any]]) -> None:
    """Write `state.pt`, which contains all parts except the tensors in files of their own."""
    path = directory / BUNDLE
    bundle = {"states": collected.structures, "random": randoms}
    plain = _is_plain(collected.structures)
    foreign = ""
    try:
        with _without_crc32():
            torch.save(bundle, path)
        if not plain:  # torch may still regard the objects as safe.
            foreign = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
    except (PicklingError, AttributeError, TypeError) as error:
        foreign = str(error)
    if foreign:
        names = ", ".join(sorted(collected.structures))
        raise CheckpointWriteError(
            f"one of the states {names} contains objects that are not plain data: {foreign}",
            "Keep numbers, strings, lists, dictionaries and tensors in state_dict(); "
            "turn numpy values into Python numbers or tensors",
        )


def load_states(directory: Path, forms: Mapping[str, str], states: Mapping[str, object]) -> list[dict[str, Any]]:
    """Restore every object of `states` from `directory`. Returns the random states of all ranks, not yet applied.

    The function reads all files before changing an object. Raises CheckpointDamagedError for unreadable files and
    CheckpointMismatchError if an object refuses its state.
    """
    try:
        bundle = torch.load(directory / BUNDLE, map_location="cpu", weights_only=True)
        loaded = {
            name: _load_state(directory, name, forms[name], bundle, holder)
            for name, holder in states.items()
            if forms[name] != "directory"
        }
        randoms: list[dict[str, Any]] = bundle["random"]
    except _READ_ERRORS as error:
        raise CheckpointDamagedError(
            f"{directory} cannot be read ({error})", "Resume from an older checkpoint"
        ) from error
    for name, holder in states.items():
        try:
            if forms[name] == "directory":
                holder.load_state(str(directory / name))  # type: ignore[attr-defined]
            elif isinstance(holder, torch.Generator):
                holder.set_state(loaded[name]["generator"])
            else:
                holder.load_state_dict(loaded[name])  # type: ignore[attr-defined]
        except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError, OSError) as error:
            raise CheckpointMismatchError(
                f"{name!r} does not accept the state stored in {directory}: {error}",
                "Resume with the model, data and settings that wrote it, or start a new job",
            ) from error
    return randoms


def stored_structure(directory: Path, name: str) -> Any | None:
    """Read the structure of one state of a checkpoint, before the restore and the verification.

    Returns None for a missing or unreadable state; `load_states` reports the damage.
    """
    try:
        return torch.load(directory / BUNDLE, map_location="cpu", weights_only=True)["states"].get(name)
    except (*_READ_ERRORS, TypeError, AttributeError):
        return None


def is_same_state(one: object, other: object) -> bool:
    """Return True for equal states; tensors are compared by content."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(one.cpu(), other.cpu())
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same_state(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same_state, one, other))
    return bool(one == other)


# --- pieces ----------------------------------------------------------------------------------------------------------


def _check_name(name: str) -> None:
    if name in _RESERVED or not name.isidentifier():
        raise CheckpointWriteError(f"a state cannot be called {name!r}", "Choose another keyword for it")


def _state_of(name: str, holder: object) -> Any:
    _check_name(name)
    if isinstance(holder, torch.Generator):
        return {"generator": holder.get_state(), "kind": "torch.Generator"}
    if not (hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")):
        raise CheckpointWriteError(
            f"{name!r} ({type(holder).__name__}) has no state_dict() and load_state_dict()",
            "Pass objects that have both (model, optimizer, scheduler, sampler, ...), an Accelerator, "
            "or a torch.Generator",
        )
    return holder.state_dict()


def _save_directory(path: Path, name: str, holder: Any) -> None:
    holder.save_state(str(path))
    if not path.is_dir() or not any(path.iterdir()):
        raise CheckpointWriteError(
            f"{name!r}.save_state() wrote nothing into its directory",
            "For accelerate: leave ProjectConfiguration(automatic_checkpoint_naming=False), the default",
        )


def _load_state(directory: Path, name: str, form: str, bundle: Mapping[str, Any], holder: Any) -> Any:
    path = directory / f"{name}.safetensors"
    if form != "tensors":
        raise ValueError(f"{name!r} has the form {form!r}, which this version does not know")
    # The file is mapped and not read, so that a module copies its tensors once, from the page cache into parameters.
    tensors = load_file(str(path)) if path.exists() else {}
    if not isinstance(holder, nn.Module) and not getattr(holder, "copies_state", False):
        # Other objects keep the given tensors, whose changes must not reach a mapped file.
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    with sharding.ShardReader(directory, name) as pieces:
        is_sharded = sharding.has_shards(holder)

        @cache
        def live() -> Any:
            return holder.state_dict()

        def shard(key: str, place: tuple[Any, ...], shape: list[int]) -> torch.Tensor:
            return pieces.read(key, shape, sharding.find_counterpart(holder, live(), place, shape))

        def whole(key: str, place: tuple[Any, ...]) -> torch.Tensor:
            # A process with the whole model may have written the checkpoint of a sharded model.
            found = tensors[key]
            if not is_sharded:
                return found
            like = sharding.find_live(holder, live(), place, list(found.shape))
            return sharding.cut(f"{name}.{key}", found, like)

        return put_together(bundle["states"][name], whole, shard)


def _is_plain(value: object) -> bool:
    """Return True if `value` consists of plain types only."""
    kind = type(value)
    if kind in _PLAIN or kind is torch.Tensor:
        return True
    if kind in (dict, OrderedDict):
        assert isinstance(value, dict)
        if kind is OrderedDict and not value.__dict__.keys() <= {"_metadata"}:  # torch's module versions.
            return False
        return all(type(key) in _PLAIN and _is_plain(item) for key, item in value.items())
    return kind in (list, tuple) and all(map(_is_plain, value))  # type: ignore[call-overload]


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Run torch.save without CRC-32, which takes half of the time on fast disks; BLAKE3 protects the file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
