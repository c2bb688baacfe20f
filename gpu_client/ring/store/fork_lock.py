"""Locks that are free in a forked process, although a thread of the parent holds them."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def make_lock() -> threading.Lock:
    """Make a lock that a fork releases in the child. The guarded state must be consistent between any two steps."""
    made = threading.Lock()
    _locks.add(made)
    return made


def _freed() -> None:
    for one in list(_locks):
        one.acquire(blocking=False)
        one.release()


os.register_at_fork(after_in_child=_freed)
