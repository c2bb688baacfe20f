"""Read the state of a ring, and compute rates from successive states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from gpu_client.ring.core.damage_report import list_quarantined
from gpu_client.ring.core.garbage_collector import count_samples_read
from gpu_client.ring.core.liveness import decode_silences
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.manifest import ObjectId
from gpu_client.ring.format.records import SAMPLES, WATCHED, WRITERS, decode_record
from gpu_client.ring.reading.reader import list_readers


@dataclass(frozen=True)
class WriterRow:
    """State of a generator, from its record."""

    name: str
    alive: bool
    put: int
    put_bytes: int
    refused: int
    waited_s: float
    """Total seconds of waiting for readers or space."""
    silent_s: float = 0.0
    """Seconds since the last renewal if more than a lease, else 0; after 1.5 leases the writer is dead."""

    @property
    def at_work(self) -> bool:
        """Return True for a writer without signs of death."""
        return self.alive and not self.silent_s

    @property
    def state(self) -> str:
        """Return the state as text; "" for a working writer."""
        return "dead" if not self.alive else f"silent for {self.silent_s:.0f} s" if self.silent_s else ""


@dataclass(frozen=True)
class ReaderRow:
    """State of a reader, from its record."""

    name: str
    read: int
    waited_s: float
    """Total seconds of waiting for samples."""
    damaged: int
    manifests: list[int]


@dataclass(frozen=True)
class RingStatus:
    """State of a ring at one moment."""

    at: float
    """Unix time of the state."""
    cap: int
    mode: str
    manifest: int
    readable: int
    inserted: int
    """Number of samples that have become readable."""
    finished: int
    """Number of claimed samples that are not yet readable."""
    read: int
    """Number of samples read by all readers."""
    oldest_s: float | None
    """Seconds since the claim of the oldest readable sample."""
    newest_s: float | None
    objects: int
    """Number of stored objects, including garbage."""
    unlisted: int
    """Number of pending and garbage objects."""
    damaged: Mapping[str, str]
    writers: list[WriterRow] = field(default_factory=list)
    readers: list[ReaderRow] = field(default_factory=list)

    @property
    def at_work(self) -> list[WriterRow]:
        """Return the working writers, the only writers in sums."""
        return [row for row in self.writers if row.at_work]

    @property
    def reuse(self) -> float | None:
        """Return the mean number of reads of a sample."""
        return self.read / self.inserted if self.inserted else None

    def rates(self, before: RingStatus) -> tuple[float, float] | None:
        """Return the samples per second that became readable, and that were read, since `before`."""
        seconds = self.at - before.at
        if seconds <= 0:
            return None
        # The last reads of a dead reader may be lost, therefore the difference may be negative.
        return (self.inserted - before.inserted) / seconds, max(self.read - before.read, 0) / seconds


def read_status(ring: Ring) -> RingStatus:
    """Read the state. Raises ManifestMissing, and OSError for an unreachable store."""
    now = ring.clock()
    newest = ring.newest()
    listed = {slot.object for slot in newest.slots}
    objects = [found for found in map(ObjectId.of_key, ring.store.keys(SAMPLES)) if found is not None]
    ages_s = [now - slot.at_ms / 1000 for slot in newest.slots]
    return RingStatus(
        at=now,
        cap=ring.settings.cap,
        mode=ring.settings.mode,
        manifest=newest.number,
        readable=len(newest),
        inserted=newest.inserted,
        finished=newest.finished(ring.claims()),
        read=count_samples_read(ring),
        oldest_s=max(ages_s, default=None),
        newest_s=min(ages_s, default=None),
        objects=len(objects),
        unlisted=sum(found not in listed for found in objects),
        damaged=list_quarantined(ring),
        writers=_writers(ring),
        readers=[_reader(name, content) for name, content in sorted(list_readers(ring).items())],
    )


def _writers(ring: Ring) -> list[WriterRow]:
    silences = decode_silences(ring.store.record(WATCHED))
    rows = []
    for key in ring.store.keys(WRITERS):
        record = ring.store.record(key)
        version, unchanged_s = silences.get(key, ("", 0.0))
        silent = record is not None and record.version == version and unchanged_s > ring.settings.lease_s
        rows.append(_writer(key.removeprefix(WRITERS), decode_record(record), unchanged_s if silent else 0.0))
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


MAX_STATUSES = 120
REUSE_STATUSES = 30
"""Number of states for the current reuse; over fewer states, single samples would make the value jump."""


class _RateSample(NamedTuple):
    at: float
    samples: int
    size_bytes: int
    waited_s: float


@dataclass(frozen=True)
class ProcessRate:
    """Current rate of one writer or reader."""

    per_s: float
    """Samples per second."""
    bytes_per_s: float
    waited_share: float
    """Share of waiting in the time."""


class RateTrend:
    """Rates from successive states of a ring."""

    def __init__(self) -> None:
        self._statuses: deque[RingStatus] = deque(maxlen=MAX_STATUSES)
        self._writers: dict[str, list[_RateSample]] = {}
        self._readers: dict[str, list[_RateSample]] = {}

    def add(self, found: RingStatus) -> None:
        """Add the current state."""
        self._statuses.append(found)
        samples = {row.name: _RateSample(found.at, row.put, row.put_bytes, row.waited_s) for row in found.at_work}
        self._writers = _follow(self._writers, samples)
        samples = {row.name: _RateSample(found.at, row.read, 0, row.waited_s) for row in found.readers}
        self._readers = _follow(self._readers, samples)

    @property
    def rates(self) -> list[tuple[float, float]]:
        """Return the samples per second that became readable, and that were read, between successive states."""
        return [found for before, after in pairwise(self._statuses) if (found := after.rates(before)) is not None]

    @property
    def reuse(self) -> float | None:
        """Return the current mean number of reads of a sample; None without new samples."""
        statuses = list(self._statuses)[-REUSE_STATUSES:]
        if len(statuses) < 2 or statuses[-1].inserted == statuses[0].inserted:
            return None
        return max(statuses[-1].read - statuses[0].read, 0) / (statuses[-1].inserted - statuses[0].inserted)

    def writer(self, name: str) -> ProcessRate | None:
        """Return the rate of a writer; None before its second report."""
        return self._pace(self._writers.get(name, ()))

    def reader(self, name: str) -> ProcessRate | None:
        """Return the rate of a reader; None before its second report."""
        return self._pace(self._readers.get(name, ()))

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes per second of all writers."""
        return sum(pace.bytes_per_s for pace in self._paces(self._writers))

    @property
    def writers_waited_share(self) -> float | None:
        """Return the mean share of waiting of the writers with a rate."""
        return _mean(pace.waited_share for pace in self._paces(self._writers))

    @property
    def readers_waited_share(self) -> float | None:
        """Return the mean share of waiting of the readers with a rate."""
        return _mean(pace.waited_share for pace in self._paces(self._readers))

    def _paces(self, samples: dict[str, list[_RateSample]]) -> list[ProcessRate]:
        return [pace for one in samples.values() if (pace := self._pace(one)) is not None]

    def _pace(self, samples: Sequence[_RateSample]) -> ProcessRate | None:
        if len(samples) < 2:
            return None
        before, after = samples
        # Each process reports at its own interval; a process with an overdue report has become slower.
        seconds = max(after.at - before.at, self._statuses[-1].at - after.at)
        if seconds <= 0:
            return None
        waited_share = min(max(after.waited_s - before.waited_s, 0.0) / seconds, 1.0)
        return ProcessRate(
            max(after.samples - before.samples, 0) / seconds,
            max(after.size_bytes - before.size_bytes, 0) / seconds,
            waited_share,
        )


def _follow(before: dict[str, list[_RateSample]], now: dict[str, _RateSample]) -> dict[str, list[_RateSample]]:
    """Keep the last two different samples of each process."""
    found = {}
    for name, one in now.items():
        samples = before.get(name, [])
        if samples and one[1:] == samples[-1][1:]:
            found[name] = samples
        elif samples and one.samples < samples[-1].samples:
            found[name] = [one]  # The process was restarted.
        else:
            found[name] = [*samples[-1:], one]
    return found


def _mean(values: Iterable[float]) -> float | None:
    there = list(values)
    return sum(there) / len(there) if there else None
