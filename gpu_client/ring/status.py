"""How a ring stands, for people and programs; and whether all that it lists can be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_client.ring.collector import read_so_far
from gpu_client.ring.errors import ObjectDamaged
from gpu_client.ring.leases import WATCHED, WRITERS, content_of
from gpu_client.ring.manifest import SAMPLES, Manifest, ObjectId
from gpu_client.ring.objects import StoredSamples
from gpu_client.ring.observations import seen_in
from gpu_client.ring.reader import quarantined, readers_of
from gpu_client.ring.ring import Ring


@dataclass(frozen=True)
class WriterRow:
    """One that generates, as it says of itself."""

    name: str
    alive: bool
    put: int
    put_bytes: int
    refused: int
    waited_s: float
    """For readers, or for room."""
    silent_s: float = 0.0
    """For so long it has given no sign of life, where that is longer than a lease; a lease and a half is death."""

    @property
    def at_work(self) -> bool:
        """Whether it is alive as far as is known."""
        return self.alive and not self.silent_s

    @property
    def state(self) -> str:
        """For people: nothing of a writer that is at work."""
        return "dead" if not self.alive else f"silent for {self.silent_s:.0f} s" if self.silent_s else ""


@dataclass(frozen=True)
class ReaderRow:
    """One that reads, as it says of itself."""

    name: str
    read: int
    waited_s: float
    """For samples."""
    damaged: int
    manifests: list[int]


@dataclass(frozen=True)
class Status:
    """A ring at one moment."""

    at: float
    """Unix time."""
    cap: int
    mode: str
    manifest: int
    readable: int
    inserted: int
    """Samples that have become readable so far."""
    finished: int
    """Samples that wait to become readable."""
    read: int
    """By all readers together."""
    oldest_s: float | None
    """Age of the oldest sample that can be read, since it was claimed."""
    newest_s: float | None
    objects: int
    """Stored, those that nobody can read any more among them."""
    unlisted: int
    """Of these: in flight, or to be removed."""
    damaged: Mapping[str, str]
    writers: list[WriterRow] = field(default_factory=list)
    readers: list[ReaderRow] = field(default_factory=list)

    @property
    def at_work(self) -> list[WriterRow]:
        """Writers that give signs of life: only these are summed up."""
        return [row for row in self.writers if row.at_work]

    @property
    def reuse(self) -> float | None:
        """How often a sample was read in the mean."""
        return self.read / self.inserted if self.inserted else None

    def rates(self, before: Status) -> tuple[float, float] | None:
        """Samples that became readable, and were read, per second since then."""
        seconds = self.at - before.at
        if seconds <= 0:
            return None
        # What a reader that has died had read last may be lost: it never becomes less than nothing.
        return (self.inserted - before.inserted) / seconds, max(self.read - before.read, 0) / seconds


def status_of(ring: Ring) -> Status:
    """Raises ManifestMissing, and OSError where the store cannot be reached."""
    now = ring.clock()
    newest = ring.newest()
    listed = {slot.object for slot in newest.slots}
    objects = [found for found in map(ObjectId.of_key, ring.store.keys(SAMPLES)) if found is not None]
    ages_s = [now - slot.at_ms / 1000 for slot in newest.slots]
    return Status(
        at=now,
        cap=ring.settings.cap,
        mode=ring.settings.mode,
        manifest=newest.number,
        readable=len(newest),
        inserted=newest.inserted,
        finished=newest.finished(ring.claims()),
        read=read_so_far(ring),
        oldest_s=max(ages_s, default=None),
        newest_s=min(ages_s, default=None),
        objects=len(objects),
        unlisted=sum(found not in listed for found in objects),
        damaged=quarantined(ring),
        writers=_writers(ring),
        readers=[_reader(name, content) for name, content in sorted(readers_of(ring).items())],
    )


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


def _writers(ring: Ring) -> list[WriterRow]:
    noted = seen_in(ring.store.record(WATCHED))
    rows = []
    for key in ring.store.keys(WRITERS):
        record = ring.store.record(key)
        version, unchanged_s = noted.get(key, ("", 0.0))
        silent = record is not None and record.version == version and unchanged_s > ring.settings.lease_s
        rows.append(_writer(key.removeprefix(WRITERS), content_of(record), unchanged_s if silent else 0.0))
    return rows


def _writer(name: str, content: Mapping[str, Any], silent_s: float) -> WriterRow:
    return WriterRow(
        name=name,
        alive=not content.get("dead", False),
        put=int(content.get("put", 0)),
        put_bytes=int(content.get("bytes", 0)),
        refused=int(content.get("refused", 0)),
        waited_s=float(content.get("waited_s", 0)),
        silent_s=silent_s,
    )


def _reader(name: str, content: Mapping[str, Any]) -> ReaderRow:
    manifests = content.get("manifests", [])
    return ReaderRow(
        name=name,
        read=int(content.get("read", 0)),
        waited_s=float(content.get("waited_s", 0)),
        damaged=int(content.get("damaged", 0)),
        manifests=manifests if isinstance(manifests, list) else [],
    )
