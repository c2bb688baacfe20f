"""Test misused, silent and unlucky readers: no stale samples, no false alarm, no endless wait, no leak."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.core.damage_report import list_quarantined
from gpu_client.ring.core.garbage_collector import _MAX_QUARANTINE_NOTES
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingMismatch, WaitedTooLong
from gpu_client.ring.format.manifest import ObjectId, Slot
from gpu_client.ring.format.records import QUARANTINE, READERS, decode_record
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.batch_plan import BatchShape
from gpu_client.ring.reading.batch_stream import BatchStream
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from gpu_client.ring.store.object_prefetcher import THREADS, ObjectPrefetcher
from tests.unit.ring.reading_scene import Scene


def test_who_waits_does_not_keep_all_that_comes_meanwhile() -> None:
    scene = Scene()
    reader = scene.reader("r")
    for _ in range(30):
        scene.put(1)
        reader.newest()
        scene.collector.collect()
    assert len(decode_record(scene.store.record(f"{READERS}r"))["manifests"]) == 1
    assert scene.manifests() <= 3
    kept = reader.newest()
    reader.keep_only([kept.number])
    scene.put(10)
    reader.newest()
    scene.collector.collect()
    for slot in kept.slots:
        reader.sample(slot)


def test_waiting_asks_the_store_less_and_less_often() -> None:
    scene = Scene(publish_interval_s=1.0)
    looks: list[int] = []
    reader = scene.reader(patience_s=100.0)
    with pytest.raises(WaitedTooLong, match="for 100 s, nothing came"):
        reader.wait(lambda: looks.append(1), "nothing came")
    assert len(looks) < 300
    assert reader.waited_s > 100


def test_what_a_reader_lost_by_being_silent_is_no_damage() -> None:
    scene = Scene()
    scene.put(4)
    reader = scene.reader("r")
    there = reader.newest()
    reader.record_consumed(4)
    reader.flush_stats()
    scene.put(8)
    scene.bury()
    with pytest.raises(ManifestMissing, match="counted as dead"):
        reader.sample(there.slots[0])
    assert list_quarantined(scene.ring) == {}
    again = reader.newest()
    assert [int(reader.sample(slot)[0]) for slot in again.slots] == [8, 9, 10, 11]
    reader.record_consumed(2)
    reader.close()
    assert decode_record(scene.store.record("read"))["samples"] == 6, "each was counted once"


def test_a_reader_that_comes_back_is_not_removed_by_who_was_just_burying_it() -> None:
    scene = Scene()
    scene.put(4)
    reader = scene.reader("r")
    reader.newest()
    scene.collector.collect()
    scene.clock.advance(21.0)
    scene.writer.renew()
    delete = scene.store.delete

    def comes_back_before(keys: Any) -> None:
        if list(keys) == [f"{READERS}r"]:
            reader.flush_stats()
        delete(keys)

    scene.store.delete = comes_back_before  # type: ignore[method-assign]
    assert scene.collector.collect().readers == 1
    assert len(scene.store.keys(READERS)) == 1
    assert reader._lease.is_own()


def test_two_readers_of_one_name_do_not_take_each_other_s_place() -> None:
    scene = Scene()
    scene.put(4)
    one, other = scene.reader("same"), scene.reader("same")
    one.record_consumed(3)
    other.record_consumed(4)
    for reader in (one, other, one):
        reader.newest()
        reader.flush_stats()
    one.close()
    other.close()
    assert decode_record(scene.store.record("read"))["samples"] == 7


def test_damage_that_cannot_be_noted_is_told_all_the_same() -> None:
    scene = Scene()
    scene.put(4)
    reader = scene.reader()
    slots = reader.newest().slots
    scene.store._objects[slots[1].object.key] = b"short"
    create = scene.store.create

    def full(key: str, pieces: Any) -> bool:
        if key.startswith(QUARANTINE):
            raise OSError(28, "No space left on device")
        return create(key, pieces)

    scene.store.create = full  # type: ignore[method-assign]
    with pytest.raises(ObjectDamaged, match="ends after 5 bytes"):
        reader.sample(slots[1])


def test_notes_of_damage_do_not_pile_up() -> None:
    scene = Scene()
    scene.put(4)
    for number in range(_MAX_QUARANTINE_NOTES + 20):
        scene.store.create(f"{QUARANTINE}samples.gone.00000001-{number:010d}", [])
    listed = scene.ring.newest().slots[0].object.key.replace("/", ".")
    scene.store.create(QUARANTINE + listed, [])
    scene.collector.collect()
    notes = scene.store.keys(QUARANTINE)
    assert len(notes) == _MAX_QUARANTINE_NOTES
    assert QUARANTINE + listed in notes


def test_a_store_that_cannot_be_reached_at_the_end_does_not_hide_what_went_before() -> None:
    scene = Scene()
    with pytest.raises(ValueError, match="of the training"), scene.reader():

        def unreachable(*_: Any) -> Any:
            raise OSError("the network is down")

        scene.store.swap = unreachable  # type: ignore[method-assign, assignment]
        raise ValueError("of the training")


@pytest.mark.parametrize("name", ["../up", "a/b", "x" * 65])
def test_names_that_are_no_part_of_a_key_are_refused(name: str) -> None:
    scene = Scene()
    with pytest.raises(RingMismatch, match="not a name of a reader"):
        scene.reader(name)
    with scene.reader() as reader, pytest.raises(RingMismatch, match="not a name of a group"):
        BatchStream(reader, BatchShape(1), group=name)


def test_the_newest_manifest_is_found_however_fast_it_is_replaced() -> None:
    scene = Scene()
    scene.put(4)
    fresh = Ring(scene.store, scene.settings, clock=scene.clock)
    record, late = scene.store.record, [2]

    def then_much_happens(key: str) -> Any:
        found = record(key)
        if key == "pointer" and late[0]:
            late[0] -= 1
            scene.store.record = record  # type: ignore[method-assign]
            scene.put(5)
            scene.collector.collect()
            scene.store.record = then_much_happens  # type: ignore[method-assign]
        return found

    scene.store.record = then_much_happens  # type: ignore[method-assign]
    assert fresh.newest().inserted == 14


def test_a_ring_that_was_removed_is_told_and_one_made_anew_is_read() -> None:
    scene = Scene()
    scene.put(4)
    reader = scene.reader("r")
    slots = reader.newest().slots
    for key in list(scene.store._objects):
        scene.store.delete([key])
    with pytest.raises(RingMismatch, match="removed during its use"):
        reader.newest()
    with pytest.raises(RingMismatch, match="removed during its use"):
        reader.sample(Slot(ObjectId("w", 1, 99), 0, 99, 0))
    assert len(slots) == 4
    anew = Ring.make(scene.store, scene.settings, clock=scene.clock)
    RingWriter(anew, "new", maintainer=Maintainer(anew, "new"), threads=False).put(np.array([77]))
    while anew.publish() is not None:
        pass
    assert [int(reader.sample(slot)[0]) for slot in reader.newest().slots] == [77]


def test_open_objects_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_client.ring.reading.reader._OPEN_BYTES", 20_000)
    scene = Scene(cap=12)
    for _ in range(12):
        scene.writer.put(np.zeros(1000))
    scene.ring.publish()
    with scene.reader() as reader:
        for slot in reader.newest().slots:
            reader.sample(slot)
        assert 1 <= len(reader._objects) <= 2


class FarAway(MemoryStore):
    """Objects are fetched side by side, and nothing comes while it is `blocked`."""

    def __init__(self) -> None:
        super().__init__()
        self.fetching = ObjectPrefetcher("far-away")
        self.blocked = threading.Event()
        self.fetched: list[str] = []

    def prefetch(self, keys: Sequence[str]) -> None:
        self.fetching.prefetch(keys, self._fetch)

    def _fetch(self, key: str) -> memoryview | None:
        assert self.blocked.wait(30)
        self.fetched.append(key)
        return self.read(key)


def test_what_was_begun_and_nobody_reads_is_given_up_with_the_reader() -> None:
    """The process waited for all of it at its end, each as long as it is tried where the store cannot be reached."""
    ring = Ring.make(store := FarAway(), RingSettings(cap=32))
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(32):
            writer.put({"x": np.full(1, number)})
    with RingReader(ring, threads=False) as reader:
        reader.prefetch(reader.newest().slots)
        assert len(store.fetching.pending) == 32
    assert not store.fetching.pending
    store.blocked.set()
    store.fetching.close()
    assert len(store.fetched) <= THREADS
