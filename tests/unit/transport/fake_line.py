"""A clock to turn by hand, and lines that move bytes by it."""

from __future__ import annotations

from collections.abc import Callable

from gpu_client.transport.limits.concurrency import AdaptiveLimit
from tests.kits.clock import Clock

STEP_S = 0.1


def run_line(limit: AdaptiveLimit, clock: Clock, seconds: float, bytes_per_s: Callable[[int], float]) -> list[int]:
    """Keep all allowed connections busy on a line that moves so much in total with so many; allowed after each step."""
    in_use = 0
    seen = []
    for _ in range(round(seconds / STEP_S)):
        while in_use > limit.allowed:
            limit.leave()
            in_use -= 1
        while limit.enter():
            in_use += 1
        clock.advance(STEP_S)
        limit.moved(int(bytes_per_s(in_use) * STEP_S))
        seen.append(limit.allowed)
    for _ in range(in_use):
        limit.leave()
    return seen
