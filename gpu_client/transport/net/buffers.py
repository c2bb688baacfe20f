"""Pool memory buffers for ranges, within a budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set

_ROUND_BYTES = 256 * 1024
"""Granularity of buffer sizes in bytes, so that a freed buffer fits later requests."""

_WASTE = 4
"""Maximum ratio of a free buffer's size to the request; a larger buffer is reused only if the budget is exhausted."""

_POLL_S = 0.1


class BufferPool:
    """Pool of buffers of any size. The pool grants a buffer above the budget only while no other buffer is in use."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._freed = threading.Condition()
        self._free: list[bytearray] = []
        self._in_use = 0
        self._allocated_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        """Return the size in bytes of all buffers, in use or free."""
        return self._allocated_bytes

    @contextmanager
    def buffer(self, size_bytes: int, cancel: CancelEvent) -> Iterator[memoryview]:
        """Wait for the budget, and yield a buffer of `size_bytes` with arbitrary content. Raises TransferCanceled."""
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
        """Release the memory of the free buffers."""
        with self._freed:
            self._drop(self._budget_bytes)

    def _take(self, size_bytes: int, cancel: CancelEvent) -> bytearray:
        needed = max(1, -(-size_bytes // _ROUND_BYTES)) * _ROUND_BYTES
        with self._freed:
            while True:
                stop_if_set(cancel)
                fitting = min((one for one in self._free if len(one) >= needed), key=len, default=None)
                no_room = self._allocated_bytes + needed > self._budget_bytes
                if fitting is not None and (no_room or len(fitting) <= _WASTE * needed):
                    self._free = [one for one in self._free if one is not fitting]
                    self._in_use += 1
                    return fitting
                self._drop(needed)
                if self._allocated_bytes + needed <= self._budget_bytes or not self._in_use:
                    self._allocated_bytes += needed
                    self._in_use += 1
                    return bytearray(needed)
                self._freed.wait(_POLL_S)

    def _drop(self, needed: int) -> None:
        """Release free buffers until `needed` more bytes fit the budget or no free buffer is left."""
        while self._free and self._allocated_bytes + needed > self._budget_bytes:
            self._allocated_bytes -= len(self._free.pop())
