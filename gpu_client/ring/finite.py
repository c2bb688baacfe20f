"""Whether a sample has NaN or infinity: of arrays found out while they are hashed, so they come from memory once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from gpu_client.ring.codecs import FLOATS
from gpu_client.ring.tree import Leaf

_PART_BYTES = 1024 * 1024
"""What stays in a processor's cache between the two."""
_HALF_BYTES = 2
"""Of a float that processors do not compute with."""


def is_finite(leaf: Leaf) -> bool:
    """Whether no value is NaN or infinite. Fills in the leaf's digest where that costs nothing more."""
    kind = FLOATS.get(leaf.dtype)
    if kind is not None and kind.itemsize > _HALF_BYTES:
        return _all_parts(leaf, np.frombuffer(leaf.data, kind))
    if leaf.form == "torch":
        return _tensor(leaf.value)
    return _array(leaf.value)


def _all_parts(leaf: Leaf, values: np.ndarray[Any, Any]) -> bool:
    digest = xxhash.xxh3_64()
    step = _PART_BYTES // values.itemsize
    with np.errstate(all="ignore"):
        for begin in range(0, len(values), step):
            part = values[begin : begin + step]
            digest.update(part.data)
            # The sum of the squares is enough, unless that is too large: it takes less than half the time of a sum.
            if not (math.isfinite(np.dot(part, part)) or np.isfinite(part).all()):
                return False
    leaf.digest = digest.hexdigest()
    return True


def _tensor(value: Any) -> bool:
    import torch

    if not (value.is_floating_point() or value.is_complex()) or value.numel() == 0:
        return True
    wide = value if value.element_size() > 1 else value.to(torch.float32)
    return bool(torch.isfinite(wide.sum())) or bool(torch.isfinite(wide).all())


def _array(array: Any) -> bool:
    if array is None or array.dtype.kind not in "fc" or array.size == 0:
        return True
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())


def floats_of(node: dict[str, Any], path: str) -> Iterator[tuple[str, float]]:
    """Plain numbers of a sample's structure, with where they are."""
    match node:
        case {"v": float(value)}:
            yield path, value
        case {"d": dict(items)}:
            for name, item in items.items():
                yield from floats_of(item, f"{path}[{name!r}]")
        case {"t": list(items)} | {"l": list(items)}:
            for place, item in enumerate(items):
                yield from floats_of(item, f"{path}[{place}]")
