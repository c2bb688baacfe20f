"""Define the interface of codecs, and the loop that all codecs share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from gpu_client.elastic.errors import NotFiniteError

PIECE = 128 * 1024
"""Values that one operation handles: 512 KiB of float32, so that all operations on a piece find it in the L2 cache."""
ALIGNMENT = 1024
"""Multiple of all block lengths: parts of a bucket that begin at multiples have the blocks of the whole bucket."""
LIMIT = float(2.0**126)
"""Absolute value that counts as infinite: scales and sums of smaller values are finite."""

Array = np.ndarray[Any, np.dtype[Any]]


class Codec(Protocol):
    """Encode and decode values.

    Values are one-dimensional contiguous float32 tensors on the CPU; encoded data are uint8 tensors
    of `encoded_bytes(number of values)`. Methods refuse NaN, infinity, and absolute values from 2**126: NotFiniteError.
    """

    @property
    def name(self) -> str:
        """Return the codec's name in settings and in the world's program."""
        ...

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of `count` encoded values."""
        ...

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the encoded values to `out`."""
        ...

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values to `out`."""
        ...

    def accumulate(self, data: torch.Tensor, weight: float, out: torch.Tensor) -> None:
        """Add the values, each multiplied by `weight`, to `out`."""
        ...


class Scratch(threading.local):
    """Buffers of one thread for one piece."""

    def __init__(self) -> None:
        self.values = np.empty(PIECE, np.float32)
        self.bytes = np.empty(PIECE, np.uint8)


def pieces(count: int, block: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Yield the range of values, the range of blocks, and (blocks, values of a block) of each piece.

    An incomplete last block is a piece of its own.
    """
    whole = count - count % block
    for start in range(0, whole, PIECE):
        stop = min(start + PIECE, whole)
        blocks = slice(start // block, stop // block)
        yield slice(start, stop), blocks, (blocks.stop - blocks.start, block)
    if whole < count:
        yield slice(whole, count), slice(whole // block, whole // block + 1), (1, count - whole)


def check_limit(largest: Array, limit: float = LIMIT) -> None:
    """Refuse absolute values that are not below the limit."""
    if not largest.max() < limit:
        raise NotFiniteError("a value is NaN, infinite, or not below 2**126")


def check_finite(values: torch.Tensor) -> None:
    """Refuse NaN, infinity, and absolute values from 2**126."""
    source = values.numpy()
    for part, _, _ in pieces(len(source), PIECE):
        check_limit(np.absolute(source[part], out=scratch.values[: part.stop - part.start]))


scratch = Scratch()
