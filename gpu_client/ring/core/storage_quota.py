"""Keeping a ring within `max_bytes`: a measurement of what is stored, and what writers may store beyond it.

One record has both. A writer adds its next object to what it was granted, by compare-and-swap, before it stores the
object; where that would be more than `max_bytes`, the writer waits, and whoever collects measures anew. Before it looks
at what is stored, a measurement takes down what each writer has stored for certain; what was granted beyond that may or
may not have been seen, and counts in full. So the sum is never less than what is stored, whoever dies and when:

    stored <= measured + (granted - stored for certain) of each writer <= max_bytes - notes_bytes

A grant ends with its writer's epoch: what a dead writer left behind, finished or not, is measured from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import StoreFull
from gpu_client.ring.format.manifest import ENDED, Manifest, ObjectId
from gpu_client.ring.format.records import ROOM, SAMPLES, WRITERS, content_of, sealed
from gpu_client.ring.store.protocol import SizedStore

_TRIES = 100
_PRESSED_SHARE = 0.5
"""From so much of `max_bytes` on, what is not needed is removed in each turn."""


class Grants:
    """What one epoch of a writer may store."""

    def __init__(self, ring: Ring, writer: str, epoch: int) -> None:
        self._ring = ring
        self._key = f"{writer}.{epoch}"
        self._spent = 0
        """Bytes of all objects whose storing has begun; by the next call it has ended, well or badly."""

    def take(self, size_bytes: int, samples: int) -> str:
        """Add an object to what this writer may store. Returns why it has to wait; empty if it need not.

        Raises StoreFull where the ring can never have room for so large objects.
        """
        settings, store = self._ring.settings, self._ring.store
        most = settings.max_bytes
        if most is None:
            return ""
        _require_room_for_all(self._ring, size_bytes, samples)
        while True:
            record = store.record(ROOM)
            if record is None:
                measure(self._ring, object_bytes=size_bytes)
                continue
            room = content_of(record)
            if "stored" not in room:
                measure(self._ring, object_bytes=size_bytes)
                continue
            writers = {**room["writers"]}
            counted = writers.get(self._key, (0, 0, 0))[2]
            writers[self._key] = (self._spent + size_bytes, self._spent, counted)
            largest = max(int(room.get("largest", 0)), size_bytes)
            granted = {**room, "writers": writers, "largest": largest}
            there = used_bytes(granted) + settings.notes_bytes
            if there > most:
                writers[self._key] = (self._spent, self._spent, counted)
                granted["wanted"] = True
            told = sealed(granted)
            if told != record.data and store.swap(ROOM, told, record.version) is None:
                continue
            if there > most:
                return (
                    f"{there - size_bytes} of max_bytes {most} are stored or reserved by {len(writers)} writers,"
                    f" and an object has {size_bytes}"
                )
            self._spent += size_bytes
            return ""


def used_bytes(room: Mapping[str, Any]) -> int:
    """So much is stored at most, or may be stored without asking again."""
    beyond = sum(int(granted) - int(counted) for granted, _, counted in room["writers"].values())
    return int(room.get("stored", 0)) + beyond


class Pressure(NamedTuple):
    """How close a ring is to `max_bytes`."""

    high: bool
    """What is not needed should be removed at once."""
    wanted: bool
    """A writer waits for room."""


def pressure_of(ring: Ring) -> Pressure:
    """Return the pressure as of the last measurement and of all grants since."""
    most = ring.settings.max_bytes
    room = {} if most is None else content_of(ring.store.record(ROOM))
    if most is None or "stored" not in room:
        return Pressure(high=False, wanted=False)
    wanted = bool(room.get("wanted"))
    return Pressure(wanted or used_bytes(room) > _PRESSED_SHARE * most, wanted)


def measure(ring: Ring, *, object_bytes: int = 0) -> None:
    """Count what is stored. Another's measurement that was begun later, and ended earlier, stays.

    `object_bytes`: so large objects are there, where the store cannot tell and no writer has noted more.
    """
    if ring.settings.max_bytes is None:
        return
    before = ring.store.record(ROOM)
    room = content_of(before)
    # In this order: who has ended stores nothing behind it, and what was stored for certain is listed.
    newest = ring.newest()
    stored_for_certain = {key: put for key, (_, put, _) in room.get("writers", {}).items()}
    ended = {key for key in stored_for_certain if _has_ended(ring, newest, key)}
    stored = _stored_bytes(ring, max(int(room.get("largest", 0)), object_bytes))
    measured = int(room.get("measured", 0))
    for _ in range(_TRIES):
        writers = {
            key: (granted, put, stored_for_certain.get(key, counted))
            for key, (granted, put, counted) in room.get("writers", {}).items()
            if key not in ended
        }
        room = {**room, "stored": stored, "writers": writers, "measured": measured + 1, "wanted": False}
        if ring.store.swap(ROOM, sealed(room), before.version if before is not None else None) is not None:
            return
        before = ring.store.record(ROOM)
        room = content_of(before)
        if int(room.get("measured", 0)) != measured:
            return


def _stored_bytes(ring: Ring, largest: int) -> int:
    """Where the store cannot tell sizes, each object counts as the largest."""
    if isinstance(ring.store, SizedStore):
        return ring.store.stored_bytes()
    return len(ring.store.keys(SAMPLES)) * largest


def _has_ended(ring: Ring, newest: Manifest, key: str) -> bool:
    writer, _, epoch = key.rpartition(".")
    if writer in newest.passed:
        return newest.settled(ObjectId(writer, int(epoch), ENDED))
    return ring.store.record(f"{WRITERS}{writer}") is None  # forgotten: a writer has its record before its first grant


def _require_room_for_all(ring: Ring, size_bytes: int, samples: int) -> None:
    """What is readable, what replaces it, and one object in the making have to fit in."""
    settings = ring.settings
    if samples < settings.pack:
        return  # of the last ones, which did not fill a pack, there are few
    objects = -(-settings.cap // samples)
    replaced = objects if settings.mode == "generation" else 1
    least = settings.notes_bytes + (objects + replaced + 1) * size_bytes
    assert settings.max_bytes is not None
    if least > settings.max_bytes:
        raise StoreFull(
            f"max_bytes is {settings.max_bytes}, and {settings.cap} samples in objects of {size_bytes} bytes need"
            f" {least}, and {size_bytes} more for each further writer",
            "Make the ring with a larger max_bytes, or with a smaller cap",
        )
