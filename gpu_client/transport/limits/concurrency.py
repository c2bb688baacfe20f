"""Adapt the number of simultaneous connections to the total speed. Pure: the module opens no socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST = 4
"""Initial number of connections, enough for most networks; object stores limit a connection to some 90 MB/s."""

EPOCH_S = 1.0
COOLDOWN_EPOCHS = 15
"""Number of epochs without an experiment after a failed one, because networks do not change every second."""

_WORTH = 0.3
"""Minimum speed of an added connection that stays, as a share of an earlier connection's speed."""
_FULLY_USED = 0.9


class AdaptiveLimit:
    """Limit of connections that grows while the total speed rises, undoes useless growth, and halves on `slow_down`.

    Thread-safe. The limit judges only epochs in which nearly all allowed connections were in use, and skips the first
    epoch after a change, because filling buffers look like speed.
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
        """Number of connections before the experiment in progress, and their bytes per second; None without one."""
        self._cooldown_epochs = 0
        self._halved_at: float | None = None
        self._begin(clock(), settled=False)

    @property
    def allowed(self) -> int:
        """Return the maximum number of connections in use."""
        return self._allowed

    def enter(self) -> bool:
        """Count a connection as in use. Returns False at the limit."""
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
        """Count transferred bytes."""
        with self._lock:
            self._count_use()
            self._bytes += size_bytes
            if self._used_at - self._began_at >= EPOCH_S:
                self._judge(self._used_at)

    def slow_down(self) -> None:
        """Halve the limit after the store's request or a timeout. Connections in use continue."""
        with self._lock:
            now = self._clock()
            if self._halved_at is not None and now - self._halved_at < EPOCH_S:
                return  # Simultaneous refusals are one signal.
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
