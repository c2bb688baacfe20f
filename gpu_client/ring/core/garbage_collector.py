"""Delete the garbage of a ring, and count the samples that readers have read.

The collector keeps the newest `retain` manifests and the manifests that living readers or pins name. An object is
garbage if no kept manifest lists the object and its claim cannot count any more (`RingManifest.settled`). For a dead
writer the collector ends a later epoch (fencing), after which no claim of the writer counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpu_client.ring.core.damage_report import quarantine_key
from gpu_client.ring.core.liveness import DEAD_AFTER_LEASES, LeaseWatch
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ManifestMissing
from gpu_client.ring.format.manifest import ENDED, ObjectId, RingManifest, SampleClaim, manifest_number
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
    decode_record,
    encode_checksummed,
)

logger = logging.getLogger("baton.ring")

_MAX_DEPARTED = 100
"""Maximum number of marks of counted departed readers, whose records are deleted within moments."""
UNFINISHED_S = 60.0
"""Minimum age, in seconds, of an incomplete write that counts as a dead process's."""
_MAX_QUARANTINE_NOTES = 1000
"""Maximum number of notes about deleted damaged objects."""
_COPIES_CHECKED = "copies checked"
"""Key of the last check of `copies/` in the lease watch."""


class CollectionResult(NamedTuple):
    """Result of one collection."""

    objects: int = 0
    manifests: int = 0
    fenced: int = 0
    """Number of dead writers that the collection fenced."""
    readers: int = 0
    """Number of dead readers that the collection removed."""
    left: frozenset[ObjectId] = frozenset()
    """Unlisted objects that stay: pending objects, or objects of a dead writer."""
    replaced: int = 0
    """Number of objects that only older, unpinned manifests list; the next collections delete them."""


class GarbageCollector:
    """Collector of a ring's garbage. Concurrent collectors are safe; each needs time to detect dead processes."""

    def __init__(self, ring: Ring, watch: LeaseWatch | None = None) -> None:
        self._ring = ring
        self._watch = watch or LeaseWatch()

    def collect(self) -> CollectionResult:
        """Collect once. Raises ManifestMissing, and OSError for an unreachable store."""
        # The pointer comes before the readers' records: a reader that pins a manifest after the read of its record
        # pins the manifest of this pointer or a later one, which this collection keeps.
        last = self._ring.newest()
        number = last.number
        readers = self._remove_dead_readers()
        fenced = self._fence_dead_writers(last)
        kept, pinned = self._needed_manifests(number)
        needed = {slot.object for manifest in kept.values() for slot in manifest.slots}
        named = {slot.object for one in (*pinned, number) if one in kept for slot in kept[one].slots}
        replaced = len(needed - named)
        store = self._ring.store
        stored = [one for one in map(ObjectId.of_key, store.keys(SAMPLES)) if one is not None and one not in needed]
        forgotten = self._forgotten_writers({one.writer for one in stored} - set(last.passed))
        gone = {one for one in stored if last.settled(one) or one.writer in forgotten}
        store.delete([one.key for one in stored if one in gone])
        numbered = [(manifest_number(key), key) for key in store.keys(MANIFESTS)]
        old = [key for one, key in numbered if one not in kept and 0 < one <= number]
        store.delete(old)
        notes = store.keys(QUARANTINE)
        if len(notes) > _MAX_QUARANTINE_NOTES:
            listed = {quarantine_key(one.key) for one in needed}
            store.delete([key for key in notes if key not in listed][: len(notes) - _MAX_QUARANTINE_NOTES])
        self._delete_dead_copies()
        store.tidy(max(2 * self._ring.settings.lease_s, UNFINISHED_S))
        return CollectionResult(len(gone), len(old), fenced, readers, frozenset(stored) - gone, replaced)

    def _delete_dead_copies(self) -> None:
        """Delete the counts of ended generator processes whose names no later process uses."""
        lease_s = self._ring.settings.lease_s
        if 0 < self._watch.unchanged_s(_COPIES_CHECKED, None) < lease_s:
            return  # A listing costs a request.
        self._watch.forget(_COPIES_CHECKED)
        self._watch.unchanged_s(_COPIES_CHECKED, None)
        copies = self._ring.store.keys(COPIES)
        self._watch.retain_only(COPIES, set(copies))
        records = set(self._ring.store.keys(WRITERS)) if copies else set()
        dead = []
        for key in copies:
            if f"{WRITERS}{key.removeprefix(COPIES)}" in records:
                self._watch.forget(key)
            elif self._watch.unchanged_s(key, None) > DEAD_AFTER_LEASES * lease_s:
                dead.append(key)
        self._ring.store.delete(dead)

    def _forgotten_writers(self, writers: set[str]) -> set[str]:
        """Select the forgotten writers, which no manifest remembers any more.

        A writer makes its record before its first object and deletes the record after its last claim; claims stay in
        the inbox until a manifest lists the writer. Therefore a writer without record, claim and manifest entry,
        checked in this order, is forgotten.
        """
        if not writers:
            return writers
        writers = writers - {key.removeprefix(WRITERS) for key in self._ring.store.keys(WRITERS)}
        writers -= {claim.object.writer for claim in self._ring.claims()}
        newest = self._ring.newest()
        return writers - set(newest.passed) - {slot.object.writer for slot in newest.slots}

    def _needed_manifests(self, number: int) -> tuple[dict[int, RingManifest], set[int]]:
        """Read the kept manifests. Returns the manifests, and the numbers that readers and pins name."""
        retained = set(range(max(number - self._ring.settings.retain + 1, 1), number + 1))
        pinned: set[int] = set()
        for prefix in (READERS, PINS):
            for key in self._ring.store.keys(prefix):
                pinned |= set(_numbers(decode_record(self._ring.store.record(key)).get("manifests", ())))
        found = {}
        for one in sorted((retained | pinned) & self._stored_numbers()):
            try:
                found[one] = self._ring.manifest(one)
            except ManifestMissing:
                if one in self._stored_numbers():
                    raise
        return found, pinned

    def _stored_numbers(self) -> set[int]:
        return {manifest_number(key) for key in self._ring.store.keys(MANIFESTS)}

    def _is_dead(self, key: str, record: Versioned, lease_s: float) -> bool:
        return self._watch.unchanged_s(key, record) > DEAD_AFTER_LEASES * lease_s

    def _records(self, prefix: str) -> Iterator[tuple[str, Versioned]]:
        keys = self._ring.store.keys(prefix)
        self._watch.retain_only(prefix, set(keys))
        for key in keys:
            record = self._ring.store.record(key)
            if record is not None:
                yield key, record

    def _remove_dead_readers(self) -> int:
        """Remove dead readers and expired pins. The samples read by a removed reader still count."""
        gone = 0
        for key, record in self._records(READERS):
            content = decode_record(record)
            if not self._is_dead(key, record, float(content.get("lease_s", self._ring.settings.lease_s))):
                continue
            # The mark comes before the deletion, so that a living reader sees the mark and continues under another
            # name.
            if self._ring.store.swap(key, encode_checksummed({**content, "dead": True}), record.version) is None:
                continue
            logger.info("reader %s is dead", key.removeprefix(READERS))
            add_departed_reads(self._ring, int(content.get("read", 0)), str(content.get("mark", "")))
            self._ring.store.delete([key])
            self._watch.forget(key)
            gone += 1
        for key, record in self._records(PINS):
            # A training with a wrong clock keeps its pins while the training renews them.
            until_ms = int(decode_record(record).get("until_ms", 0))
            if until_ms < self._ring.clock() * 1000 and self._is_dead(key, record, self._ring.settings.lease_s):
                group = key.removeprefix(PINS)
                logger.info("the training %s was not resumed in time: its samples are released", group)
                self._ring.store.delete([*self._ring.store.keys(f"{GROUPS}{group}/"), key])
                self._watch.forget(key)
        return gone

    def _fence_dead_writers(self, last: RingManifest) -> int:
        """Fence dead writers by ending their epochs, so that their objects become garbage."""
        done = 0
        for key, record in self._records(WRITERS):
            silent = self._is_dead(key, record, self._ring.settings.lease_s)
            content = decode_record(record)
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
                if self._ring.store.swap(key, encode_checksummed(content), record.version) is None:
                    continue
                logger.info("writer %s is dead", writer)
                done += 1
            # The process that made the mark may have died before the claim, therefore the claim is repeated. The key is
            # equal, therefore the claim is idempotent.
            self._ring.store.create(SampleClaim.ending(writer, epoch, int(content.get("ended_ms", 0))).key, [])
        return done


def add_departed_reads(ring: Ring, samples: int, mark: str) -> None:
    """Add the samples of a departing reader to the total. Idempotent, also if a process dies during the call.

    `mark` identifies the reader's record, which no longer counts.
    """
    while samples:
        record = ring.store.record(READ_BEFORE)
        content = decode_record(record)
        left = content.get("left", {})
        more = max(samples - int(left.get(mark, 0)), 0)
        if not more:
            return
        kept = dict([*((one, count) for one, count in left.items() if one != mark), (mark, samples)][-_MAX_DEPARTED:])
        data = encode_checksummed({"samples": int(content.get("samples", 0)) + more, "left": kept})
        if ring.store.swap(READ_BEFORE, data, record.version if record else None) is not None:
            return


class ReaderTotals(NamedTuple):
    """Totals of all readers."""

    read: int
    """Number of samples read, including departed readers."""
    wanted: int
    """Largest number of samples that a reader takes at a time."""
    starved: int
    """Number of readers that wait because every readable sample is too old or used up."""


def sum_reads(ring: Ring) -> ReaderTotals:
    """Sum up the records of all readers. Raises OSError for an unreachable store."""
    records = [decode_record(ring.store.record(key)) for key in ring.store.keys(READERS)]
    # A departing reader's samples move from its record to the total. The total is read second, so that no sample is
    # lost between the reads.
    before = decode_record(ring.store.record(READ_BEFORE))
    left = before.get("left", {})
    still = (int(content.get("read", 0)) - int(left.get(content.get("mark", ""), 0)) for content in records)
    return ReaderTotals(
        int(before.get("samples", 0)) + sum(max(one, 0) for one in still),
        max((int(content.get("wanted", 0)) for content in records), default=0),
        sum(bool(content.get("starved")) for content in records),
    )


def count_samples_read(ring: Ring) -> int:
    """Count the samples that all readers have read."""
    return sum_reads(ring).read


def _numbers(found: object) -> Iterable[int]:
    return [one for one in found if isinstance(one, int)] if isinstance(found, list) else []
