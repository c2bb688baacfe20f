"""Prefetch objects of a distant store concurrently."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

THREADS = 8
"""Number of concurrent reads."""

Read = Callable[[str], memoryview | None]


class ObjectPrefetcher:
    """Prefetched objects of one store. Thread-safe; a forked process starts empty."""

    def __init__(self, name: str) -> None:
        """`name`: prefix of the thread names."""
        self._name = name
        self._threads: ThreadPoolExecutor | None = None
        self.pending: dict[str, Future[memoryview | None]] = {}
        self._lock, self._process = threading.Lock(), os.getpid()

    def prefetch(self, keys: Sequence[str], read: Read) -> None:
        """Begin to read `keys`; cancels earlier reads that are not among them. A single key is read on demand."""
        with self._process_lock():
            for key in self.pending.keys() - set(keys):
                self.pending.pop(key).cancel()
            if len(keys) > 1:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=self._name)
                submit = self._threads.submit
                self.pending.update({key: submit(read, key) for key in keys if key not in self.pending})

    def read(self, key: str, read: Read) -> memoryview | None:
        """Return the prefetched object, or read the object now. Raises the exception of `read`."""
        with self._process_lock():
            pending = self.pending.pop(key, None)
        return read(key) if pending is None or pending.cancel() else pending.result()

    def close(self) -> None:
        """End the threads; the next `prefetch` starts new ones."""
        with self._process_lock():
            threads, self._threads, self.pending = self._threads, None, {}
        if threads is not None:
            threads.shutdown(cancel_futures=True)

    def _process_lock(self) -> threading.Lock:
        """Return the lock of this process. After a fork, the lock and the pending reads belong to the parent."""
        if self._process != os.getpid():
            self._threads, self.pending = None, {}
            self._lock, self._process = threading.Lock(), os.getpid()
        return self._lock
