"""How a ring stands, for people and programs; and whether all that it lists can be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from gpu_client.ring.core.damage_report import quarantined
from gpu_client.ring.core.garbage_collector import read_so_far
from gpu_client.ring.core.liveness import seen_in
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.manifest import ObjectId
from gpu_client.ring.format.records import SAMPLES, WATCHED, WRITERS, content_of
from gpu_client.ring.reading.reader import readers_of


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


KEPT_LOOKS = 120
REUSE_LOOKS = 30
"""Reuse now is counted over so many looks: single ones say little, since samples come one at a time."""


class _Told(NamedTuple):
    at: float
    samples: int
    size_bytes: int
    waited_s: float


@dataclass(frozen=True)
class Pace:
    """How fast one writer or reader is, of late."""

    per_s: float
    """Samples."""
    bytes_per_s: float
    waited_share: float
    """Of its time."""


class Trend:
    """Is given one look after the other."""

    def __init__(self) -> None:
        self._looks: deque[Status] = deque(maxlen=KEPT_LOOKS)
        self._writers: dict[str, list[_Told]] = {}
        self._readers: dict[str, list[_Told]] = {}

    def look(self, found: Status) -> None:
        """The ring as it is now."""
        self._looks.append(found)
        told = {row.name: _Told(found.at, row.put, row.put_bytes, row.waited_s) for row in found.at_work}
        self._writers = _followed(self._writers, told)
        told = {row.name: _Told(found.at, row.read, 0, row.waited_s) for row in found.readers}
        self._readers = _followed(self._readers, told)

    @property
    def rates(self) -> list[tuple[float, float]]:
        """Samples that became readable, and were read, per second between each two looks."""
        return [found for before, after in pairwise(self._looks) if (found := after.rates(before)) is not None]

    @property
    def reuse(self) -> float | None:
        """Reads of a sample of late; None while nothing comes."""
        looks = list(self._looks)[-REUSE_LOOKS:]
        if len(looks) < 2 or looks[-1].inserted == looks[0].inserted:
            return None
        return max(looks[-1].read - looks[0].read, 0) / (looks[-1].inserted - looks[0].inserted)

    def writer(self, name: str) -> Pace | None:
        """None before it has told twice."""
        return self._pace(self._writers.get(name, ()))

    def reader(self, name: str) -> Pace | None:
        """None before it has told twice."""
        return self._pace(self._readers.get(name, ()))

    @property
    def bytes_per_s(self) -> float:
        """Of all writers."""
        return sum(pace.bytes_per_s for pace in self._paces(self._writers))

    @property
    def writers_waited_share(self) -> float | None:
        """In the mean of those that have told twice."""
        return _mean(pace.waited_share for pace in self._paces(self._writers))

    @property
    def readers_waited_share(self) -> float | None:
        """In the mean of those that have told twice."""
        return _mean(pace.waited_share for pace in self._paces(self._readers))

    def _paces(self, told: dict[str, list[_Told]]) -> list[Pace]:
        return [pace for one in told.values() if (pace := self._pace(one)) is not None]

    def _pace(self, told: Sequence[_Told]) -> Pace | None:
        if len(told) < 2:
            return None
        before, after = told
        # Each tells at intervals of its own. One that is overdue has become slower.
        seconds = max(after.at - before.at, self._looks[-1].at - after.at)
        if seconds <= 0:
            return None
        waited_share = min(max(after.waited_s - before.waited_s, 0.0) / seconds, 1.0)
        return Pace(
            max(after.samples - before.samples, 0) / seconds,
            max(after.size_bytes - before.size_bytes, 0) / seconds,
            waited_share,
        )


def _followed(before: dict[str, list[_Told]], now: dict[str, _Told]) -> dict[str, list[_Told]]:
    """Of each that is there, the last two things that it told; one look that shows nothing new is none."""
    found = {}
    for name, one in now.items():
        told = before.get(name, [])
        if told and one[1:] == told[-1][1:]:
            found[name] = told
        elif told and one.samples < told[-1].samples:
            found[name] = [one]  # it has begun anew
        else:
            found[name] = [*told[-1:], one]
    return found


def _mean(values: Iterable[float]) -> float | None:
    there = list(values)
    return sum(there) / len(there) if there else None
