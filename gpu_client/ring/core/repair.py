"""Whether a ring is whole, and making it so again: its pointer, its manifests, and all that the newest one lists.

What was lost stays lost; everything else can be read again, and goes on. Writers and readers may be at work meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from gpu_client.ring.core.damage_report import quarantine_key, tell_job
from gpu_client.ring.core.ring import Pointed, Ring, pointer_to, schema_document, stored_schema
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged
from gpu_client.ring.format.manifest import (
    EMPTY,
    ENDED,
    Manifest,
    ObjectId,
    Passed,
    Slot,
    manifest_key,
    manifest_number,
)
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.format.records import MANIFESTS, POINTER, SAMPLES, SCHEMA, WRITERS, Versioned, content_of

_TRIES = 100
"""Publishers are at work, too; each of their turns takes longer than one of these."""
_NOT_KNOWN_OF = 1000
"""More manifests than can have been lost together with the pointer."""


@dataclass(frozen=True)
class Examined:
    """What was found. Keys of what is damaged, and why."""

    pointer: str = ""
    """What is wrong with it; empty if nothing is."""
    manifests: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)
    """Of those that the newest good manifest lists."""
    schema: str = ""
    """What is wrong with it; empty if nothing is."""
    read: int = 0
    """So many objects were looked at."""

    @property
    def damaged(self) -> dict[str, str]:
        """All of it."""
        alone = {POINTER: self.pointer, SCHEMA: self.schema}
        return {**{key: why for key, why in alone.items() if why}, **self.manifests, **self.objects}


@dataclass(frozen=True)
class _Stored:
    """The pointer, and the manifests that are there."""

    named: int
    """By the pointer; 0 if it names none."""
    inserted: int
    """As the pointer says."""
    version: str | None
    wrong: str
    """With the pointer; empty if nothing is."""
    good: Mapping[int, Manifest]
    bad: Mapping[str, str]

    @property
    def newest(self) -> Manifest:
        """That can be read: the pointer's own, or else the highest."""
        if not self.wrong:
            return self.good.get(self.named, EMPTY)
        return self.good[max(self.good)] if self.good else EMPTY

    @property
    def highest(self) -> int:
        """Number of a manifest that is known of."""
        return max(self.named, *self.good, *map(manifest_number, self.bad), 0)

    @property
    def unused(self) -> int:
        """A number that never was: somebody may remember what another one had."""
        return self.highest + (1 if self.named or not self.wrong else _NOT_KNOWN_OF)


def examined(ring: Ring) -> Examined:
    """Read everything that can be read. Raises ManifestMissing where manifests are replaced faster than they can be
    read, and OSError where the store cannot be reached."""
    stored = _stored(ring)
    objects = dict(verified(ring, stored.newest))
    damaged = {key: why for key, why in objects.items() if why}
    if damaged:
        # What was replaced and removed meanwhile is missed by nobody.
        listed = {slot.object.key for slot in _stored(ring).newest.slots}
        damaged = {key: why for key, why in damaged.items() if key in listed}
    return Examined(stored.wrong, stored.bad, damaged, _wrong_schema(ring, stored.newest), len(objects))


def repaired(ring: Ring) -> Examined:
    """Set the pointer to the newest good manifest, without what is damaged, which is noted as quarantined.

    What was found, as of before. Samples that only a lost manifest has listed are listed again, and one that cannot be
    read is removed: it would stop publishing, or collecting. A damaged schema is set to that of a sample that verifies;
    where there is none, it is the next one's. Raises ManifestMissing if others are faster again and again, and OSError
    where the store cannot be reached.
    """
    found = examined(ring)
    if found.schema:
        told = _told_schema(ring, _stored(ring).newest)
        ring.store.delete([SCHEMA])
        if told is not None:
            ring.store.create(SCHEMA, [memoryview(schema_document(told))])
    for key, why in found.objects.items():
        ring.store.create(quarantine_key(key), [memoryview(why.encode())])
        tell_job(ring.place, key, f"{key} is damaged: {why}")
    for _ in range(_TRIES):
        stored = _stored(ring)
        newest = stored.newest
        whole = all(slot.object.key not in found.objects for slot in newest.slots)
        if not stored.wrong and whole:
            ring.store.delete(list(stored.bad))
            return found
        kept = tuple(slot for slot in newest.slots if slot.object.key not in found.objects)
        ahead = replace(newest, number=stored.unused, slots=kept, at_ms=int(ring.clock() * 1000))
        if stored.wrong:
            ahead = _with_unlisted(ring, ahead, stored.inserted)
        if ahead.slots == newest.slots and newest.number == stored.highest > 0:
            ahead = newest
        elif not ring.store.create(manifest_key(ahead.number), [memoryview(ahead.to_bytes())]):
            continue
        ring.store.swap(POINTER, pointer_to(ahead), stored.version)
    raise _in_a_hurry()


def verified(ring: Ring, manifest: Manifest | None = None) -> Iterator[tuple[str, str]]:
    """Read every object that a manifest, or else the newest, lists: its key, and what is wrong with it, or nothing."""
    for found in dict.fromkeys(slot.object for slot in (ring.newest() if manifest is None else manifest).slots):
        data = ring.store.read(found.key)
        if data is None:
            yield found.key, "it is not there"
            continue
        try:
            StoredSamples(found.key, data).verify()
        except ObjectDamaged as error:
            yield found.key, error.problem
        else:
            yield found.key, ""


def _wrong_schema(ring: Ring, newest: Manifest) -> str:
    data = ring.store.read(SCHEMA)
    if data is None:
        return "it is not there, and samples are" if newest.slots else ""
    try:
        schema = stored_schema(data)
    except ValueError as error:
        return f"it is damaged: {error}"
    # Without a digest it may have been altered to another one.
    told = _told_schema(ring, newest) if bytes(data[:1]) == b"[" else None
    return "" if told in (None, schema) else "it is damaged: it is not that of the ring's samples"


def _told_schema(ring: Ring, newest: Manifest) -> str | None:
    """By a sample that verifies, one that is listed if there is any."""
    listed = [slot.object.key for slot in reversed(newest.slots)]
    for key in dict.fromkeys([*listed, *ring.store.keys(SAMPLES)]):
        data = ring.store.read(key)
        try:
            stored = StoredSamples(key, data if data is not None else memoryview(b""))
            stored.verify()
        except ObjectDamaged:
            continue
        if len(stored):
            return stored.schema(shapes=ring.settings.shapes == "same")
    return None


def _stored(ring: Ring) -> _Stored:
    """As it was at one moment: the pointer stayed where it was while manifests were read."""
    for _ in range(_TRIES):
        record = ring.store.record(POINTER)
        good: dict[int, Manifest] = {}
        bad: dict[str, str] = {}
        for key in ring.store.keys(MANIFESTS):
            data = ring.store.read(key)
            if data is None:
                continue  # collected since
            try:
                number = manifest_number(key)
                good[number] = Manifest.from_bytes(data, number)
            except ValueError as error:
                bad[key] = f"it cannot be read ({error})"
        after = ring.store.record(POINTER)
        if (after.version if after else None) == (record.version if record else None):
            return _as_found(record, good, bad)
    raise _in_a_hurry()


def _in_a_hurry() -> ManifestMissing:
    return ManifestMissing("others publish all the time", "Try again, or end the writers meanwhile")


def _as_found(record: Versioned | None, good: Mapping[int, Manifest], bad: Mapping[str, str]) -> _Stored:
    version = record.version if record else None
    if record is None:
        # The first manifest is there before it is pointed to.
        gone = max([*good, *map(manifest_number, bad), 0]) > 1
        return _Stored(0, 0, version, "it is not there, and manifests are" if gone else "", good, bad)
    try:
        named, _, inserted = Pointed.from_bytes(record.data)
    except ValueError as error:
        return _Stored(0, 0, version, f"it cannot be read ({error})", good, bad)
    wrong = "" if named in good else f"it names manifest {named}, which is not there or cannot be read"
    return _Stored(named, inserted, version, wrong, good, bad)


def _with_unlisted(ring: Ring, manifest: Manifest, inserted: int) -> Manifest:
    """With the samples behind it that count, but wait nowhere: the manifests that listed them are lost.

    Those count whose writer has gone on, or gone: its claim of them was made, and was cleared away as counted.
    """
    # In this order: whoever has stored the next one has claimed this one before.
    objects = sorted(found for found in map(ObjectId.of_key, ring.store.keys(SAMPLES)) if found is not None)
    waiting = {claim.object for claim in ring.claims()}
    records = {key.removeprefix(WRITERS): ring.store.record(key) for key in ring.store.keys(WRITERS)}
    at_work = {name: int(content_of(record).get("epoch", 1)) for name, record in records.items()}
    last: dict[str, ObjectId] = {}
    for one in (*objects, *waiting):
        last[one.writer] = max(last.get(one.writer, one), one)
    passed = dict(manifest.passed)
    there: list[tuple[int, ObjectId, range]] = []
    blocked = {one.writer: one for one in sorted(waiting, reverse=True) if not manifest.settled(one)}
    for one in objects:
        follows = one.writer in blocked and one > blocked[one.writer]
        if manifest.settled(one) or one in waiting or follows or (one == last[one.writer] and one.writer in at_work):
            continue
        data = ring.store.read(one.key)
        try:
            stored = StoredSamples(one.key, data if data is not None else memoryview(b""))
            stored.verify()
        except ObjectDamaged:
            continue
        left = range(manifest.counted_of(one), len(stored))
        there.append((int(stored.provenance.made_at * 1000), one, left))
        passed[one.writer] = Passed(one.epoch, one.seq, manifest.at_ms)
    slots = [
        Slot(one, number, 0, at_ms)
        for at_ms, one, left in sorted(there, key=lambda found: found[:2])
        for number in left
    ]
    for name in {*last, *at_work} - set(passed):
        # That it has begun may have been said in a lost manifest alone, and what it claims next has to count.
        epochs = [one.epoch for one in (*objects, *waiting) if one.writer == name] or [at_work[name]]
        passed[name] = Passed(min(epochs), 0, manifest.at_ms)
    for name in set(passed) - set(at_work) - {one.writer for one in waiting}:
        # So was that it has ended: it has gone, and need not be remembered for ever.
        passed[name] = Passed(passed[name].epoch, ENDED, manifest.at_ms)
    slots = [slot._replace(inserted=manifest.inserted + place) for place, slot in enumerate(slots)]
    return replace(
        manifest,
        slots=(*manifest.slots, *slots)[-ring.settings.cap :],
        inserted=max(inserted, manifest.inserted + len(slots)),
        passed=passed,
    )
