"""One ring in one store: its settings, its newest manifest, and how the next one is published.

ring.json            what the ring is (`RingSettings`)
schema.json          what its samples are
samples/<writer>/... objects (`objects.py`)
inbox/...            claims: objects that are to become readable (`manifest.py`)
manifests/<number>   which samples can be read
pointer              the newest manifest's number
writers/ readers/ pins/ publisher   who is alive, and what readers still need (`leases.py`)
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable

from pydantic import ValidationError

from gpu_client.ring.errors import ManifestMissing, RingMismatch, SampleRefused
from gpu_client.ring.manifest import EMPTY, INBOX, Claim, Manifest, advanced, doubtful, manifest_key
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store import RingStore

SETTINGS = "ring.json"
SCHEMA = "schema.json"
POINTER = "pointer"
_NO_VERSION = "0" * 32
_KEPT = 8
"""Manifests that a process remembers."""


class Ring:
    """What writers, readers, publishers and collectors share. Threads may share it."""

    def __init__(self, store: RingStore, settings: RingSettings, *, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.settings = settings
        self.clock = clock
        self._manifests: OrderedDict[int, Manifest] = OrderedDict()
        self._schema: str | None = None

    @classmethod
    def make(cls, store: RingStore, settings: RingSettings, *, clock: Callable[[], float] = time.time) -> Ring:
        """Open the ring that is there, or make it. Raises RingMismatch where there is one with other settings."""
        data = settings.model_dump_json().encode()
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
        return cls(store, settings, clock=clock)

    @classmethod
    def open(cls, store: RingStore, *, clock: Callable[[], float] = time.time) -> Ring:
        """The ring that is there. Raises RingMismatch if there is none."""
        return cls(store, _settings(store), clock=clock)

    def pointer(self) -> tuple[int, str | None]:
        """The newest manifest's number, 0 before there is any, and the pointer's version. Raises ManifestMissing."""
        record = self.store.record(POINTER)
        if record is None:
            return 0, None
        try:
            number = json.loads(record.data)["manifest"]
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"names {number!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestMissing(
                f"the pointer cannot be read ({error})", "baton ring verify --repair sets it anew"
            ) from error
        return number, record.version

    def manifest(self, number: int) -> Manifest:
        """One that is retained. Raises ManifestMissing."""
        if number == 0:
            return EMPTY
        found = self._manifests.get(number)
        if found is not None:
            return found
        data = self.store.read(manifest_key(number))
        if data is None:
            raise ManifestMissing(
                f"manifest {number} is not there", "A newer one has replaced it, or the store lost it"
            )
        try:
            found = Manifest.from_bytes(data)
        except ValueError as error:
            raise ManifestMissing(
                f"manifest {number} cannot be read ({error})", "baton ring verify shows what is left"
            ) from error
        self._manifests[number] = found
        while len(self._manifests) > _KEPT:
            self._manifests.popitem(last=False)
        return found

    def newest(self) -> Manifest:
        """The manifest that the pointer names."""
        return self.manifest(self.pointer()[0])

    def claims(self) -> list[Claim]:
        """What waits, and what was published but not cleared away yet."""
        return [claim for claim in map(Claim.of_key, self.store.keys(INBOX)) if claim is not None]

    def publish(self, *, at_once: bool = False) -> Manifest | None:
        """Make readable what is due, `at_once` also what is not; None if that is nothing, or another was faster.

        Any process may call this at any time. The manifest is stored under its number, which only one of many can do;
        whoever finds it there points to it. So it does not matter where a publisher dies.
        """
        number, version = self.pointer()
        last = self.manifest(number)
        claims = self._waiting(last)
        ahead = advanced(last, claims, self.settings, int(self.clock() * 1000), at_once=at_once)
        if ahead is None:
            # Somebody may have died behind the pointer, and before this.
            self.store.delete([claim.key for claim in claims if last.settled(claim.object)])
            return None
        key = manifest_key(ahead.number)
        if not self.store.create(key, [memoryview(ahead.to_bytes())]):
            # Of one that died before pointing to it, or is just about to. It may be that it is pointed to already, and
            # forgotten: then the pointer has moved, and the swap below does not happen.
            try:
                ahead = self.manifest(ahead.number)
            except ManifestMissing:
                return None
        data = json.dumps({"manifest": ahead.number, "at_ms": ahead.at_ms, "inserted": ahead.inserted}).encode()
        if self.store.swap(POINTER, data, version) is None:
            return None
        self._manifests[ahead.number] = ahead
        self.store.delete([claim.key for claim in claims if ahead.settled(claim.object)])
        return ahead

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
        """The first sample's schema is the ring's. Raises SampleRefused for any other."""
        if self._schema is None:
            self.store.create(SCHEMA, [memoryview(schema.encode())])
            there = self.store.read(SCHEMA)
            self._schema = bytes(there).decode() if there is not None else schema
        if schema != self._schema:
            raise SampleRefused(
                f"it is {_said(schema)}, and the ring's samples are {_said(self._schema)}",
                "Change the generator, or make another ring",
            )


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
        return RingSettings.model_validate_json(bytes(data))
    except ValidationError as error:
        raise RingMismatch(
            f"{SETTINGS} cannot be read: {error.errors()[0]['msg']}", "Use the version that made it"
        ) from error


def _said(schema: str) -> str:
    """A schema, for people."""
    _, arrays = json.loads(schema)
    parts = [f"{dtype.strip(chr(34)) or form} {shape}" for form, dtype, shape in arrays]
    return f"[{', '.join(parts)}]" if parts else "without arrays"
