"""Passing on for how long records have not changed, from one watcher to the next.

A watcher that dies would leave the next one to wait for one and a half leases anew: where publishers are replaced more
often than that, no dead writer would ever be taken for dead. A watcher therefore notes the version of each record, and
for how long that version has been there by the watcher's own clock. The next watcher counts on from the noted seconds
where the version is still the same. Versions never come back, and seconds are only added up, so a note can make a death
be found later, never earlier than one and a half leases after the last sign of life; and no clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu_client.ring.leases import PINS, PUBLISHER, READERS, WATCHED, WRITERS, Watch, content_of
from gpu_client.ring.sealing import sealed
from gpu_client.ring.store import RingStore, Versioned

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
