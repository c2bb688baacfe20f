"""Test deaths at every step and racing publishers, at every place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from functions.local.emulator import Emulator
from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.format.manifest import manifest_key
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.control_plane import ControlPlaneStore
from gpu_client.ring.store.filesystem import DirectoryStore
from gpu_client.ring.store.memory import MemoryStore
from gpu_client.ring.store.protocol import RingBackend
from gpu_client.ring.store.s3 import BucketStore
from tests.kits.api.served_api import ServedApi
from tests.kits.clock import Clock
from tests.kits.clouds.emulator import unique
from tests.kits.ring.bucket import RingBucket
from tests.unit.ring.ring_kit import Died, MortalStore


class Places(NamedTuple):
    """`open` opens the place of that name. `stride`: of so many steps one is tried, where each takes long."""

    open: Callable[[str], RingBackend]
    stride: int = 1


LEASE_S = 10.0
KINDS = [
    "memory",
    "fs",
    pytest.param("s3", marks=pytest.mark.emulator),
    pytest.param("api", marks=pytest.mark.emulator),
]


@pytest.fixture(params=KINDS)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    if request.param == "s3":
        emulator: Emulator = request.getfixturevalue("emulator")
        with RingBucket.of(emulator) as bucket:
            one = bucket.opened()
            yield Places(lambda name: BucketStore(f"{bucket.name}/rings/{name}", one.bucket), stride=3)
    elif request.param == "api":
        served: ServedApi = request.getfixturevalue("served")
        prefix = unique("ring")
        yield Places(lambda name: served.store(f"{prefix}-{name}"), stride=7)
    elif request.param == "fs":
        yield Places(lambda name: DirectoryStore(tmp_path / name))
    else:
        stores: dict[str, MemoryStore] = {}
        yield Places(lambda name: stores.setdefault(name, MemoryStore()))


class Scene:
    """A ring with some readable samples, and a process of the ring that is about to die."""

    def __init__(self, store: RingBackend, writer: str = "w", later_s: float = 0.0) -> None:
        self.clock = Clock()
        self.clock.advance(later_s)
        self.store = store
        self.mortal = MortalStore(store)
        self.settings = RingSettings(cap=3, retain=2, lease_s=LEASE_S, max_ahead=100)
        self.ring = Ring.make(store, self.settings, clock=self.clock)
        self.writer = self.written_by(writer, self.ring)
        self.put = [self.one() for _ in range(4)]
        self.publish_all()
        self.put += [self.one() for _ in range(2)]

    def written_by(self, name: str, ring: Ring) -> RingWriter:
        return RingWriter(ring, name, maintainer=Maintainer(ring, name), threads=False, clock=self.clock)

    def publish_all(self) -> None:
        while self.ring.publish() is not None:
            pass

    def one(self) -> int:
        value = int(self.writer.put_samples)
        self.writer.put(np.array([value]), seed=value)
        return value

    @property
    def own(self) -> Ring:
        """Return the ring as the dying process opens it."""
        return Ring(self.mortal, self.settings, clock=self.clock)

    def read_to_the_end(self) -> list[int]:
        """Publish everything; return the readable values in order of insertion. Each listed object must be stored."""
        found: dict[int, int] = {}
        while True:
            newest = self.ring.newest()
            for slot in newest.slots:
                data = self.store.read(slot.object.key)
                assert data is not None, f"{slot.id} is listed and not there"
                value = int(StoredSamples(slot.id, data).sample(slot.number)[0])
                assert found.setdefault(slot.inserted, value) == value
            if self.ring.publish(at_once=True) is None and self.ring.newest().number == newest.number:
                return [found[number] for number in sorted(found)]

    def settle(self) -> None:
        """Time passes, others work on: leases run out, and what is not needed goes."""
        collector = GarbageCollector(self.ring, LeaseWatch(self.clock))
        for _ in range(6):
            self.clock.advance(LEASE_S / 2)
            self.writer.renew()
            self.ring.publish(at_once=True)
            collector.collect()


def dies(scene: Scene, step: int, done_first: bool, act: Callable[[], object]) -> bool:
    """Run `act` on a store that dies at operation `step`; return False if `act` ended with fewer operations."""
    scene.mortal.dies_after, scene.mortal.done_first = step, done_first
    try:
        act()
    except Died:
        return True
    return False


@pytest.mark.parametrize("done_first", [False, True], ids=["before", "behind"])
def test_a_publisher_may_die_at_any_step(places: Places, done_first: bool) -> None:
    for step in range(0, 20, places.stride):
        scene = Scene(places.open(f"{step}"))
        before = scene.ring.newest().inserted
        died = dies(scene, step, done_first, lambda scene=scene: scene.own.publish())  # type: ignore[misc]
        assert scene.ring.newest().inserted in (before, before + 2), "all of it, or nothing"
        finished(scene)
        if not died:
            assert step >= 4, "a publication has some steps"
            return
    raise AssertionError("there is no end to a publication's steps")


def finished(scene: Scene) -> None:
    """Let others go on after the death; check that each sample is read once, in order, and no object is left over."""
    scene.put.append(scene.one())
    values = scene.read_to_the_end()
    assert values == sorted(set(values)), "in their order, and none twice"
    assert set(scene.put[-3:]) <= set(values)
    assert scene.ring.newest().inserted == len(scene.put)
    scene.settle()
    assert scene.store.keys("inbox/") == []
    number = scene.ring.newest().number
    retained = [scene.ring.manifest(one) for one in range(number - scene.settings.retain + 1, number + 1)]
    listed = {slot.object.key for manifest in retained for slot in manifest.slots}
    assert set(scene.store.keys("samples/")) == listed, "and nothing besides"


@pytest.mark.parametrize("done_first", [False, True], ids=["before", "behind"])
def test_a_writer_may_die_at_any_step_and_costs_its_last_sample_at_most(places: Places, done_first: bool) -> None:
    for step in range(0, 20, places.stride):
        scene = Scene(places.open(f"{step}"))
        dying = scene.written_by("dying", scene.own)
        died = dies(scene, step, done_first, lambda dying=dying: dying.put(np.array([1000])))  # type: ignore[misc]
        values = scene.read_to_the_end()
        others = [value for value in values if value != 1000]
        assert others == scene.put[-len(others) :]
        assert dying.put_samples <= values.count(1000) <= 1
        assert scene.ring.newest().inserted == len(scene.put) + values.count(1000)
        scene.settle()
        scene.settle()
        assert scene.store.keys("inbox/") == []
        listed = {slot.object.key for slot in scene.ring.newest().slots}
        orphans = [key for key in scene.store.keys("samples/dying/") if key not in listed]
        assert not died or orphans == [], "gone within two lease periods"
        if not died:
            assert step >= 3
            return
    raise AssertionError("there is no end to a put's steps")


@pytest.mark.parametrize("done_first", [False, True], ids=["before", "behind"])
def test_a_collector_may_die_at_any_step(places: Places, done_first: bool) -> None:
    for step in range(0, 60, places.stride):
        scene = Scene(places.open(f"{step}"))
        scene.put += [scene.one() for _ in range(3)]
        scene.publish_all()
        scene.put += [scene.one() for _ in range(3)]
        scene.publish_all()
        died = dies(scene, step, done_first, lambda scene=scene: GarbageCollector(scene.own).collect())  # type: ignore[misc]
        assert [slot.inserted for slot in scene.ring.newest().slots] == [9, 10, 11]
        finished(scene)
        if not died:
            assert step >= 6
            return
    raise AssertionError("there is no end to a collection's steps")


def test_publishers_that_race_insert_everything_once(places: Places) -> None:
    settings = RingSettings(cap=1000, max_ahead=1000)
    Ring.make(places.open("race"), settings)
    each, done, wrong = 15, threading.Event(), []

    def publish() -> None:
        ring = Ring.open(places.open("race"))
        try:
            while not done.is_set():
                ring.publish()
        except Exception as error:
            wrong.append(error)

    def write(name: str) -> None:
        ring = Ring.open(places.open("race"))
        with RingWriter(ring, name, threads=False) as writer:
            for number in range(each):
                writer.put(np.array([number]))
                ring.publish()

    publishers = [threading.Thread(target=publish) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
    for thread in (*publishers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in publishers:
        thread.join()
    assert wrong == []
    ring = Ring.open(places.open("race"))
    while ring.publish() is not None:
        pass
    slots = ring.newest().slots
    assert [slot.inserted for slot in slots] == list(range(2 * each))
    for name in ("a", "b"):
        assert [slot.object.seq for slot in slots if slot.object.writer == name] == list(range(1, each + 1))


def test_who_slept_while_a_ring_was_made_anew_leaves_nothing_in_the_new_one(places: Places) -> None:
    scene = Scene(places.open("again"))
    sleeper = Ring(scene.store, scene.settings, clock=scene.clock)
    assert sleeper.publish() is not None
    there = places.open("again")
    if isinstance(there, ControlPlaneStore):
        there.remove()
    else:
        for prefix in ("inbox/", "manifests/", "samples/", "writers/"):
            there.delete(there.keys(prefix))
        there.delete(["pointer", "ring.json"])
    anew = Scene(places.open("again"), "another", later_s=60.0)
    anew.written_by("third", anew.ring)
    before = anew.store.keys("manifests/")
    with suppress(RingMismatch):
        sleeper.publish()
    for key in set(anew.store.keys("manifests/")) - set(before):
        assert key == manifest_key(anew.ring.newest().number), "only what comes next may have come"
    anew.publish_all()
    for _ in range(6):
        anew.put.append(anew.one())
        anew.publish_all()
    finished(anew)
