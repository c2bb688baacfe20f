"""Counters: control-plane calls by kind, transferred objects and bytes."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import asdict, dataclass, field


class CallStats:
    """Control-plane requests by kind. Every try counts as a request. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()

    def count(self, kind: str, *, retry: bool) -> None:
        """Count a request before it is sent."""
        with self._lock:
            self._requests[kind] += 1
            self._retries[kind] += retry

    def refused(self, code: str) -> None:
        """Count a call that ended in an ApiError with this code."""
        with self._lock:
            self._refusals[code] += 1

    @property
    def requests(self) -> dict[str, int]:
        """Return the requests sent by kind, retries included."""
        with self._lock:
            return dict(self._requests)

    @property
    def retries(self) -> dict[str, int]:
        """Return the requests that repeated an earlier one, by kind."""
        with self._lock:
            return dict(+self._retries)

    @property
    def refusals(self) -> dict[str, int]:
        """Return the calls that the control plane refused, by error code."""
        with self._lock:
            return dict(self._refusals)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return all counters, for a report."""
        return {"requests": self.requests, "retries": self.retries, "refusals": self.refusals}


@dataclass
class TransferCounts:
    """Transferred objects and payload bytes. The bytes of a try that failed half-way count as `wasted_bytes`."""

    uploaded_objects: int = 0
    uploaded_parts: int = 0
    """Parts of large objects. A large object also counts as one object when its parts are joined."""
    uploaded_bytes: int = 0
    already_stored_objects: int = 0
    """Uploads that the store refused because the object existed already: a success without effect."""
    downloaded_objects: int = 0
    downloaded_ranges: int = 0
    """Ranges of objects that were fetched to memory."""
    downloaded_bytes: int = 0
    retries: int = 0
    wasted_bytes: int = 0


@dataclass
class TransferStats:
    """TransferCounts that several threads update."""

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
