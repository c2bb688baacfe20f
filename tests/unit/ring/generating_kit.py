"""A generation loop on one clock, without threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.generating.generation_loop import GenerationCounts, GenerationLoop, adapt_generator
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from gpu_client.ring.store.protocol import RingBackend
from tests.kits.clock import Clock


def one(seed: int) -> np.ndarray[Any, Any]:
    return np.array([seed])


def but_at(seed: int, do: Callable[[], object]) -> Callable[[int], Any]:
    """Make samples as `one` does; call a hook before the sample of one seed."""

    def make(given: int) -> Any:
        if given == seed:
            do()
        return one(given)

    return make


class Told:
    """Record progress; request a stop when a test asks for one."""

    def __init__(self) -> None:
        self.should_stop = False
        self.reports: list[tuple[int, int, dict[str, Any]]] = []
        self.phases: list[tuple[str, int]] = []
        self.stops_in_phase = 0

    def report(self, step: int, total: int, **metrics: object) -> None:
        self.reports.append((step, total, metrics))

    def phase(self, name: str, done: int, total: int) -> None:
        self.phases.append((name, done))
        if len(self.phases) == self.stops_in_phase:
            self.should_stop = True


class Scene:
    """One ring on one clock, without threads: a waiting process runs a turn of the maintainer."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.settings = RingSettings(**{"cap": 8, "max_ahead": 1000, "retain": 1000, **settings})
        self.ring = Ring.make(self.store, self.settings, clock=self.clock)

    def generation(
        self,
        generator: Callable[..., Any] = one,
        told: Told | None = None,
        store: RingBackend | None = None,
        **more: Any,
    ) -> GenerationLoop:
        options = more.pop("options", {})
        ring = Ring(store or self.store, self.settings, clock=self.clock)
        keeper = Maintainer(ring, "k", clock=self.clock)

        def turn(seconds: float) -> None:
            self.clock.advance(seconds)
            keeper.turn()

        keeper.wait_turn = turn  # type: ignore[method-assign]
        return GenerationLoop(
            ring,
            adapt_generator(generator, options),
            told or Told(),
            maintainer=keeper,
            threads=False,
            clock=self.clock,
            pause=self.clock.advance,
            **more,
        )

    def run(self, generator: Callable[..., Any] = one, told: Told | None = None, **more: Any) -> GenerationCounts:
        return self.generation(generator, told, **more).run()

    def bury(self) -> None:
        """Make the generator silent until it counts as dead."""
        collector = GarbageCollector(self.ring, LeaseWatch(self.clock))
        collector.collect()
        self.clock.advance(3 * self.settings.lease_s)
        assert collector.collect().fenced

    def publish(self) -> None:
        while self.ring.publish() is not None:
            pass

    def readable(self) -> list[tuple[str, int]]:
        """Return writer and seed of each sample that became readable; require the value of its seed."""
        self.publish()
        found = {}
        for number in range(1, self.ring.pointer()[0] + 1):
            for slot in self.ring.manifest(number).slots:
                data = self.store.read(slot.object.key)
                assert data is not None
                stored = StoredSamples(slot.object.key, data)
                assert stored.sample(slot.number)[0] == stored.seed(slot.number)
                found[slot.inserted] = (slot.object.writer, stored.seed(slot.number))
        return [found[inserted] for inserted in sorted(found)]


class Slow:
    """Make samples that take a second each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, seed: int) -> np.ndarray[Any, Any]:
        self.clock.advance(1.0)
        return one(seed)
