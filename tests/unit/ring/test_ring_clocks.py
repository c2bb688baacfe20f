"""Test wrong clocks, by hours: the living stay alive, the dead are detected, and processes are not confused."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_client.ring.core.garbage_collector import CollectionResult, GarbageCollector
from gpu_client.ring.core.liveness import DEAD_AFTER_LEASES, LeaseWatch
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import WriterFenced
from gpu_client.ring.format.records import PUBLISHER, decode_record
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock

LEASE_S = 10.0
HOURS = 3600.0


class Machines:
    """Time passes for all alike; what o'clock it is, each machine sees differently."""

    def __init__(self) -> None:
        self.time = Clock()
        self.store = MemoryStore()
        self.settings = RingSettings(cap=20, retain=2, lease_s=LEASE_S)
        Ring.make(self.store, self.settings)

    def ring(self, skew_s: float) -> Ring:
        """Open the ring on a machine whose clock is `skew_s` ahead."""
        return Ring(self.store, self.settings, clock=lambda: self.time.now + skew_s)

    def writer(self, name: str, skew_s: float) -> RingWriter:
        ring = self.ring(skew_s)
        keeper = Maintainer(ring, name, clock=self.time)
        return RingWriter(ring, name, maintainer=keeper, threads=False, clock=self.time, pause=self.time.advance)

    def reader(self, name: str, skew_s: float) -> RingReader:
        return RingReader(self.ring(skew_s), name, threads=False, clock=self.time)

    def collector(self, skew_s: float) -> GarbageCollector:
        return GarbageCollector(self.ring(skew_s), LeaseWatch(self.time))


@pytest.mark.parametrize("watcher_s", [0.0, -20 * HOURS, 20 * HOURS])
@pytest.mark.parametrize("skew_s", [0.0, -3 * HOURS, 3 * HOURS])
def test_leases_run_out_by_the_time_that_passes_not_by_what_clocks_say(skew_s: float, watcher_s: float) -> None:
    machines = Machines()
    living, dying = machines.writer("living", skew_s), machines.writer("dying", skew_s)
    reading, leaving = machines.reader("reading", skew_s), machines.reader("leaving", skew_s)
    collector = machines.collector(watcher_s)
    dying.put(np.array([0]))
    machines.ring(watcher_s).publish()
    leaving.newest()
    leaving.record_consumed(3)
    leaving.flush_stats()

    def passes(seconds: float) -> CollectionResult:
        machines.time.advance(seconds)
        living.renew()
        reading.flush_stats()
        machines.ring(watcher_s).publish()
        return collector.collect()

    for _ in range(8):
        early = passes(DEAD_AFTER_LEASES * LEASE_S / 8)
        assert (early.fenced, early.readers) == (0, 0), "not before so many leases have passed"
    told = [passes(2 * LEASE_S / 8) for _ in range(8)]
    assert sum(one.fenced for one in told) == 1
    assert sum(one.readers for one in told) == 1
    living.put(np.array([1]))
    with pytest.raises(WriterFenced):
        dying.put(np.array([2]))
    machines.ring(watcher_s).publish()
    assert [slot.object.writer for slot in machines.ring(0).newest().slots] == ["dying", "living"]
    assert decode_record(machines.store.record("read"))["samples"] == 3
    assert machines.store.keys("readers/") == ["readers/reading"]


@pytest.mark.parametrize("skew_s", [-20 * HOURS, 20 * HOURS])
def test_a_publisher_that_dies_is_followed_by_one_with_another_clock(skew_s: float) -> None:
    machines = Machines()
    first, second = (
        Maintainer(machines.ring(own_s), name, clock=machines.time) for name, own_s in (("a", 0), ("b", skew_s))
    )
    writer = machines.writer("w", skew_s / 2)
    assert first.turn()
    for _ in range(10):
        writer.put(np.array([1]))
        machines.time.advance(0.5)
        assert first.turn()
        assert not second.turn(), "the first one is at work"
    writer.put(np.array([2]))
    turns = []
    for _ in range(8):
        machines.time.advance(0.5)
        turns.append(second.turn())
    assert turns.index(True) in (2, 3), "after the second that it takes to see that nothing changes"
    assert decode_record(machines.store.record(PUBLISHER))["holder"] == "b"
    assert machines.ring(0).newest().inserted == 11
    machines.time.advance(0.5)
    assert [first.turn() for _ in range(2)] == [True, False], "back again, it sees in its turn that it was followed"


def test_a_clock_that_is_put_back_stops_nobody() -> None:
    machines = Machines()
    skew = [0.0]
    ring = Ring(machines.store, machines.settings, clock=lambda: machines.time.now + skew[0])
    writer = RingWriter(ring, "w", threads=False, clock=machines.time)
    for number in range(6):
        writer.put(np.array([number]))
        ring.publish()
        skew[0] -= 2 * HOURS
        machines.time.advance(1.0)
    assert [slot.object.seq for slot in ring.newest().slots] == [1, 2, 3, 4, 5, 6]
