"""Encode and decode the bytes of a chunk, bit for bit. baton/contract/manifest.py describes each codec.

Threads may use all of it at once: the work is done by numpy and zstd, outside the interpreter's lock.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from baton.contract.manifest import Codec

_LEVEL = 1
"""Higher ones cost twice the time and save nothing on weights."""

_LARGE_BYTES = 1024 * 1024
"""From here on it makes no difference that zstd's blocks of 128 KiB do not end where the planes do."""

Buffer = memoryview | bytes | bytearray


class BadChunk(Exception):  # noqa: N818 - a finding about stored bytes, reported as damage
    """Stored bytes do not decode to what they are said to be."""


def is_all_zero(raw: Buffer) -> bool:
    """True if there is no other byte than 0."""
    view = memoryview(raw)
    if any(view[:: max(1, len(view) // 64)]):
        return False  # told apart without reading all of it
    return not view or int(np.frombuffer(view, np.uint8).max()) == 0


@lru_cache(maxsize=256)
def hash_zeros(size_bytes: int) -> str:
    """BLAKE3 of so many zero bytes."""
    return blake3(bytes(size_bytes)).hexdigest()


def encode(codec: Codec, raw: Buffer, *, width: int, base: Buffer | None = None) -> bytes:
    """The bytes to store. For `delta`, `base` has as many bytes as `raw`."""
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
    """The chunk's `size_bytes` bytes. Raises BadChunk for stored bytes that are anything else; never allocates more.

    The caller compares the digest: bytes of the right number need not be the right ones.
    """
    if codec == "raw":
        if len(stored) != size_bytes:
            raise BadChunk(f"{len(stored)} bytes are stored of a chunk of {size_bytes}")
        return memoryview(stored)
    if codec == "zeros":
        if len(stored):
            raise BadChunk("bytes are stored of a chunk of zeros")
        return bytes(size_bytes)
    if codec == "delta" and (base is None or len(base) != size_bytes):
        raise BadChunk("the base has another size than the chunk")
    data = _from_planes(np.frombuffer(_decompress(stored, size_bytes), np.uint8), width)
    if base is not None and codec == "delta":
        np.bitwise_xor(data, np.frombuffer(base, np.uint8), out=data)
    return memoryview(data.data)


def _compress(planes: NDArray[np.uint8], width: int) -> bytes:
    """One frame, which says its size. In a small one, blocks end where planes end: a block of both the mantissas' noise
    and the exponents gains nothing by either, and a sample would promise less than the whole keeps.
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
        if announced_bytes not in (-1, size_bytes):  # -1: the frame does not say
            raise BadChunk(f"a frame of {announced_bytes} bytes is stored instead of {size_bytes}")
        data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadChunk(f"the stored bytes are no zstd frame: {error}") from error
    if len(data) != size_bytes:
        raise BadChunk(f"a frame of {len(data)} bytes is stored instead of {size_bytes}")
    return data


def _to_planes(data: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """All first bytes of the elements, all second ones, ..., and what is left behind the last whole element."""
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
    """The inverse; always a new array."""
    data = np.empty(len(planes), np.uint8)
    count = len(planes) // width
    elements = data[: count * width].reshape(count, width)
    for index in range(width):
        elements[:, index] = planes[index * count : (index + 1) * count]
    data[count * width :] = planes[count * width :]
    return data
