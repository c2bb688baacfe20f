"""What a forked process must not inherit: locks that a thread which does not go with it held."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def lock() -> threading.Lock:
    """One that is free in a process that is forked from this one, whoever held it. What it guards has to be whole
    between any two steps of a thread."""
    made = threading.Lock()
    _locks.add(made)
    return made


def _freed() -> None:
    for one in list(_locks):
        one.acquire(blocking=False)
        one.release()


os.register_at_fork(after_in_child=_freed)
