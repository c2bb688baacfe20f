"""Removing what nobody can read any more. It is never wrong about what somebody can.

What is needed: everything in the newest `retain` manifests, and in those that living readers, or pins, name. An object
goes when no such manifest lists it and its claim could not count any more (`Manifest.settled`). For a writer that has
died, a later epoch is ended in its name: after that its claims do not count, whenever they arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpu_client.ring.core.damage_report import quarantine_key
from gpu_client.ring.core.liveness import DEAD_AFTER_LEASES, Watch
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ManifestMissing
from gpu_client.ring.format.manifest import ENDED, Claim, Manifest, ObjectId, manifest_number
from gpu_client.ring.format.records import (
    COPIES,
    GROUPS,
    MANIFESTS,
    PINS,
    QUARANTINE,
    READ_BEFORE,
    READERS,
    SAMPLES,
    WRITERS,
    Versioned,
    content_of,
    sealed,
)

logger = logging.getLogger("baton.ring")

_LEAVING = 100
"""Readers that have left, of whom it is known that they were counted: their records are gone in a moment."""
UNFINISHED_S = 60.0
"""What is being stored and has not grown for so long is left behind by a process that has died."""
_NOTES = 1000
"""Notes of damaged objects that are kept when the objects are gone."""
_LOOK = "look at copies"
"""To the watch: when it was last looked for those of copies."""


class Collected(NamedTuple):
    """What one round did."""

    objects: int = 0
    manifests: int = 0
    fenced: int = 0
    """Writers that were taken for dead."""
    readers: int = 0
    """Readers that were taken for dead."""
    left: frozenset[ObjectId] = frozenset()
    """Objects that nobody can read and that were not removed: they wait to become readable, or their writer died."""
    replaced: int = 0
    """Objects that only older manifests list, which nobody has named, and which are retained for a moment."""


class Collector:
    """Any number may run at once; each takes time to see who is dead."""

    def __init__(self, ring: Ring, watch: Watch | None = None) -> None:
        self._ring = ring
        self._watch = watch or Watch()

    def collect(self) -> Collected:
        """One round. Raises ManifestMissing, and OSError where the store cannot be reached."""
        # In this order: a reader that pins a manifest after its record was looked for here finds the pointer where it
        # is now, or further, and so only manifests that are kept here.
        last = self._ring.newest()
        number = last.number
        readers = self._buried()
        fenced = self._fenced(last)
        kept, pinned = self._kept(number)
        needed = {slot.object for manifest in kept.values() for slot in manifest.slots}
        named = {slot.object for one in (*pinned, number) if one in kept for slot in kept[one].slots}
        replaced = len(needed - named)
        store = self._ring.store
        stored = [one for one in map(ObjectId.of_key, store.keys(SAMPLES)) if one is not None and one not in needed]
        forgotten = self._forgotten({one.writer for one in stored} - set(last.passed))
        gone = {one for one in stored if last.settled(one) or one.writer in forgotten}
        store.delete([one.key for one in stored if one in gone])
        numbered = [(manifest_number(key), key) for key in store.keys(MANIFESTS)]
        old = [key for one, key in numbered if one not in kept and 0 < one <= number]
        store.delete(old)
        notes = store.keys(QUARANTINE)
        if len(notes) > _NOTES:
            listed = {quarantine_key(one.key) for one in needed}
            store.delete([key for key in notes if key not in listed][: len(notes) - _NOTES])
        self._forget_copies()
        store.tidy(max(2 * self._ring.settings.lease_s, UNFINISHED_S))
        return Collected(len(gone), len(old), fenced, readers, frozenset(stored) - gone, replaced)

    def _forget_copies(self) -> None:
        """What was counted for copies of generators that have died, or ended, goes: nobody takes up their names."""
        lease_s = self._ring.settings.lease_s
        if 0 < self._watch.unchanged_s(_LOOK, None) < lease_s:
            return  # to list is a request
        self._watch.forget(_LOOK)
        self._watch.unchanged_s(_LOOK, None)
        copies = self._ring.store.keys(COPIES)
        self._watch.only(COPIES, set(copies))
        there = set(self._ring.store.keys(WRITERS)) if copies else set()
        dead = []
        for key in copies:
            if f"{WRITERS}{key.removeprefix(COPIES)}" in there:
                self._watch.forget(key)
            elif self._watch.unchanged_s(key, None) > DEAD_AFTER_LEASES * lease_s:
                dead.append(key)
        self._ring.store.delete(dead)

    def _forgotten(self, writers: set[str]) -> set[str]:
        """Those of these, of whom objects were found, that have ended so long ago that no manifest knows them.

        A writer has a record before it has objects, and gives it up when all its claims are made; these lie in the
        inbox until a manifest knows the writer. So it has been forgotten if it is found nowhere, looked for in this
        order.
        """
        if not writers:
            return writers
        writers = writers - {key.removeprefix(WRITERS) for key in self._ring.store.keys(WRITERS)}
        writers -= {claim.object.writer for claim in self._ring.claims()}
        newest = self._ring.newest()
        return writers - set(newest.passed) - {slot.object.writer for slot in newest.slots}

    def _kept(self, number: int) -> tuple[dict[int, Manifest], set[int]]:
        """Return the manifests that are needed, and the numbers of those that readers and pins name."""
        retained = set(range(max(number - self._ring.settings.retain + 1, 1), number + 1))
        pinned: set[int] = set()
        for prefix in (READERS, PINS):
            for key in self._ring.store.keys(prefix):
                pinned |= set(_numbers(content_of(self._ring.store.record(key)).get("manifests", ())))
        found = {}
        for one in sorted((retained | pinned) & self._there()):
            try:
                found[one] = self._ring.manifest(one)
            except ManifestMissing:
                if one in self._there():
                    raise
        return found, pinned

    def _there(self) -> set[int]:
        return {manifest_number(key) for key in self._ring.store.keys(MANIFESTS)}

    def _dead(self, key: str, record: Versioned, lease_s: float) -> bool:
        return self._watch.unchanged_s(key, record) > DEAD_AFTER_LEASES * lease_s

    def _records(self, prefix: str) -> Iterator[tuple[str, Versioned]]:
        keys = self._ring.store.keys(prefix)
        self._watch.only(prefix, set(keys))
        for key in keys:
            record = self._ring.store.record(key)
            if record is not None:
                yield key, record

    def _buried(self) -> int:
        """Readers that have died need nothing any more; what they have read counts on."""
        gone = 0
        for key, record in self._records(READERS):
            content = content_of(record)
            if not self._dead(key, record, float(content.get("lease_s", self._ring.settings.lease_s))):
                continue
            # Changed first: a reader that was not dead sees it, and goes on under another name.
            if self._ring.store.swap(key, sealed({**content, "dead": True}), record.version) is None:
                continue
            logger.info("reader %s is dead", key.removeprefix(READERS))
            add_read(self._ring, int(content.get("read", 0)), str(content.get("mark", "")))
            self._ring.store.delete([key])
            self._watch.forget(key)
            gone += 1
        for key, record in self._records(PINS):
            # A training whose clock is wrong keeps its pins for as long as it goes on.
            until_ms = int(content_of(record).get("until_ms", 0))
            if until_ms < self._ring.clock() * 1000 and self._dead(key, record, self._ring.settings.lease_s):
                group = key.removeprefix(PINS)
                logger.info("nobody has resumed the training %s: what it has read is not kept any more", group)
                self._ring.store.delete([*self._ring.store.keys(f"{GROUPS}{group}/"), key])
                self._watch.forget(key)
        return gone

    def _fenced(self, last: Manifest) -> int:
        """End the epochs of writers that have died, so that what they left can be forgotten."""
        done = 0
        for key, record in self._records(WRITERS):
            silent = self._dead(key, record, self._ring.settings.lease_s)
            content = content_of(record)
            writer, epoch = key.removeprefix(WRITERS), int(content.get("epoch", 0))
            if content.get("dead") and last.settled(ObjectId(writer, epoch, ENDED)):
                self._ring.store.delete([key])
                self._watch.forget(key)
                continue
            if not silent:
                continue
            if not content.get("dead"):
                epoch += 1
                content = {**content, "epoch": epoch, "dead": True, "ended_ms": max(int(self._ring.clock() * 1000), 0)}
                if self._ring.store.swap(key, sealed(content), record.version) is None:
                    continue
                logger.info("writer %s is dead", writer)
                done += 1
            # Again, where whoever marked it died before this; under the same name, which is there once.
            self._ring.store.create(Claim.ending(writer, epoch, int(content.get("ended_ms", 0))).key, [])
        return done


def add_read(ring: Ring, samples: int, mark: str) -> None:
    """Remember what a reader has read that is going; `mark`: its record's, which counts no more from then on.

    So it is counted once, at any time, whoever dies in between and however often this is done.
    """
    while samples:
        record = ring.store.record(READ_BEFORE)
        content = content_of(record)
        left = content.get("left", {})
        more = max(samples - int(left.get(mark, 0)), 0)
        if not more:
            return
        kept = dict([*((one, count) for one, count in left.items() if one != mark), (mark, samples)][-_LEAVING:])
        data = sealed({"samples": int(content.get("samples", 0)) + more, "left": kept})
        if ring.store.swap(READ_BEFORE, data, record.version if record else None) is not None:
            return


class Said(NamedTuple):
    """What all readers say together."""

    read: int
    """Samples, those of readers that have gone among them."""
    wanted: int
    """The most that one takes at a time."""
    starved: int
    """How many wait since there is nothing that they may read."""


def readers_say(ring: Ring) -> Said:
    """Raises OSError where the store cannot be reached."""
    there = [content_of(ring.store.record(key)) for key in ring.store.keys(READERS)]
    # Behind the readers: what one of them has read is in one of both at any time.
    before = content_of(ring.store.record(READ_BEFORE))
    left = before.get("left", {})
    still = (int(content.get("read", 0)) - int(left.get(content.get("mark", ""), 0)) for content in there)
    return Said(
        int(before.get("samples", 0)) + sum(max(one, 0) for one in still),
        max((int(content.get("wanted", 0)) for content in there), default=0),
        sum(bool(content.get("starved")) for content in there),
    )


def read_so_far(ring: Ring) -> int:
    """Samples that all readers have read."""
    return readers_say(ring).read


def _numbers(found: object) -> Iterable[int]:
    return [one for one in found if isinstance(one, int)] if isinstance(found, list) else []
