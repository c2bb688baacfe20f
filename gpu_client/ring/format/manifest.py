"""Which samples can be read: manifests, and how the next one comes from the last and from what writers claim.

Pure: no store, no clock. A sample's object is stored before it is claimed, so a writer that dies leaves an object that
nobody lists, never a list that names nothing. Claims of a writer count in their order; what is behind one that counted
(`Manifest.passed`) never will, so objects up to there that no manifest lists can be forgotten. A writer that nothing is
known of counts from where it begins: so those that have ended can be forgotten, and no clock decides what counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpu_client.ring.format.records import INBOX, MANIFESTS, SAMPLES, sealed, unsealed
from gpu_client.ring.settings import RingSettings

WRITER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CLAIM = re.compile(r"([A-Za-z0-9_-]{1,64})\.([0-9]{8})\.([0-9]{10})\.([0-9]{1,6})\.([0-9]{1,16})")
_OBJECT = re.compile(r"([A-Za-z0-9_-]{1,64})/([0-9]{8})-([0-9]{10})")

ENDED = 9_999_999_999
"""The number of a claim that says that a writer's epoch has ended: nothing of it comes behind."""
_FIELDS = frozenset({"version", "number", "inserted", "at_ms", "writers", "slots", "passed"})
REMEMBERED_S = 6 * 3600.0
"""For so long a writer that has ended is known: time enough to remove what it left behind."""


class ObjectId(NamedTuple):
    """One object of a writer: its `seq`-th since it began for the `epoch`-th time."""

    writer: str
    epoch: int
    seq: int

    @property
    def key(self) -> str:
        """Where it lies."""
        return f"{SAMPLES}{self.writer}/{self.epoch:08d}-{self.seq:010d}"

    @classmethod
    def of_key(cls, key: str) -> ObjectId | None:
        """None for what is no object's key."""
        found = _OBJECT.fullmatch(key.removeprefix(SAMPLES))
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))


class Claim(NamedTuple):
    """A writer says that an object is stored. With seq 0 it says that it begins, and that older epochs have ended; with
    `ENDED`, that this one has."""

    object: ObjectId
    samples: int
    """How many are in it."""
    at_ms: int
    """When, by the writer's clock."""

    @classmethod
    def beginning(cls, writer: str, epoch: int, at_ms: int) -> Claim:
        """From now on this epoch counts, and no earlier one."""
        return cls(ObjectId(writer, epoch, 0), 0, at_ms)

    @classmethod
    def ending(cls, writer: str, epoch: int, at_ms: int) -> Claim:
        """Nothing more comes of this epoch."""
        return cls(ObjectId(writer, epoch, ENDED), 0, at_ms)

    @property
    def key(self) -> str:
        """Everything is in its name: listing the claims is reading them."""
        writer, epoch, seq = self.object
        return f"{INBOX}{writer}.{epoch:08d}.{seq:010d}.{self.samples}.{self.at_ms}"

    @classmethod
    def of_key(cls, key: str) -> Claim | None:
        """None for what is no claim's key."""
        found = _CLAIM.fullmatch(key.removeprefix(INBOX))
        if found is None:
            return None
        return cls(ObjectId(found[1], int(found[2]), int(found[3])), int(found[4]), int(found[5]))


class Slot(NamedTuple):
    """One sample that can be read."""

    object: ObjectId
    number: int
    """Its place in the object."""
    inserted: int
    """How many samples had become readable before it, ever."""
    at_ms: int
    """When it was claimed."""

    @property
    def id(self) -> str:
        """Names the sample for ever."""
        writer, epoch, seq = self.object
        return f"{writer}-{epoch}-{seq}" + (f"-{self.number}" if self.number else "")


class Passed(NamedTuple):
    """How far a writer's claims have counted."""

    epoch: int
    seq: int
    at_ms: int
    part: int = 0
    """So many samples of the object behind that one have counted, too: the rest are of the next generation."""

    @property
    def ended(self) -> bool:
        """Whether it has said that nothing more comes."""
        return self.seq == ENDED


@dataclass(frozen=True)
class Manifest:
    """The samples that can be read, in the order of their insertion. It never changes."""

    number: int
    slots: tuple[Slot, ...]
    inserted: int
    """Samples that have become readable so far, those that were replaced among them: it tells what is in the slots."""
    passed: Mapping[str, Passed]
    at_ms: int

    def __len__(self) -> int:
        return len(self.slots)

    def settled(self, found: ObjectId) -> bool:
        """Whether a claim of that object would not count any more."""
        passed = self.passed.get(found.writer)
        return passed is not None and (found.epoch, found.seq) <= (passed.epoch, passed.seq)

    def counted_of(self, found: ObjectId) -> int:
        """How many samples of an object have counted whose claim has not counted as a whole."""
        passed = self.passed.get(found.writer)
        return passed.part if passed is not None and (found.epoch, found.seq) == (passed.epoch, passed.seq + 1) else 0

    def finished(self, claims: Iterable[Claim]) -> int:
        """Samples among these that wait to become readable."""
        return sum(one.samples - self.counted_of(one.object) for one in claims if not self.settled(one.object))

    def to_bytes(self) -> bytes:
        """JSON with a digest; slots by object, since those of one share everything."""
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
            # Who does not know of parts can read what has none.
            "passed": {name: list(one if one.part else one[:3]) for name, one in sorted(self.passed.items())},
        }
        return sealed(content)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, number: int) -> Manifest:
        """The one of that number. Raises ValueError for anything else."""
        try:
            content = unsealed(data, _FIELDS)
            if content["version"] != 1:
                raise ValueError(f"its format has version {content['version']}")
            writers = content["writers"]
            slots = tuple(
                Slot(ObjectId(writers[writer], epoch, seq), number, inserted, at_ms)
                for writer, epoch, seq, number, inserted, at_ms in content["slots"]
            )
            passed = {name: Passed(*values) for name, values in content["passed"].items()}
            found = cls(content["number"], slots, content["inserted"], passed, content["at_ms"])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"is no manifest: {error!r}") from error
        if found.number != number:
            raise ValueError(f"it is manifest {found.number}")
        return found


EMPTY = Manifest(0, (), 0, {}, 0)


def manifest_key(number: int) -> str:
    """Where a manifest lies."""
    return f"{MANIFESTS}{number:012d}"


def manifest_number(key: str) -> int:
    """The manifest that lies there; 0 for none's key."""
    digits = key.removeprefix(MANIFESTS)
    return int(digits) if digits.isdigit() else 0


def waiting(last: Manifest, claims: Iterable[Claim]) -> list[Claim]:
    """Claims that count, oldest first; each writer's in its order, each object once."""
    latest: dict[str, int] = {}
    found = []
    before: ObjectId | None = None
    for one in _counting(last, claims):
        if one.object != before:
            # Clocks may go back; a writer's claims may not change their order.
            latest[one.object.writer] = max(latest.get(one.object.writer, 0), one.at_ms)
            found.append((latest[one.object.writer], one.object, one))
        before = one.object
    return [one for _, _, one in sorted(found, key=lambda entry: entry[:2])]


def stray(last: Manifest, claims: Iterable[Claim]) -> list[Claim]:
    """Claims that will never count: behind others that did, or of writers that have ended and were forgotten."""
    claims = list(claims)
    counting = set(_counting(last, claims))
    return [one for one in claims if one not in counting]


def _counting(last: Manifest, claims: Iterable[Claim]) -> Iterator[Claim]:
    """In the order of writers, epochs and numbers. What nothing is known of counts from its beginning on."""
    begun = set(last.passed)
    for one in sorted(one for one in claims if not last.settled(one.object)):
        if one.object.seq in (0, ENDED):
            begun.add(one.object.writer)
        if one.object.writer in begun:
            yield one


def doubtful(last: Manifest, claims: Iterable[Claim]) -> bool:
    """Whether an older claim may be there that this listing has missed, since listing takes time: list once more."""
    expected = {name: (one.epoch, one.seq) for name, one in last.passed.items()}
    for one in sorted((one for one in claims if not last.settled(one.object)), key=lambda claim: claim.object):
        writer, epoch, seq = one.object
        if expected.get(writer) != (epoch, seq - 1):
            return True
        expected[writer] = (epoch, seq)
    return False


def advanced(
    last: Manifest, claims: Iterable[Claim], settings: RingSettings, now_ms: int, *, at_once: bool = False
) -> Manifest | None:
    """The next manifest; None while there is nothing to be published.

    generation: all slots are new ones, `cap` of them once there are enough, or with `at_once` those that there are; of
    a pack what does not fit is left to the next one. rolling: new ones replace the oldest; never more than a whole ring
    at once, so that every sample can be read: packs that do not fit wait.
    A manifest that only says that writers begin has the slots of the last one, and as many `inserted`.
    """
    counted = waiting(last, claims)
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
            passed[writer] = Passed(epoch, seq - 1, now_ms, end)
            break
        passed[writer] = Passed(epoch, seq, now_ms)
    kept = last.slots if settings.mode == "rolling" or not slots else ()
    readable = (*kept, *slots)[-settings.cap :] if settings.mode == "rolling" else (*kept, *slots)
    return replace(
        last,
        number=last.number + 1,
        slots=readable,
        inserted=last.inserted + len(slots),
        passed=_remembered(passed, readable, now_ms),
        at_ms=now_ms,
    )


def _leading_beginnings(counted: list[Claim]) -> list[Claim]:
    """Beginnings of writers of whom nothing older waits: they need no generation to count."""
    blocked: set[str] = set()
    found = []
    for one in counted:
        if one.samples == 0 and one.object.writer not in blocked:
            found.append(one)
        else:
            blocked.add(one.object.writer)
    return found


def _remembered(passed: Mapping[str, Passed], slots: Iterable[Slot], now_ms: int) -> dict[str, Passed]:
    """All but those that have ended and of whom nothing can be read any more."""
    horizon_ms = now_ms - int(REMEMBERED_S * 1000)
    ended = {name for name, one in passed.items() if one.ended and one.at_ms < horizon_ms}
    ended -= {slot.object.writer for slot in slots} if ended else set()
    return {name: one for name, one in passed.items() if name not in ended}
