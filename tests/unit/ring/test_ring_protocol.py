"""Test the protocol by a state machine: processes die at any step, with any clocks, and each sample is read once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ManifestMissing, WriterFenced
from gpu_client.ring.format.manifest import RingManifest
from gpu_client.ring.format.records import Versioned
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock
from tests.unit.ring.ring_kit import Died, MortalStore

LEASE_S = 10.0
deaths = st.none() | st.tuples(st.integers(0, 12), st.booleans())
skews = st.sampled_from([0.0, -5000.0, 5000.0, -1e9, 1e9])


class RingMachine(RuleBasedStateMachine):
    """A ring of which each process has its own connection to the one store."""

    @initialize(mode=st.sampled_from(["rolling", "generation"]), cap=st.integers(2, 6), pack=st.integers(1, 5))
    def begin(self, mode: str, cap: int, pack: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("gpu_client.ring.format.manifest.REMEMBERED_S", 3 * LEASE_S)
        self.clock = Clock()
        self.store = MemoryStore()
        self.settings = RingSettings(
            cap=cap, mode=mode, pack=min(pack, cap), retain=2, lease_s=LEASE_S, max_ahead=10_000
        )
        Ring.make(self.store, self.settings)
        self.writers: list[tuple[MortalStore, RingWriter]] = []
        self.readers: list[tuple[RingReader, RingManifest]] = []
        self.collector = GarbageCollector(Ring(self.store, self.settings, clock=self.clock), LeaseWatch(self.clock))
        self.next = self.number_of_readers = 0
        self.put: set[int] = set()
        self.seen: dict[int, str] = {}
        self.values: dict[str, int] = {}
        self.number = 0

    def own(self, skew_s: float = 0.0) -> tuple[MortalStore, Ring]:
        """`skew_s`: by how much that process's clock is wrong."""
        store = MortalStore(self.store)
        return store, Ring(store, self.settings, clock=lambda: self.clock() + skew_s)

    def note(self) -> None:
        """Note the readable samples; check that each sample has one number of insertion, and each number one sample."""
        newest = Ring(self.store, self.settings).newest()
        assert newest.number >= self.number
        self.number = newest.number
        for slot in newest.slots:
            assert self.seen.setdefault(slot.inserted, slot.id) == slot.id
        assert len(set(self.seen.values())) == len(self.seen)
        assert [slot.inserted for slot in newest.slots] == list(range(newest.inserted - len(newest), newest.inserted))

    @rule(name=st.sampled_from("ab"), death=deaths, skew_s=skews)
    def begin_writer(self, name: str, death: tuple[int, bool] | None, skew_s: float) -> None:
        store, ring = self.own(skew_s)
        kill(store, death)
        try:
            keeper = Maintainer(ring, name, clock=self.clock)
            writer = RingWriter(ring, name, maintainer=keeper, threads=False, clock=self.clock)
        except Died:
            return
        kill(store, None)
        self.writers.append((store, writer))

    @rule(which=st.integers(0, 99), samples=st.integers(1, 6), death=deaths)
    def put_some(self, which: int, samples: int, death: tuple[int, bool] | None) -> None:
        """Put samples in packs, the last of which may be small."""
        if not self.writers:
            return
        store, writer = self.writers[which % len(self.writers)]
        kill(store, death)
        values = range(self.next, self.next + samples)
        self.next += samples
        try:
            for value in values:
                writer.put({"value": np.array([value])}, seed=value)
            writer.flush()
        except Died:
            self.writers.remove((store, writer))
            return
        except WriterFenced:
            self.writers.remove((store, writer))
            return
        finally:
            kill(store, None)
        self.put |= set(values)

    @rule(which=st.integers(0, 99))
    def renew(self, which: int) -> None:
        if self.writers:
            self.writers[which % len(self.writers)][1].renew()

    @rule(which=st.integers(0, 99), death=deaths)
    def close_writer(self, which: int, death: tuple[int, bool] | None) -> None:
        if not self.writers:
            return
        store, writer = self.writers.pop(which % len(self.writers))
        publish = writer._ring.publish

        def looked_at(*, at_once: bool = False) -> RingManifest | None:
            """Closing publishes again and again: what is read of it has to be looked for each time."""
            found = publish(at_once=at_once)
            for slot in found.slots if found is not None else ():
                self.value_of(Ring(self.store, self.settings), slot)
            return found

        writer._ring.publish = looked_at  # type: ignore[method-assign]
        kill(store, death)
        with suppress(Died, WriterFenced):
            writer.close()
        self.note()

    @rule(death=deaths, at_once=st.booleans(), skew_s=skews)
    def publish(self, death: tuple[int, bool] | None, at_once: bool, skew_s: float) -> None:
        store, ring = self.own(skew_s)
        kill(store, death)
        with suppress(Died):
            ring.publish(at_once=at_once)
        self.note()

    @rule(first=deaths, steps=st.integers(0, 6))
    def publish_by_two(self, first: tuple[int, bool] | None, steps: int) -> None:
        """Stop a publisher midway while another one publishes, then let the first go on."""
        store, ring = self.own()
        inner = Ring(self.store, self.settings, clock=self.clock)
        done = store._do

        def interrupted(operation):  # type: ignore[no-untyped-def]
            if store.operations == steps:
                inner.publish(at_once=True)
                self.note()
            return done(operation)

        store._do = interrupted  # type: ignore[method-assign]
        kill(store, first)
        with suppress(Died):
            ring.publish(at_once=True)
        self.note()

    @rule(death=deaths)
    def collect(self, death: tuple[int, bool] | None) -> None:
        store = MortalStore(self.store)
        self.collector._ring = Ring(store, self.settings, clock=self.clock)
        kill(store, death)
        with suppress(Died):
            self.collector.collect()

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 11.0, 21.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for reader, _ in self.readers:
            reader.flush_stats()

    @rule()
    def read(self) -> None:
        _, ring = self.own()
        self.number_of_readers += 1
        reader = RingReader(ring, f"r{self.number_of_readers}", threads=False, clock=self.clock)
        self.readers.append((reader, reader.newest()))

    @rule()
    def leave(self) -> None:
        if self.readers:
            self.readers.pop(0)[0].close()

    @invariant()
    def all_that_is_listed_can_be_read(self) -> None:
        if not hasattr(self, "store"):
            return
        ring = Ring(self.store, self.settings)
        number, _ = ring.pointer()
        manifests = [ring.manifest(one) for one in range(max(1, number - self.settings.retain + 1), number + 1)]
        for manifest in [*manifests, *(manifest for _, manifest in self.readers)]:
            for slot in manifest.slots:
                self.value_of(ring, slot)

    def value_of(self, ring: Ring, slot) -> None:  # type: ignore[no-untyped-def]
        from gpu_client.ring.format.objects import StoredSamples

        data = ring.store.read(slot.object.key)
        assert data is not None, f"{slot.id} is listed and not there"
        value = int(StoredSamples(slot.object.key, data).sample(slot.number)["value"][0])
        assert self.values.setdefault(slot.id, value) == value

    def teardown(self) -> None:
        """Check that each sample put has been in a manifest exactly once, after everything is published."""
        if not hasattr(self, "store"):
            return
        self.patch.undo()
        ring = Ring(self.store, self.settings, clock=self.clock)
        while ring.publish(at_once=True) is not None:
            self.note()
            for slot in ring.newest().slots:
                self.value_of(ring, slot)
        self.note()
        read = list(self.values.values())
        missing = self.put - set(read)
        assert not missing, f"{missing} were put and never readable"
        assert len(read) == len(set(read)), "a sample was inserted twice"


def kill(store: MortalStore, death: tuple[int, bool] | None) -> None:
    store.dies_after = None if death is None else death[0]
    store.done_first = False if death is None else death[1]


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)


def test_a_pointer_to_a_missing_manifest_is_told() -> None:
    store = MemoryStore()
    ring = Ring.make(store, RingSettings(cap=2))
    store.swap("pointer", b'{"manifest": 7}', None)
    with pytest.raises(ManifestMissing, match="manifest 7"):
        ring.newest()


class Overtaken(MemoryStore):
    """Store on which a publisher acts while a reader reads the pointer."""

    meanwhile: Callable[[], object] | None = None

    def record(self, key: str) -> Versioned | None:
        found = super().record(key)
        if key == "pointer" and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return found


def test_a_ring_that_a_thread_has_just_begun_was_not_removed() -> None:
    store = Overtaken()
    ring = Ring.make(store, RingSettings(cap=4))
    with RingWriter(ring, "w", threads=False) as writer:
        writer.put(np.zeros(2))
        store.meanwhile = lambda: (ring.publish(), ring.newest())
        assert ring.pointer()[0] in (0, 1)
        assert len(ring.newest()) == 1
