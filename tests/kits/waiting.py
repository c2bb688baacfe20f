"""Waits for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

PATIENCE_S = 60.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.3


def until(
    condition: Callable[[], Any], timeout_s: float = PATIENCE_S, *, what: str = "it", every_s: float | None = None
) -> Any:
    """Wait for a true condition and return its value; fails after `timeout_s`.

    `every_s`: constant pause between two evaluations. Without it, the pause grows to a tenth of the wait, because one
    request about a job costs 9 ms of a core that the awaited processes need.
    """
    began = time.monotonic()
    while not (found := condition()):
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"{what} did not happen within {timeout_s} s"
        time.sleep(every_s or min(max(SHORTEST_PAUSE_S, waited_s / 10), LONGEST_PAUSE_S))
    return found


def soon(condition: Callable[[], Any], *, what: str = "it") -> Any:
    """Wait for another thread of this process: short intervals; the limit allows for a loaded machine."""
    return until(condition, 30, what=what, every_s=0.002)


def alive(pid: int) -> bool:
    """Check that a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
