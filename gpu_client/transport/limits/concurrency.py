"""The number of simultaneous connections, as large as it raises the total speed. Pure: the module opens no socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST = 4
"""Connections at the start. Enough for most lines; object stores limit each connection to some 90 MB/s."""

EPOCH_S = 1.0
COOLDOWN_EPOCHS = 15
"""Epochs without a new experiment after one that did not help, because lines do not change every second."""

_WORTH = 0.3
"""Least speed of an added connection, as a share of the earlier ones' speed each, to stay."""
_FULLY_USED = 0.9


class AdaptiveLimit:
    """Adds connections while the total speed rises, removes those that did not help, halves on `slow_down`.

    Safe from several threads. Only epochs in which nearly all allowed connections were in use are judged. The first
    epoch after a change is skipped, because filling buffers look like speed.
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
        """During an experiment: the earlier number of connections, and their bytes per second."""
        self._cooldown_epochs = 0
        self._halved_at: float | None = None
        self._begin(clock(), settled=False)

    @property
    def allowed(self) -> int:
        """Return how many connections may be in use now."""
        return self._allowed

    def enter(self) -> bool:
        """Count a connection as in use; return False if no more are allowed."""
        with self._lock:
            if self._in_use >= self._allowed:
                return False
            self._count_use()
            self._in_use += 1
            return True

    def leave(self) -> None:
        """Count a connection as no longer in use."""
        with self._lock:
            self._count_use()
            self._in_use -= 1

    def moved(self, size_bytes: int) -> None:
        """Count bytes that have moved."""
        with self._lock:
            self._count_use()
            self._bytes += size_bytes
            if self._used_at - self._began_at >= EPOCH_S:
                self._judge(self._used_at)

    def slow_down(self) -> None:
        """Halve the allowed connections, after the store asked for it or timed out. Connections in use continue."""
        with self._lock:
            now = self._clock()
            if self._halved_at is not None and now - self._halved_at < EPOCH_S:
                return  # The store refuses all simultaneous requests at once, which is one signal.
            self._halved_at = now
            self._before = None
            self._cooldown_epochs = COOLDOWN_EPOCHS
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
                self._cooldown_epochs = COOLDOWN_EPOCHS
                self._change(count, now)
                return
        if self._cooldown_epochs:
            self._cooldown_epochs -= 1
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
