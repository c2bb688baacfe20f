"""State dictionaries and random states as files that load without executing anything.

A state that is a flat dictionary of dense tensors (a model's) becomes `<name>.safetensors`; tensors that share their
memory (tied weights) are stored once and named as aliases. Every other state dictionary goes into one `state.pt`, which
`torch.load(weights_only=True)` reads; an object with `save_state(directory)` / `load_state(directory)` (accelerate's
Accelerator) gets a directory of its own. One file for all small states: each file of a checkpoint costs one upload.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gpu_client.training.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointWriteError

BUNDLE = "state.pt"
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_RESERVED = frozenset({"state", "baton"})
_READ_ERRORS = (OSError, RuntimeError, EOFError, KeyError, ValueError, BadZipFile, UnpicklingError, SafetensorError)
# What writing can raise besides SessionError: torch reports a full disk as RuntimeError, safetensors by its own error.
WRITE_ERRORS = (OSError, RuntimeError, ValueError, SafetensorError)

log = logging.getLogger("baton.training")


def save_states(directory: Path, states: Mapping[str, object], randoms: list[dict[str, Any]] | None) -> dict[str, str]:
    """Write every state into `directory`; returns the form of each by name ("safetensors", "bundle", "directory").

    randoms are the random states of all ranks, from `capture_random`. None on ranks other than the first: they only
    take part in what has to be done together.
    Raises CheckpointWriteError for an object that has no state, or one that cannot be stored as plain data.
    """
    forms: dict[str, str] = {}
    bundle: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, holder in states.items():
        if hasattr(holder, "save_state") and not hasattr(holder, "state_dict"):
            _save_directory(directory / name, name, holder)
            forms[name] = "directory"
            continue
        state = _state_of(name, holder)
        if randoms is None:
            continue
        if _is_flat(state):
            tensors[name] = _save_tensors(directory / f"{name}.safetensors", name, state)
            forms[name] = "safetensors"
        else:
            bundle[name] = state
            forms[name] = "bundle"
    if randoms is not None:
        _save_bundle(directory / BUNDLE, {"states": bundle, "tensors": tensors, "random": randoms})
    return forms


def load_states(directory: Path, forms: Mapping[str, str], states: Mapping[str, object]) -> list[dict[str, Any]]:
    """Restore every object of `states` from `directory`; returns the random states of all ranks, not yet applied.

    Everything is read before anything is changed. Raises CheckpointDamagedError for unreadable files and
    CheckpointMismatchError when an object refuses its state.
    """
    try:
        bundle = torch.load(directory / BUNDLE, map_location="cpu", weights_only=True)
        loaded = {
            name: bundle["states"][name]
            if forms[name] == "bundle"
            else _load_tensors(directory / f"{name}.safetensors", bundle["tensors"][name])
            for name in states
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


def capture_random() -> dict[str, Any]:
    """The state of every global random number generator of this process, as plain data and tensors."""
    version, internal, gauss_next = random.getstate()
    captured: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss_next": gauss_next},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        import numpy as np

        state = np.random.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":
            raise CheckpointWriteError(
                f"numpy's global generator is {state['bit_generator']}, whose state cannot be stored",
                "Use the default global generator, or a numpy Generator of your own that you reseed by step",
            )
        captured["numpy"] = {
            "key": torch.from_numpy(state["state"]["key"].astype("int64")),
            "pos": int(state["state"]["pos"]),
            "has_gauss": int(state["has_gauss"]),
            "gauss": float(state["gauss"]),
        }
    # Asking a process that never touched a GPU would create a context on every device.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        captured["cuda"] = torch.cuda.get_rng_state_all()
    return captured


def restore_random(captured: Mapping[str, Any]) -> None:
    """Put every global generator back where `capture_random` found it."""
    python = captured["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss_next"]))
    torch.set_rng_state(captured["torch"])
    if "numpy" in captured:
        import numpy as np

        numpy_state = captured["numpy"]
        np.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": numpy_state["key"].numpy().astype("uint32"), "pos": numpy_state["pos"]},
                "has_gauss": numpy_state["has_gauss"],
                "gauss": numpy_state["gauss"],
            }
        )
    cuda = captured.get("cuda", [])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(min(len(cuda), devices)):
        torch.cuda.set_rng_state(cuda[index], index)
    if cuda and len(cuda) != devices:
        log.warning(
            "the checkpoint holds random states of %d GPUs, this machine has %d: random numbers drawn on the GPU "
            "will differ from an uninterrupted run",
            len(cuda),
            devices,
        )


# --- pieces ----------------------------------------------------------------------------------------------------------


def _state_of(name: str, holder: object) -> Any:
    if name in _RESERVED or not name.isidentifier():
        raise CheckpointWriteError(f"a state cannot be called {name!r}", "Choose another keyword for it")
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
            f"{name!r}.save_state() has written nothing into the directory it was given",
            "For accelerate: leave ProjectConfiguration(automatic_checkpoint_naming=False), the default",
        )


def _is_flat(state: object) -> bool:
    """Whether `state` is a non-empty dictionary of dense tensors only."""
    return (
        isinstance(state, Mapping)
        and bool(state)
        and all(isinstance(key, str) for key in state)
        and all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in state.values())
    )


def _save_tensors(path: Path, name: str, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write one safetensors file; identical views of one memory are stored once. Returns what else is to be kept.

    Not kept in the file's own metadata: safetensors writes that in random order, and equal states should make equal
    files (they are stored and uploaded once).
    """
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for key, value in state.items():
        _refuse_sharded(f"{name}.{key}", value)
        tensor = value.detach()
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and view in first:
            aliases[key] = first[view]
        else:
            first[view] = key
            # A copy only where the layout asks for one; a partial overlap (a slice of another weight) is copied too,
            # because safetensors refuses memory that two tensors share.
            stored[key] = tensor.contiguous()
    _separate_overlaps(stored)
    save_file(stored, str(path), metadata={"format": "pt"})
    versions = getattr(state, "_metadata", None)  # torch's per-module versions, for modules that have changed since
    return {"aliases": aliases, "module_versions": None if versions is None else dict(versions)}


def _separate_overlaps(tensors: dict[str, torch.Tensor]) -> None:
    seen: set[tuple[torch.device, int]] = set()
    for key, tensor in tensors.items():
        memory = (tensor.device, tensor.untyped_storage().data_ptr())
        if memory in seen and tensor.numel():
            tensors[key] = tensor.clone()
        seen.add(memory)


def _load_tensors(path: Path, kept: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    state: OrderedDict[str, torch.Tensor] = OrderedDict(load_file(str(path)))
    for alias, key in kept["aliases"].items():
        state[alias] = state[key]
    if kept["module_versions"] is not None:
        state._metadata = kept["module_versions"]  # type: ignore[attr-defined]
    return state


def _save_bundle(path: Path, bundle: dict[str, Any]) -> None:
    plain = _is_plain("", bundle["states"])
    foreign = ""
    try:
        with _without_crc32():
            torch.save(bundle, path)
        if not plain:  # it may still be something that torch regards as safe
            foreign = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
    except (PicklingError, AttributeError, TypeError) as error:
        foreign = str(error)
    if foreign:
        names = ", ".join(sorted(bundle["states"]))
        raise CheckpointWriteError(
            f"one of the states {names} contains objects that are not plain data: {foreign}",
            "Keep numbers, strings, lists, dictionaries and tensors in state_dict(); "
            "turn numpy values into Python numbers or tensors",
        )


def _is_plain(key: str, value: object) -> bool:
    """Whether `value` consists of nothing but the plainest types. Refuses sharded tensors on the way."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if isinstance(value, torch.Tensor):
        _refuse_sharded(key, value)
        return kind is torch.Tensor
    plain = kind in (dict, list, tuple)  # all the same, every tensor inside has to be looked at
    if isinstance(value, Mapping):
        for inner, item in value.items():
            plain = _is_plain(f"{key}.{inner}", item) and type(inner) in _PLAIN and plain
    elif isinstance(value, list | tuple):
        for item in value:
            plain = _is_plain(key, item) and plain
    return plain


def _refuse_sharded(key: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "device_mesh"):  # a DTensor: this process holds only a piece of it
        raise CheckpointWriteError(
            f"{key.lstrip('.')} is sharded over several processes and would be stored in part only",
            "Let the library that shards the model write its state: session.checkpoint(step, accelerator=accelerator)",
        )


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch.save without its CRC-32, half of its time on fast disks: the marker's BLAKE3 protects the file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
