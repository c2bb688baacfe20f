"""Counts that are kept under a name, whoever has it."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from gpu_client.ring.format.records import COPIES, GENERATORS, Versioned, content_of, sealed
from gpu_client.ring.store.protocol import RingStore


class Tally:
    """How many samples were put under a name, by all processes that have had it one after the other."""

    def __init__(self, store: RingStore, key: str, holds_name: Callable[[], bool]) -> None:
        """`holds_name`: whether the name is this process's still."""
        self._store, self._key, self._holds_name = store, key, holds_name
        self._mark = secrets.token_hex(4)
        """Whoever has written the record last. Not the epoch: those of a name that was forgotten begin anew."""
        self._version: str | None = None
        self._is_own = False
        self._noted = 0

    def take(self, put: int = 0) -> int:
        """Make it this process's: whoever had it before can note nothing more. `put`: what it knows of; how many there
        are."""
        self._is_own = False
        while not self._is_own:
            record = self._store.record(self._key)
            self._noted = max(put, put_of(record))
            self._is_own = self._swapped(self._noted, record.version if record is not None else None)
        return self._noted

    def note(self, put: int) -> None:
        """So many now. Left to whoever has taken the name, if somebody has."""
        if put == self._noted:
            return
        while self._is_own and not self._swapped(put, self._version):
            record = self._store.record(self._key)
            # Its own mark: the store's answer was lost. Another one's: of one that was begun before and is fenced.
            if content_of(record).get("mark") != self._mark:
                self._is_own = self._holds_name()
            self._version = record.version if record is not None else None
        if self._is_own:
            self._noted = put

    def _swapped(self, put: int, seen: str | None) -> bool:
        version = self._store.swap(self._key, sealed({"put": put, "mark": self._mark}), seen)
        if version is not None:
            self._version = version
        return version is not None


def put_of(record: Versioned | None) -> int:
    """How many samples such a record says were put; 0 for none."""
    return int(content_of(record).get("put", 0))


def tally_key(name: str, *, again: bool = True) -> str:
    """Where it is noted how many samples were put under a name."""
    return f"{GENERATORS if again else COPIES}{name}"


def put_under(store: RingStore, name: str, *, again: bool = True) -> int:
    """How many samples were put under that name so far."""
    return put_of(store.record(tally_key(name, again=again)))
