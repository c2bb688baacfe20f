"""Waiting for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

PATIENCE_S = 60.0


def until(
    condition: Callable[[], Any], timeout_s: float = PATIENCE_S, *, what: str = "it", every_s: float = 0.05
) -> Any:
    """Wait until a condition holds, and give its value; fails if that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(every_s)
    return found


def soon(condition: Callable[[], Any], *, what: str = "it") -> Any:
    """`until` for other threads of this process: looked at often, and not for long."""
    return until(condition, 5, what=what, every_s=0.002)


def alive(pid: int) -> bool:
    """Whether this process runs; one that only waits to be asked for its exit code does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
