"""Build manifests, which list the readable samples, from the last manifest and the claims of writers.

All functions are pure and use neither store nor clock. A writer stores an object before claiming the object, therefore
a killed writer leaves an object without a claim, never a claim without an object. Claims of a writer count in order:
once a claim counts, earlier claims never will (`RingManifest.passed`), therefore earlier unlisted objects are garbage.
The claims of an unknown writer count from its beginning claim on, therefore manifests can forget ended writers, and no
clock decides which claims count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpu_client.ring.format.records import INBOX, MANIFESTS, SAMPLES, decode_checksummed, encode_checksummed
from gpu_client.ring.settings import RingSettings

WRITER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CLAIM = re.compile(r"([A-Za-z0-9_-]{1,64})\.([0-9]{8})\.([0-9]{10})\.([0-9]{1,6})\.([0-9]{1,16})")
_OBJECT = re.compile(r"([A-Za-z0-9_-]{1,64})/([0-9]{8})-([0-9]{10})")

ENDED = 9_999_999_999
"""Sequence number of the claim that ends a writer's epoch."""
_FIELDS = frozenset({"version", "number", "inserted", "at_ms", "writers", "slots", "passed"})
REMEMBERED_S = 6 * 3600.0
"""Seconds for which manifests remember an ended writer; long enough for the collection of its garbage."""


class ObjectId(NamedTuple):
    """Identity of an object: the object number `seq` of a writer's epoch."""

    writer: str
    epoch: int
    seq: int

    @property
    def key(self) -> str:
        """Return the key in the store."""
        return f"{SAMPLES}{self.writer}/{self.epoch:08d}-{self.seq:010d}"

    @classmethod
    def of_key(cls, key: str) -> ObjectId | None:
        """Parse a key; None for other keys."""
        found = _OBJECT.fullmatch(key.removeprefix(SAMPLES))
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))


class SampleClaim(NamedTuple):
    """Claim that a writer has stored an object. `seq` 0 begins an epoch and ends older ones; `ENDED` ends the epoch."""

    object: ObjectId
    samples: int
    """Number of samples in the object."""
    at_ms: int
    """Time of the claim by the writer's clock (Unix ms)."""

    @classmethod
    def beginning(cls, writer: str, epoch: int, at_ms: int) -> SampleClaim:
        """Make the claim that begins an epoch and ends all earlier epochs."""
        return cls(ObjectId(writer, epoch, 0), 0, at_ms)

    @classmethod
    def ending(cls, writer: str, epoch: int, at_ms: int) -> SampleClaim:
        """Make the claim that ends an epoch."""
        return cls(ObjectId(writer, epoch, ENDED), 0, at_ms)

    @property
    def key(self) -> str:
        """Return the key in the store, which contains the whole claim, so that a listing of keys reads the claims."""
        writer, epoch, seq = self.object
        return f"{INBOX}{writer}.{epoch:08d}.{seq:010d}.{self.samples}.{self.at_ms}"

    @classmethod
    def of_key(cls, key: str) -> SampleClaim | None:
        """Parse a key; None for other keys."""
        found = _CLAIM.fullmatch(key.removeprefix(INBOX))
        if found is None:
            return None
        return cls(ObjectId(found[1], int(found[2]), int(found[3])), int(found[4]), int(found[5]))


class Slot(NamedTuple):
    """Place of one readable sample in a manifest."""

    object: ObjectId
    number: int
    """Index of the sample in its object."""
    inserted: int
    """Number of samples that became readable before this sample."""
    at_ms: int
    """Time of the claim (Unix ms)."""

    @property
    def id(self) -> str:
        """Return the permanent name of the sample."""
        writer, epoch, seq = self.object
        return f"{writer}-{epoch}-{seq}" + (f"-{self.number}" if self.number else "")


class WriterWatermark(NamedTuple):
    """Last counted claim of a writer."""

    epoch: int
    seq: int
    at_ms: int
    part: int = 0
    """Number of counted samples of the next object, whose other samples belong to the next generation."""

    @property
    def ended(self) -> bool:
        """Return True after the writer has ended the epoch."""
        return self.seq == ENDED


@dataclass(frozen=True)
class RingManifest:
    """Immutable list of the readable samples, ordered by insertion."""

    number: int
    slots: tuple[Slot, ...]
    inserted: int
    """Number of samples that ever became readable. Equal numbers mean equal slots."""
    passed: Mapping[str, WriterWatermark]
    at_ms: int

    def __len__(self) -> int:
        return len(self.slots)

    def settled(self, found: ObjectId) -> bool:
        """Return True if no claim of the object can count any more."""
        passed = self.passed.get(found.writer)
        return passed is not None and (found.epoch, found.seq) <= (passed.epoch, passed.seq)

    def counted_of(self, found: ObjectId) -> int:
        """Return the number of counted samples of an object whose claim has counted in part."""
        passed = self.passed.get(found.writer)
        return passed.part if passed is not None and (found.epoch, found.seq) == (passed.epoch, passed.seq + 1) else 0

    def finished(self, claims: Iterable[SampleClaim]) -> int:
        """Count the samples in `claims` that are not yet readable."""
        return sum(one.samples - self.counted_of(one.object) for one in claims if not self.settled(one.object))

    def to_bytes(self) -> bytes:
        """Encode as JSON with a digest."""
        writers = sorted({slot.object.writer for slot in self.slots})
        index = {name: place for place, name in enumerate(writers)}
        rows = [
            (index[s.object.writer], s.object.epoch, s.object.seq, s.number, s.inserted, s.at_ms) for s in self.slots
        ]
        content = {
            "version": 1,
            "number": self.number,
            "inserted": self.inserted,
            "at_ms": self.at_ms,
            "writers": writers,
            "slots": rows,
            # Versions without `part` can read manifests without parts, therefore a part of 0 is omitted.
            "passed": {name: list(one if one.part else one[:3]) for name, one in sorted(self.passed.items())},
        }
        return encode_checksummed(content)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, number: int) -> RingManifest:
        """Decode the manifest `number`. Raises ValueError for any other bytes."""
        try:
            content = decode_checksummed(data, _FIELDS)
            if content["version"] != 1:
                raise ValueError(f"unknown format version {content['version']}")
            writers = content["writers"]
            slots = tuple(
                Slot(ObjectId(writers[writer], epoch, seq), number, inserted, at_ms)
                for writer, epoch, seq, number, inserted, at_ms in content["slots"]
            )
            passed = {name: WriterWatermark(*values) for name, values in content["passed"].items()}
            found = cls(content["number"], slots, content["inserted"], passed, content["at_ms"])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        if found.number != number:
            raise ValueError(f"the content is manifest {found.number}")
        return found


EMPTY = RingManifest(0, (), 0, {}, 0)


def manifest_key(number: int) -> str:
    """Return the key of a manifest."""
    return f"{MANIFESTS}{number:012d}"


def manifest_number(key: str) -> int:
    """Parse the number of a manifest from its key; 0 for other keys."""
    digits = key.removeprefix(MANIFESTS)
    return int(digits) if digits.isdigit() else 0


def pending_claims(last: RingManifest, claims: Iterable[SampleClaim]) -> list[SampleClaim]:
    """Select the valid claims, oldest first: in order for each writer, once for each object."""
    latest: dict[str, int] = {}
    found = []
    before: ObjectId | None = None
    for one in _iter_countable(last, claims):
        if one.object != before:
            # A clock may go back, while the order of a writer's claims must not change.
            latest[one.object.writer] = max(latest.get(one.object.writer, 0), one.at_ms)
            found.append((latest[one.object.writer], one.object, one))
        before = one.object
    return [one for _, _, one in sorted(found, key=lambda entry: entry[:2])]


def obsolete_claims(last: RingManifest, claims: Iterable[SampleClaim]) -> list[SampleClaim]:
    """Select the claims that can never count: before a counted claim, or of ended and forgotten writers."""
    claims = list(claims)
    counting = set(_iter_countable(last, claims))
    return [one for one in claims if one not in counting]


def _iter_countable(last: RingManifest, claims: Iterable[SampleClaim]) -> Iterator[SampleClaim]:
    """Yield the countable claims by writer, epoch and sequence; of an unknown writer from the beginning claim on."""
    begun = set(last.passed)
    for one in sorted(one for one in claims if not last.settled(one.object)):
        if one.object.seq in (0, ENDED):
            begun.add(one.object.writer)
        if one.object.writer in begun:
            yield one


def may_lack_claims(last: RingManifest, claims: Iterable[SampleClaim]) -> bool:
    """Return True if the listing may lack an older claim, because listing takes time; the caller lists again."""
    expected = {name: (one.epoch, one.seq) for name, one in last.passed.items()}
    for one in sorted((one for one in claims if not last.settled(one.object)), key=lambda claim: claim.object):
        writer, epoch, seq = one.object
        if expected.get(writer) != (epoch, seq - 1):
            return True
        expected[writer] = (epoch, seq)
    return False


def next_manifest(
    last: RingManifest, claims: Iterable[SampleClaim], settings: RingSettings, now_ms: int, *, at_once: bool = False
) -> RingManifest | None:
    """Build the next manifest; None without due samples.

    generation: all slots are new: `cap` slots, or with `at_once` the available samples; the rest of a pack waits for
    the next generation. rolling: new samples replace the oldest, at most `cap` at a time, so that every sample becomes
    readable; packs that do not fit wait. A manifest that only begins writers keeps the slots and `inserted` of `last`.
    """
    counted = pending_claims(last, claims)
    there = last.finished(counted)
    if settings.mode == "generation" and there < settings.cap and not at_once:
        counted = _leading_beginnings(counted)
    if not counted:
        return None
    slots: list[Slot] = []
    passed = dict(last.passed)
    for one in counted:
        writer, epoch, seq = one.object
        begun, room = last.counted_of(one.object), settings.cap - len(slots)
        fits = one.samples - begun <= room
        if not fits and (not room or (slots and settings.mode == "rolling")):
            break
        end = one.samples if fits or settings.mode == "rolling" else begun + room
        first = last.inserted + len(slots) - begun
        slots += [Slot(one.object, number, first + number, one.at_ms) for number in range(begun, end)]
        if end < one.samples:
            passed[writer] = WriterWatermark(epoch, seq - 1, now_ms, end)
            break
        passed[writer] = WriterWatermark(epoch, seq, now_ms)
    kept = last.slots if settings.mode == "rolling" or not slots else ()
    readable = (*kept, *slots)[-settings.cap :] if settings.mode == "rolling" else (*kept, *slots)
    return replace(
        last,
        number=last.number + 1,
        slots=readable,
        inserted=last.inserted + len(slots),
        passed=_drop_forgotten(passed, readable, now_ms),
        at_ms=now_ms,
    )


def _leading_beginnings(counted: list[SampleClaim]) -> list[SampleClaim]:
    """Select the beginning claims of writers without an older waiting claim, which count without a full generation."""
    blocked: set[str] = set()
    found = []
    for one in counted:
        if one.samples == 0 and one.object.writer not in blocked:
            found.append(one)
        else:
            blocked.add(one.object.writer)
    return found


def _drop_forgotten(
    passed: Mapping[str, WriterWatermark], slots: Iterable[Slot], now_ms: int
) -> dict[str, WriterWatermark]:
    """Drop writers that ended long ago and have no readable samples."""
    horizon_ms = now_ms - int(REMEMBERED_S * 1000)
    ended = {name for name, one in passed.items() if one.ended and one.at_ms < horizon_ms}
    ended -= {slot.object.writer for slot in slots} if ended else set()
    return {name: one for name, one in passed.items() if name not in ended}
