"""Count control-plane calls by kind, and transferred objects and bytes."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import asdict, dataclass, field


class CallStats:
    """Counters of control-plane requests by kind. Every try counts as a request. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()

    def count(self, kind: str, *, retry: bool) -> None:
        """Count a request before its sending."""
        with self._lock:
            self._requests[kind] += 1
            self._retries[kind] += retry

    def refused(self, code: str) -> None:
        """Count a call that ended in an ApiError with the code."""
        with self._lock:
            self._refusals[code] += 1

    @property
    def requests(self) -> dict[str, int]:
        """Return the number of sent requests by kind, including retries."""
        with self._lock:
            return dict(self._requests)

    @property
    def retries(self) -> dict[str, int]:
        """Return the number of retries by kind."""
        with self._lock:
            return dict(+self._retries)

    @property
    def refusals(self) -> dict[str, int]:
        """Return the number of refused calls by error code."""
        with self._lock:
            return dict(self._refusals)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return all counters, for a report."""
        return {"requests": self.requests, "retries": self.retries, "refusals": self.refusals}


@dataclass
class TransferCounts:
    """Counts of transferred objects and payload bytes. The bytes of a failed try count as `wasted_bytes`."""

    uploaded_objects: int = 0
    uploaded_parts: int = 0
    """Parts of large objects. A large object also counts as an object when the store joins its parts."""
    uploaded_bytes: int = 0
    already_stored_objects: int = 0
    """Uploads of existing objects, which the store refused; a success without effect."""
    downloaded_objects: int = 0
    downloaded_ranges: int = 0
    """Ranges of objects fetched to memory."""
    downloaded_bytes: int = 0
    retries: int = 0
    wasted_bytes: int = 0


@dataclass
class TransferStats:
    """Thread-safe TransferCounts."""

    _counts: TransferCounts = field(default_factory=TransferCounts)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **more: int) -> None:
        """Add amounts to the named counters."""
        with self._lock:
            for name, amount in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    @property
    def counts(self) -> TransferCounts:
        """Return a copy of the counters."""
        with self._lock:
            return TransferCounts(**asdict(self._counts))

    def as_dict(self) -> dict[str, int]:
        """Return all counters, for a report."""
        return asdict(self.counts)
