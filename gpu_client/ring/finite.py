"""Whether a sample has NaN or infinity: of arrays found out while they are hashed, so they come from memory once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import xxhash

from gpu_client.ring.codecs import FLOATS, require_quantisable
from gpu_client.ring.errors import SampleRefused
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tree import Leaf, Taken

_PART_BYTES = 1024 * 1024
"""What stays in a processor's cache between the two."""
_HALF_BYTES = 2
"""Of a float that processors do not compute with."""


def require_finite(taken: Taken) -> None:
    """Raises SampleRefused for a sample with NaN or infinity in an array or as a plain value."""
    for leaf in taken.leaves:
        if not is_finite(leaf):
            raise SampleRefused(
                f"{leaf.path} has values that are not finite", "Mend the generator, or set finite to false"
            )
    for path, value in taken.plain:
        if isinstance(value, float) and not math.isfinite(value):
            raise SampleRefused(f"{path} is {value}", "Mend the generator, or set finite to false")


def require_quantisable_arrays(taken: Taken, settings: RingSettings) -> None:
    """Raises SampleRefused unless all arrays that the settings name are there and can be quantised."""
    unknown = set(settings.quantise) - {leaf.path for leaf in taken.leaves}
    if unknown:
        raise SampleRefused(f"it has no {min(unknown)}, which is to be quantised", "Name paths as in sample['image']")
    for leaf in taken.leaves:
        if leaf.path in settings.quantise:
            require_quantisable(leaf)
            if not settings.finite and not is_finite(leaf):
                raise SampleRefused(f"{leaf.path} has values that are not finite", "Quantise finite values only")


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
