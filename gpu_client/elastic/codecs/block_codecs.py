"""Encode blocks of values as small integers with one scale for each block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch

from gpu_client.elastic.codecs.codec import LIMIT, Array, check_limit, pieces, scratch

ROUNDER = np.float32(1.5 * 2.0**23)
"""Summand that rounds a small float32 to the nearest even integer, whose two's complement the lowest bits then hold."""
SMALLEST = np.float32(1e-30)
"""Lower bound of a block's largest absolute value: reciprocals of much smaller scales are infinite."""


class BlockCodec(ABC):
    """Divide the values of a block by one scale, and round the quotients. Data: all scales, then all quotients.

    A scale is a bfloat16, because float16 has no range for small deltas.
    """

    name: ClassVar[str]
    block: ClassVar[int]
    largest_quotient: ClassVar[int]

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of `count` encoded values."""
        return self._scale_bytes(count) + self._quotient_bytes(count)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write scales and rounded quotients."""
        source = values.numpy()
        scale_bits, data = self._parts(out, len(source))
        for part, blocks, shape in pieces(len(source), self.block):
            block, buffer = source[part].reshape(shape), scratch.values[: part.stop - part.start].reshape(shape)
            np.absolute(block, out=buffer)
            # The bits of positive floats have the floats' order, and integers are compared twice as fast.
            largest = np.maximum.reduce(buffer.view(np.int32), axis=1, keepdims=True).view(np.float32)
            check_limit(largest)
            scales = np.maximum(largest, SMALLEST) / np.float32(self.largest_quotient)
            bits = scales.view(np.uint32)
            np.copyto(scale_bits[blocks], (bits + 0x8000) >> 16, casting="unsafe")
            np.multiply(block, np.reciprocal(_scales(scale_bits[blocks])), out=buffer)
            np.add(buffer, ROUNDER, out=buffer)
            self._pack(buffer.view(np.int32), data, part)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply the quotients by their scales."""
        self._expand(data, out.numpy(), None)

    def accumulate(self, data: torch.Tensor, weight: float, out: torch.Tensor) -> None:
        """Add `weight` times the values to `out`."""
        self._expand(data, out.numpy(), np.float32(weight))

    def _expand(self, data: torch.Tensor, target: Array, weight: np.float32 | None) -> None:
        scale_bits, packed = self._parts(data, len(target))
        for part, blocks, shape in pieces(len(target), self.block):
            scales = _scales(scale_bits[blocks])
            check_limit(np.absolute(scales), 2 * LIMIT / self.largest_quotient)
            values = target[part] if weight is None else scratch.values[: part.stop - part.start]
            self._unpack(packed, part, values)
            block = values.reshape(shape)
            np.multiply(block, scales if weight is None else scales * weight, out=block)
            if weight is not None:
                np.add(target[part], values, out=target[part])

    def _scale_bytes(self, count: int) -> int:
        return 2 * -(-count // self.block)

    def _parts(self, data: torch.Tensor, count: int) -> tuple[Array, Array]:
        array, scale_bytes = data.numpy(), self._scale_bytes(count)
        return array[:scale_bytes].view(np.uint16).reshape(-1, 1), array[scale_bytes:]

    @abstractmethod
    def _quotient_bytes(self, count: int) -> int: ...

    @abstractmethod
    def _pack(self, quotients: Array, data: Array, part: slice) -> None:
        """Store the lowest bits of the 32-bit quotients of the values in `part`."""

    @abstractmethod
    def _unpack(self, data: Array, part: slice, out: Array) -> None:
        """Write the quotients of the values in `part` as float32."""


def _scales(bits: Array) -> Array:
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


class Int8Codec(BlockCodec):
    """Store 512 values as int8 with a bfloat16 scale: smaller errors than 1024 values with a float32 scale."""

    name = "int8"
    block = 512
    largest_quotient = 127

    def _quotient_bytes(self, count: int) -> int:
        return count

    def _pack(self, quotients: Array, data: Array, part: slice) -> None:
        np.copyto(data[part].view(np.int8), quotients.reshape(-1), casting="unsafe")

    def _unpack(self, data: Array, part: slice, out: Array) -> None:
        np.copyto(out, data[part].view(np.int8))


class Int4Codec(BlockCodec):
    """Store 64 values as 4-bit integers with a bfloat16 scale. A byte holds values n and n + 32 of its block.

    The last block has full length.
    """

    name = "int4"
    block = 64
    largest_quotient = 7

    def _quotient_bytes(self, count: int) -> int:
        return -(-count // self.block) * self.block // 2

    def _packed(self, data: Array, part: slice) -> Array:
        stop = -(-part.stop // self.block)
        return data[part.start // 2 : stop * self.block // 2].reshape(-1, self.block // 2)

    def _pack(self, quotients: Array, data: Array, part: slice) -> None:
        packed, width = self._packed(data, part), quotients.shape[1]
        halves = scratch.bytes[: 2 * packed.size].reshape(-1, self.block)
        halves[:, width:] = 0
        np.copyto(halves[:, :width], quotients, casting="unsafe")
        eights = np.bitwise_and(halves, 15, out=halves).view(np.uint64)
        low, high = np.split(eights, 2, axis=1)
        np.bitwise_or(low, np.left_shift(high, 4), out=low)
        np.copyto(packed, low.view(np.uint8))

    def _unpack(self, data: Array, part: slice, out: Array) -> None:
        packed = self._packed(data, part)
        halves = scratch.bytes[: 2 * packed.size].reshape(-1, self.block)
        low, high = halves[:, : self.block // 2], halves[:, self.block // 2 :]
        np.left_shift(packed, 4, out=low)
        np.copyto(high, packed)
        # The arithmetic shift extends the sign.
        signed = halves.view(np.int8)
        np.right_shift(signed, 4, out=signed)
        np.copyto(out, signed.reshape(-1)[: len(out)])
