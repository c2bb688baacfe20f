"""Renew the leases of living processes, and detect dead processes by unchanged leases.

Watchers never compare clocks of two machines. A holder changes its record at each renewal; a watcher counts a holder as
dead after 1.5 leases without a change, by the watcher's own clock, therefore a wrong clock harms no process.

After the death of a watcher, the next watcher would wait another 1.5 leases, and frequent replacements of watchers
would hide every death. Therefore watchers save, for each record, the version and the seconds without a change; the next
watcher continues from a note whose version equals the record's. Versions never repeat and the seconds only grow,
therefore a note can delay the detection of a death but never advance the detection.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import Any

from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.format.records import (
    PINS,
    PUBLISHER,
    READERS,
    WATCHED,
    WRITERS,
    Versioned,
    decode_record,
    encode_checksummed,
)
from gpu_client.ring.store.protocol import RingBackend

DEAD_AFTER_LEASES = 1.5
"""Leases without a change after which a holder is dead; holders renew three times in a lease."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")


def require_name(name: str, kind: str, pattern: re.Pattern[str] = _NAME) -> str:
    """Return the name if the name can be a part of keys, else raise RingMismatch.

    The function never adapts a name, because a changed name could belong to another process.
    """
    if pattern.fullmatch(name) is None:
        dots = "" if pattern.fullmatch("a.b") is None else ", and after the first one dots"
        raise RingMismatch(f"{name!r} is not a name of a {kind}", f"Use 1 to 64 letters, digits, - and _{dots}")
    return name


def unique_name() -> str:
    """Make a unique name of a process."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().split(".")[0])[:32]
    return f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(3)}"


class LeaseWatch:
    """Watch over records, which measures the time without a change of each record."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_seen: dict[str, tuple[str, float]] = {}

    def unchanged_s(self, key: str, record: Versioned | None) -> float:
        """Return the seconds without a change of the record; 0 at the first observation."""
        now = self._clock()
        version = record.version if record is not None else ""
        seen = self._first_seen.get(key)
        if seen is None or seen[0] != version:
            self._first_seen[key] = (version, now)
            return 0.0
        return now - seen[1]

    def snapshot(self, prefixes: tuple[str, ...]) -> dict[str, tuple[str, float]]:
        """Return the version and the seconds without a change of each record with one of the prefixes."""
        now = self._clock()
        return {
            key: (version, round(now - since, 3))
            for key, (version, since) in self._first_seen.items()
            if version and key.startswith(prefixes)
        }

    def adopt(self, snapshot: Mapping[str, tuple[str, float]]) -> None:
        """Continue from another watcher's snapshot for records with an equal version at the next observation."""
        now = self._clock()
        for key, (version, unchanged_s) in snapshot.items():
            since = now - max(unchanged_s, 0.0)
            seen = self._first_seen.get(key)
            if seen is not None and seen[0] == version:
                self._first_seen[key] = (version, min(seen[1], since))
            elif seen is None or key != PUBLISHER:  # Waiting processes observe the publisher themselves.
                self._first_seen[key] = (version, since)

    def forget(self, key: str) -> None:
        """Drop a deleted record."""
        self._first_seen.pop(key, None)

    def retain_only(self, prefix: str, keys: Container[str]) -> None:
        """Drop the records with the prefix that are not in `keys`."""
        for key in [key for key in self._first_seen if key.startswith(prefix)]:
            if key not in keys:
                del self._first_seen[key]


class LeaseHandle:
    """Lease of this process, acquired by the constructor and renewed by `renew`."""

    def __init__(self, store: RingBackend, key: str, content: dict[str, Any], seen: Versioned | None) -> None:
        """Acquire the lease by replacing the record `seen`; `lost` is True if another process was faster."""
        self.key = key
        self._store = store
        # The unique mark prevents equal records of two holders.
        self.mark = secrets.token_hex(4)
        self._content = {**content, "mark": self.mark}
        self._count = int(decode_record(seen).get("count", 0))
        self._version = seen.version if seen is not None else None
        self._unconfirmed: set[bytes] = set()
        self._lock = threading.Lock()
        self.lost = False
        self.renew()

    def renew(self, **changed: Any) -> bool:
        """Renew the lease with changed fields. Returns False, also later, once another process has taken the lease."""
        with self._lock:
            if self.lost:
                return False
            self._content.update(changed)
            self._count += 1
            data = encode_checksummed({**self._content, "count": self._count})
            # A write whose answer is lost may have succeeded, therefore the handle remembers the data.
            self._unconfirmed.add(data)
            version = self._store.swap(self.key, data, self._version)
            if version is None:
                record = self._store.record(self.key)
                if record is not None and record.data == data:
                    version = record.version
                elif record is not None and record.data in self._unconfirmed:
                    version = self._store.swap(self.key, data, record.version)
            self.lost = version is None
            self._version = version
            self._unconfirmed.clear()
            return not self.lost

    def is_own(self) -> bool:
        """Read the store and return True if no other process has taken the lease."""
        with self._lock:
            return self._check_own()

    def release(self) -> None:
        """Delete the record, unless another process has taken the lease."""
        with self._lock:
            if self._check_own():
                self._store.delete([self.key])
                self.lost = True

    def _check_own(self) -> bool:
        record = None if self.lost else self._store.record(self.key)
        if record is not None and record.version != self._version and record.data in self._unconfirmed:
            self._version = record.version
        self.lost = record is None or (record.version != self._version and not self._wrote(record))
        return not self.lost

    def _wrote(self, record: Versioned) -> bool:
        """Return True if this holder wrote the record, including a record older than another thread's renewal."""
        content = decode_record(record)
        return content.get("mark") == self.mark and not content.get("dead")


_MOST = 1000
"""Maximum number of saved records, longest silence first; a record of the control plane has 390,000 bytes at most."""
_SAVED_PREFIXES = (WRITERS, READERS, PINS)

Seen = Mapping[str, tuple[str, float]]
"""Version and minimum seconds without a change, by key."""


class SilenceNotes:
    """Record in which the watchers of a ring save their observations."""

    def __init__(self, store: RingBackend, watch: LeaseWatch) -> None:
        self._store, self._watch = store, watch
        self._version: str | None = None
        self._current = False
        """True if `_version` is the record's version, to the knowledge of this process."""

    def load(self, *, plus_s: float = 0.0) -> None:
        """Continue from the saved observations. `plus_s`: minimum seconds since the save."""
        self._load(plus_s)

    def save(self) -> None:
        """Save the observations. A newer note of another watcher stays, and the next call adopts the note."""
        if not self._current:
            self.load()
        snapshot = self._watch.snapshot(_SAVED_PREFIXES)
        longest = sorted(snapshot.items(), key=lambda entry: -entry[1][1])[:_MOST]
        self._version = self._store.swap(WATCHED, encode_checksummed({"seen": dict(sorted(longest))}), self._version)
        self._current = self._version is not None

    def save_publisher(self) -> None:
        """Save a waiting process's observation of the publisher's record.

        The other notes stay, because only the publisher observes the other records.
        """
        record = self._load()
        seen = {**decode_silences(record), **self._watch.snapshot((PUBLISHER,))}
        self._version = self._store.swap(WATCHED, encode_checksummed({"seen": seen}), self._version)
        self._current = self._version is not None

    def _load(self, plus_s: float = 0.0) -> Versioned | None:
        record = self._store.record(WATCHED)
        self._version, self._current = record.version if record is not None else None, True
        seen = decode_silences(record).items()
        self._watch.adopt({key: (version, at_s + plus_s * (key != PUBLISHER)) for key, (version, at_s) in seen})
        return record


def decode_silences(record: Versioned | None) -> Seen:
    """Decode the record; empty for a missing or altered record."""
    found = decode_record(record).get("seen")
    if not isinstance(found, dict):
        return {}
    return {
        key: (entry[0], float(entry[1]))
        for key, entry in found.items()
        if isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and isinstance(entry[1], int | float)
    }
