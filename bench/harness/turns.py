"""Turns of processes in short slices: one runs, the others are stopped.

A machine that is shared, and whose clock rate moves, is as fast for one as for the other within so short a time; runs
of several seconds one after the other differ by more than what is to be measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

SLICE_S = 0.05
POLL_S = 0.02

Span = tuple[float, float]
"""From and to, seconds of `time.monotonic`, which all processes of a machine share."""


class Process(Protocol):
    """Process that can be stopped and continued."""

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


class Handle:
    """Process by a descriptor: fast signals, and never another process with the same number."""

    def __init__(self, pid: int) -> None:
        """Open the descriptor; raises ProcessLookupError without such a process."""
        self._descriptor = os.pidfd_open(pid)

    def suspend(self) -> None:
        """Stop the process if it still runs."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process."""
        self._send(signal.SIGCONT)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)


@dataclass
class Subject:
    """Subject of the turns. `ended`: True once the timed part is over.

    The first process is the one that is timed: it goes on first and stops last, so that no time of its turn is lost.
    """

    processes: Sequence[Process]
    ended: Callable[[], bool]
    turns: list[Span] = field(default_factory=list)

    def freeze(self) -> None:
        """Stop all processes of the subject except ended ones."""
        for process in reversed(self.processes):
            process.suspend()

    def thaw(self) -> None:
        """Continue all processes of the subject."""
        for process in self.processes:
            process.resume()


def take_turns(
    subjects: Sequence[Subject],
    *,
    timeout_s: float,
    slice_s: float = SLICE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Give turns to stopped subjects until all have ended, then continue all; fills in their turns.

    Raises TimeoutError; they go on then, too.
    """
    deadline = clock() + timeout_s
    try:
        for subject in cycle(subjects):
            if all(each.ended() for each in subjects):
                return
            if clock() > deadline:
                raise TimeoutError(f"not over after {timeout_s:.0f} s")
            if subject.ended():
                continue
            began = clock()
            subject.thaw()
            sleep(slice_s)
            subject.freeze()
            subject.turns.append((began, clock()))
    finally:
        for subject in subjects:
            subject.thaw()


def overlap_s(span: Span, turns: Sequence[Span]) -> float:
    """Compute the seconds of `span` within `turns`, which do not overlap."""
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in turns)
