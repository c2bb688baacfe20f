"""Count samples under a name, over all processes that own the name one after the other."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from gpu_client.ring.format.records import COPIES, GENERATORS, Versioned, decode_record, encode_checksummed
from gpu_client.ring.store.protocol import RingBackend


class NamedCounter:
    """Counter of the samples that were put under a name."""

    def __init__(self, store: RingBackend, key: str, owns_name: Callable[[], bool]) -> None:
        """`owns_name`: returns True while this process owns the name."""
        self._store, self._key, self._owns_name = store, key, owns_name
        self._mark = secrets.token_hex(4)
        """Identifies the last writer of the record. Epochs cannot: those of a forgotten name begin anew."""
        self._version: str | None = None
        self._is_own = False
        self._saved = 0

    def acquire(self, put: int = 0) -> int:
        """Acquire the counter, which fences its former owner. `put`: known count. Returns the count."""
        self._is_own = False
        while not self._is_own:
            record = self._store.record(self._key)
            self._saved = max(put, decode_count(record))
            self._is_own = self._swapped(self._saved, record.version if record is not None else None)
        return self._saved

    def save(self, put: int) -> None:
        """Save the count, unless another process has acquired the counter."""
        if put == self._saved:
            return
        while self._is_own and not self._swapped(put, self._version):
            record = self._store.record(self._key)
            # With our mark, the store's answer was lost. With another mark, the record is of an earlier owner, which is
            # fenced.
            if decode_record(record).get("mark") != self._mark:
                self._is_own = self._owns_name()
            self._version = record.version if record is not None else None
        if self._is_own:
            self._saved = put

    def _swapped(self, put: int, seen: str | None) -> bool:
        version = self._store.swap(self._key, encode_checksummed({"put": put, "mark": self._mark}), seen)
        if version is not None:
            self._version = version
        return version is not None


def decode_count(record: Versioned | None) -> int:
    """Decode the count of a record; 0 without a record."""
    return int(decode_record(record).get("put", 0))


def counter_key(name: str, *, again: bool = True) -> str:
    """Format the key of a counter."""
    return f"{GENERATORS if again else COPIES}{name}"


def read_count(store: RingBackend, name: str, *, again: bool = True) -> int:
    """Read the count under a name."""
    return decode_count(store.record(counter_key(name, again=again)))
