"""Process many items in a few threads; the first failure or a cancel event stops all threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

from gpu_client.transport.errors import UrlExpired
from gpu_client.transport.net.cancellation import CancelEvent, Flight, stop_if_set

T = TypeVar("T")
Slot = Callable[[Callable[[], bool]], AbstractContextManager[object]]
"""Reservation of a thread's resources for an item. May wait until the given function returns True (no work is left)."""

_POLL_S = 0.05
"""Interval in seconds between checks of the cancel event."""

_JOIN_TIMEOUT_S = 2.0
"""Longest wait in seconds for the threads of a stopped batch. A thread that still blocks (in a name look-up, for
example) is a daemon and ends at its next step, before any write."""


class _Batch(Generic[T]):
    """Shared state of the threads of one batch."""

    def __init__(
        self, items: Sequence[T], work: Callable[[T, Flight], None], cancel: CancelEvent | None, slot: Slot
    ) -> None:
        self.failure: BaseException | None = None
        self._slot = slot
        self._flight = Flight(cancel)
        self._expired: UrlExpired | None = None
        self._work = work
        self._lock = threading.Lock()
        self._items = iter(items)
        self._left = len(items)

    def loop(self) -> None:
        """Process items until the last; the body of each thread."""
        try:
            while self._step():
                pass
        except BaseException as error:  # noqa: BLE001 - raised by run_batch in the caller's thread
            with self._lock:
                self.failure = self.failure or error
            self._flight.abort()

    def _step(self) -> bool:
        """Process one item. Returns False without a remaining item."""
        with self._slot(self._over):
            item = self._take()
            if item is None:
                return False
            try:
                self._work(item, self._flight)
            except UrlExpired as error:
                with self._lock:
                    self._expired = self._expired or error
        return True

    def _over(self) -> bool:
        return bool(self.failure or self._expired or self._flight.is_set() or self._left <= 0)

    def _take(self) -> T | None:
        with self._lock:
            if self._over():
                return None
            self._left -= 1
            return next(self._items)

    def stop(self, threads: Sequence[threading.Thread]) -> None:
        """Wake and end all threads."""
        self._flight.abort()
        join_until = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, join_until - time.monotonic()))

    def raise_failure(self) -> None:
        """Raise the first failure, else the first UrlExpired, if any."""
        if self.failure is not None:
            raise self.failure
        if self._expired is not None:
            raise self._expired


def run_batch(
    items: Sequence[T],
    work: Callable[[T, Flight], None],
    *,
    workers: int,
    cancel: CancelEvent | None,
    slot: Slot = nullcontext,
) -> None:
    """Call `work` on each item, in at most `workers` threads, each within a `slot`.

    Raises the first failure, and TransferCanceled if `cancel` is set. After UrlExpired no further item begins, but
    items in progress finish, because a stop would waste their bytes.
    """
    if cancel is not None:
        stop_if_set(cancel)
    batch = _Batch(items, work, cancel, slot)
    started: list[threading.Thread] = []
    try:
        for index in range(min(workers, len(items))):
            thread = threading.Thread(target=batch.loop, name=f"transfer-{index}", daemon=True)
            thread.start()
            started.append(thread)
        for thread in started:
            _join(thread, cancel)
    except BaseException:
        batch.stop(started)
        raise
    batch.raise_failure()
    if cancel is not None:
        stop_if_set(cancel)  # The threads may have detected the event first and skipped items.


def _join(thread: threading.Thread, cancel: CancelEvent | None) -> None:
    while thread.is_alive():
        thread.join(None if cancel is None else _POLL_S)
        if cancel is not None:
            stop_if_set(cancel)
