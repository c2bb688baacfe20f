"""Turn SIGTERM and SIGINT into a stop request with two levels: drain (release the job), then exit now."""

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

_log = logging.getLogger(__name__)

# One event often causes two signals (to the process and to its group), therefore signals within this time count once.
SAME_REQUEST_S = 1.0

SIGNALS = (signal.SIGTERM, signal.SIGINT)

Handler = Callable[[int, FrameType | None], None]


class ShutdownLevel(IntEnum):
    """Urgency of a stop request."""

    NONE = 0
    DRAIN = 1
    """Save a checkpoint, release the job, exit."""
    NOW = 2
    """Exit at once."""


LEAVE_MIN_S = 30.0
"""Minimum seconds for the upload of the last checkpoint, after SIGTERM and the trainer's own grace."""
LEAVE_MARGIN_S = 3.0
"""Seconds before the end of the machine at which the agent releases the job, even during an upload."""


class ShutdownRequest:
    """A `threading.Event` with two levels and a reason. The level only rises.

    `shutdown_grace_s`: seconds from the first signal to the end of the machine; None if unknown.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        same_request_s: float = SAME_REQUEST_S,
        shutdown_grace_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._same_request_s = same_request_s
        self._shutdown_grace_s = shutdown_grace_s
        self._lock = threading.Lock()
        self._drain = threading.Event()
        self._now = threading.Event()
        self._requested_at: float | None = None
        self._signaled_at: float | None = None
        self._gone_at: float | None = None
        self._reason = ""

    @property
    def level(self) -> ShutdownLevel:
        """Return the present level."""
        if self._now.is_set():
            return ShutdownLevel.NOW
        return ShutdownLevel.DRAIN if self._drain.is_set() else ShutdownLevel.NONE

    @property
    def reason(self) -> str:
        """Return the reason of the first request; "" without a request."""
        return self._reason

    @property
    def signaled(self) -> bool:
        """Return True after a signal; a drain alone is none."""
        return self._signaled_at is not None

    def pending_s(self) -> float:
        """Return the seconds since the first request; 0 without a request."""
        return 0.0 if self._requested_at is None else self._clock() - self._requested_at

    def remaining_s(self) -> float | None:
        """Return the seconds until the end of the machine; None if unknown."""
        with self._lock:
            return None if self._gone_at is None else max(self._gone_at - self._clock(), 0.0)

    def out_of_time(self, grace_s: float) -> bool:
        """Return True once the time for an orderly exit is used up. `grace_s`: the trainer's grace."""
        if self.level is ShutdownLevel.NOW:
            return True
        left_s = self.remaining_s()
        if left_s is not None:
            return left_s <= LEAVE_MARGIN_S
        return self.pending_s() > grace_s + max(grace_s, LEAVE_MIN_S)

    def request(self, reason: str) -> ShutdownLevel:
        """Raise the level: the first request drains, a second one later than `same_request_s` exits now.

        Signal handlers must not call this method; see ``stop_on_signals``.
        """
        with self._lock:
            now = self._clock()
            if self._signaled_at is None:
                self._signaled_at = now
                self._drain_since(now, reason, self._shutdown_grace_s)
            elif now - self._signaled_at >= self._same_request_s:
                self._now.set()
            return self.level

    def announce(self, reason: str, leave_within_s: float | None = None) -> None:
        """Drain, because the machine ends in ``leave_within_s`` seconds; None for an unknown time.

        The next signal still counts as the first.
        """
        with self._lock:
            self._drain_since(self._clock(), reason, leave_within_s)

    def _drain_since(self, now: float, reason: str, leave_within_s: float | None) -> None:
        if leave_within_s is not None:
            gone_at = now + leave_within_s
            self._gone_at = gone_at if self._gone_at is None else min(self._gone_at, gone_at)
        if self._requested_at is None:
            self._requested_at = now
            self._reason = reason
            self._drain.set()

    def is_set(self) -> bool:
        """Return True after a request."""
        return self._drain.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a request; returns False after `timeout_s` seconds without a request."""
        return self._drain.wait(timeout_s)

    def wait_now(self, timeout_s: float | None = None) -> bool:
        """Wait for the level NOW; returns False after `timeout_s` seconds."""
        return self._now.wait(timeout_s)


@contextmanager
def stop_on_signals(
    stop: ShutdownRequest,
    register: Callable[[signal.Signals, Handler], object] = signal.signal,
) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into requests on ``stop`` inside the context, then restore the former handlers.

    ``signal.signal`` demands the main thread. ``register`` sets a handler and returns the former one.
    """
    # A handler runs between two bytecodes of the main thread, which may be inside Event.wait and hold the event's lock:
    # a handler that sets the event could deadlock. SimpleQueue.put is reentrant, therefore the handler only puts the
    # signal into a queue and another thread makes the request.
    arrived: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def handle(number: int, _frame: FrameType | None) -> None:
        arrived.put(number)

    def pass_on() -> None:
        while (number := arrived.get()) is not None:
            name = signal.Signals(number).name
            level = stop.request(name)
            _log.warning("%s received: %s", name, level.name.lower())

    thread = threading.Thread(target=pass_on, name="signals", daemon=True)
    thread.start()
    former = [(number, register(number, handle)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in former:
            # None: C code installed the former handler, therefore Python cannot restore the handler and sets the
            # default.
            register(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        arrived.put(None)
        thread.join()
