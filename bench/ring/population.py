"""Processes of the ring's bench, forked from a loaded one so that many start at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from multiprocessing.context import ForkServerProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
_POLL_S = 0.02


class Counters:
    """Counters in shared memory, one slot for each process; the counts survive a killed process."""

    def __init__(self, names: Sequence[str], processes: int) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._width = len(names)
        self._values = CONTEXT.RawArray(c_int64, len(names) * processes)

    def add(self, name: str, process: int, number: int = 1) -> None:
        """Change the own slot; only the process itself may call this."""
        self._values[process * self._width + self._places[name]] += number

    def put(self, name: str, process: int, number: int) -> None:
        """Change the own slot; only the process itself may call this."""
        self._values[process * self._width + self._places[name]] = number

    def of(self, name: str, process: int) -> int:
        """Read the slot of a process."""
        return int(self._values[process * self._width + self._places[name]])

    def total(self, name: str) -> int:
        """Sum the slots of all processes."""
        return sum(self._values[self._places[name] :: self._width])


def begun(role: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a process that runs a function of `roles`."""
    process = CONTEXT.Process(target=role, args=arguments)
    process.start()
    return process


@contextlib.contextmanager
def population(role: Callable[..., None], arguments: Sequence[Sequence[Any]]) -> Iterator[list[ForkServerProcess]]:
    """Start the processes and kill the rest at the end. The list may change meanwhile."""
    processes = [begun(role, *one) for one in arguments]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def ended_well(processes: Sequence[ForkServerProcess], timeout_s: float) -> None:
    """Wait for all processes; raises RuntimeError for a failed or running one."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.01))
        if process.exitcode != 0:
            raise RuntimeError(f"a process of the bench ended with {process.exitcode} instead of 0")


def wait_for(ready: Callable[[], bool], event: str, timeout_s: float) -> float:
    """Wait for a condition; returns the seconds. Raises TimeoutError."""
    began_at = time.monotonic()
    while not ready():
        if time.monotonic() - began_at > timeout_s:
            raise TimeoutError(f"{event}: not after {timeout_s:g} s")
        time.sleep(_POLL_S)
    return time.monotonic() - began_at
