"""How many connections move bytes at once: as many as make it faster. Knows no sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST = 4
"""Enough for most lines; object stores limit each connection to some 90 MB/s."""

EPOCH_S = 1.0
HOLD_EPOCHS = 15
"""So long no more are tried after more did not help: lines change, but not every second."""

_WORTH = 0.3
"""A connection more is worth it if it brings this much of what each of those before it brings."""
_FULLY_USED = 0.9


class AdaptiveLimit:
    """Starts with a few, adds while the total rises, takes back what did not help, halves when told to slow down.

    Safe from several threads. Only times in which nearly all allowed connections were in use are judged, and after a
    change the first epoch is not: buffers that fill up look like speed.
    """

    def __init__(self, most: int, *, first: int = FIRST, clock: Callable[[], float] = time.monotonic) -> None:
        if most < 1:
            raise ValueError("at least one connection is needed")
        self._most = most
        self._allowed = min(first, most)
        self._clock = clock
        self._lock = threading.Lock()
        self._in_use = 0
        self._before: tuple[int, float] | None = None
        """While more are tried: how many there were, and their bytes per second."""
        self._hold_epochs = 0
        self._halved_at: float | None = None
        self._begin(clock(), settled=False)

    @property
    def allowed(self) -> int:
        """How many connections may be in use now."""
        return self._allowed

    def enter(self) -> bool:
        """Take a connection into use; False if no more are allowed."""
        with self._lock:
            if self._in_use >= self._allowed:
                return False
            self._count_use()
            self._in_use += 1
            return True

    def leave(self) -> None:
        """One that was in use is so no longer."""
        with self._lock:
            self._count_use()
            self._in_use -= 1

    def moved(self, size_bytes: int) -> None:
        """Bytes have moved."""
        with self._lock:
            self._count_use()
            self._bytes += size_bytes
            if self._used_at - self._began_at >= EPOCH_S:
                self._judge(self._used_at)

    def slow_down(self) -> None:
        """The store asked for it, or does not answer in time. Those in use are not stopped."""
        with self._lock:
            now = self._clock()
            if self._halved_at is not None and now - self._halved_at < EPOCH_S:
                return  # all that are under way are refused at once
            self._halved_at = now
            self._before = None
            self._hold_epochs = HOLD_EPOCHS
            self._change(max(1, self._allowed // 2), now)

    def _judge(self, now: float) -> None:
        elapsed_s = now - self._began_at
        bytes_per_s = self._bytes / elapsed_s
        fully_used = self._use_s >= _FULLY_USED * self._allowed * elapsed_s
        settled = self._settled
        self._begin(now, settled=True)
        if not (settled and fully_used):
            return
        if self._before is not None:
            count, before_bytes_per_s = self._before
            self._before = None
            if bytes_per_s < before_bytes_per_s * (1 + _WORTH * (self._allowed - count) / count):
                self._hold_epochs = HOLD_EPOCHS
                self._change(count, now)
                return
        if self._hold_epochs:
            self._hold_epochs -= 1
        elif self._allowed < self._most:
            self._before = (self._allowed, bytes_per_s)
            self._change(min(self._most, self._allowed + max(1, self._allowed // 4)), now)

    def _change(self, allowed: int, now: float) -> None:
        self._allowed = allowed
        self._begin(now, settled=False)

    def _begin(self, now: float, *, settled: bool) -> None:
        self._began_at = self._used_at = now
        self._bytes = 0
        self._use_s = 0.0
        self._settled = settled

    def _count_use(self) -> None:
        now = self._clock()
        self._use_s += self._in_use * (now - self._used_at)
        self._used_at = now
