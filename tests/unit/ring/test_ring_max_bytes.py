"""Test `max_bytes`: the bound holds at every moment, and writers continue after a collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.core.storage_quota import measure_storage
from gpu_client.ring.errors import StoreFull, WaitedTooLong
from gpu_client.ring.format.records import ROOM, SAMPLES, decode_record
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock
from tests.unit.ring.ring_kit import Died, MortalStore

LEASE_S, TURN_S = 12.0, 0.25
SAMPLE = np.zeros(1000)
OBJECT_BYTES = 8448
"""A sample with its header."""


def settings(cap: int = 10, objects: int = 0, **more: Any) -> RingSettings:
    """A ring that has room for so many objects, besides lists and records."""
    plain = RingSettings(cap=cap)
    most = plain.notes_bytes + objects * OBJECT_BYTES
    return RingSettings(**{"cap": cap, "lease_s": LEASE_S, "publish_interval_s": TURN_S, "max_bytes": most, **more})


class Watched(MemoryStore):
    """A store that knows the most it ever had."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = self.most_samples = 0

    def _put(self, key: str, data: bytes) -> None:
        super()._put(key, data)
        self.most_bytes = max(self.most_bytes, sum(map(len, self._objects.values())))
        self.most_samples = max(self.most_samples, sum(key.startswith(SAMPLES) for key in self._objects))


class Scene:
    """Writers without threads; while one waits, the ring is looked after."""

    def __init__(self, given: RingSettings) -> None:
        self.clock, self.store = Clock(), Watched()
        self.settings = given
        self.ring = Ring.make(self.store, given, clock=self.clock)
        self.keeper = Maintainer(self.ring, "k", clock=self.clock)
        self.keeper.wait_turn = self.waited  # type: ignore[method-assign, assignment]
        self.renewed: list[Callable[[], object]] = []

    def waited(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for renew in self.renewed:
            renew()
        self.keeper.turn()

    def writer(self, name: str, store: Any = None, **more: Any) -> RingWriter:
        ring = self.ring if store is None else Ring(store, self.settings, clock=self.clock)
        writer = RingWriter(ring, name, maintainer=self.keeper, threads=False, clock=self.clock, **more)
        self.renewed.append(writer.renew)
        return writer


@pytest.mark.parametrize(("mode", "objects"), [("rolling", 13), ("generation", 22)])
def test_writers_wait_for_room_and_never_for_ever(mode: str, objects: int) -> None:
    """Writers wait for room and go on, in a ring of the least size that docs/ring.md names for two writers."""
    scene = Scene(settings(objects=objects, mode=mode, max_ahead=500))
    writers = [scene.writer(f"w{number}") for number in range(2)]
    for number in range(100):
        writers[number % 2].put(SAMPLE)
    assert scene.settings.max_bytes is not None
    assert scene.store.most_bytes <= scene.settings.max_bytes
    scene.waited(TURN_S)
    assert scene.ring.newest().inserted >= 100 - 10
    assert sum(writer.waited_s for writer in writers) > 0


def test_what_readers_pin_counts() -> None:
    scene = Scene(settings(objects=15))
    writer = scene.writer("w", patience_s=60.0)
    for _ in range(10):
        writer.put(SAMPLE)
    scene.waited(TURN_S)
    reader = RingReader(scene.ring, "r", threads=False, clock=scene.clock)
    scene.renewed.append(reader.flush_stats)
    pinned = reader.newest()
    with pytest.raises(WaitedTooLong, match="max_bytes"):
        for _ in range(100):
            writer.put(SAMPLE)
    assert scene.settings.max_bytes is not None
    assert scene.store.most_bytes <= scene.settings.max_bytes
    for slot in pinned.slots:
        reader.sample(slot)


@pytest.mark.parametrize("pack", [1, 3])
def test_a_sample_that_found_no_room_is_not_taken_and_may_be_put_again(pack: int) -> None:
    scene = Scene(settings(cap=12, objects=12 + 4 * pack, pack=pack))
    writer = scene.writer("w", patience_s=60.0)

    def put(number: int) -> None:
        writer.put(np.full(1000, number))

    for number in range(12):
        put(number)
    scene.waited(TURN_S)
    reader = RingReader(scene.ring, "r", threads=False, clock=scene.clock)
    scene.renewed.append(reader.flush_stats)
    reader.newest()
    number = 11
    with pytest.raises(WaitedTooLong, match="max_bytes"):
        while True:
            number += 1
            put(number)
    counts, began_at, waited_s = (writer.put_samples, writer.put_bytes), scene.clock(), writer.waited_s
    for _ in range(2):
        with pytest.raises(WaitedTooLong, match="max_bytes"):
            put(number)
    assert (writer.put_samples, writer.put_bytes) == counts
    assert writer.waited_s - waited_s == pytest.approx(scene.clock() - began_at)
    scene.renewed.remove(reader.flush_stats)
    reader.close()
    put(number)
    assert writer.put_samples == number + 1
    scene.waited(TURN_S)
    with RingReader(scene.ring, "r", threads=False, clock=scene.clock) as reader:
        found = [int(reader.sample(slot)[0]) for slot in reader.newest().slots]
    assert found == list(range(number - 11, number + 1))


@pytest.mark.parametrize("done_first", [False, True])
@pytest.mark.parametrize("dies_after", range(6))
def test_what_the_killed_leave_counts_until_it_is_removed(dies_after: int, done_first: bool) -> None:
    scene = Scene(settings(objects=16, max_ahead=500))
    for number in range(30):
        mortal = MortalStore(scene.store)
        writer = scene.writer(f"dies-{number}", mortal, patience_s=10 * LEASE_S)
        writer.put(SAMPLE)
        scene.renewed.clear()
        mortal.dies_after, mortal.done_first = dies_after, done_first
        with pytest.raises(Died):
            for _ in range(4):
                writer.put(SAMPLE)
        assert scene.settings.max_bytes is not None
        assert scene.store.most_bytes <= scene.settings.max_bytes
    for _ in range(int(4 * LEASE_S / TURN_S)):
        scene.waited(TURN_S)
    assert len(scene.store.keys(SAMPLES)) == 10, "what the ring lists, and no orphan"
    measure_storage(scene.ring)
    assert decode_record(scene.store.record(ROOM))["writers"] == {}, "no grant of the dead is left"


@pytest.mark.parametrize("mode", ["rolling", "generation"])
def test_without_it_the_sum_of_the_documentation_is_a_bound(mode: str) -> None:
    """The parts are those of docs/ring.md, for a writer with killed predecessors and no reader."""
    cap, retain, put_every_s, kill_every = 10, 3, 0.05, 60
    scene = Scene(settings(cap, mode=mode, retain=retain, max_ahead=cap, max_bytes=None))
    for number in range(20):
        mortal = MortalStore(scene.store)
        writer = scene.writer(f"w{number}", mortal)
        for count in range(kill_every):
            writer.put(SAMPLE)
            scene.clock.advance(put_every_s)
            if count % 4 == 3:
                scene.waited(TURN_S)
        scene.renewed.clear()
        mortal.dies_after, mortal.done_first = number % 4, True
        with pytest.raises(Died):
            for _ in range(4):
                writer.put(SAMPLE)
    put_per_s = 4 / (4 * put_every_s + TURN_S)
    killed_in_two_leases = int(2 * LEASE_S * put_per_s / kill_every) + 1
    replaced, uncollected = (retain - 1) * cap, int(LEASE_S / 6 * put_per_s) + 1
    most = cap + replaced + uncollected + 2 * cap + killed_in_two_leases
    assert most / 2 < scene.store.most_samples <= most


def test_two_that_measure_at_once_forget_no_grant() -> None:
    scene = Scene(settings(objects=14, max_ahead=500))
    writer = scene.writer("w")
    writer.put(SAMPLE)
    stored_bytes = scene.store.stored_bytes

    def stored_while_it_is_measured() -> int:
        scene.store.stored_bytes = stored_bytes  # type: ignore[method-assign]
        found = stored_bytes()
        for _ in range(5):
            writer.put(SAMPLE)
        measure_storage(scene.ring)
        for _ in range(5):
            writer.put(SAMPLE)
        return found

    scene.store.stored_bytes = stored_while_it_is_measured  # type: ignore[method-assign]
    measure_storage(scene.ring)
    for _ in range(20):
        writer.put(SAMPLE)
    assert scene.settings.max_bytes is not None
    assert scene.store.most_bytes <= scene.settings.max_bytes


def test_a_ring_that_can_never_have_room_is_refused_with_what_it_needs() -> None:
    scene = Scene(settings(objects=5))
    with pytest.raises(StoreFull, match=r"10 samples in objects of \d+ bytes need \d+, and"):
        scene.writer("w").put(SAMPLE)
    assert scene.store.keys(SAMPLES) == []


@pytest.mark.parametrize("given", [0, -1, 1.5, "much", 65_536])
def test_bad_values_are_refused(given: Any) -> None:
    with pytest.raises(ValidationError, match="max_bytes"):
        RingSettings(cap=10, max_bytes=given)
