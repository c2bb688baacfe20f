"""Waits for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any

import psutil

PATIENCE_S = 80.0
"""Below the default lease of 90 s, whose end would also bring what some tests wait for."""
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
    return until(condition, 60, what=what, every_s=0.002)


def expire_for(hanging: Callable[[], int], *, below_s: float) -> Callable[[Collection[Future[Any]], float], object]:
    """Return a `concurrent.futures.wait` whose time limit passes once all calls hang that lack an answer.

    hanging: returns the number of calls that hang so far. The other calls have as much time as a loaded machine needs,
    and no test waits for the limit, which is below `below_s`.
    """
    asked: list[Future[Any]] = []

    def wait_for_others(calls: Collection[Future[Any]], limit_s: float) -> object:
        assert 0 < limit_s < below_s
        asked.extend(calls)
        soon(lambda: sum(not one.done() for one in asked) == hanging(), what="the answers of the others")
        return wait(calls, 0)

    return wait_for_others


def alive(pid: int) -> bool:
    """Check that a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
