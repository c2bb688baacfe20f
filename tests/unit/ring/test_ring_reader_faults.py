"""Readers that are used wrongly, fall silent, or meet what others have left: no stale samples, no false alarm, no wait
without end, and nothing kept that nobody needs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.collector import _NOTES, Collector
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingError, RingMismatch, WaitedTooLong
from gpu_client.ring.flow import Flow, write_wait
from gpu_client.ring.group import PINNED_S
from gpu_client.ring.keeper import Keeper
from gpu_client.ring.leases import GROUPS, PINS, QUARANTINE, READERS, Watch, content_of
from gpu_client.ring.manifest import MANIFESTS, SAMPLES, ObjectId, Slot
from gpu_client.ring.plan import Decision, Plan, Shape
from gpu_client.ring.reader import RingReader, quarantined
from gpu_client.ring.ring import Ring
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store_memory import MemoryStore
from gpu_client.ring.stream import Stream
from gpu_client.ring.writer import RingWriter
from tests.unit.ring.ring_kit import Clock


class Scene:
    """One ring in memory, one clock, no threads."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.settings = RingSettings(**{"cap": 4, "retain": 2, "lease_s": 10.0, "max_ahead": 10_000, **settings})
        self.ring = Ring.make(self.store, self.settings, clock=self.clock)
        self.keeper = Keeper(self.ring, "k", clock=self.clock)
        self.collector = Collector(self.ring, Watch(self.clock))
        self.writer = RingWriter(self.ring, "w", keeper=self.keeper, threads=False, clock=self.clock)
        self.next = 0

    def put(self, count: int) -> None:
        """So many samples, each readable before the next."""
        for _ in range(count):
            self.writer.put(np.array([self.next]))
            self.next += 1
            self.ring.publish()

    def reader(self, name: str = "", **more: Any) -> RingReader:
        ring = Ring(self.store, self.settings, clock=self.clock)
        return RingReader(ring, name, threads=False, clock=self.clock, pause=self.clock.go_on, **more)

    def bury(self, *living: RingReader) -> None:
        for _ in range(6):
            self.clock.go_on(6.0)
            self.writer.renew()
            for reader in living:
                reader.tell()
            self.collector.collect()

    def manifests(self) -> int:
        return len(self.store.keys(MANIFESTS))


def test_who_waits_does_not_keep_all_that_comes_meanwhile() -> None:
    scene = Scene()
    reader = scene.reader("r")
    for _ in range(30):
        scene.put(1)
        reader.newest()
        scene.collector.collect()
    assert len(content_of(scene.store.record(f"{READERS}r"))["manifests"]) == 1
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
    reader.took(4)
    reader.tell()
    scene.put(8)
    scene.bury()
    with pytest.raises(ManifestMissing, match="taken for dead"):
        reader.sample(there.slots[0])
    assert quarantined(scene.ring) == {}
    again = reader.newest()
    assert [int(reader.sample(slot)[0]) for slot in again.slots] == [8, 9, 10, 11]
    reader.took(2)
    reader.close()
    assert content_of(scene.store.record("read"))["samples"] == 6, "each was counted once"


def test_a_reader_that_comes_back_is_not_removed_by_who_was_just_burying_it() -> None:
    scene = Scene()
    scene.put(4)
    reader = scene.reader("r")
    reader.newest()
    scene.collector.collect()
    scene.clock.go_on(21.0)
    scene.writer.renew()
    delete = scene.store.delete

    def comes_back_before(keys: Any) -> None:
        if list(keys) == [f"{READERS}r"]:
            reader.tell()
        delete(keys)

    scene.store.delete = comes_back_before  # type: ignore[method-assign]
    assert scene.collector.collect().readers == 1
    assert len(scene.store.keys(READERS)) == 1
    assert reader._lease.is_own()


def test_two_readers_of_one_name_do_not_take_each_other_s_place() -> None:
    scene = Scene()
    scene.put(4)
    one, other = scene.reader("same"), scene.reader("same")
    one.took(3)
    other.took(4)
    for reader in (one, other, one):
        reader.newest()
        reader.tell()
    one.close()
    other.close()
    assert content_of(scene.store.record("read"))["samples"] == 7


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
    for number in range(_NOTES + 20):
        scene.store.create(f"{QUARANTINE}samples.gone.00000001-{number:010d}", [])
    listed = scene.ring.newest().slots[0].object.key.replace("/", ".")
    scene.store.create(QUARANTINE + listed, [])
    scene.collector.collect()
    notes = scene.store.keys(QUARANTINE)
    assert len(notes) == _NOTES
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
    with pytest.raises(RingMismatch, match="no name of a reader"):
        scene.reader(name)
    with scene.reader() as reader, pytest.raises(RingMismatch, match="no name of a group"):
        Stream(reader, Shape(1), group=name)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"batch_size": 0}, "is none"),
        ({"batch_size": 5}, "more than the ring's 4 samples"),
        ({"batch_size": 2, "world_size": 3}, "more than the ring's 4 samples"),
        ({"batch_size": 1, "policy": 0}, "no policy 0"),
        ({"batch_size": 1, "policy": "newest"}, "no policy 'newest'"),
    ],
)
def test_what_can_never_be_read_is_refused_at_once(shape: dict[str, Any], reason: str) -> None:
    scene = Scene()
    with scene.reader() as reader, pytest.raises(RingError, match=reason):
        Stream(reader, Shape(**shape))
    with scene.reader() as reader, pytest.raises(RingError, match="no rank 2 of 2"):
        Stream(reader, Shape(1, world_size=2), rank=2)


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
    with pytest.raises(RingMismatch, match="removed while it was used"):
        reader.newest()
    with pytest.raises(RingMismatch, match="removed while it was used"):
        reader.sample(Slot(ObjectId("w", 1, 99), 0, 99, 0))
    assert len(slots) == 4
    anew = Ring.make(scene.store, scene.settings, clock=scene.clock)
    RingWriter(anew, "new", keeper=Keeper(anew, "new"), threads=False).put(np.array([77]))
    while anew.publish() is not None:
        pass
    assert [int(reader.sample(slot)[0]) for slot in reader.newest().slots] == [77]


def batch(stream: Stream) -> list[int]:
    return sorted(int(sample[0]) for sample in stream.next_batch()[1])


def test_another_training_of_that_group_begins_with_the_newest_samples() -> None:
    scene = Scene()
    reader = scene.reader("first")
    first = Stream(reader, Shape(2, policy="latest"))
    for _ in range(20):
        scene.put(1)
        if scene.next >= 2:
            first.next_batch()
    reader.close()
    scene.put(8)
    with scene.reader("second") as again:
        second = Stream(again, Shape(4))
        assert batch(second) == [24, 25, 26, 27]
        for _ in range(30):
            scene.put(4)
            assert min(batch(second)) >= scene.next - 4


def test_who_begins_beside_a_training_of_that_group_that_goes_on_is_told() -> None:
    scene = Scene()
    going = scene.reader("going")
    first = Stream(going, Shape(2, policy="latest"))
    for _ in range(30):
        scene.put(2)
        first.next_batch()
    with scene.reader("late", patience_s=1000.0) as late, pytest.raises(RingMismatch, match="a group of its own"):
        Stream(late, Shape(2)).next_batch()
    first.next_batch()


def test_a_training_that_is_resumed_after_days_goes_on_with_the_newest_samples() -> None:
    scene = Scene()
    scene.put(4)
    reader = scene.reader()
    stream = Stream(reader, Shape(2))
    stream.next_batch()
    state = json.loads(json.dumps(stream.state_dict()))
    stream.checkpointed(state)
    reader.close()
    scene.clock.go_on(PINNED_S + 60)
    scene.put(12)
    scene.bury()
    assert scene.store.keys(PINS) == scene.store.keys(GROUPS) == []
    with scene.reader() as again:
        resumed = Stream(again, Shape(2))
        resumed.load_state_dict(state)
        assert min(batch(resumed)) >= 12
        assert resumed.plan.batch == 2


def test_decisions_of_trainings_that_nobody_resumes_go_with_their_pins() -> None:
    scene = Scene()
    scene.put(4)
    for number in range(5):
        with scene.reader() as reader:
            Stream(reader, Shape(1), group=f"run-{number}").next_batch()
    assert len(scene.store.keys(GROUPS)) == 5
    scene.clock.go_on(PINNED_S + 60)
    scene.bury()
    scene.put(8)
    scene.bury()
    assert scene.store.keys(GROUPS) == scene.store.keys(PINS) == []
    assert scene.manifests() <= 2


def test_readers_that_may_read_nothing_of_what_is_there_are_not_waited_for() -> None:
    scene = Scene(samples_per_insert=4.0, max_age_s=60.0)
    scene.put(4)
    scene.keeper.turn()
    scene.clock.go_on(3600.0)
    scene.writer.renew()
    scene.put(62)
    scene.keeper.turn()
    scene.clock.go_on(3600.0)
    assert write_wait(scene.keeper.flow, scene.settings, 256), "writers are ahead of readers"
    with scene.reader(patience_s=30.0) as reader:
        stream = Stream(reader, Shape(4, max_age_s=60.0))
        pause = reader._pause
        writes: list[int] = []

        def meanwhile(seconds: float) -> None:
            pause(seconds)
            scene.writer.renew()
            scene.keeper.turn()
            if not write_wait(scene.keeper.flow, scene.settings, 256):
                writes.append(1)
                scene.put(1)

        reader._pause = meanwhile
        assert min(batch(stream)) >= 66
        assert len(writes) >= 4


def test_batches_larger_than_what_writers_are_ahead_of_readers_come() -> None:
    settings = RingSettings(cap=4096, samples_per_insert=1.0)
    flow = Flow(inserted=300, read=0, readable=300)
    assert write_wait(flow, settings, 256)
    assert not write_wait(Flow(inserted=300, read=0, readable=300, wanted=1024), settings, 256)
    scene = Scene()
    with scene.reader() as reader:
        Stream(reader, Shape(3))
        reader.tell()
        assert scene.keeper.measured(scene.ring.newest()).wanted == 3


def test_packs_are_read_about_once_a_pass() -> None:
    scene = Scene(cap=4000, pack=20)
    for number in range(4000):
        scene.writer.put(np.array([number]))
    while scene.ring.publish() is not None:
        pass
    read, opened = scene.store.read, []

    def noted(key: str) -> Any:
        if key.startswith(SAMPLES):
            opened.append(key)
        return read(key)

    scene.store.read = noted  # type: ignore[method-assign]
    with scene.reader() as reader:
        stream = Stream(reader, Shape(40))
        found = [value for _ in range(100) for value in (int(one[0]) for one in stream.next_batch()[1])]
    assert sorted(found) == list(range(4000))
    assert found[:20] != sorted(found[:20])
    assert len(opened) <= 1.2 * 200


def test_open_objects_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_client.ring.reader._OPEN_BYTES", 20_000)
    scene = Scene(cap=12)
    for _ in range(12):
        scene.writer.put(np.zeros(1000))
    scene.ring.publish()
    with scene.reader() as reader:
        for slot in reader.newest().slots:
            reader.sample(slot)
        assert 1 <= len(reader._objects) <= 2


def test_a_state_does_not_grow_with_the_ring() -> None:
    scene = Scene(cap=64)
    scene.put(64)
    with scene.reader() as reader:
        stream = Stream(reader, Shape(8))
        for _ in range(40):
            stream.next_batch()
        assert len(json.dumps(stream.state_dict())) < 300


def test_a_plan_that_has_left_its_manifest_wants_another() -> None:
    scene = Scene()
    scene.put(4)
    newest = scene.ring.newest()
    plan = Plan(Shape(1))
    plan.decide(Decision(newest.number, 0), newest, None)
    plan.next_batch(newest)
    plan.left()
    assert plan.wants_decision(newest)
    assert plan.batch == 1
