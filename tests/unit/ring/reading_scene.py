"""A ring in memory with one writer and readers, on its own clock."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.records import MANIFESTS
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.batch_stream import BatchStream
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock


class Scene:
    """One ring in memory, one clock, no threads."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.settings = RingSettings(**{"cap": 4, "retain": 2, "lease_s": 10.0, "max_ahead": 10_000, **settings})
        self.ring = Ring.make(self.store, self.settings, clock=self.clock)
        self.keeper = Maintainer(self.ring, "k", clock=self.clock)
        self.collector = GarbageCollector(self.ring, LeaseWatch(self.clock))
        self.writer = RingWriter(self.ring, "w", maintainer=self.keeper, threads=False, clock=self.clock)
        self.next = 0

    def put(self, count: int) -> None:
        """Put this many samples, each readable before the next."""
        for _ in range(count):
            self.writer.put(np.array([self.next]))
            self.next += 1
            self.ring.publish()

    def reader(self, name: str = "", **more: Any) -> RingReader:
        ring = Ring(self.store, self.settings, clock=self.clock)
        return RingReader(ring, name, threads=False, clock=self.clock, pause=self.clock.advance, **more)

    def bury(self, *living: RingReader) -> None:
        for _ in range(6):
            self.clock.advance(6.0)
            self.writer.renew()
            for reader in living:
                reader.flush_stats()
            self.collector.collect()

    def manifests(self) -> int:
        return len(self.store.keys(MANIFESTS))


def batch(stream: BatchStream) -> list[int]:
    return sorted(int(sample[0]) for sample in stream.next_batch()[1])
