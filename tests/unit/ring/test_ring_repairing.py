"""Test inspection and repair: damage is excluded, losses stay local, the ring continues."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_client.ring.core.damage_report import list_quarantined
from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.core.repair import inspect_ring, repair_ring
from gpu_client.ring.core.ring import Ring, make_ring, open_ring
from gpu_client.ring.errors import ManifestMissing
from gpu_client.ring.format.manifest import manifest_key
from gpu_client.ring.format.records import POINTER, SAMPLES
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore


class Rig:
    """A ring in a directory, one publication for each sample, and its files."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.place = place
        make_ring(str(place), RingSettings(**{"cap": 8, "retain": 3, "max_ahead": 100, **settings}))
        self.writer = RingWriter(self.ring, "w", threads=False)
        self.next = 0

    @property
    def ring(self) -> Ring:
        """Open the ring as a new process does."""
        return open_ring(str(self.place))

    def put(self, count: int) -> None:
        for _ in range(count):
            self.next += 1
            self.writer.put({"x": np.full(20, self.next - 1)}, seed=self.next - 1)
            while self.ring.publish() is not None:
                pass

    def alter(self, key: str) -> None:
        path = self.place / key
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data[: len(data) - 5])

    def readable(self) -> list[int]:
        """Return every sample of the newest manifest, as a reader receives the samples."""
        with RingReader(self.ring, threads=False) as reader:
            return [int(reader.sample(slot)["x"][0]) for slot in reader.newest().slots]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "ring")


def test_nothing_is_done_to_a_ring_that_is_whole(rig: Rig) -> None:
    rig.put(5)
    before = {path: path.read_bytes() for path in rig.place.rglob("*") if path.is_file()}
    assert inspect_ring(rig.ring).damaged == repair_ring(rig.ring).damaged == {}
    assert {path: path.read_bytes() for path in rig.place.rglob("*") if path.is_file()} == before


def test_a_ring_without_any_sample_is_whole(rig: Rig) -> None:
    assert repair_ring(rig.ring).damaged == {}


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"null", b'{"manifest": "x"}', b'{"manifest": 0}'])
def test_a_pointer_that_is_lost_is_set_to_the_newest_manifest(rig: Rig, content: bytes | None) -> None:
    rig.put(5)
    newest = rig.ring.newest()
    (rig.place / POINTER).unlink() if content is None else (rig.place / POINTER).write_bytes(content)
    assert list(inspect_ring(rig.ring).damaged) == [POINTER]
    repair_ring(rig.ring)
    assert rig.ring.newest() == newest
    assert inspect_ring(rig.ring).damaged == {}
    rig.put(2)
    assert rig.readable() == list(range(7))


@pytest.mark.parametrize("gone", [True, False])
def test_a_pointer_to_a_lost_manifest_goes_back_to_the_last_good_one(rig: Rig, gone: bool) -> None:
    rig.put(5)
    lost = rig.ring.newest()
    key = manifest_key(lost.number)
    (rig.place / key).unlink() if gone else rig.alter(key)
    with pytest.raises(ManifestMissing, match="baton ring verify RING --repair"):
        rig.ring.newest()
    found = inspect_ring(rig.ring)
    assert f"names manifest {lost.number}, which" in found.damaged[POINTER]
    assert list(found.manifests) == ([] if gone else [key])
    repair_ring(rig.ring)
    newest = rig.ring.newest()
    assert newest.number == lost.number + 1, "a number that nobody remembers"
    assert newest.inserted == lost.inserted
    assert inspect_ring(rig.ring).damaged == {}
    assert rig.readable() == [0, 1, 2, 3], "the writer may be about to claim its last one"
    rig.put(2)
    assert rig.readable() == [0, 1, 2, 3, 5, 6]
    assert len({slot.inserted for slot in rig.ring.newest().slots}) == 6


def test_what_only_lost_manifests_listed_can_be_read_again(rig: Rig) -> None:
    rig.put(6)
    rig.writer.close()
    other = RingWriter(rig.ring, "other", threads=False)
    for number in (100, 101):
        other.put({"x": np.full(20, number)})
    newest = rig.ring.newest().number
    for number in range(newest - 2, newest + 1):
        (rig.place / manifest_key(number)).unlink(missing_ok=True)
    repair_ring(rig.ring)
    assert rig.readable() == list(range(6)), "the writer has left: all that it has stored counts"
    while rig.ring.publish() is not None:
        pass
    assert rig.readable() == [*range(6), 100, 101], "what waited still waits its turn, and comes once"
    assert len({slot.object for slot in rig.ring.newest().slots}) == 8
    assert {name: one.ended for name, one in rig.ring.newest().passed.items()} == {"w": True, "other": False}


def test_a_writer_whose_end_only_a_lost_manifest_has_told_need_not_be_remembered(rig: Rig) -> None:
    rig.put(3)
    rig.writer.close()
    rig.ring.publish()
    newest = rig.ring.newest()
    assert newest.passed["w"].ended
    for number in range(newest.number - 1, newest.number + 1):
        (rig.place / manifest_key(number)).unlink()
    repair_ring(rig.ring)
    assert rig.ring.newest().passed["w"].ended
    assert rig.readable() == [0, 1, 2]


def test_the_stored_samples_that_are_not_listed_again_are_collected(rig: Rig) -> None:
    rig.put(5)
    (rig.place / manifest_key(rig.ring.newest().number)).unlink()
    repair_ring(rig.ring)
    rig.put(10)
    GarbageCollector(rig.ring, LeaseWatch()).collect()
    kept = {slot.object for number in range(3) for slot in rig.ring.manifest(rig.ring.newest().number - number).slots}
    assert len(rig.ring.store.keys(SAMPLES)) == len(kept) == 10


def test_damaged_objects_are_left_out_and_noted(rig: Rig) -> None:
    rig.put(5)
    keys = rig.ring.store.keys(SAMPLES)
    rig.alter(keys[1])
    (rig.place / keys[3]).unlink()
    found = repair_ring(rig.ring)
    assert set(found.objects) == {keys[1], keys[3]}
    assert set(list_quarantined(rig.ring)) == {keys[1], keys[3]}
    assert rig.readable() == [0, 2, 4]
    assert inspect_ring(rig.ring).damaged == {}
    rig.put(1)
    assert rig.readable() == [0, 2, 4, 5]


def test_a_damaged_manifest_ahead_of_the_pointer_stops_nobody(rig: Rig) -> None:
    rig.put(3)
    ahead = manifest_key(rig.ring.newest().number + 1)
    (rig.place / ahead).write_bytes(b"rot")
    with suppress(ManifestMissing):
        rig.put(1)
    assert rig.readable() == [0, 1, 2], "it stands in the way"
    assert list(inspect_ring(rig.ring).damaged) == [ahead]
    repair_ring(rig.ring)
    rig.put(1)
    assert rig.readable() == [0, 1, 2, 3, 4]


def test_a_damaged_manifest_that_is_retained_stops_no_collecting(rig: Rig) -> None:
    rig.put(4)
    older = manifest_key(rig.ring.newest().number - 1)
    rig.alter(older)
    with pytest.raises(ManifestMissing):
        GarbageCollector(rig.ring, LeaseWatch()).collect()
    assert list(repair_ring(rig.ring).damaged) == [older]
    GarbageCollector(rig.ring, LeaseWatch()).collect()
    assert rig.readable() == [0, 1, 2, 3]


def test_a_publisher_that_is_faster_is_not_undone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(3)
    rig.alter(rig.ring.store.keys(SAMPLES)[0])
    ring = rig.ring
    create, raced = ring.store.create, []

    def racing(key: str, pieces: Any) -> bool:
        if key.startswith("manifests/") and not raced:
            raced.append(key)
            rig.put(1)
        return create(key, pieces)

    monkeypatch.setattr(ring.store, "create", racing)
    repair_ring(ring)
    assert raced
    assert rig.readable() == [1, 2, 3]


def test_a_whole_generation_that_is_lost_comes_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "ring", mode="generation", cap=4)
    rig.put(8)
    rig.writer.close()
    newest = rig.ring.newest()
    assert rig.readable() == [4, 5, 6, 7]
    (rig.place / manifest_key(newest.number)).unlink()
    (rig.place / POINTER).write_bytes(json.dumps({"manifest": newest.number}).encode())
    repair_ring(rig.ring)
    assert rig.readable() == [4, 5, 6, 7]
    assert rig.ring.newest().inserted == 8


def test_what_is_replaced_while_it_is_looked_at_is_not_told_as_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(8)
    ring = rig.ring
    read = ring.store.read

    def slow(key: str) -> memoryview | None:
        if key.startswith(SAMPLES) and rig.next == 8:
            rig.put(20)
            GarbageCollector(rig.ring, LeaseWatch()).collect()
        return read(key)

    monkeypatch.setattr(ring.store, "read", slow)
    assert inspect_ring(ring).damaged == {}
    assert rig.readable() == list(range(20, 28))


@settings(max_examples=60, deadline=None)
@given(
    acts=st.lists(st.sampled_from(["put a", "put b", "publish", "close a"]), min_size=1, max_size=25),
    pointer=st.sampled_from(["kept", "lost", "rubbish"]),
    lost=st.integers(0, 4),
)
def test_whatever_was_lost_takes_nothing_else_with_it(acts: list[str], pointer: str, lost: int) -> None:
    store = MemoryStore()
    ring = Ring.make(store, RingSettings(cap=1000, max_ahead=1000))
    writers = {name: RingWriter(ring, name, threads=False) for name in ("a", "b")}
    put: dict[str, int] = {"a": 0, "b": 0}
    for act in acts:
        word, _, name = act.partition(" ")
        if word == "publish":
            ring.publish()
        elif word == "close" and name in writers:
            writers.pop(name).close()
        elif name in writers:
            writers[name].put(np.array([put[name]]))
            put[name] += 1
    highest = ring.newest().number
    store.delete([manifest_key(number) for number in range(highest - lost + 1, highest + 1)])
    if pointer != "kept":
        store.delete([POINTER])
    if pointer == "rubbish":
        store.swap(POINTER, b"?", None)
    repair_ring(Ring.open(store))
    ring = Ring.open(store)
    assert inspect_ring(ring).damaged == {}
    for name, writer in writers.items():
        writer.put(np.array([put[name]]))
        put[name] += 1
    while ring.publish() is not None:
        pass
    newest = ring.newest()
    # Without its pointer and all but the first manifest, a ring is like one that is just beginning.
    told = pointer != "lost" or highest - lost > 1
    assert newest.number >= highest - (lost if pointer != "kept" else 0) or not told
    objects = [slot.object for slot in newest.slots]
    numbers = [slot.inserted for slot in newest.slots]
    assert len(set(objects)) == len(objects) and len(set(numbers)) == len(numbers)
    assert all(store.read(found.key) is not None for found in objects)
    for name, samples in put.items() if told else ():
        there = sum(found.writer == name for found in objects)
        assert there >= samples - (name in writers), "at most the one that might have been about to be claimed"
