"""Encode and decode the bytes of a chunk, bit for bit. baton/contract/checkpoints/manifest.py describes each codec.

All functions are thread-safe; numpy and zstd work outside the interpreter lock.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from baton.contract.checkpoints.manifest import Codec

_LEVEL = 1
"""zstd level. Higher levels double the time and save no bytes of weights."""

_LARGE_BYTES = 1024 * 1024
"""Chunk size above which the mismatch between zstd's 128 KiB blocks and the planes costs no compression."""

Buffer = memoryview | bytes | bytearray


class BadChunk(Exception):  # noqa: N818 - a finding about stored bytes, reported as damage
    """Error of stored bytes that do not decode to the declared chunk."""


def is_all_zero(raw: Buffer) -> bool:
    """Return True if every byte is 0."""
    view = memoryview(raw)
    if any(view[:: max(1, len(view) // 64)]):
        return False  # A nonzero sample saves reading all bytes.
    return not view or int(np.frombuffer(view, np.uint8).max()) == 0


@lru_cache(maxsize=256)
def hash_zeros(size_bytes: int) -> str:
    """Return the BLAKE3 of `size_bytes` zero bytes."""
    return blake3(bytes(size_bytes)).hexdigest()


def encode(codec: Codec, raw: Buffer, *, width: int, base: Buffer | None = None) -> bytes:
    """Encode a chunk for storage. `delta` requires a `base` of the length of `raw`."""
    if codec == "raw":
        return bytes(raw)
    if codec == "zeros":
        return b""
    data = np.frombuffer(raw, np.uint8)
    if codec == "delta":
        if base is None or len(base) != len(raw):
            raise ValueError("a delta needs a base of the same size")
        data = np.bitwise_xor(data, np.frombuffer(base, np.uint8))
    return _compress(_to_planes(data, width), width)


def decode(
    codec: Codec, stored: Buffer, *, size_bytes: int, width: int, base: Buffer | None = None
) -> bytes | memoryview:
    """Decode stored bytes to the `size_bytes` bytes of the chunk, and never allocate more. Raises BadChunk.

    The caller compares the digest, because bytes of the right number can still be wrong.
    """
    if codec == "raw":
        if len(stored) != size_bytes:
            raise BadChunk(f"{len(stored)} bytes are stored for a raw chunk of {size_bytes} bytes")
        return memoryview(stored)
    if codec == "zeros":
        if len(stored):
            raise BadChunk("bytes are stored for a chunk of zeros")
        return bytes(size_bytes)
    if codec == "delta" and (base is None or len(base) != size_bytes):
        raise BadChunk("the base has another size than the chunk")
    data = _from_planes(np.frombuffer(_decompress(stored, size_bytes), np.uint8), width)
    if base is not None and codec == "delta":
        np.bitwise_xor(data, np.frombuffer(base, np.uint8), out=data)
    return memoryview(data.data)


def _compress(planes: NDArray[np.uint8], width: int) -> bytes:
    """Compress the planes to one zstd frame, which declares its size.

    In a small frame the blocks end at the ends of the planes. A block that mixed the noise of the mantissas with the
    exponents would compress badly, and a sample would predict a smaller gain than the whole chunk's.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    if width == 1 or len(planes) >= _LARGE_BYTES:
        return compressor.compress(planes.data)
    frame = compressor.compressobj(size=len(planes))
    pieces = []
    count = max(1, len(planes) // width)
    for start in range(0, len(planes), count):
        pieces.append(frame.compress(planes[start : start + count].data))
        pieces.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    pieces.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
    return b"".join(pieces)


def _decompress(stored: Buffer, size_bytes: int) -> bytes:
    try:
        announced_bytes = zstandard.frame_content_size(stored)
        if announced_bytes not in (-1, size_bytes):  # -1: the frame declares no size
            raise BadChunk(f"a frame of {announced_bytes} bytes is stored instead of {size_bytes}")
        data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadChunk(f"the stored bytes are not a zstd frame: {error}") from error
    if len(data) != size_bytes:
        raise BadChunk(f"a frame of {len(data)} bytes is stored instead of {size_bytes}")
    return data


def _to_planes(data: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Return all first bytes of the elements, all second bytes, ..., then the bytes behind the last whole element."""
    if width == 1:
        return data
    count = len(data) // width
    planes = np.empty(len(data), np.uint8)
    elements = data[: count * width].reshape(count, width)
    for index in range(width):
        planes[index * count : (index + 1) * count] = elements[:, index]
    planes[count * width :] = data[count * width :]
    return planes


def _from_planes(planes: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Invert `_to_planes`, into a new array."""
    data = np.empty(len(planes), np.uint8)
    count = len(planes) // width
    elements = data[: count * width].reshape(count, width)
    for index in range(width):
        elements[:, index] = planes[index * count : (index + 1) * count]
    data[count * width :] = planes[count * width :]
    return data
