"""Test packs: limits by number and by bytes; no sample is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st

from gpu_client.ring.core.repair import repair_ring
from gpu_client.ring.errors import StoreFull
from gpu_client.ring.format.manifest import Slot, WriterWatermark
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.format.records import POINTER, SAMPLES
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import PACK_BYTES, RingSettings
from tests.unit.ring.ring_scene import Scene

BOUND = 4096
MIB = 1024 * 1024


def sample(number: int, size_bytes: int) -> dict[str, Any]:
    """Return a sample of `size_bytes` in an object, or of up to 64 more."""
    return {"number": np.array([number]), "rest": np.zeros(max(size_bytes - 64, 0), np.uint8)}


def stored(scene: Scene) -> list[StoredSamples]:
    found = []
    for key in scene.store.keys(SAMPLES):
        data = scene.store.read(key)
        assert data is not None
        found.append(StoredSamples(key, data))
    return found


def body_bytes(pack: StoredSamples) -> int:
    """Return the number of bytes behind a pack's header."""
    return pack.size_bytes - pack._body


def test_unless_said_otherwise_a_pack_has_64_mib_at_most() -> None:
    assert PACK_BYTES == RingSettings(cap=4, pack=4).most_pack_bytes == 64 * MIB
    assert RingSettings(cap=4, pack=4, pack_bytes=8 * MIB).most_pack_bytes == 8 * MIB
    scene = Scene(cap=100, pack=100)
    with scene.writer() as writer:
        for number in range(5):
            writer.put(sample(number, 20 * MIB))
    assert [len(pack) for pack in stored(scene)] == [3, 2]
    assert "pack_bytes" not in scene.ring.settings.model_dump(exclude_none=True), "who does not know of it can open it"


@checked(max_examples=150, deadline=None, derandomize=True)
@given(
    made=st.lists(st.tuples(st.sampled_from("ab"), st.integers(65, 6000) | st.integers(65, 300)), max_size=40),
    pack=st.integers(2, 9),
    cap=st.integers(9, 20),
    mode=st.sampled_from(["rolling", "generation"]),
    looks=st.integers(1, 7),
)
def test_packs_are_bounded_and_each_sample_is_readable_once(
    made: list[tuple[str, int]], pack: int, cap: int, mode: Literal["rolling", "generation"], looks: int
) -> None:
    scene = Scene(cap=cap, mode=mode, pack=pack, pack_bytes=BOUND, shapes="any", max_ahead=1000, retain=1000)
    writers = {name: scene.writer(name) for name in "ab"}
    seen: dict[int, Slot] = {}

    def look(*, at_once: bool = False) -> None:
        """Publish step by step, and note each sample that becomes readable."""
        while True:
            before = scene.ring.newest()
            if scene.ring.publish(at_once=at_once) is None:
                return
            newest = scene.ring.newest()
            if mode == "generation" and newest.inserted > before.inserted:
                assert [slot.inserted for slot in newest.slots] == list(range(before.inserted, newest.inserted))
                assert len(newest) == cap or at_once
            for slot in newest.slots:
                assert seen.setdefault(slot.inserted, slot) == slot

    for number, (name, size_bytes) in enumerate(made):
        writers[name].put(sample(number, size_bytes), seed=number)
        if number % looks == 0:
            look()
            assert mode == "rolling" or scene.ring.newest().finished(scene.ring.claims()) < cap, "all that is due"
    for writer in writers.values():
        writer.flush()
    look(at_once=True)
    packs = stored(scene)
    assert all(len(one) == 1 or (len(one) <= pack and body_bytes(one) <= BOUND) for one in packs)
    for name in "ab":
        samples = sum(who == name for who, _ in made)
        assert sum(len(one) for one in packs if one.provenance.writer == name) == samples
    assert sorted(seen) == list(range(len(made)))
    with RingReader(scene.ring, threads=False) as reader:
        assert sorted(int(reader.sample(slot)["number"][0]) for slot in seen.values()) == list(range(len(made)))
        for name in "ab":
            own = [number for number, (who, _) in enumerate(made) if who == name]
            found = [seen[at] for at in sorted(seen) if seen[at].object.writer == name]
            assert [int(reader.sample(slot)["number"][0]) for slot in found] == own, "in their order"


def test_a_sample_that_is_larger_than_a_pack_may_be_has_an_object_of_its_own() -> None:
    scene = Scene(cap=10, pack=5, pack_bytes=BOUND, shapes="any")
    with scene.writer() as writer:
        for number, size_bytes in enumerate([1000, 1000, 9000, 1000, 3008, 64, 1000]):
            writer.put(sample(number, size_bytes))
    assert [[int(pack.sample(at)["number"][0]) for at in range(len(pack))] for pack in stored(scene)] == [
        [0, 1], [2], [3, 4, 5], [6]
    ]  # fmt: skip


def test_what_waits_behind_a_full_store_is_stored_in_packs_that_are_no_larger() -> None:
    scene = Scene(cap=20, pack=3, pack_bytes=BOUND)
    writer = scene.writer(patience_s=0.5)
    create, full = scene.store.create, True

    def refuse(key: str, pieces: Sequence[memoryview]) -> bool:
        if full and key.startswith(SAMPLES):
            scene.clock.advance(1.0)
            raise StoreFull("there is no room", "Free some")
        return create(key, pieces)

    scene.store.create = refuse  # type: ignore[method-assign]
    for number in range(2):
        writer.put(sample(number, 1500))
    for _ in range(5):
        with pytest.raises(StoreFull):
            writer.put(sample(2, 1500))
    full = False
    for number in range(2, 8):
        writer.put(sample(number, 1500))
    writer.close()
    assert [len(pack) for pack in stored(scene)] == [2, 2, 2, 2]
    assert [int(value["number"][0]) for value in scene.values()] == list(range(8))


def test_a_pack_that_two_generations_share_is_read_whole_and_then_goes() -> None:
    scene = Scene(cap=4, mode="generation", pack=3, retain=2)
    writer = scene.writer()
    for number in range(6):
        writer.put(np.array([number]))
    first = scene.ring.publish() and scene.ring.newest()
    assert first and [int(value[0]) for value in scene.values()] == [0, 1, 2, 3]
    assert first.passed["w"] == WriterWatermark(1, 1, first.at_ms, 1)
    assert first.finished(scene.ring.claims()) == 2 and scene.ring.publish() is None
    for _ in range(3):
        scene.collector.collect()
    assert len(scene.store.keys(SAMPLES)) == 2, "half of it waits"
    for number in range(6, 15):
        writer.put(np.array([number]))
        scene.publish()
    assert [int(value[0]) for value in scene.values()] == [8, 9, 10, 11]
    scene.collector.collect()
    assert [len(scene.store.keys(SAMPLES)), scene.ring.newest().inserted] == [4, 12]
    writer.close()
    scene.ring.publish(at_once=True)
    assert [int(value[0]) for value in scene.values()] == [12, 13, 14]


def test_a_writer_that_dies_in_between_leaves_the_rest_of_its_pack_to_the_next_generation() -> None:
    scene = Scene(cap=4, mode="generation", pack=3, lease_s=5.0)
    dead = scene.writer("dead")
    for number in range(6):
        dead.put(np.array([number]))
    other = scene.writer("other")
    scene.publish()
    scene.bury(other)
    for number in range(6, 9):
        other.put(np.array([number]))
    scene.publish()
    assert [int(value[0]) for value in scene.values()] == [4, 5, 6, 7]


def test_a_repair_lists_nothing_twice_of_a_pack_that_two_generations_share() -> None:
    scene = Scene(cap=4, mode="generation", pack=3, retain=3)
    writer = scene.writer()
    for number in range(9):
        writer.put(np.array([number]))
    scene.publish()
    newest = scene.ring.newest()
    assert newest.inserted == 8
    scene.store.delete([f"manifests/{newest.number:012d}"])
    repair_ring(scene.ring)
    writer.close()
    values, last = [], 0
    while True:
        found = scene.ring.newest()
        if found.inserted > last:
            fresh = [slot for slot in found.slots if slot.inserted >= last]
            last = found.inserted
            values += [slot.id for slot in fresh]
        if scene.ring.publish(at_once=True) is None:
            break
    assert len(values) == len(set(values))
    assert scene.store.record(POINTER) is not None
