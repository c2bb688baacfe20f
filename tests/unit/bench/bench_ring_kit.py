"""Define a process of the ring bench's tests, in a module of its own: the process imports the module."""

from __future__ import annotations

import os
import signal

from bench.ring.population import Counters


def count_then_die(counters: Counters, number: int) -> None:
    """Count two numbers, then die by SIGKILL."""
    counters.add("a", number, 5)
    counters.put("b", number, 7)
    os.kill(os.getpid(), signal.SIGKILL)
