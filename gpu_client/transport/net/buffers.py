"""Memory for what is fetched into memory: reused, and never more than a budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set

_ROUND_BYTES = 256 * 1024
"""Sizes are rounded up, so that buffers fit again."""

_WASTE = 4
"""A free buffer that is more times too large is not used while there is room for another."""

_POLL_S = 0.1


class BufferPool:
    """Buffers of any size. One that is larger than the budget is handed out when no other is in use."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._freed = threading.Condition()
        self._free: list[bytearray] = []
        self._in_use = 0
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Of all buffers, in use or kept for the next."""
        return self._held_bytes

    @contextmanager
    def buffer(self, size_bytes: int, cancel: CancelEvent) -> Iterator[memoryview]:
        """A buffer with old bytes in it. Waits for one; raises TransferCanceled."""
        buffer = self._take(size_bytes, cancel)
        try:
            yield memoryview(buffer)[:size_bytes]
        finally:
            with self._freed:
                self._in_use -= 1
                self._free.append(buffer)
                self._drop(0)
                self._freed.notify_all()

    def clear(self) -> None:
        """Let go of the buffers that are not in use."""
        with self._freed:
            self._drop(self._budget_bytes)

    def _take(self, size_bytes: int, cancel: CancelEvent) -> bytearray:
        needed = max(1, -(-size_bytes // _ROUND_BYTES)) * _ROUND_BYTES
        with self._freed:
            while True:
                stop_if_set(cancel)
                fitting = min((one for one in self._free if len(one) >= needed), key=len, default=None)
                no_room = self._held_bytes + needed > self._budget_bytes
                if fitting is not None and (no_room or len(fitting) <= _WASTE * needed):
                    self._free = [one for one in self._free if one is not fitting]
                    self._in_use += 1
                    return fitting
                self._drop(needed)
                if self._held_bytes + needed <= self._budget_bytes or not self._in_use:
                    self._held_bytes += needed
                    self._in_use += 1
                    return bytearray(needed)
                self._freed.wait(_POLL_S)

    def _drop(self, needed: int) -> None:
        """Let go of free buffers until `needed` more bytes are within the budget, if that can be."""
        while self._free and self._held_bytes + needed > self._budget_bytes:
            self._held_bytes -= len(self._free.pop())
