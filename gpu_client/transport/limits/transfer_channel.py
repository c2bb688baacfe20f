"""Limit all transfers of a process in one direction: connection slots, bandwidth, measured speed."""

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
"""Callback for the number of transferred bytes, negative when a transfer restarts; called in worker threads."""

Pause = Callable[[CancelEvent, float], object]
"""Function that waits for seconds, or until the event is set."""

_POLL_S = 0.1

HALF_LIFE_S = 20.0
LEAST_BYTES = 1024 * 1024
"""Minimum bytes of a measurement; fewer bytes would measure the latency of an answer, not the network's speed."""


class TransferChannel:
    """Channel of all uploads, or all downloads. `cap_bytes_per_s` None: no cap. Thread-safe."""

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
        self.speed = SpeedMeter(clock=clock)
        self.cap = Bandwidth(cap_bytes_per_s, clock=clock) if cap_bytes_per_s is not None else None
        self._pause = pause
        self._lock = threading.Lock()
        self._queue: deque[threading.Condition] = deque()
        """Waiting threads in order of arrival; a change wakes only the first thread."""

    @contextmanager
    def slot(self, over: Callable[[], bool]) -> Iterator[None]:
        """Reserve a connection for the `with` block. Waits until a connection is free or `over()` is true."""
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
                    # Threads enter in turn; otherwise the many threads of a checkpoint would pass connections to each
                    # other.
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
        """Yield the flow of one try. After a failure, bytes without `mark_kept` count as wasted, not as progress."""
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
    """Flow of one try's bytes, which the cap permits before and counters record after their transfer."""

    def __init__(self, channel: TransferChannel, flight: Flight, meter: Meter, pause: Pause, traffic: Traffic) -> None:
        self._channel = channel
        self._flight = flight
        self._meter = meter
        self._pause = pause
        self._traffic = traffic
        self._granted_bytes = 0
        self.lost_bytes = 0
        """Number of bytes that a failure of this try would lose."""

    def allow(self, wanted_bytes: int) -> int:
        """Wait for and return the number of granted bytes, up to `wanted_bytes`. Raises TransferCanceled."""
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
        """Count bytes that have moved."""
        self.passed(size_bytes)
        self.lost_bytes += size_bytes
        self._meter.add(size_bytes)

    def passed(self, size_bytes: int) -> None:
        """Count transferred bytes that the caller discards."""
        if self._channel.cap is not None:
            self._granted_bytes -= size_bytes
        self._channel.limit.moved(size_bytes)
        self._channel.speed.moved(size_bytes)

    def mark_kept(self) -> None:
        """Mark all bytes so far as kept even if this try fails: the next try continues after them."""
        self.lost_bytes = 0

    def give_back(self) -> None:
        """Return granted but unused bytes to the cap."""
        if self._channel.cap is not None and self._granted_bytes > 0:
            self._channel.cap.give_back(self._granted_bytes)
            self._granted_bytes = 0


class Meter:
    """Meter that forwards progress of several threads, one call at a time."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Report `size_bytes` further bytes; negative numbers take progress back."""
        if self._progress is not None and size_bytes:
            with self._lock:
                self._progress(size_bytes)


class SpeedMeter:
    """Meter of the bytes per second during transfers, exponentially weighted. Thread-safe."""

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
        """Count the time of the `with` block as time with a transfer in progress."""
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
        """Count transferred bytes, including bytes of a try that fails later."""
        with self._lock:
            self._pass_time()
            self._total_bytes += size_bytes
            self._bytes += size_bytes

    def bytes_per_s(self) -> float | None:
        """Return the measured bytes per second; None before enough transferred bytes."""
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
