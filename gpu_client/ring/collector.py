"""Removing what nobody can read any more. It is never wrong about what somebody can.

What is needed: everything in the newest `retain` manifests, and in those that living readers, or pins, name. An object
goes when no such manifest lists it and its claim could not count any more (`Manifest.settled`). For a writer that has
died, a later epoch is begun in its name: after that its claims do not count, whenever they arrive.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import NamedTuple

from gpu_client.ring.leases import DEAD_AFTER_LEASES, PINS, READERS, WRITERS, Watch, content_of
from gpu_client.ring.manifest import MANIFESTS, SAMPLES, Claim, Manifest, ObjectId
from gpu_client.ring.ring import Ring

logger = logging.getLogger("baton.ring")

READ_BEFORE = "read"
"""A record: samples that were read by readers that have gone."""
UNFINISHED_S = 60.0
"""What is being stored and has not grown for so long is left behind by a process that has died."""
_ADDED = 5


class Collected(NamedTuple):
    """What one round did."""

    objects: int = 0
    manifests: int = 0
    fenced: int = 0
    """Writers that were taken for dead."""
    readers: int = 0
    """Readers that were taken for dead."""


class Collector:
    """Any number may run at once; each takes time to see who is dead."""

    def __init__(self, ring: Ring, watch: Watch | None = None) -> None:
        self._ring = ring
        self._watch = watch or Watch()

    def collect(self) -> Collected:
        """One round. Raises ManifestMissing, and OSError where the store cannot be reached."""
        # In this order: a reader that pins a manifest after its record was looked for here finds the pointer where it
        # is now, or further, and so only manifests that are kept here.
        number, _ = self._ring.pointer()
        last = self._ring.manifest(number)
        readers = self._buried()
        fenced = self._fenced(last)
        kept = self._kept(number)
        needed = {slot.object for manifest in kept.values() for slot in manifest.slots}
        store = self._ring.store
        objects = []
        for key in store.keys(SAMPLES):
            found = ObjectId.of_key(key)
            if found is not None and found not in needed and last.settled(found):
                objects.append(key)
        store.delete(objects)
        old = [key for key in store.keys(MANIFESTS) if _number(key) not in kept and _number(key) <= number]
        store.delete(old)
        store.tidy(max(2 * self._ring.settings.lease_s, UNFINISHED_S))
        return Collected(len(objects), len(old), fenced, readers)

    def _kept(self, number: int) -> dict[int, Manifest]:
        wanted = set(range(max(number - self._ring.settings.retain + 1, 1), number + 1))
        for prefix in (READERS, PINS):
            for key in self._ring.store.keys(prefix):
                wanted |= set(_numbers(content_of(self._ring.store.record(key)).get("manifests", ())))
        there = {_number(key) for key in self._ring.store.keys(MANIFESTS)}
        return {one: self._ring.manifest(one) for one in sorted(wanted & there)}

    def _dead(self, key: str, lease_s: float) -> bool:
        return self._watch.unchanged_s(key, self._ring.store.record(key)) > DEAD_AFTER_LEASES * lease_s

    def _buried(self) -> int:
        """Readers that have died need nothing any more; what they have read counts on."""
        gone = 0
        for key in self._ring.store.keys(READERS):
            record = self._ring.store.record(key)
            content = content_of(record)
            if record is None or not self._dead(key, float(content.get("lease_s", self._ring.settings.lease_s))):
                continue
            # Emptied first: of several collectors one counts what it has read.
            if self._ring.store.swap(key, json.dumps({**content, "read": 0}).encode(), record.version) is None:
                continue
            logger.info("reader %s is dead", key.removeprefix(READERS))
            add_read(self._ring, int(content.get("read", 0)))
            self._ring.store.delete([key])
            self._watch.forget(key)
            gone += 1
        for key in self._ring.store.keys(PINS):
            until_ms = int(content_of(self._ring.store.record(key)).get("until_ms", 0))
            if until_ms < self._ring.clock() * 1000:
                self._ring.store.delete([key])
        return gone

    def _fenced(self, last: Manifest) -> int:
        """Begin another epoch for writers that have died, so that what they left can be forgotten."""
        done = 0
        for key in self._ring.store.keys(WRITERS):
            if not self._dead(key, self._ring.settings.lease_s):
                continue
            record = self._ring.store.record(key)
            content = content_of(record)
            writer, epoch = key.removeprefix(WRITERS), int(content.get("epoch", 0))
            if record is None or not content.get("dead"):
                epoch += 1
                taken = json.dumps({**content, "epoch": epoch, "dead": True}).encode()
                if record is None or self._ring.store.swap(key, taken, record.version) is None:
                    continue
                logger.info("writer %s is dead", writer)
                done += 1
            elif last.settled(ObjectId(writer, epoch, 0)):
                self._ring.store.delete([key])
                self._watch.forget(key)
                continue
            # Again, where whoever marked it died before this.
            self._ring.store.create(Claim(ObjectId(writer, epoch, 0), 0, int(self._ring.clock() * 1000)).key, [])
        return done


def add_read(ring: Ring, samples: int) -> None:
    """Remember what a reader has read that is going."""
    for _ in range(_ADDED if samples else 0):
        record = ring.store.record(READ_BEFORE)
        total = int(content_of(record).get("samples", 0)) + samples
        data = json.dumps({"samples": total}).encode()
        if ring.store.swap(READ_BEFORE, data, record.version if record else None) is not None:
            return


def read_so_far(ring: Ring) -> int:
    """Samples that all readers have read."""
    there = (content_of(ring.store.record(key)) for key in ring.store.keys(READERS))
    before = content_of(ring.store.record(READ_BEFORE))
    return int(before.get("samples", 0)) + sum(int(content.get("read", 0)) for content in there)


def _number(key: str) -> int:
    digits = key.removeprefix(MANIFESTS)
    return int(digits) if digits.isdigit() else -1


def _numbers(found: object) -> Iterable[int]:
    return [one for one in found if isinstance(one, int)] if isinstance(found, list) else []
