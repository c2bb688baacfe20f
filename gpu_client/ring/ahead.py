"""The next batch taken over from a DataLoader's workers while the training still works on the one before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

POLL_S = 0.25
"""The workers' DataLoader is to give up (`timeout`) so often: else nothing ends who waits for them."""
_TIMED_OUT = "DataLoader timed out"


class Ahead(Iterator[Any]):
    """One batch ahead, in a thread: to receive one takes milliseconds, which a step on a GPU can hide.

    What a batch raises is raised where it is asked for. To be closed before the workers are.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        """`batches`: of a DataLoader with workers and with the timeout `POLL_S`; nobody else asks for them any more."""
        self._batches = batches
        self._taken: queue.Queue[_Taken] = queue.Queue(maxsize=1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._take, name="ring-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        taken = self._taken.get()
        if taken.failure is not None:
            self._taken.put(taken)  # for whoever asks again: the thread has ended
            raise taken.failure
        return taken.batch

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _take(self) -> None:
        while not self._closing.is_set():
            try:
                taken = _Taken(next(self._batches), None)
            except BaseException as error:  # noqa: BLE001 - raised where the batch is asked for
                if isinstance(error, RuntimeError) and str(error).startswith(_TIMED_OUT):
                    continue
                taken = _Taken(None, error)
            while not self._closing.is_set():
                try:
                    self._taken.put(taken, timeout=POLL_S)
                    break
                except queue.Full:
                    continue
            if taken.failure is not None:
                return


class _Taken(NamedTuple):
    batch: Any
    failure: BaseException | None
