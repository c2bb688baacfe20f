"""How arrays lie in objects, chosen by name and recorded with each of them: as they are, compressed, or quantised.

`none`, `zstd` and `lz4` give back every bit. `uint8` and `uint16` do not: they keep floats on an even grid between the
array's least and greatest value, and are used only for the arrays that the ring's settings name.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import zstandard

from gpu_client.ring.errors import SampleRefused
from gpu_client.ring.tree import Leaf

Codec = Literal["none", "zstd", "lz4", "uint8", "uint16"]
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
