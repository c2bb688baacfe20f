"""Apply averaged deltas to the outer state: Nesterov SGD in float32 on the CPU, and a 64-bit hash of the result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
_HASH_BITS = (1 << 64) - 1
_HASH_BLOCK = 1 << 16


@dataclass
class OuterState:
    """Outer parameters and momentum (one-dimensional, float32, CPU, of equal length) after `round` committed rounds."""

    params: torch.Tensor
    momentum: torch.Tensor
    round: int = 0

    @classmethod
    def begin(cls, params: torch.Tensor) -> OuterState:
        """Return the state before the first round; the state owns `params` from now on."""
        return cls(params, torch.zeros_like(params))


@dataclass(frozen=True)
class OuterOptimizer:
    """Outer step of DiLoCo; equals `torch.optim.SGD(lr, momentum, nesterov=True)` bit for bit."""

    lr: float = OUTER_LR
    momentum: float = OUTER_MOMENTUM

    def step(self, params: torch.Tensor, momentum: torch.Tensor, average: torch.Tensor, *, first: bool) -> None:
        """Apply the averaged delta in place. All operations are elementwise, therefore any split gives equal bits.

        first: the state has no committed round, and the momentum begins as a copy, as in torch's SGD.
        """
        if first:
            momentum.copy_(average)
        else:
            momentum.mul_(self.momentum).add_(average)
        params.add_(average.add(momentum, alpha=self.momentum), alpha=-self.lr)


def hash_values(*tensors: torch.Tensor) -> int:
    """Return a 64-bit hash of the bits of float32 tensors, for the detection of differences between members.

    Multilinear over the 32-bit halves with odd pseudo-random factors: any single changed value changes the hash, and
    integer arithmetic gives equal hashes on all machines. The hash is no protection against forgery.
    """
    total = 0
    for number, tensor in enumerate(tensors):
        low, high = _hash_factors()
        if tensor.storage_offset() % 2:
            # Pairs of float32 begin at even places of the memory.
            tensor = tensor.clone()  # noqa: PLW2901
        total = total * 0x9E3779B97F4A7C15 + number + tensor.numel()
        even = tensor.numel() // 2 * 2
        for position, pairs in enumerate(tensor[:even].view(torch.int64).split(_HASH_BLOCK)):
            halves = torch.bitwise_right_shift(pairs, 32)
            block = int(torch.dot(pairs, low[: len(pairs)])) + int(torch.dot(halves, high[: len(pairs)]))
            total = (total * 0xD1342543DE82EF95 + block + position) & _HASH_BITS
        if even < tensor.numel():
            total += int(tensor[even:].view(torch.int32)) * 0xA0761D6478BD642F
    return total & _HASH_BITS


@cache
def _hash_factors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0x0BA70)
    low, high = (
        torch.randint(-(1 << 63), (1 << 63) - 1, (_HASH_BLOCK,), generator=generator, dtype=torch.int64) | 1
        for _ in range(2)
    )
    return low, high


def combine_hashes(hashes: Iterable[int]) -> int:
    """Return one 64-bit hash of the hashes of all buckets."""
    digest = hashlib.blake2b(digest_size=8)
    for one in hashes:
        digest.update(one.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")
