"""How fast bytes move, as it was lately."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HALF_LIFE_S = 20.0
LEAST_BYTES = 1024 * 1024
"""Fewer measure how long an answer takes, not how fast the line is."""


class Speed:
    """Bytes per second of the time in which something was under way; what is long ago counts less and less.

    Safe from several threads.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._counted_at = 0.0
        self._total_bytes = 0
        self._bytes = 0.0
        self._busy_s = 0.0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Something moves as long as this lasts."""
        with self._lock:
            self._pass_time()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._pass_time()
                self._under_way -= 1

    def moved(self, size_bytes: int) -> None:
        """Bytes have moved, whether for good or not."""
        with self._lock:
            self._pass_time()
            self._total_bytes += size_bytes
            self._bytes += size_bytes

    def bytes_per_s(self) -> float | None:
        """None before enough has moved to tell."""
        with self._lock:
            self._pass_time()
            if self._total_bytes < LEAST_BYTES or not self._busy_s:
                return None
            return self._bytes / self._busy_s

    def _pass_time(self) -> None:
        now = self._clock()
        if self._under_way:
            passed_s = now - self._counted_at
            fade = 0.5 ** (passed_s / HALF_LIFE_S)
            self._bytes *= fade
            self._busy_s = self._busy_s * fade + (1 - fade) * HALF_LIFE_S / math.log(2)
        self._counted_at = now
