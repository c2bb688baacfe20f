"""One ring in one store: its settings, its newest manifest, and how the next one is published.

ring.json            what the ring is (`RingSettings`)
schema.json          what its samples are
samples/<writer>/... objects (`objects.py`)
inbox/...            claims: objects that are to become readable (`manifest.py`)
manifests/<number>   which samples can be read
pointer              the newest manifest's number
writers/ readers/ pins/ groups/ publisher   who is alive, and what readers still need (`leases.py`, `group.py`)
quarantine/          notes of damaged objects; `read`: what readers that have gone have read (`collector.py`)
generators/ copies/  what generators have counted (`tally.py`, `copies.py`); `seeds`: which come next (`seeds.py`)
swaps                when generations became readable, for logs (`swaps.py`)
"""

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
    Claim,
    Manifest,
    ObjectId,
    advanced,
    doubtful,
    manifest_key,
    stray,
    waiting,
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
    sealed,
    unsealed,
)
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store import fork_lock
from gpu_client.ring.store.filesystem import DirectoryStore
from gpu_client.ring.store.protocol import RemovingStore, RingStore, SyncingStore
from gpu_client.ring.store.uri import store_at

_NO_VERSION = "0" * 32
_KEPT = 8
"""Manifests that a process remembers, if they are small."""
_KEPT_SLOTS = 100_000
"""Of all that it remembers, besides the newest: some 300 bytes each."""
_TRIES = 100
_FASTER = 10


class Ring:
    """What writers, readers, publishers and collectors share. Threads may share it."""

    def __init__(self, store: RingStore, settings: RingSettings, *, clock: Callable[[], float] = time.time) -> None:
        self.place = ""
        """Where it lies, for messages, if it was opened by that."""
        self.store = store
        self.settings = settings
        self.clock = clock
        self._manifests: OrderedDict[int, Manifest] = OrderedDict()
        self._lock = fork_lock.lock()
        self._schema: str | None = None
        self._pointed = 0
        if settings.fsync:
            if not isinstance(store, SyncingStore):
                raise RingMismatch(
                    "fsync is for rings in directories, and this one is not in a directory",
                    "Leave fsync out: a bucket, and the control plane, answer when what they were given is durable",
                )
            store.sync_writes()

    @classmethod
    def make(cls, store: RingStore, settings: RingSettings, *, clock: Callable[[], float] = time.time) -> Ring:
        """Open the ring that is there, or make it. Raises RingMismatch where there is one with other settings."""
        # Before the settings are stored: the store flushes them, too, or refuses before there is anything.
        ring = cls(store, settings, clock=clock)
        # What is not set is left out: who does not know of it yet can open the ring.
        data = sealed(settings.model_dump(mode="json", exclude_none=True))
        if store.create(SETTINGS, [memoryview(data)]):
            _require_promises(store, data)
        else:
            there = _settings(store)
            if there != settings:
                ours, theirs = settings.model_dump(), there.model_dump()
                said = ", ".join(
                    f"{name} {theirs[name]!r} instead of {ours[name]!r}" for name in ours if ours[name] != theirs[name]
                )
                raise RingMismatch(f"there is a ring already, with {said}", "Open it as it is, or name another place")
        return ring

    @classmethod
    def open(cls, store: RingStore, *, clock: Callable[[], float] = time.time) -> Ring:
        """The ring that is there. Raises RingMismatch if there is none."""
        return cls(store, _settings(store), clock=clock)

    def pointer(self) -> tuple[int, str | None]:
        """The newest manifest's number, 0 before there is any, and the pointer's version.

        Raises ManifestMissing for a pointer that cannot be read, RingMismatch where the ring was removed.
        """
        pointed = self._pointed  # before it is looked: another thread may publish meanwhile
        record = self.store.record(POINTER)
        if record is None:
            if pointed:
                raise RingMismatch("the ring was removed while it was used", "Make it again, and begin anew")
            if not self._has_begun():
                return 0, None
            record = self.store.record(POINTER)  # made since
            if record is None:
                raise ManifestMissing("the pointer is not there", "baton ring verify --repair sets it anew")
        try:
            pointed_to = Pointed.from_bytes(record.data)
        except ValueError as error:
            raise ManifestMissing(
                f"the pointer cannot be read ({error})", "baton ring verify --repair sets it anew"
            ) from error
        number, at_ms = pointed_to.manifest, pointed_to.at_ms
        with self._lock:
            known = self._manifests.get(number)
            if number < self._pointed or (known is not None and at_ms not in (None, known.at_ms)):
                # Repaired, or removed and made anew: what this process remembers may be of another manifest.
                self._manifests.clear()
            self._pointed = number
        return number, record.version

    def _has_begun(self) -> bool:
        """Whether something was pointed to: the first manifest may be of one that died before it could."""
        return any(key > manifest_key(1) for key in self.store.keys(MANIFESTS))

    def manifest(self, number: int) -> Manifest:
        """One that is retained. Raises ManifestMissing."""
        if number == 0:
            return EMPTY
        with self._lock:
            found = self._manifests.get(number)
        if found is not None:
            return found
        data = self.store.read(manifest_key(number))
        if data is None:
            raise ManifestMissing(
                f"manifest {number} is not there",
                "A newer one has replaced it, or it was lost: see baton ring verify --repair",
            )
        try:
            found = Manifest.from_bytes(data, number)
        except ValueError as error:
            raise ManifestMissing(
                f"manifest {number} cannot be read ({error})", "baton ring verify --repair sets the ring anew"
            ) from error
        self._remember(found)
        return found

    def newest(self) -> Manifest:
        """The manifest that the pointer names. Raises ManifestMissing, RingMismatch."""
        return self._pointed_at()[0]

    def _pointed_at(self) -> tuple[Manifest, str | None]:
        """The newest manifest and the pointer's version. Nobody keeps it for this process: it may be gone by now."""
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

    def _remember(self, manifest: Manifest) -> None:
        with self._lock:
            self._manifests[manifest.number] = manifest
            slots = sum(map(len, self._manifests.values())) - len(manifest)
            while len(self._manifests) > _KEPT or (slots > _KEPT_SLOTS and len(self._manifests) > 1):
                slots -= len(self._manifests.popitem(last=False)[1])

    def claims(self) -> list[Claim]:
        """What waits, and what was published but not cleared away yet."""
        return [claim for claim in map(Claim.of_key, self.store.keys(INBOX)) if claim is not None]

    def publish(self, *, at_once: bool = False) -> Manifest | None:
        """Make readable what is due, `at_once` also what is not; None if that is nothing, or another was faster.

        Any process may call this at any time. The manifest is stored under its number, which only one of many can do;
        whoever finds it there points to it. So it does not matter where a publisher dies.
        """
        last, version = self._pointed_at()
        return self._published(last, version, self._waiting(last), at_once=at_once)

    def publish_from(self, samples: int) -> Looked:
        """Publish if at least so many samples wait. Any process may call this at any time, too."""
        for _ in range(_FASTER):
            last, version = self._pointed_at()
            claims = self._waiting(last)
            there = last.finished(waiting(last, claims))
            # Another that was faster may have published without what was claimed since.
            newest = (self._published(last, version, claims) if there >= samples else None) or last
            there = max(there - (newest.inserted - last.inserted), 0)
            if there < samples:
                break
        return Looked(newest, there)

    def _published(
        self, last: Manifest, version: str | None, claims: list[Claim], *, at_once: bool = False
    ) -> Manifest | None:
        """The manifest behind `last`, of which the pointer had that version."""
        ahead = advanced(last, claims, self.settings, int(self.clock() * 1000), at_once=at_once)
        if ahead is None:
            # Somebody may have died behind the pointer, and before this. If the pointer has not moved, nothing has
            # become known that was not when the inbox was listed.
            useless = stray(last, claims)
            if useless and self.pointer()[1] == version:
                self.store.delete([claim.key for claim in useless])
            return None
        pointed = self._pointed_to(ahead, version)
        if pointed is None:
            return None
        useless = stray(pointed, claims)
        if useless:
            self.store.delete([claim.key for claim in useless])
        return pointed

    def turn_over(self) -> None:
        """List once more what is readable, so that older manifests, and what only they list, are not retained."""
        last, version = self._pointed_at()
        if last.number:
            self._pointed_to(replace(last, number=last.number + 1, at_ms=int(self.clock() * 1000)), version)

    def _pointed_to(self, ahead: Manifest, version: str | None) -> Manifest | None:
        """Store a manifest and point to it, or to the one that is there; None if the pointer has moved."""
        if not self.store.create(manifest_key(ahead.number), [memoryview(ahead.to_bytes())]):
            # Of one that died before pointing to it, or is just about to. It may be that it is pointed to already, and
            # forgotten: then the pointer has moved, and the swap below does not happen.
            try:
                ahead = self.manifest(ahead.number)
            except ManifestMissing:
                if self.pointer()[1] == version:
                    raise
                return None
        if self.store.swap(POINTER, pointer_to(ahead), version) is None:
            return None
        self._remember(ahead)
        return ahead

    def publish_all(self, own: ObjectId | None, *, at_once: bool = False) -> bool:
        """Publish until that object's claim has counted, or nothing is due; whether it has. None: until nothing is due.

        It ends, however fast others go on claiming.
        """
        in_vain = 0
        for _ in range(_TRIES):
            published = self.publish(at_once=at_once)
            if own is not None and (published or self.newest()).settled(own):
                return True
            in_vain = 0 if published is not None else in_vain + 1
            # At once, or rolling, there is something due until the claim counts: another publisher was faster.
            due = own is not None and (at_once or self.settings.mode == "rolling")
            if in_vain > (_FASTER if due else 0):
                break
        return False

    def _waiting(self, last: Manifest) -> list[Claim]:
        """The inbox, and of each writer all claims that are older than its newest here.

        A listing may miss one that was made while it was going on, and still have a later one of the same writer.
        """
        found = self.claims()
        if not doubtful(last, found):
            return found
        newest: dict[str, Claim] = {}
        for one in found:
            newest[one.object.writer] = max(newest.get(one.object.writer, one), one, key=lambda claim: claim.object)
        older = [one for one in self.claims() if one.object <= newest.get(one.object.writer, one).object]
        return list({one.object: one for one in [*older, *found] if one.object.writer in newest}.values())

    def require_schema(self, schema: str) -> None:
        """The first sample's schema is the ring's. Raises SampleRefused for any other, and ObjectDamaged."""
        if self._schema is None:
            self.store.create(SCHEMA, [memoryview(schema_document(schema))])
            there = self.store.read(SCHEMA)
            try:
                self._schema = schema if there is None else stored_schema(there)
            except ValueError as error:
                raise ObjectDamaged(
                    f"{SCHEMA} is damaged: {error}", "baton ring verify --repair sets it anew"
                ) from error
        if schema != self._schema:
            raise SampleRefused(
                f"it is {_said(schema)}, and the ring's samples are {_said(self._schema)}",
                "Change the generator, or make another ring",
            )


def open_ring(place: str) -> Ring:
    """The ring that is there. Raises RingMismatch if there is none."""
    ring = Ring.open(store_at(place, make=False))
    ring.place = place
    return ring


def make_ring(place: str, settings: RingSettings) -> Ring:
    """The ring that is there, or a new one. Raises RingMismatch where it has other settings."""
    ring = Ring.make(store_at(place, make=True), settings)
    ring.place = place
    return ring


class Looked(NamedTuple):
    """What there is behind a look for samples that are due."""

    newest: Manifest
    waiting: int
    """Samples that are not readable yet."""


class Pointed(NamedTuple):
    """What the pointer says."""

    manifest: int
    """The newest one's number."""
    at_ms: int | None
    """When that was made."""
    inserted: int
    """As it says itself."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Pointed:
        """Raises ValueError for what is no pointer."""
        content = unsealed(data, frozenset(cls._fields))
        number, inserted = content.get("manifest"), content.get("inserted", 0)
        if not isinstance(number, int) or number < 1 or not isinstance(inserted, int):
            raise ValueError(f"it names {number!r}")
        return cls(number, content.get("at_ms"), inserted)


def pointer_to(manifest: Manifest) -> bytes:
    """The content of the pointer that makes it the newest."""
    return sealed(Pointed(manifest.number, manifest.at_ms, manifest.inserted)._asdict())


def schema_document(schema: str) -> bytes:
    """How it is stored."""
    return sealed({"schema": json.loads(schema)})


def stored_schema(data: memoryview) -> str:
    """Raises ValueError for what is none. One without a digest was stored as it is."""
    there = bytes(data)
    if there.startswith(b"["):
        said, text = json.loads(there), there.decode()
    else:
        said = unsealed(there, frozenset()).get("schema")
        text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    if not isinstance(said, list) or len(said) != 2 or not isinstance(said[1], list):
        raise ValueError("it is no schema")
    return text


def _require_promises(store: RingStore, settings: bytes) -> None:
    """Raises RingMismatch for a store that writes whatever the conditions are: samples would be lost there, unseen."""
    if store.create(SETTINGS, [memoryview(settings)]) or store.swap(POINTER, b"{}", _NO_VERSION) is not None:
        store.delete([SETTINGS, POINTER])
        raise RingMismatch(
            "the store there does not refuse to write over what is there (If-None-Match, If-Match)",
            "Use one that keeps conditions, as S3, R2 and MinIO do",
        )


def _settings(store: RingStore) -> RingSettings:
    data = store.read(SETTINGS)
    if data is None:
        raise RingMismatch("there is no ring here", "Make one with Ring.make, or name the place where it is")
    try:
        return RingSettings.model_validate(unsealed(data, RingSettings.model_fields.keys()))
    except ValidationError as error:
        raise RingMismatch(
            f"{SETTINGS} cannot be read: {error.errors()[0]['msg']}", "Use the version that made it"
        ) from error
    except ValueError as error:
        raise RingMismatch(
            f"{SETTINGS} cannot be read: {error}",
            "Delete it, and make the ring again with the settings that it had: its samples stay",
        ) from error


def _said(schema: str) -> str:
    """A schema, for people."""
    _, arrays = json.loads(schema)
    parts = [f"{dtype.strip(chr(34)) or form} {shape}" for form, dtype, shape in arrays]
    return f"[{', '.join(parts)}]" if parts else "without arrays"


_PREFIXES = (INBOX, MANIFESTS, SAMPLES, WRITERS, READERS, PINS, GROUPS, QUARANTINE, GENERATORS, COPIES)


def remove_ring(place: str) -> int:
    """Remove a ring; return how many objects and records are gone. Raises RingMissing if there is no ring.

    Its settings go last: whatever is interrupted is still a ring, and can be removed.
    """
    store = store_at(place, make=False)
    try:
        if isinstance(store, RemovingStore):
            return store.remove()
        if store.read(SETTINGS) is None:
            raise RingMissing(f"there is no ring at {place}", "Name the place where it is")
        removed = emptied(store)
        if isinstance(store, DirectoryStore):
            _remove_empty(store.root)
        return removed
    finally:
        store.close()


def emptied(store: RingStore) -> int:
    """The same of a store."""
    # The pointer first: readers and publishers find an empty ring, not one that lacks what it lists.
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
    """The directories that a ring has made; one in which something else lies stays."""
    (root / "lock").unlink(missing_ok=True)
    for directory in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            directory.rmdir()
    with contextlib.suppress(OSError):
        root.rmdir()
