"""Encode each value by itself: float32 and bfloat16."""

from __future__ import annotations

import numpy as np
import torch

from gpu_client.elastic.codecs.codec import PIECE, check_finite, pieces, scratch


class Fp32Codec:
    """Copy values exactly."""

    name = "fp32"

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of `count` encoded values."""
        return 4 * count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the values."""
        check_finite(values)
        np.copyto(out.numpy().view(np.float32), values.numpy())

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the values."""
        np.copyto(out.numpy(), data.numpy().view(np.float32))
        check_finite(out)

    def accumulate(self, data: torch.Tensor, weight: float, out: torch.Tensor) -> None:
        """Add `weight` times the values to `out`, rounded after the product and after the sum."""
        source, target = data.numpy().view(np.float32), out.numpy()
        for part, _, _ in pieces(len(target), PIECE):
            product = np.multiply(source[part], np.float32(weight), out=scratch.values[: part.stop - part.start])
            np.add(target[part], product, out=target[part])
        check_finite(out)


class Bf16Codec:
    """Round values to bfloat16, to nearest even."""

    name = "bf16"

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes of `count` encoded values."""
        return 2 * count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Keep the upper halves of the rounded values."""
        check_finite(values)
        source, target = values.numpy().view(np.uint32), out.numpy().view(np.uint16)
        for part, _, _ in pieces(len(source), PIECE):
            rounded = scratch.values[: part.stop - part.start].view(np.uint32)
            np.right_shift(source[part], 16, out=rounded)
            np.bitwise_and(rounded, 1, out=rounded)
            np.add(rounded, 0x7FFF, out=rounded)
            np.add(rounded, source[part], out=rounded)
            np.right_shift(rounded, 16, out=rounded)
            np.copyto(target[part], rounded, casting="unsafe")

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Append zero bits to the upper halves."""
        np.left_shift(data.numpy().view(np.uint16), 16, out=out.numpy().view(np.uint32), dtype=np.uint32)
        check_finite(out)

    def accumulate(self, data: torch.Tensor, weight: float, out: torch.Tensor) -> None:
        """Add `weight` times the values to `out`."""
        source, target = data.numpy().view(np.uint16), out.numpy()
        for part, _, _ in pieces(len(target), PIECE):
            product = scratch.values[: part.stop - part.start]
            np.left_shift(source[part], 16, out=product.view(np.uint32), dtype=np.uint32)
            np.multiply(product, np.float32(weight), out=product)
            np.add(target[part], product, out=target[part])
        check_finite(out)
