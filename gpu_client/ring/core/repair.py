"""Inspect and repair a ring: its pointer, its manifests, its schema, and the objects of the newest manifest.

Lost samples stay lost; a repair makes all other samples readable again. Writers and readers may work during a repair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from gpu_client.ring.core.damage_report import quarantine_key, report_damage
from gpu_client.ring.core.ring import PointerRecord, Ring, decode_schema, encode_pointer, encode_schema
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged
from gpu_client.ring.format.manifest import (
    EMPTY,
    ENDED,
    ObjectId,
    RingManifest,
    Slot,
    WriterWatermark,
    manifest_key,
    manifest_number,
)
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.format.records import MANIFESTS, POINTER, SAMPLES, SCHEMA, WRITERS, Versioned, decode_record

_TRIES = 100
"""Maximum tries against concurrent publishers, whose turns take longer than a try."""
_LOST_MANIFESTS = 1000
"""Maximum number of manifests that can be lost together with the pointer."""


@dataclass(frozen=True)
class InspectionReport:
    """Result of an inspection: problems by key."""

    pointer: str = ""
    """Problem of the pointer; "" for a sound pointer."""
    manifests: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)
    """Damaged objects of the newest good manifest: problem by key."""
    schema: str = ""
    """Problem of the schema; "" for a sound schema."""
    read: int = 0
    """Number of objects read."""

    @property
    def damaged(self) -> dict[str, str]:
        """Return all problems by key."""
        alone = {POINTER: self.pointer, SCHEMA: self.schema}
        return {**{key: why for key, why in alone.items() if why}, **self.manifests, **self.objects}


@dataclass(frozen=True)
class _StoredManifests:
    """Pointer and all stored manifests of a ring."""

    named: int
    """Number of the manifest that the pointer names; 0 without a pointer."""
    inserted: int
    """`inserted` of the pointer."""
    version: str | None
    wrong: str
    """Problem of the pointer; "" for a sound pointer."""
    good: Mapping[int, RingManifest]
    bad: Mapping[str, str]

    @property
    def newest(self) -> RingManifest:
        """Return the newest readable manifest: the pointer's, else the manifest with the highest number."""
        if not self.wrong:
            return self.good.get(self.named, EMPTY)
        return self.good[max(self.good)] if self.good else EMPTY

    @property
    def highest(self) -> int:
        """Return the highest known manifest number."""
        return max(self.named, *self.good, *map(manifest_number, self.bad), 0)

    @property
    def unused(self) -> int:
        """Return an unused manifest number, because processes may have cached the manifests of used numbers."""
        return self.highest + (1 if self.named or not self.wrong else _LOST_MANIFESTS)


def inspect_ring(ring: Ring) -> InspectionReport:
    """Verify the pointer, the manifests, the schema and all listed objects.

    Raises ManifestMissing if publishers replace manifests faster than this process reads them, and OSError for an
    unreachable store.
    """
    stored = _read_manifests(ring)
    objects = dict(verify_objects(ring, stored.newest))
    damaged = {key: why for key, why in objects.items() if why}
    if damaged:
        # Objects that were replaced and collected during the inspection are no damage.
        listed = {slot.object.key for slot in _read_manifests(ring).newest.slots}
        damaged = {key: why for key, why in damaged.items() if key in listed}
    return InspectionReport(stored.wrong, stored.bad, damaged, _check_schema(ring, stored.newest), len(objects))


def repair_ring(ring: Ring) -> InspectionReport:
    """Point to the newest good manifest, and quarantine damaged objects. Returns the problems before the repair.

    The repair lists the samples of lost manifests again, and deletes unreadable manifests, which would block
    publication or collection. The schema of a sound sample replaces a damaged schema; without a sound sample, the next
    sample sets the schema. Raises ManifestMissing if publishers are faster in all tries, and OSError for an unreachable
    store.
    """
    found = inspect_ring(ring)
    if found.schema:
        schema_found = _schema_of_samples(ring, _read_manifests(ring).newest)
        ring.store.delete([SCHEMA])
        if schema_found is not None:
            ring.store.create(SCHEMA, [memoryview(encode_schema(schema_found))])
    for key, why in found.objects.items():
        ring.store.create(quarantine_key(key), [memoryview(why.encode())])
        report_damage(ring.place, key, f"{key} is damaged: {why}")
    for _ in range(_TRIES):
        stored = _read_manifests(ring)
        newest = stored.newest
        whole = all(slot.object.key not in found.objects for slot in newest.slots)
        if not stored.wrong and whole:
            ring.store.delete(list(stored.bad))
            return found
        kept = tuple(slot for slot in newest.slots if slot.object.key not in found.objects)
        ahead = replace(newest, number=stored.unused, slots=kept, at_ms=int(ring.clock() * 1000))
        if stored.wrong:
            ahead = _relist_samples(ring, ahead, stored.inserted)
        if ahead.slots == newest.slots and newest.number == stored.highest > 0:
            ahead = newest
        elif not ring.store.create(manifest_key(ahead.number), [memoryview(ahead.to_bytes())]):
            continue
        ring.store.swap(POINTER, encode_pointer(ahead), stored.version)
    raise _outpaced_error()


def verify_objects(ring: Ring, manifest: RingManifest | None = None) -> Iterator[tuple[str, str]]:
    """Read every object of a manifest (default: the newest). Yields key and problem; "" for a sound object."""
    for found in dict.fromkeys(slot.object for slot in (ring.newest() if manifest is None else manifest).slots):
        data = ring.store.read(found.key)
        if data is None:
            yield found.key, "missing"
            continue
        try:
            StoredSamples(found.key, data).verify()
        except ObjectDamaged as error:
            yield found.key, error.problem
        else:
            yield found.key, ""


def _check_schema(ring: Ring, newest: RingManifest) -> str:
    data = ring.store.read(SCHEMA)
    if data is None:
        return "missing, although samples exist" if newest.slots else ""
    try:
        schema = decode_schema(data)
    except ValueError as error:
        return f"damaged: {error}"
    # A schema without a digest may have been altered to another valid schema, therefore the samples verify the schema.
    schema_found = _schema_of_samples(ring, newest) if bytes(data[:1]) == b"[" else None
    return "" if schema_found in (None, schema) else "damaged: it differs from the schema of the samples"


def _schema_of_samples(ring: Ring, newest: RingManifest) -> str | None:
    """Return the schema of a sound sample, preferably a listed sample."""
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


def _read_manifests(ring: Ring) -> _StoredManifests:
    """Read all manifests while the pointer stays unchanged."""
    for _ in range(_TRIES):
        record = ring.store.record(POINTER)
        good: dict[int, RingManifest] = {}
        bad: dict[str, str] = {}
        for key in ring.store.keys(MANIFESTS):
            data = ring.store.read(key)
            if data is None:
                continue  # Collected since the listing.
            try:
                number = manifest_number(key)
                good[number] = RingManifest.from_bytes(data, number)
            except ValueError as error:
                bad[key] = f"unreadable ({error})"
        after = ring.store.record(POINTER)
        if (after.version if after else None) == (record.version if record else None):
            return _classify_pointer(record, good, bad)
    raise _outpaced_error()


def _outpaced_error() -> ManifestMissing:
    return ManifestMissing("publishers are faster than the inspection", "Try again, or stop the writers meanwhile")


def _classify_pointer(
    record: Versioned | None, good: Mapping[int, RingManifest], bad: Mapping[str, str]
) -> _StoredManifests:
    version = record.version if record else None
    if record is None:
        # The first manifest exists before the pointer, therefore a missing pointer is damage only with later manifests.
        gone = max([*good, *map(manifest_number, bad), 0]) > 1
        return _StoredManifests(0, 0, version, "missing, although manifests exist" if gone else "", good, bad)
    try:
        named, _, inserted = PointerRecord.from_bytes(record.data)
    except ValueError as error:
        return _StoredManifests(0, 0, version, f"unreadable ({error})", good, bad)
    wrong = "" if named in good else f"names manifest {named}, which is missing or unreadable"
    return _StoredManifests(named, inserted, version, wrong, good, bad)


def _relist_samples(ring: Ring, manifest: RingManifest, inserted: int) -> RingManifest:
    """List valid samples that no manifest or claim names, because their manifests are lost.

    An object is valid if its writer has continued or ended after the object, which proves that the claim was made,
    counted and deleted.
    """
    # The objects come before the claims: a writer claims an object before storing the next object.
    objects = sorted(found for found in map(ObjectId.of_key, ring.store.keys(SAMPLES)) if found is not None)
    waiting = {claim.object for claim in ring.claims()}
    records = {key.removeprefix(WRITERS): ring.store.record(key) for key in ring.store.keys(WRITERS)}
    at_work = {name: int(decode_record(record).get("epoch", 1)) for name, record in records.items()}
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
        passed[one.writer] = WriterWatermark(one.epoch, one.seq, manifest.at_ms)
    slots = [
        Slot(one, number, 0, at_ms)
        for at_ms, one, left in sorted(there, key=lambda found: found[:2])
        for number in left
    ]
    for name in {*last, *at_work} - set(passed):
        # Only a lost manifest may contain the beginning of a writer, whose next claims must count.
        epochs = [one.epoch for one in (*objects, *waiting) if one.writer == name] or [at_work[name]]
        passed[name] = WriterWatermark(min(epochs), 0, manifest.at_ms)
    for name in set(passed) - set(at_work) - {one.writer for one in waiting}:
        # Only a lost manifest may contain the end of a departed writer. The entry marks the end, so that later
        # manifests can forget the writer.
        passed[name] = WriterWatermark(passed[name].epoch, ENDED, manifest.at_ms)
    slots = [slot._replace(inserted=manifest.inserted + place) for place, slot in enumerate(slots)]
    return replace(
        manifest,
        slots=(*manifest.slots, *slots)[-ring.settings.cap :],
        inserted=max(inserted, manifest.inserted + len(slots)),
        passed=passed,
    )
