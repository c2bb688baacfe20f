"""Check, encode and decode arrays: raw, compressed or quantized. Each stored array has the name of its codec.

`none`, `zstd` and `lz4` are lossless. `uint8` and `uint16` store floats on an even grid between the least and greatest
value, only for arrays that the settings name.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard

from gpu_client.ring.errors import SampleRefused
from gpu_client.ring.format.sample_tree import FlattenedSample, Leaf
from gpu_client.ring.settings import Codec, RingSettings

_PART_BYTES = 1024 * 1024
"""Bytes of an array that stay in the processor's cache between check and hash."""
_HALF_BYTES = 2
"""Size in bytes of a half-precision float, with which processors do not compute."""


def require_finite(taken: FlattenedSample) -> None:
    """Raise SampleRefused for NaN or infinity in an array or a plain value."""
    for leaf in taken.leaves:
        if not is_finite(leaf):
            raise SampleRefused(f"{leaf.path} has non-finite values", "Mend the generator, or set finite to false")
    for path, value in taken.plain:
        if isinstance(value, float) and not math.isfinite(value):
            raise SampleRefused(f"{path} is {value}", "Mend the generator, or set finite to false")


def require_quantisable_arrays(taken: FlattenedSample, settings: RingSettings) -> None:
    """Raise SampleRefused if an array to quantize is missing or not quantizable."""
    unknown = set(settings.quantise) - {leaf.path for leaf in taken.leaves}
    if unknown:
        raise SampleRefused(
            f"the sample has no {min(unknown)}, which the setting quantise names", "Name paths as in sample['image']"
        )
    for leaf in taken.leaves:
        if leaf.path in settings.quantise:
            require_quantisable(leaf)
            if not settings.finite and not is_finite(leaf):
                raise SampleRefused(f"{leaf.path} has non-finite values", "Quantize finite values only")


def is_finite(leaf: Leaf) -> bool:
    """Return True for an array without NaN and infinity. Also sets the array's digest where hashing is free."""
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
            # The sum of squares takes less than half the time of a sum; only a nonfinite result needs the exact check.
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
"""Float dtypes by their names in `sample_tree`, of tensors and of numpy arrays."""
_ZSTD_LEVEL = 1
"""zstd level; low, because samples are read a few times only and encoding must not delay the generator."""


class EncodedArray(NamedTuple):
    """Stored bytes of an array."""

    codec: Codec
    data: memoryview
    scale: tuple[float, float] | None = None
    """Least value and grid step of a quantized array."""


def require_codec(codec: str) -> None:
    """Import the library of a codec. Raises ImportError if the library is not installed."""
    if codec == "lz4":
        import lz4.frame  # noqa: F401


def encode_array(leaf: Leaf, codec: Codec) -> EncodedArray:
    """Encode an array. Raises SampleRefused for an array that the codec cannot represent."""
    if codec == "zstd":
        return EncodedArray(codec, memoryview(zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(leaf.data)))
    if codec == "lz4":
        import lz4.frame

        return EncodedArray(codec, memoryview(lz4.frame.compress(leaf.data)))
    return EncodedArray("none", leaf.data) if codec == "none" else _quantised(leaf, codec)


def decode_array_bytes(
    codec: str, data: memoryview, dtype: str, size_bytes: int, scale: list[float] | None
) -> memoryview:
    """Decode to the `size_bytes` bytes of the array. Raises ValueError, or an exception of the codec library."""
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
    # torch lacks read-only tensors, therefore the buffer is writable, like mapped files.
    return found if isinstance(found, memoryview) else memoryview(bytearray(found))


def require_quantisable(leaf: Leaf) -> None:
    """Raise SampleRefused for an array whose dtype is not a float."""
    if leaf.dtype not in FLOATS:
        raise SampleRefused(f"{leaf.path} is {leaf.dtype}, and only floats can be quantized", "Use none, zstd or lz4")


def _quantised(leaf: Leaf, codec: Codec) -> EncodedArray:
    require_quantisable(leaf)
    values: np.ndarray[Any, Any] = np.frombuffer(leaf.data, FLOATS[leaf.dtype]).astype(np.float64)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise SampleRefused(f"{leaf.path} has non-finite values", "Quantize finite values only")
    kind = LOSSY[codec]
    if not math.isfinite(high - low):
        raise SampleRefused(f"{leaf.path} has values from {low:g} to {high:g}", "Quantize a smaller range of values")
    step = (high - low) / np.iinfo(kind).max or 1.0
    grid = np.rint((values - low) / step).astype(kind)
    return EncodedArray(codec, grid.view(np.uint8).data, (low, step))
