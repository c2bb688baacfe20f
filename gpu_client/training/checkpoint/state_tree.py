"""Take state dictionaries apart into tensors and structure, and put them together again.

The structure of a state is plain data in which a placeholder replaces each tensor in a file of its own
(`safetensors_file.py`). The functions traverse dictionaries, ordered dictionaries, lists and tuples; other values stay
in place, including tensors that no safetensors file can represent.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gpu_client.training.checkpoint.safetensors_file import DTYPE_NAMES
from gpu_client.training.checkpoint.sharding import is_sharded

Path = tuple[Any, ...]
"""Path to a value: dictionary keys and list positions."""

# Prefix of a placeholder: "tensor:<key>", "shard:<shape>:<key>", or "text:<text>" for a state's own text with the
# prefix. A placeholder is a single text, because pickling dominates the time.
_MARK = "\0baton "
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass
class StateParts:
    """Parts of a state. Keys are unique; a flat dictionary keeps its own keys."""

    structure: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, Any] = field(default_factory=dict)
    """Sharded tensors (DTensor), of which this process has a piece."""


def take_apart(state: object) -> StateParts:
    """Separate `state` into structure and tensors, without copies. Tied weights become one tensor."""
    walk = _Walk()
    walk.parts.structure = walk.visit(state, ())
    return walk.parts


class _Walk:
    def __init__(self) -> None:
        self.parts = StateParts()
        self._first: dict[tuple[Any, ...], str] = {}

    def visit(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is dict:
            return {key: self.visit(item, (*path, key)) for key, item in value.items()}
        if kind is OrderedDict:
            ordered = OrderedDict((key, self.visit(item, (*path, key))) for key, item in value.items())
            ordered.__dict__.update(value.__dict__)  # torch keeps versions of modules in `__dict__`.
            return ordered
        if kind is list:
            return [self.visit(item, (*path, index)) for index, item in enumerate(value)]
        if kind is tuple:
            return tuple(self.visit(item, (*path, index)) for index, item in enumerate(value))
        if kind is str and value.startswith(_MARK):
            return f"{_MARK}text:{value}"
        return value

    def _tensor(self, value: torch.Tensor, path: Path) -> Any:
        if is_sharded(value):
            key = self._new_key(path)
            self.parts.shards[key] = value
            return f"{_MARK}shard:{json.dumps(list(value.shape))}:{key}"
        if not is_storable(value):
            return value
        tensor = value.detach()
        view = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        known = self._first.get(view) if tensor.numel() else None
        if known is None:
            known = self._first[view] = self._new_key(path)
            self.parts.tensors[known] = tensor
        return f"{_MARK}tensor:{known}"

    def _new_key(self, path: Path) -> str:
        name = key = ".".join(str(part) for part in path)
        number = 1
        while key in self.parts.tensors or key in self.parts.shards or key == "__metadata__":
            number += 1
            key = f"{name}#{number}"
        return key


def is_storable(tensor: torch.Tensor) -> bool:
    """Return True if a safetensors file can represent the tensor: dense, and of a known type."""
    return (
        type(tensor) in _PLAIN_TENSORS
        and tensor.layout == torch.strided
        and tensor.dtype in DTYPE_NAMES
        and tensor.device.type != "meta"
    )


def put_together(
    structure: Any,
    tensor: Callable[[str, Path], torch.Tensor],
    shard: Callable[[str, Path, list[int]], torch.Tensor],
    path: Path = (),
) -> Any:
    """Invert `take_apart`.

    `tensor` returns a tensor by key and place, `shard` this rank's piece of a sharded tensor by key, place and whole
    shape. Raises their KeyError for a missing tensor, ValueError for an unknown placeholder.
    """
    kind = type(structure)

    def inner(item: Any, key: Any) -> Any:
        return put_together(item, tensor, shard, (*path, key))

    if kind is dict:
        return {key: inner(item, key) for key, item in structure.items()}
    if kind is OrderedDict:
        ordered = OrderedDict((key, inner(item, key)) for key, item in structure.items())
        ordered.__dict__.update(structure.__dict__)
        return ordered
    if kind is list:
        return [inner(item, index) for index, item in enumerate(structure)]
    if kind is tuple:
        return tuple(inner(item, index) for index, item in enumerate(structure))
    if kind is not str or not structure.startswith(_MARK):
        return structure
    word, _, rest = structure.removeprefix(_MARK).partition(":")
    if word == "tensor":
        return tensor(rest, path)
    if word == "shard":
        shape, _, key = rest.partition(":")
        return shard(key, path, json.loads(shape))
    if word == "text":
        return rest
    raise ValueError(f"a placeholder {word!r} that this version does not know")
