"""Who is alive: records that their holders keep changing, and watching whether they change.

Nobody compares clocks. A holder counts its record up; who watches takes it for dead after not having seen a change for
one and a half leases, by its own clock. So a clock that is wrong harms nobody. A watcher that has just begun counts on
from the seconds that the watchers before it have noted (`observations`).
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
    content_of,
    sealed,
)
from gpu_client.ring.store.protocol import RingStore

DEAD_AFTER_LEASES = 1.5
"""Records are renewed three times in a lease. What the dead have left is to be gone after two."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")


def require_name(name: str, what: str, pattern: re.Pattern[str] = _NAME) -> str:
    """The name, if it can be a part of keys. Raises RingMismatch: a name that was changed could be another one's."""
    if pattern.fullmatch(name) is None:
        dots = "" if pattern.fullmatch("a.b") is None else ", and behind these dots"
        raise RingMismatch(f"{name!r} is no name of a {what}", f"Use 1 to 64 letters, digits, - and _{dots}")
    return name


def own_name() -> str:
    """A name that no other process has."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().split(".")[0])[:32]
    return f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(3)}"


class Watch:
    """Since when each record has not changed, as this process has seen it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}

    def unchanged_s(self, key: str, record: Versioned | None) -> float:
        """For how long; 0 when it is seen for the first time."""
        now = self._clock()
        version = record.version if record is not None else ""
        seen = self._seen.get(key)
        if seen is None or seen[0] != version:
            self._seen[key] = (version, now)
            return 0.0
        return now - seen[1]

    def told(self, prefixes: tuple[str, ...]) -> dict[str, tuple[str, float]]:
        """Return the version of each record with one of these prefixes, and for how many seconds it has been there."""
        now = self._clock()
        return {
            key: (version, round(now - since, 3))
            for key, (version, since) in self._seen.items()
            if version and key.startswith(prefixes)
        }

    def adopt(self, told: Mapping[str, tuple[str, float]]) -> None:
        """Count on from what another watcher has told, where a record's version is still the same at the next look."""
        now = self._clock()
        for key, (version, unchanged_s) in told.items():
            since = now - max(unchanged_s, 0.0)
            seen = self._seen.get(key)
            if seen is not None and seen[0] == version:
                self._seen[key] = (version, min(seen[1], since))
            elif seen is None or key != PUBLISHER:  # who waits looks at the publisher's record itself, all the time
                self._seen[key] = (version, since)

    def forget(self, key: str) -> None:
        """It is gone."""
        self._seen.pop(key, None)

    def only(self, prefix: str, keys: Container[str]) -> None:
        """Of those with this prefix, no others are there."""
        for key in [key for key in self._seen if key.startswith(prefix)]:
            if key not in keys:
                del self._seen[key]


class Held:
    """A record of this process: written at once, then renewed by `renew` as often as its holder likes."""

    def __init__(self, store: RingStore, key: str, content: dict[str, Any], seen: Versioned | None) -> None:
        """`seen`: what it replaces. `lost` afterwards, if somebody else was faster."""
        self.key = key
        self._store = store
        # With a mark of its own, no two holders ever write the same.
        self.mark = secrets.token_hex(4)
        self._content = {**content, "mark": self.mark}
        self._count = int(content_of(seen).get("count", 0))
        self._version = seen.version if seen is not None else None
        self._unsure: set[bytes] = set()
        self._lock = threading.Lock()
        self.lost = False
        self.renew()

    def renew(self, **changed: Any) -> bool:
        """Say that it is still held, and what has changed; False, from then on, if somebody else has taken it."""
        with self._lock:
            if self.lost:
                return False
            self._content.update(changed)
            self._count += 1
            data = sealed({**self._content, "count": self._count})
            # Where the store's answer gets lost it may be written all the same.
            self._unsure.add(data)
            version = self._store.swap(self.key, data, self._version)
            if version is None:
                record = self._store.record(self.key)
                if record is not None and record.data == data:
                    version = record.version
                elif record is not None and record.data in self._unsure:
                    version = self._store.swap(self.key, data, record.version)
            self.lost = version is None
            self._version = version
            self._unsure.clear()
            return not self.lost

    def is_own(self) -> bool:
        """Whether nobody else has taken it, asked of the store."""
        with self._lock:
            return self._is_own()

    def release(self) -> None:
        """Give it up: the record is gone, unless somebody else has taken it."""
        with self._lock:
            if self._is_own():
                self._store.delete([self.key])
                self.lost = True

    def _is_own(self) -> bool:
        record = None if self.lost else self._store.record(self.key)
        if record is not None and record.version != self._version and record.data in self._unsure:
            self._version = record.version
        self.lost = record is None or (record.version != self._version and not self._was_own(record))
        return not self.lost

    def _was_own(self, record: Versioned) -> bool:
        """Whether this holder has written it. What the store says may be of a moment ago, of before another thread
        renewed it: that nobody else had taken it by then is what is asked for."""
        content = content_of(record)
        return content.get("mark") == self.mark and not content.get("dead")


_MOST = 1000
"""Records that are noted, those that have been silent for longest: the control plane keeps notes of 390,000 bytes."""
_PASSED_ON = (WRITERS, READERS, PINS)

Seen = Mapping[str, tuple[str, float]]
"""By key: the version, and for how many seconds it has been there at least."""


class Observations:
    """The record in which one ring's watchers note what they see."""

    def __init__(self, store: RingStore, watch: Watch) -> None:
        self._store, self._watch = store, watch
        self._version: str | None = None
        self._current = False
        """Whether `_version` is the record's, as far as this process knows."""

    def recall(self, *, plus_s: float = 0.0) -> None:
        """Count on from what was noted. `plus_s`: so many seconds have passed since the last note at least."""
        self._recalled(plus_s)

    def note(self) -> None:
        """Note what this watcher sees. Another's newer note stays: it is taken up by the next call."""
        if not self._current:
            self.recall()
        told = self._watch.told(_PASSED_ON)
        longest = sorted(told.items(), key=lambda entry: -entry[1][1])[:_MOST]
        self._version = self._store.swap(WATCHED, sealed({"seen": dict(sorted(longest))}), self._version)
        self._current = self._version is not None

    def note_publisher(self) -> None:
        """Note for how long the publisher's record has not changed, as one that waits for it to end or to die.

        All else stays as it was noted: only who collects has looked at it.
        """
        record = self._recalled()
        seen = {**seen_in(record), **self._watch.told((PUBLISHER,))}
        self._version = self._store.swap(WATCHED, sealed({"seen": seen}), self._version)
        self._current = self._version is not None

    def _recalled(self, plus_s: float = 0.0) -> Versioned | None:
        record = self._store.record(WATCHED)
        self._version, self._current = record.version if record is not None else None, True
        seen = seen_in(record).items()
        self._watch.adopt({key: (version, at_s + plus_s * (key != PUBLISHER)) for key, (version, at_s) in seen})
        return record


def seen_in(record: Versioned | None) -> Seen:
    """What such a record says; nothing of one that is not there, or was altered."""
    found = content_of(record).get("seen")
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
