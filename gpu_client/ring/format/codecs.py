"""How arrays lie in objects, chosen by name and recorded with each of them: as they are, compressed, or quantised.

`none`, `zstd` and `lz4` give back every bit. `uint8` and `uint16` do not: they keep floats on an even grid between the
array's least and greatest value, and are used only for the arrays that the ring's settings name.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard

from gpu_client.ring.errors import SampleRefused
from gpu_client.ring.format.sample_tree import Leaf, Taken
from gpu_client.ring.settings import Codec, RingSettings

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


LOSSY: dict[str, np.dtype[Any]] = {"uint8": np.dtype(np.uint8), "uint16": np.dtype(np.uint16)}
FLOATS = {
    **{name: np.dtype(name) for name in ("float16", "float32", "float64")},
    **{f'"{np.dtype(name).str}"': np.dtype(name) for name in ("float16", "float32", "float64")},
}
"""As `tree.py` writes them, of tensors and of numpy's arrays."""
_ZSTD_LEVEL = 1
"""Samples are read a few times and thrown away: what matters is that compressing does not hold up the generator."""


class Stored(NamedTuple):
    """An array's bytes as they are stored."""

    codec: Codec
    data: memoryview
    scale: tuple[float, float] | None = None
    """Of a quantised array: its least value, and the distance between two neighbours of the grid."""


def check_codec(codec: str) -> None:
    """Raises ImportError where it needs a package that is not here."""
    if codec == "lz4":
        import lz4.frame  # noqa: F401


def encoded(leaf: Leaf, codec: Codec) -> Stored:
    """Raises SampleRefused for an array that the codec cannot hold."""
    if codec == "zstd":
        return Stored(codec, memoryview(zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(leaf.data)))
    if codec == "lz4":
        import lz4.frame

        return Stored(codec, memoryview(lz4.frame.compress(leaf.data)))
    return Stored("none", leaf.data) if codec == "none" else _quantised(leaf, codec)


def decoded(codec: str, data: memoryview, dtype: str, size_bytes: int, scale: list[float] | None) -> memoryview:
    """The array's own bytes, `size_bytes` of them. Raises ValueError, or what the codec's library raises."""
    if codec == "none":
        return data
    found: bytes | memoryview
    if codec == "zstd":
        found = zstandard.ZstdDecompressor().decompress(data, max_output_size=size_bytes)
    elif codec == "lz4":
        import lz4.frame

        found = lz4.frame.decompress(data)
    elif codec in LOSSY and scale is not None:
        grid = np.frombuffer(data, LOSSY[codec])
        found = (grid * scale[1] + scale[0]).astype(FLOATS[dtype]).view(np.uint8).data
    else:
        raise ValueError(f"there is no codec {codec[:20]!r}")
    # Writable, as mapped files are: torch has no tensors that cannot be written to.
    return found if isinstance(found, memoryview) else memoryview(bytearray(found))


def require_quantisable(leaf: Leaf) -> None:
    """Raises SampleRefused for an array that is none of floats."""
    if leaf.dtype not in FLOATS:
        raise SampleRefused(f"{leaf.path} is {leaf.dtype}, and only floats are quantised", "Use none, zstd or lz4")


def _quantised(leaf: Leaf, codec: Codec) -> Stored:
    require_quantisable(leaf)
    values: np.ndarray[Any, Any] = np.frombuffer(leaf.data, FLOATS[leaf.dtype]).astype(np.float64)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise SampleRefused(f"{leaf.path} has values that are not finite", "Quantise finite values only")
    kind = LOSSY[codec]
    if not math.isfinite(high - low):
        raise SampleRefused(f"{leaf.path} has values from {low:g} to {high:g}", "Quantise what lies closer together")
    step = (high - low) / np.iinfo(kind).max or 1.0
    grid = np.rint((values - low) / step).astype(kind)
    return Stored(codec, grid.view(np.uint8).data, (low, step))
