"""Objects of a distant store that are fetched side by side, ahead of being read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

THREADS = 8
"""Objects that are fetched at a time."""

Read = Callable[[str], memoryview | None]


class Fetching:
    """Those of one store. Threads may share it; a forked process begins with none."""

    def __init__(self, name: str) -> None:
        """`name`: of its threads."""
        self._name = name
        self._threads: ThreadPoolExecutor | None = None
        self.begun: dict[str, Future[memoryview | None]] = {}
        self._lock, self._process = threading.Lock(), os.getpid()

    def begin(self, keys: Sequence[str], read: Read) -> None:
        """Fetch these; what was begun before and is not among them is given up. One alone is read when it is wanted."""
        with self._own_lock():
            for key in self.begun.keys() - set(keys):
                self.begun.pop(key).cancel()
            if len(keys) > 1:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=self._name)
                submit = self._threads.submit
                self.begun.update({key: submit(read, key) for key in keys if key not in self.begun})

    def read(self, key: str, read: Read) -> memoryview | None:
        """What was begun, or what `read` says: then nobody has begun with it. Raises what that raises."""
        with self._own_lock():
            begun = self.begun.pop(key, None)
        return read(key) if begun is None or begun.cancel() else begun.result()

    def close(self) -> None:
        """End the threads; the next `begin` makes others."""
        with self._own_lock():
            threads, self._threads, self.begun = self._threads, None, {}
        if threads is not None:
            threads.shutdown(cancel_futures=True)

    def _own_lock(self) -> threading.Lock:
        """What was begun before a fork is not this process's, and nor is the lock."""
        if self._process != os.getpid():
            self._threads, self.begun = None, {}
            self._lock, self._process = threading.Lock(), os.getpid()
        return self._lock
