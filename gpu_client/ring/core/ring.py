"""Open, publish and remove a ring: settings, schema, and the pointer. `format/records.py` lists the keys."""

from __future__ import annotations

import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingMismatch, RingMissing, SampleRefused
from gpu_client.ring.format.manifest import (
    EMPTY,
    ObjectId,
    RingManifest,
    SampleClaim,
    manifest_key,
    may_lack_claims,
    next_manifest,
    obsolete_claims,
    pending_claims,
)
from gpu_client.ring.format.records import (
    COPIES,
    GENERATORS,
    GROUPS,
    INBOX,
    MANIFESTS,
    PINS,
    POINTER,
    PUBLISHER,
    QUARANTINE,
    READ_BEFORE,
    READERS,
    ROOM,
    SAMPLES,
    SCHEMA,
    SEEDS,
    SETTINGS,
    SWAPS,
    WATCHED,
    WRITERS,
    decode_checksummed,
    encode_checksummed,
)
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store import fork_lock
from gpu_client.ring.store.filesystem import DirectoryStore
from gpu_client.ring.store.protocol import RemovingStore, RingBackend, SyncingStore
from gpu_client.ring.store.uri import open_store

_NO_VERSION = "0" * 32
_CACHED_MANIFESTS = 8
"""Maximum number of small manifests that a process caches."""
_CACHED_SLOTS = 100_000
"""Maximum number of cached slots (about 300 bytes each), without the newest manifest."""
_TRIES = 100
_MAX_LOST_RACES = 10


class Ring:
    """State shared by the writers, readers, publishers and collectors of a process. Thread-safe."""

    def __init__(self, store: RingBackend, settings: RingSettings, *, clock: Callable[[], float] = time.time) -> None:
        self.place = ""
        """Place of the ring in messages; "" for a ring that was opened from a store."""
        self.store = store
        self.settings = settings
        self.clock = clock
        self._manifests: OrderedDict[int, RingManifest] = OrderedDict()
        self._lock = fork_lock.make_lock()
        self._schema: str | None = None
        self._last_pointer = 0
        if settings.fsync:
            if not isinstance(store, SyncingStore):
                raise RingMismatch(
                    "fsync is for rings in directories, and the place is not a directory",
                    "Omit fsync: a bucket and the control plane answer when the data is durable",
                )
            store.sync_writes()

    @classmethod
    def make(cls, store: RingBackend, settings: RingSettings, *, clock: Callable[[], float] = time.time) -> Ring:
        """Make the ring, or open an existing one with equal settings. Raises RingMismatch for other settings."""
        # The ring's constructor comes before the storage of the settings, so that the store flushes the settings, too,
        # or refuses before any object exists.
        ring = cls(store, settings, clock=clock)
        # Unset settings are omitted, so that versions without these settings can open the ring.
        data = encode_checksummed(settings.model_dump(mode="json", exclude_none=True))
        if store.create(SETTINGS, [memoryview(data)]):
            _require_conditional_writes(store, data)
        else:
            there = _read_settings(store)
            if there != settings:
                ours, theirs = settings.model_dump(), there.model_dump()
                described = ", ".join(
                    f"{name} {theirs[name]!r} instead of {ours[name]!r}" for name in ours if ours[name] != theirs[name]
                )
                raise RingMismatch(f"a ring exists with {described}", "Open the existing ring, or name another place")
        return ring

    @classmethod
    def open(cls, store: RingBackend, *, clock: Callable[[], float] = time.time) -> Ring:
        """Open the ring. Raises RingMismatch for a missing ring."""
        return cls(store, _read_settings(store), clock=clock)

    def pointer(self) -> tuple[int, str | None]:
        """Return the number of the newest manifest, 0 before the first, and the version of the pointer.

        Raises ManifestMissing for an unreadable pointer, RingMismatch for a removed ring.
        """
        pointed = self._last_pointer  # Read before the record: another thread may publish.
        record = self.store.record(POINTER)
        if record is None:
            if pointed:
                raise RingMismatch("the ring was removed during its use", "Make the ring again and restart")
            if not self._has_begun():
                return 0, None
            record = self.store.record(POINTER)  # Created by another process.
            if record is None:
                raise ManifestMissing("the pointer is missing", "Repair the ring: baton ring verify RING --repair")
        try:
            pointed_to = PointerRecord.from_bytes(record.data)
        except ValueError as error:
            raise ManifestMissing(
                f"the pointer cannot be read ({error})", "Repair the ring: baton ring verify RING --repair"
            ) from error
        number, at_ms = pointed_to.manifest, pointed_to.at_ms
        with self._lock:
            known = self._manifests.get(number)
            if number < self._last_pointer or (known is not None and at_ms not in (None, known.at_ms)):
                # The ring was repaired or made anew, therefore cached manifests may differ from stored manifests.
                self._manifests.clear()
            self._last_pointer = number
        return number, record.version

    def _has_begun(self) -> bool:
        """Return True if the pointer ever existed.

        The first manifest alone is no proof, because its publisher may have died before the swap.
        """
        return any(key > manifest_key(1) for key in self.store.keys(MANIFESTS))

    def manifest(self, number: int) -> RingManifest:
        """Read a retained manifest. Raises ManifestMissing."""
        if number == 0:
            return EMPTY
        with self._lock:
            found = self._manifests.get(number)
        if found is not None:
            return found
        data = self.store.read(manifest_key(number))
        if data is None:
            raise ManifestMissing(
                f"manifest {number} is missing",
                "A newer manifest has replaced it, or it was lost: see baton ring verify RING --repair",
            )
        try:
            found = RingManifest.from_bytes(data, number)
        except ValueError as error:
            raise ManifestMissing(
                f"manifest {number} cannot be read ({error})", "Repair the ring: baton ring verify RING --repair"
            ) from error
        self._remember(found)
        return found

    def newest(self) -> RingManifest:
        """Read the manifest that the pointer names. Raises ManifestMissing, RingMismatch."""
        return self._newest_and_version()[0]

    def _newest_and_version(self) -> tuple[RingManifest, str | None]:
        """Read the newest manifest and the version of the pointer.

        No lease protects the manifest, which the collector may already have deleted.
        """
        number, version = self.pointer()
        for _ in range(_TRIES):
            try:
                return self.manifest(number), version
            except ManifestMissing:
                before = version
                number, version = self.pointer()
                if version == before:
                    raise
        raise ManifestMissing("manifests are replaced faster than they can be read", "Raise retain, or lower cap")

    def _remember(self, manifest: RingManifest) -> None:
        with self._lock:
            self._manifests[manifest.number] = manifest
            slots = sum(map(len, self._manifests.values())) - len(manifest)
            while len(self._manifests) > _CACHED_MANIFESTS or (slots > _CACHED_SLOTS and len(self._manifests) > 1):
                slots -= len(self._manifests.popitem(last=False)[1])

    def claims(self) -> list[SampleClaim]:
        """List the pending claims, and published claims before their deletion."""
        return [claim for claim in map(SampleClaim.of_key, self.store.keys(INBOX)) if claim is not None]

    def publish(self, *, at_once: bool = False) -> RingManifest | None:
        """Publish the due samples; with `at_once` all. Returns None without due samples, or if a publisher was faster.

        Any process may call `publish` at any time. Only one process can create the manifest of a number, and a later
        publisher points to an existing manifest, therefore a publisher may die at any step.
        """
        last, version = self._newest_and_version()
        return self._publish_next(last, version, self._complete_claims(last), at_once=at_once)

    def publish_from(self, samples: int) -> RingSnapshot:
        """Publish if at least `samples` samples wait. Any process may call this method at any time."""
        for _ in range(_MAX_LOST_RACES):
            last, version = self._newest_and_version()
            claims = self._complete_claims(last)
            there = last.finished(pending_claims(last, claims))
            # A faster publisher may have missed newer claims.
            newest = (self._publish_next(last, version, claims) if there >= samples else None) or last
            there = max(there - (newest.inserted - last.inserted), 0)
            if there < samples:
                break
        return RingSnapshot(newest, there)

    def _publish_next(
        self, last: RingManifest, version: str | None, claims: list[SampleClaim], *, at_once: bool = False
    ) -> RingManifest | None:
        """Publish the manifest after `last`, for which the pointer had `version`."""
        ahead = next_manifest(last, claims, self.settings, int(self.clock() * 1000), at_once=at_once)
        if ahead is None:
            # A publisher may have died after the swap and before the deletion of claims. While the pointer does not
            # move, obsolete claims stay obsolete and can be deleted.
            useless = obsolete_claims(last, claims)
            if useless and self.pointer()[1] == version:
                self.store.delete([claim.key for claim in useless])
            return None
        pointed = self._advance_pointer(ahead, version)
        if pointed is None:
            return None
        useless = obsolete_claims(pointed, claims)
        if useless:
            self.store.delete([claim.key for claim in useless])
        return pointed

    def republish(self) -> None:
        """Publish the newest manifest under a new number, so that retention releases older manifests."""
        last, version = self._newest_and_version()
        if last.number:
            self._advance_pointer(replace(last, number=last.number + 1, at_ms=int(self.clock() * 1000)), version)

    def _advance_pointer(self, ahead: RingManifest, version: str | None) -> RingManifest | None:
        """Create a manifest, or read the existing one, and swap the pointer. Returns None if the pointer has moved."""
        if not self.store.create(manifest_key(ahead.number), [memoryview(ahead.to_bytes())]):
            # Another publisher made the manifest and died before the swap, or is about to swap. If the manifest was
            # already replaced and collected, the pointer has moved, and the swap below fails.
            try:
                ahead = self.manifest(ahead.number)
            except ManifestMissing:
                if self.pointer()[1] == version:
                    raise
                return None
        if self.store.swap(POINTER, encode_pointer(ahead), version) is None:
            return None
        self._remember(ahead)
        return ahead

    def publish_all(self, own: ObjectId | None, *, at_once: bool = False) -> bool:
        """Publish until the claim of `own` has counted or no sample is due. Returns True if the claim has counted.

        `own` None: publish until no sample is due. The method terminates however fast other writers claim.
        """
        in_vain = 0
        for _ in range(_TRIES):
            published = self.publish(at_once=at_once)
            if own is not None and (published or self.newest()).settled(own):
                return True
            in_vain = 0 if published is not None else in_vain + 1
            # With at_once or rolling, a publication is due until the claim counts; a failed publication then means that
            # another publisher was faster.
            due = own is not None and (at_once or self.settings.mode == "rolling")
            if in_vain > (_MAX_LOST_RACES if due else 0):
                break
        return False

    def _complete_claims(self, last: RingManifest) -> list[SampleClaim]:
        """List the claims without gaps: with every older claim of each listed claim's writer.

        A single listing may miss a concurrent claim and contain a later claim of the same writer.
        """
        found = self.claims()
        if not may_lack_claims(last, found):
            return found
        newest: dict[str, SampleClaim] = {}
        for one in found:
            newest[one.object.writer] = max(newest.get(one.object.writer, one), one, key=lambda claim: claim.object)
        older = [one for one in self.claims() if one.object <= newest.get(one.object.writer, one).object]
        return list({one.object: one for one in [*older, *found] if one.object.writer in newest}.values())

    def require_schema(self, schema: str) -> None:
        """Compare a sample's schema with the ring's schema, which the first sample sets.

        Raises SampleRefused for another schema, ObjectDamaged for a damaged stored schema.
        """
        if self._schema is None:
            self.store.create(SCHEMA, [memoryview(encode_schema(schema))])
            there = self.store.read(SCHEMA)
            try:
                self._schema = schema if there is None else decode_schema(there)
            except ValueError as error:
                raise ObjectDamaged(
                    f"{SCHEMA} is damaged: {error}", "Repair the ring: baton ring verify RING --repair"
                ) from error
        if schema != self._schema:
            raise SampleRefused(
                f"the sample is {_describe_schema(schema)}, and the ring expects {_describe_schema(self._schema)}",
                "Change the generator, or make another ring",
            )


def open_ring(place: str) -> Ring:
    """Open the ring at a place. Raises RingMismatch for a missing ring."""
    ring = Ring.open(open_store(place, make=False))
    ring.place = place
    return ring


def make_ring(place: str, settings: RingSettings) -> Ring:
    """Make or open the ring at a place. Raises RingMismatch for an existing ring with other settings."""
    ring = Ring.make(open_store(place, make=True), settings)
    ring.place = place
    return ring


class RingSnapshot(NamedTuple):
    """Newest manifest of a ring, and the number of waiting samples."""

    newest: RingManifest
    waiting: int
    """Number of claimed samples that are not yet readable."""


_SUMMARY = frozenset({"readable", "oldest_ms", "newest_ms"})
"""Further members of the pointer, for pages that read records and no manifests."""


class PointerRecord(NamedTuple):
    """Content of the pointer."""

    manifest: int
    """Number of the newest manifest."""
    at_ms: int | None
    """Time of the manifest (Unix ms)."""
    inserted: int
    """`inserted` of the manifest."""

    @classmethod
    def from_bytes(cls, data: bytes) -> PointerRecord:
        """Decode the pointer. Raises ValueError for other bytes."""
        content = decode_checksummed(data, _SUMMARY.union(cls._fields))
        number, inserted = content.get("manifest"), content.get("inserted", 0)
        if not isinstance(number, int) or number < 1 or not isinstance(inserted, int):
            raise ValueError(f"the pointer names {number!r}")
        return cls(number, content.get("at_ms"), inserted)


def encode_pointer(manifest: RingManifest) -> bytes:
    """Encode the pointer to a manifest, with the summary of the manifest."""
    claimed_ms = [slot.at_ms for slot in manifest.slots]
    summary = {
        "readable": len(manifest),
        "oldest_ms": min(claimed_ms, default=0),
        "newest_ms": max(claimed_ms, default=0),
    }
    return encode_checksummed(
        {**PointerRecord(manifest.number, manifest.at_ms, manifest.inserted)._asdict(), **summary}
    )


def encode_schema(schema: str) -> bytes:
    """Encode the schema for the store."""
    return encode_checksummed({"schema": json.loads(schema)})


def decode_schema(data: memoryview) -> str:
    """Decode a stored schema, with or without a digest. Raises ValueError."""
    there = bytes(data)
    if there.startswith(b"["):
        described, text = json.loads(there), there.decode()
    else:
        described = decode_checksummed(there, frozenset()).get("schema")
        text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    if not isinstance(described, list) or len(described) != 2 or not isinstance(described[1], list):
        raise ValueError("not a schema")
    return text


def _require_conditional_writes(store: RingBackend, settings: bytes) -> None:
    """Raise RingMismatch for a store that ignores conditions, because such a store would lose samples silently."""
    if store.create(SETTINGS, [memoryview(settings)]) or store.swap(POINTER, b"{}", _NO_VERSION) is not None:
        store.delete([SETTINGS, POINTER])
        raise RingMismatch(
            "the store ignores the conditions of writes (If-None-Match, If-Match)",
            "Use a store with conditional writes, such as S3, R2 or MinIO",
        )


def _read_settings(store: RingBackend) -> RingSettings:
    data = store.read(SETTINGS)
    if data is None:
        raise RingMismatch("there is no ring here", "Make a ring with make_ring, or name another place")
    try:
        return RingSettings.model_validate(decode_checksummed(data, RingSettings.model_fields.keys()))
    except ValidationError as error:
        raise RingMismatch(
            f"{SETTINGS} cannot be read: {error.errors()[0]['msg']}", "Use the version of Baton that made the ring"
        ) from error
    except ValueError as error:
        raise RingMismatch(
            f"{SETTINGS} cannot be read: {error}",
            "Delete the file and make the ring again with the same settings: its samples stay",
        ) from error


def _describe_schema(schema: str) -> str:
    """Format the arrays of a schema for messages."""
    _, arrays = json.loads(schema)
    parts = [f"{dtype.strip(chr(34)) or form} {shape}" for form, dtype, shape in arrays]
    return f"[{', '.join(parts)}]" if parts else "without arrays"


_PREFIXES = (INBOX, MANIFESTS, SAMPLES, WRITERS, READERS, PINS, GROUPS, QUARANTINE, GENERATORS, COPIES)


def remove_ring(place: str) -> int:
    """Remove a ring. Returns the number of removed objects and records. Raises RingMissing for a missing ring.

    Stop the processes of the ring first. The function removes the settings last, so that an interrupted removal can be
    repeated.
    """
    store = open_store(place, make=False)
    try:
        if isinstance(store, RemovingStore):
            return store.remove()
        if store.read(SETTINGS) is None:
            raise RingMissing(f"there is no ring at {place}", "Name the place of a ring")
        removed = delete_contents(store)
        if isinstance(store, DirectoryStore):
            _remove_empty(store.root)
        return removed
    finally:
        store.close()


def delete_contents(store: RingBackend) -> int:
    """Delete all objects and records of a ring. Returns their number, without the single records."""
    # The pointer goes first, so that readers and publishers find an empty ring instead of missing objects.
    store.delete([POINTER])
    removed = 0
    for prefix in _PREFIXES:
        keys = store.keys(prefix)
        store.delete(keys)
        removed += len(keys)
    store.delete([SCHEMA, PUBLISHER, WATCHED, ROOM, READ_BEFORE, SEEDS, SWAPS])
    store.delete([SETTINGS])
    return removed


def _remove_empty(root: Path) -> None:
    """Remove the empty directories of a ring."""
    (root / "lock").unlink(missing_ok=True)
    for directory in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            directory.rmdir()
    with contextlib.suppress(OSError):
        root.rmdir()
