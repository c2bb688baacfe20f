"""Share a bandwidth cap (bytes per second) by weight between the kinds of traffic, without sleeping."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

Traffic = Literal["checkpoint", "artifact", "data"]
"""Kinds of bulk traffic. API calls, including log lines, are tiny, therefore API calls count but never wait."""

WEIGHTS: Mapping[Traffic, float] = {"checkpoint": 2.0, "artifact": 1.0, "data": 1.0}
"""Weights of simultaneous traffic. Checkpoints weigh more, because a lost machine loses unfinished uploads."""

_BURST_S = 0.1
_LEAST_BURST_BYTES = 64 * 1024
_QUANTUM_BYTES = 16 * 1024
"""Minimum grant in bytes, unless the caller wants less; smaller writes would cost more than they transfer."""

_LONGEST_WAIT_S = 0.25
"""Longest wait in seconds before the next request, because another kind may finish and free its share."""


class Bandwidth:
    """Token buckets: one for each kind of traffic, and a shared bucket for unused shares. Thread-safe.

    In any `t` seconds the buckets grant at most `t * bytes_per_s` and one burst each. An active kind gets at least its
    share by weight; other kinds get the unused rest.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        weights: Mapping[Traffic, float] = WEIGHTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"the bandwidth is {bytes_per_s} bytes per second, but must be more than 0")
        self.burst_bytes = max(_LEAST_BURST_BYTES, bytes_per_s * _BURST_S)
        self._bytes_per_s = bytes_per_s
        self._weights = weights
        self._clock = clock
        self._lock = threading.Lock()
        self._users: Counter[Traffic] = Counter()
        self._own: dict[Traffic, float] = {}
        self._common = self.burst_bytes
        self._filled_at = clock()

    @contextmanager
    def using(self, traffic: Traffic) -> Iterator[None]:
        """Give `traffic` a share of the bandwidth during the `with` block."""
        with self._lock:
            self._fill()
            self._users[traffic] += 1
            self._own.setdefault(traffic, 0.0)
        try:
            yield
        finally:
            with self._lock:
                self._fill()
                self._users[traffic] -= 1
                if not self._users[traffic]:
                    self._common = min(self.burst_bytes, self._common + self._own.pop(traffic))

    def take(self, traffic: Traffic, wanted_bytes: int) -> tuple[int, float]:
        """Return the number of granted bytes, up to `wanted_bytes`; if 0, also the seconds until the next request.

        Call only during `using(traffic)`.
        """
        with self._lock:
            self._fill()
            own = self._own[traffic]
            granted = min(wanted_bytes, int(own + max(0.0, self._common)))
            needed = min(wanted_bytes, _QUANTUM_BYTES)
            if granted >= needed:
                self._own[traffic] = own - min(own, granted)
                self._common -= max(0.0, granted - own)
                return granted, 0.0
            wait_s = (needed - granted) / (self._bytes_per_s * self._share(traffic))
            return 0, min(_LONGEST_WAIT_S, max(0.001, wait_s))

    def give_back(self, size_bytes: int) -> None:
        """Return granted but unused bytes to the buckets."""
        with self._lock:
            self._common = min(self.burst_bytes, self._common + size_bytes)

    def spend(self, size_bytes: int) -> None:
        """Count bytes sent without a grant, for which waiting traffic waits longer."""
        with self._lock:
            self._fill()
            self._common -= size_bytes

    def _share(self, traffic: Traffic) -> float:
        return self._weights[traffic] / sum(self._weights[one] for one in self._own)

    def _fill(self) -> None:
        now = self._clock()
        fresh = (now - self._filled_at) * self._bytes_per_s
        self._filled_at = now
        if self._common < 0:
            paid = min(fresh, -self._common)
            self._common += paid
            fresh -= paid
        hungry = set(self._own)
        while hungry and fresh >= 1:
            weight = sum(self._weights[one] for one in hungry)
            left = 0.0
            for one in tuple(hungry):
                more = self._own[one] + fresh * self._weights[one] / weight
                if more > self.burst_bytes:
                    hungry.remove(one)
                self._own[one] = min(more, self.burst_bytes)
                left += more - self._own[one]
            fresh = left
        self._common = min(self.burst_bytes, self._common + fresh)
