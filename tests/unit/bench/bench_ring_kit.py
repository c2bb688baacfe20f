"""What a process of the tests does. By itself, since whoever runs it loads its module."""

from __future__ import annotations

import os
import signal

from bench.ring.population import Counters


def count_then_die(counters: Counters, number: int) -> None:
    """Two numbers, then SIGKILL."""
    counters.add("a", number, 5)
    counters.put("b", number, 7)
    os.kill(os.getpid(), signal.SIGKILL)
