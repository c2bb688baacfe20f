"""Pytest plugin that delays all threads but the first at random, to find tests that assume fast threads.

    .venv/bin/python -m pytest -p tests.kits.runner.slow_threads tests/unit tests/functional

On a busy machine they do so by themselves, and seldom; SLOW_THREADS_SEED makes other turns slow. Not in CI: some tests
measure time.
"""

from __future__ import annotations

import os
import queue
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_chance = random.Random(int(os.environ.get("SLOW_THREADS_SEED", "1")) * 1_000_003 + os.getpid())
_sleep = time.sleep  # tests replace it


def dawdle(chance: float, most_s: float) -> None:
    """Sleep at random, never in the first thread."""
    if threading.current_thread() is not threading.main_thread() and _chance.random() < chance:
        _sleep(_chance.random() * most_s)


def _slowed(owner: Any, name: str, *, before: float = 0.0, after: float = 0.0, most_s: float) -> None:
    """Make a method sleep with these chances before and after its work."""
    quick: Callable[..., Any] = getattr(owner, name)

    def slow(*given: Any, **named: Any) -> Any:
        dawdle(before, most_s)
        found = quick(*given, **named)
        dawdle(after, most_s)
        return found

    setattr(owner, name, slow)


def pytest_configure() -> None:
    """Patch the thread classes before any import starts threads."""
    _slowed(threading.Thread, "run", before=0.7, most_s=0.06)
    _slowed(socket.socket, "accept", before=0.5, most_s=0.05)
    _slowed(queue.Queue, "get", after=0.2, most_s=0.02)
    _slowed(threading.Event, "wait", after=0.2, most_s=0.02)
    for selector in {selectors.DefaultSelector, selectors.PollSelector, selectors.SelectSelector}:
        _slowed(selector, "select", after=0.2, most_s=0.02)
