"""One direction of all transfers of a process: its connections, its bandwidth, its speed."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from gpu_client.transport.limits.bandwidth import Bandwidth, Traffic
from gpu_client.transport.limits.concurrency import AdaptiveLimit
from gpu_client.transport.limits.stats import TransferStats
from gpu_client.transport.net.cancellation import CancelEvent, Flight, stop_if_set

Progress = Callable[[int], None]
"""Told how many more bytes have moved; a negative number when a transfer starts again. Called from worker threads."""

Pause = Callable[[CancelEvent, float], object]
"""Waits so many seconds, or until the event is set."""

_POLL_S = 0.1

HALF_LIFE_S = 20.0
LEAST_BYTES = 1024 * 1024
"""Fewer measure how long an answer takes, not how fast the line is."""


class TransferChannel:
    """Uploads, or downloads. `cap_bytes_per_s` None: no limit. Safe from several threads."""

    def __init__(
        self,
        most: int,
        *,
        cap_bytes_per_s: float | None = None,
        pause: Pause,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most = most
        self.limit = AdaptiveLimit(most, clock=clock)
        self.speed = Speed(clock=clock)
        self.cap = Bandwidth(cap_bytes_per_s, clock=clock) if cap_bytes_per_s is not None else None
        self._pause = pause
        self._lock = threading.Lock()
        self._queue: deque[threading.Condition] = deque()
        """Who waits for a connection; only the first has to know that something has changed."""

    @contextmanager
    def slot(self, over: Callable[[], bool]) -> Iterator[None]:
        """The right to one connection. Waits for it, unless `over` says that nothing is left to do with it."""
        entered = self._enter(over)
        try:
            yield
        finally:
            if entered:
                with self._lock:
                    self.limit.leave()
                    self._wake_first()

    def _enter(self, over: Callable[[], bool]) -> bool:
        place = threading.Condition(self._lock)
        with self._lock:
            self._queue.append(place)
            try:
                while True:
                    # in turn: else the many threads of a checkpoint would hand a connection on among themselves
                    if self._queue[0] is place and self.limit.enter():
                        return True
                    if over():
                        return False
                    place.wait(_POLL_S)
            finally:
                self._queue.remove(place)
                self._wake_first()

    def _wake_first(self) -> None:
        if self._queue:
            self._queue[0].notify()

    @contextmanager
    def attempt(self, flight: Flight, meter: Meter, stats: TransferStats, traffic: Traffic) -> Iterator[Flow]:
        """One try: if it fails, its bytes that were not kept are taken back from the progress and counted as wasted."""
        flow = Flow(self, flight, meter, self._pause, traffic)
        with ExitStack() as stack:
            stack.enter_context(self.speed.under_way())
            if self.cap is not None:
                stack.enter_context(self.cap.using(traffic))
            complete = False
            try:
                yield flow
                complete = True
            finally:
                flow.give_back()
                if not complete:
                    meter.add(-flow.lost_bytes)
                    stats.add(wasted_bytes=flow.lost_bytes)


class Flow:
    """The bytes of one try: told to move by the cap, counted when they have."""

    def __init__(self, channel: TransferChannel, flight: Flight, meter: Meter, pause: Pause, traffic: Traffic) -> None:
        self._channel = channel
        self._flight = flight
        self._meter = meter
        self._pause = pause
        self._traffic = traffic
        self._granted_bytes = 0
        self.lost_bytes = 0
        """What would have to move again if this try failed now."""

    def allow(self, wanted_bytes: int) -> int:
        """How many of the next `wanted_bytes` may move now. Waits; raises TransferCanceled."""
        stop_if_set(self._flight)
        cap = self._channel.cap
        if cap is None:
            return wanted_bytes
        while not self._granted_bytes:
            self._granted_bytes, wait_s = cap.take(self._traffic, wanted_bytes)
            if not self._granted_bytes:
                self._pause(self._flight, wait_s)
                stop_if_set(self._flight)
        return min(self._granted_bytes, wanted_bytes)

    def moved(self, size_bytes: int) -> None:
        """So many have moved."""
        self.passed(size_bytes)
        self.lost_bytes += size_bytes
        self._meter.add(size_bytes)

    def passed(self, size_bytes: int) -> None:
        """So many have moved that nobody wants."""
        if self._channel.cap is not None:
            self._granted_bytes -= size_bytes
        self._channel.limit.moved(size_bytes)
        self._channel.speed.moved(size_bytes)

    def kept(self) -> None:
        """What has moved so far stays, also if this try fails: the next goes on behind it."""
        self.lost_bytes = 0

    def give_back(self) -> None:
        """Bytes that were allowed and did not move."""
        if self._channel.cap is not None and self._granted_bytes > 0:
            self._channel.cap.give_back(self._granted_bytes)
            self._granted_bytes = 0


class Meter:
    """Passes progress on from several threads, one at a time."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """More bytes; fewer if negative."""
        if self._progress is not None and size_bytes:
            with self._lock:
                self._progress(size_bytes)


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
