"""Keep the stored bytes within `max_bytes`, by a measurement of the stored bytes and later grants to writers.

One record contains both. A writer adds its next object to its grant by compare-and-swap before storing the object; if
the sum would exceed `max_bytes`, the writer waits and the collector measures again. Before the listing, a measurement
notes the certainly stored bytes of each writer; the listing may or may not contain bytes granted beyond these,
therefore the difference counts in full. The sum is never below the stored bytes, whichever process dies at any time:

    stored <= measured + (granted - stored for certain) of each writer <= max_bytes - notes_bytes

A grant ends with its epoch: later measurements contain all bytes of a dead writer, complete or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import StoreFull
from gpu_client.ring.format.manifest import ENDED, ObjectId, RingManifest
from gpu_client.ring.format.records import ROOM, SAMPLES, WRITERS, decode_record, encode_checksummed
from gpu_client.ring.store.protocol import SizedStore

_TRIES = 100
_PRESSED_SHARE = 0.5
"""Share of `max_bytes` from which on each turn collects garbage."""


class WriterGrants:
    """Grants of bytes to one epoch of a writer."""

    def __init__(self, ring: Ring, writer: str, epoch: int) -> None:
        self._ring = ring
        self._key = f"{writer}.{epoch}"
        self._spent = 0
        """Bytes of all objects whose write has begun; the write has ended by the next call of `reserve`."""

    def reserve(self, size_bytes: int, samples: int) -> str:
        """Add an object to the grant. Returns "" for a granted object, else the reason to wait.

        Raises StoreFull for objects that can never fit.
        """
        settings, store = self._ring.settings, self._ring.store
        most = settings.max_bytes
        if most is None:
            return ""
        _require_minimum(self._ring, size_bytes, samples)
        while True:
            record = store.record(ROOM)
            if record is None:
                measure_storage(self._ring, object_bytes=size_bytes)
                continue
            room = decode_record(record)
            if "stored" not in room:
                measure_storage(self._ring, object_bytes=size_bytes)
                continue
            writers = {**room["writers"]}
            counted = writers.get(self._key, (0, 0, 0))[2]
            writers[self._key] = (self._spent + size_bytes, self._spent, counted)
            largest = max(int(room.get("largest", 0)), size_bytes)
            granted = {**room, "writers": writers, "largest": largest}
            used = sum_used_bytes(granted) + settings.notes_bytes
            if used > most:
                writers[self._key] = (self._spent, self._spent, counted)
                granted["wanted"] = True
            data = encode_checksummed(granted)
            if data != record.data and store.swap(ROOM, data, record.version) is None:
                continue
            if used > most:
                return (
                    f"{used - size_bytes} of max_bytes {most} are stored or reserved by {len(writers)} writers,"
                    f" and an object has {size_bytes}"
                )
            self._spent += size_bytes
            return ""


def sum_used_bytes(room: Mapping[str, Any]) -> int:
    """Sum the stored and granted bytes."""
    beyond = sum(int(granted) - int(counted) for granted, _, counted in room["writers"].values())
    return int(room.get("stored", 0)) + beyond


class StoragePressure(NamedTuple):
    """Closeness of a ring to `max_bytes`."""

    high: bool
    """True if the next turn must collect garbage."""
    wanted: bool
    """True if a writer waits for space."""


def read_pressure(ring: Ring) -> StoragePressure:
    """Compute the pressure from the last measurement and the later grants."""
    most = ring.settings.max_bytes
    room = {} if most is None else decode_record(ring.store.record(ROOM))
    if most is None or "stored" not in room:
        return StoragePressure(high=False, wanted=False)
    wanted = bool(room.get("wanted"))
    return StoragePressure(wanted or sum_used_bytes(room) > _PRESSED_SHARE * most, wanted)


def measure_storage(ring: Ring, *, object_bytes: int = 0) -> None:
    """Measure the stored bytes. Keeps a measurement of another process that began later and ended earlier.

    `object_bytes`: minimum object size for stores without sizes.
    """
    if ring.settings.max_bytes is None:
        return
    before = ring.store.record(ROOM)
    room = decode_record(before)
    # The manifest comes before the listing: an ended writer stores no more objects, and the listing contains all
    # certainly stored objects.
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
        if ring.store.swap(ROOM, encode_checksummed(room), before.version if before is not None else None) is not None:
            return
        before = ring.store.record(ROOM)
        room = decode_record(before)
        if int(room.get("measured", 0)) != measured:
            return


def _stored_bytes(ring: Ring, largest: int) -> int:
    """Return the stored bytes; without sizes, each object counts as the largest."""
    if isinstance(ring.store, SizedStore):
        return ring.store.stored_bytes()
    return len(ring.store.keys(SAMPLES)) * largest


def _has_ended(ring: Ring, newest: RingManifest, key: str) -> bool:
    writer, _, epoch = key.rpartition(".")
    if writer in newest.passed:
        return newest.settled(ObjectId(writer, int(epoch), ENDED))
    return ring.store.record(f"{WRITERS}{writer}") is None  # A writer has a record before its first grant.


def _require_minimum(ring: Ring, size_bytes: int, samples: int) -> None:
    """Raise StoreFull unless the readable samples, their replacements and one more object fit."""
    settings = ring.settings
    if samples < settings.pack:
        return  # Few packs are incomplete.
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
