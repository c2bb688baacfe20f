"""Flatten samples into a JSON structure and arrays, and rebuild samples.

A sample is an array, a tensor or a plain value, or a nested dict (with text keys), tuple or list of samples. The
structure is JSON: `{"d": {name: node}}`, `{"t": [node]}`, `{"l": [node]}`, `{"a": number of the array}`, `{"v": text,
number, boolean or None}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from gpu_client.ring.errors import SampleRefused

_sorted_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
Node = dict[str, Any]
Form = Literal["numpy", "scalar", "torch", "bytes"]
ALIGNED = 64
"""Alignment of arrays in an object, in bytes: one cache line."""
MAX_DEPTH = 32
MAX_ARRAYS = 4096


@dataclass
class Leaf:
    """Array before its encoding; `data` is a view of its bytes."""

    form: Form
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    path: str
    value: object
    """The array or tensor."""
    digest: str = ""
    """XXH3-64 of `data`; "" before its computation."""


@dataclass(frozen=True)
class FlattenedSample:
    """Sample as a structure and arrays."""

    structure: Node
    leaves: list[Leaf]
    plain: list[tuple[str, object]]
    """Path and value of each text, number, boolean or None."""

    @property
    def arrays(self) -> list[tuple[Form, str, tuple[int, ...]]]:
        """Return form, dtype and shape of each array."""
        return [(leaf.form, leaf.dtype, leaf.shape) for leaf in self.leaves]

    def schema(self, *, shapes: bool) -> str:
        """Make the schema, which is equal for samples of one kind. `shapes`: include the shapes."""
        return make_schema(self.structure, self.arrays, shapes=shapes)

    @property
    def size_bytes(self) -> int:
        """Return the size of the arrays in an object, with alignment, in bytes."""
        return sum(len(leaf.data) + -len(leaf.data) % ALIGNED for leaf in self.leaves)

    def copied(self) -> FlattenedSample:
        """Copy the arrays, so that the caller may change the originals."""
        leaves = [replace(leaf, data=memoryview(bytearray(leaf.data)), value=None) for leaf in self.leaves]
        return replace(self, leaves=leaves)


def make_schema(structure: Node, arrays: Iterable[tuple[str, str, Sequence[int]]], *, shapes: bool) -> str:
    """Make the schema of a sample. `arrays`: form, dtype and shape of each array."""
    described = [[form, dtype, list(shape) if shapes else len(shape)] for form, dtype, shape in arrays]
    return _sorted_json([_kind(structure), described])


def flatten(sample: object) -> FlattenedSample:
    """Flatten a sample. Raises SampleRefused for a value that cannot be stored."""
    leaves: list[Leaf] = []
    plain: list[tuple[str, object]] = []
    return FlattenedSample(_taken(sample, "sample", leaves, plain, 0), leaves, plain)


def unflatten(structure: Node, arrays: Sequence[object]) -> Any:
    """Rebuild the sample from its structure and decoded arrays."""
    match structure:
        case {"a": int(number)}:
            return arrays[number]
        case {"d": dict(items)}:
            return {name: unflatten(node, arrays) for name, node in items.items()}
        case {"t": list(items)}:
            return tuple(unflatten(node, arrays) for node in items)
        case {"l": list(items)}:
            return [unflatten(node, arrays) for node in items]
        case {"v": value}:
            return value
    raise ValueError("is no structure of a sample")


def find_path(structure: Node, number: int, path: str = "sample") -> str:
    """Find the path of an array in the sample, as in sample['image']; "" if absent."""
    match structure:
        case {"a": int(found)} if found == number:
            return path
        case {"d": dict(items)}:
            inside = [find_path(node, number, f"{path}[{name!r}]") for name, node in items.items()]
        case {"t": list(nodes)} | {"l": list(nodes)}:
            inside = [find_path(node, number, f"{path}[{place}]") for place, node in enumerate(nodes)]
        case _:
            return ""
    return next((one for one in inside if one), "")


def decode_array(form: str, dtype: str, shape: Sequence[int], data: memoryview) -> Any:
    """Decode an array without copying. Raises ValueError if the bytes do not fit the dtype and shape."""
    if form == "bytes":
        return bytes(data)
    if form == "torch":
        return _tensor(dtype, shape, data)
    kind = np.lib.format.descr_to_dtype(_descr(json.loads(dtype)))
    count = int(np.prod(shape, dtype=np.int64))
    if kind.hasobject or count * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no array of {dtype} with the shape {list(shape)}")
    found = np.frombuffer(data, np.uint8).view(kind) if count and kind.itemsize else np.empty(count, kind)
    found = found.reshape(tuple(shape))
    return found[()] if form == "scalar" else found


def _taken(value: object, path: str, leaves: list[Leaf], plain: list[tuple[str, object]], depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise SampleRefused(f"{path} is nested more than {MAX_DEPTH} levels deep", "Flatten the sample")
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise SampleRefused(f"{path} has the key {wrong[0]!r}, which is not a text", "Use texts as keys")
        return {"d": {key: _taken(item, f"{path}[{key!r}]", leaves, plain, depth + 1) for key, item in value.items()}}
    if isinstance(value, tuple | list):
        items = [_taken(item, f"{path}[{place}]", leaves, plain, depth + 1) for place, item in enumerate(value)]
        return {"t" if isinstance(value, tuple) else "l": items}
    if value is None or (isinstance(value, bool | int | float | str) and type(value).__module__ == "builtins"):
        plain.append((path, value))
        return {"v": value}
    if len(leaves) >= MAX_ARRAYS:
        raise SampleRefused(f"the sample has more than {MAX_ARRAYS} arrays", "Stack equal arrays")
    leaves.append(_leaf(value, path))
    return {"a": len(leaves) - 1}


def _leaf(value: object, path: str) -> Leaf:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(torch, value, path)
    if isinstance(value, bytes | bytearray):
        return Leaf("bytes", "", (len(value),), memoryview(bytes(value)), path, None)
    if isinstance(value, np.ndarray | np.generic):
        return _of_numpy(value, path)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise SampleRefused(f"{path} is a {kind}", "Arrays, tensors, texts, numbers, dicts, tuples and lists can be stored")


def _of_numpy(value: np.ndarray[Any, Any] | np.generic, path: str) -> Leaf:
    if isinstance(value, np.ma.MaskedArray):
        raise SampleRefused(
            f"{path} is a masked array, whose mask would be lost", "Put its data and its mask as two arrays"
        )
    array = np.asarray(value)
    plain = array.dtype.names is not None or array.dtype.kind != "V" or array.dtype.type is np.void
    if array.dtype.hasobject or not plain:
        raise SampleRefused(f"{path} has the dtype {array.dtype}", "Use a numpy dtype without Python objects")
    whole = np.ascontiguousarray(array)
    data = whole.reshape(-1).view(np.uint8).data if whole.nbytes else memoryview(b"")
    dtype = _described(array.dtype)
    form: Form = "scalar" if isinstance(value, np.generic) else "numpy"
    return Leaf(form, dtype, array.shape, data, path, whole)


@lru_cache(256)
def _described(dtype: np.dtype[Any]) -> str:
    return json.dumps(np.lib.format.dtype_to_descr(dtype), separators=(",", ":"))


def _of_tensor(torch: Any, value: Any, path: str) -> Leaf:
    if value.layout is not torch.strided or value.is_quantized:
        raise SampleRefused(f"{path} is a sparse or quantized tensor", "Store its components")
    whole = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # The numpy view keeps the tensor alive during the use of the bytes.
    data = whole.reshape(-1).view(torch.uint8).numpy().data if whole.numel() else memoryview(b"")
    return Leaf("torch", str(whole.dtype).removeprefix("torch."), tuple(whole.shape), data, path, whole)


def _tensor(dtype: str, shape: Sequence[int], data: memoryview) -> Any:
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"this torch has no dtype {dtype[:40]!r}")
    found = torch.frombuffer(data, dtype=kind) if len(data) else torch.empty(0, dtype=kind)
    return found.reshape(tuple(shape))


def _descr(value: Any) -> Any:
    """Convert JSON lists to the tuples that `descr_to_dtype` requires."""
    if isinstance(value, list):
        return [tuple(_field(item) for item in entry) for entry in value]
    return value


def _field(item: Any) -> Any:
    if isinstance(item, list):
        return _descr(item) if item and isinstance(item[0], list) else tuple(item)
    return item


def _kind(structure: Node) -> Any:
    """Strip the values from a structure."""
    match structure:
        case {"d": dict(items)}:
            return {name: _kind(node) for name, node in items.items()}
        case {"t": list(items)} | {"l": list(items)}:
            return [next(iter(structure)), *map(_kind, items)]
        case {"v": value}:
            return type(value).__name__
    return structure
