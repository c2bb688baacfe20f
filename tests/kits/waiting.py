"""Waits for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

PATIENCE_S = 60.0


def until(
    condition: Callable[[], Any], timeout_s: float = PATIENCE_S, *, what: str = "it", every_s: float = 0.05
) -> Any:
    """Wait for a true condition and return its value; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(every_s)
    return found


def soon(condition: Callable[[], Any], *, what: str = "it") -> Any:
    """Wait for another thread of this process: short intervals, short limit."""
    return until(condition, 5, what=what, every_s=0.002)


def alive(pid: int) -> bool:
    """Check that a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
