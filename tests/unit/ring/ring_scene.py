"""A ring without threads, on a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock


class Scene:
    """One ring, one clock, no threads."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.ring = Ring.make(self.store, RingSettings(**{"cap": 4, **settings}), clock=self.clock)
        self.keeper = Maintainer(self.ring, "k", clock=self.clock)
        self.collector = GarbageCollector(self.ring, LeaseWatch(self.clock))
        self.keeper.wait_turn = self.waited  # type: ignore[method-assign, assignment]

    def waited(self, seconds: float) -> None:
        """Run the wait of a writer."""
        self.clock.advance(seconds)
        self.keeper.turn()

    def writer(self, name: str = "w", *, clock: Callable[[], float] | None = None, **more: Any) -> RingWriter:
        ring = Ring(self.store, self.ring.settings, clock=clock) if clock is not None else self.ring
        return RingWriter(
            ring, name, maintainer=self.keeper, threads=False, clock=self.clock, pause=self.clock.advance, **more
        )

    def publish(self) -> None:
        while self.ring.publish() is not None:
            pass

    def values(self) -> list[Any]:
        """Return the values of all readable samples in order."""
        found = []
        for slot in self.ring.newest().slots:
            data = self.store.read(slot.object.key)
            assert data is not None
            found.append(StoredSamples("", data).sample(slot.number))
        return found

    def bury(self, *living: RingWriter) -> None:
        """Pass enough time to detect the dead and to collect their garbage."""
        for _ in range(8):
            self.clock.advance(self.ring.settings.lease_s)
            for writer in living:
                writer.renew()
            self.publish()
            self.collector.collect()
