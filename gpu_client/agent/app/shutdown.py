"""SIGTERM and SIGINT as a request to stop, in two steps: first drain (release the job), then leave now."""

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

# One event often comes as two signals (to the process and to its group): so close together they are one request.
SAME_REQUEST_S = 1.0

SIGNALS = (signal.SIGTERM, signal.SIGINT)

Handler = Callable[[int, FrameType | None], None]


class ShutdownLevel(IntEnum):
    """How urgent it is."""

    NONE = 0
    DRAIN = 1
    """Save, release the job, leave."""
    NOW = 2
    """Leave at once."""


LEAVE_MIN_S = 30.0
"""After a SIGTERM, and after the trainer's own grace, the last checkpoint has at least this long to be stored."""
LEAVE_MARGIN_S = 3.0
"""So long before the machine is gone the job is handed back, whatever is still under way."""


class ShutdownRequest:
    """Like ``threading.Event``, with two levels and the reason. It only ever rises.

    ``shutdown_grace_s``: how long after the first signal the machine is gone, if that is known.
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
        """The level reached."""
        if self._now.is_set():
            return ShutdownLevel.NOW
        return ShutdownLevel.DRAIN if self._drain.is_set() else ShutdownLevel.NONE

    @property
    def reason(self) -> str:
        """Who asked first; empty if nobody has."""
        return self._reason

    def pending_s(self) -> float:
        """Seconds since somebody first asked; 0 if nobody has."""
        return 0.0 if self._requested_at is None else self._clock() - self._requested_at

    def remaining_s(self) -> float | None:
        """Seconds until the machine is gone; None if nobody knows."""
        with self._lock:
            return None if self._gone_at is None else max(self._gone_at - self._clock(), 0.0)

    def out_of_time(self, grace_s: float) -> bool:
        """Whether the time for leaving in good order is used up. `grace_s`: the trainer's own."""
        if self.level is ShutdownLevel.NOW:
            return True
        left_s = self.remaining_s()
        if left_s is not None:
            return left_s <= LEAVE_MARGIN_S
        return self.pending_s() > grace_s + max(grace_s, LEAVE_MIN_S)

    def request(self, reason: str) -> ShutdownLevel:
        """Ask to stop: the first time to drain, again (later than ``same_request_s``) to leave now.

        Not to be called from a signal handler; see ``stop_on_signals``.
        """
        with self._lock:
            now = self._clock()
            if self._signaled_at is None:
                self._signaled_at = now
                self._drain_since(now, reason, self._shutdown_grace_s)
            elif now - self._signaled_at >= self._same_request_s:
                self._now.set()
            return self.level

    def announce(self, reason: str, leave_within_s: float) -> None:
        """The machine will be gone in ``leave_within_s`` seconds: drain. The signal that follows is the first one."""
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
        """Somebody asked to stop."""
        return self._drain.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until somebody asks to stop; False if nobody did in that time."""
        return self._drain.wait(timeout_s)

    def wait_now(self, timeout_s: float | None = None) -> bool:
        """Sleep until somebody asks to leave now; False if nobody did in that time."""
        return self._now.wait(timeout_s)


@contextmanager
def stop_on_signals(
    stop: ShutdownRequest,
    register: Callable[[signal.Signals, Handler], object] = signal.signal,
) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT become requests on ``stop``; afterwards the former handlers are back.

    Main thread only (``signal.signal`` says so). ``register`` sets a handler and returns the former one.
    """
    # A handler runs between two bytecodes of the main thread, which may be inside Event.wait and hold the event's lock:
    # setting the event there could wait for itself. SimpleQueue.put is reentrant, and another thread does the rest.
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
            # None: it was not installed from Python and cannot be put back; then the default is nearest.
            register(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        arrived.put(None)
        thread.join()
