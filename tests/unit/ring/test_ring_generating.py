"""Test generators: no seed is used twice, samples survive every death, faults of the generator are raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.errors import RingMismatch, WriterFenced
from gpu_client.ring.format.records import SEEDS
from gpu_client.ring.generating.generation_loop import (
    MAX_FAILURES,
    GeneratorFault,
    adapt_generator,
)
from gpu_client.ring.generating.seeds import SeedSource
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock
from tests.unit.ring.generating_kit import Scene, Slow, Told, one
from tests.unit.ring.ring_kit import Died, MortalStore


def test_so_many_samples_are_put_each_from_a_seed_of_its_own() -> None:
    scene, told = Scene(), Told()
    assert scene.run(told=told, count=5, name="job-1", generator=one).put == 5
    assert scene.readable() == [("job-1", seed) for seed in range(5)]
    assert told.reports[-1][:2] == (5, 5)


def test_copies_share_the_seeds_of_the_ring() -> None:
    scene = Scene()
    for name in ("a", "b", "c"):
        assert scene.run(count=10, name=name).put == 10
    seeds = [seed for _, seed in scene.readable()]
    assert len(seeds) == len(set(seeds)) == 30


@pytest.mark.parametrize("pack", [1, 3])
def test_killed_at_any_operation_it_goes_on_with_its_count_and_no_seed_comes_twice(pack: int) -> None:
    """The samples of a killed generator stay; its successor makes the rest, and one pack more at most."""
    count, kills = 6, 0
    for dies_after in range(1, 200):
        for done_first in (False, True):
            scene = Scene(pack=pack)
            mortal = MortalStore(scene.store)
            mortal.dies_after, mortal.done_first = dies_after, done_first
            slow = Slow(scene.clock)
            try:
                scene.run(slow, store=mortal, count=count, name="job-1")
            except Died:
                kills += 1
            before = len(scene.readable())
            scene.clock.advance(5)
            made = scene.run(slow, count=count, name="job-1")
            found = scene.readable()
            seeds = [seed for _, seed in found]
            assert len(set(seeds)) == len(seeds), "a seed was given twice"
            assert made.put >= count and len(found) in range(count, count + pack + 1), (dies_after, before, found)
        if not kills and dies_after > 1:
            break
    assert kills > 40


def test_a_sample_that_is_refused_or_cannot_be_made_is_left_out_and_counted() -> None:
    def sometimes(seed: int) -> Any:
        if seed == 2:
            raise ValueError("no luck")
        return np.array([np.nan if seed == 4 else float(seed)])

    scene, told = Scene(), Told()
    made = scene.run(sometimes, told, count=5)
    assert (made.put, made.refused, made.failed) == (5, 1, 1)
    assert [seed for _, seed in scene.readable()] == [0, 1, 3, 5, 6]
    assert told.reports[-1][2]["refused"] == told.reports[-1][2]["failed"] == 1


def test_one_that_never_makes_a_good_sample_ends_with_the_reason() -> None:
    calls: list[int] = []

    def broken(seed: int) -> Any:
        calls.append(seed)
        raise ValueError("always")

    with pytest.raises(ValueError, match="always"):
        Scene().run(broken, count=5)
    assert len(calls) == MAX_FAILURES
    with pytest.raises(GeneratorFault, match=r"10 samples in a row .* non-finite"):
        Scene().run(lambda seed: np.array([np.inf]), count=5)


def batches(seeds: Iterator[int], size: int = 4) -> Iterator[Any]:
    while True:
        taken = [seed for _, seed in zip(range(size), seeds, strict=False)]
        if not taken:
            return
        yield from map(one, taken)


class Loaded:
    """A class: made once, called for each seed."""

    made = 0

    def __init__(self, offset: int) -> None:
        Loaded.made += 1
        self.offset = offset

    def __call__(self, seed: int) -> Any:
        return np.array([seed + self.offset])


def test_all_forms_of_generators() -> None:
    scene = Scene()
    assert scene.run(batches, count=10, options={"size": 3}).put == 10
    assert [seed for _, seed in scene.readable()] == list(range(10))
    Loaded.made = 0
    scene = Scene()
    assert scene.run(Loaded, count=4, options={"offset": 0}).put == 4
    assert Loaded.made == 1
    assert len(scene.readable()) == 4
    scene = Scene()
    assert scene.run(lambda seed, offset: one(seed + offset), count=2, options={"offset": 0}).put == 2


@pytest.mark.parametrize("form", [one, batches, Loaded, lambda seed, size: one(seed)])
def test_options_that_it_does_not_take_are_an_error_before_anything_is_made(form: Any) -> None:
    with pytest.raises(TypeError):
        adapt_generator(form, {"colour": "red"})


def test_generators_that_lose_count_are_told_so() -> None:
    def unasked(seeds: Iterator[int]) -> Iterator[Any]:
        yield one(0)

    def lazy(seeds: Iterator[int]) -> Iterator[Any]:
        yield from ()

    with pytest.raises(GeneratorFault, match="without taking a seed"):
        Scene().run(unasked)
    with pytest.raises(GeneratorFault, match="ends without a sample"):
        Scene().run(lazy)


def test_told_to_stop_while_it_waits_for_readers_it_ends_and_keeps_what_was_put() -> None:
    scene, told = Scene(samples_per_insert=1.0), Told()
    told.stops_in_phase = 4
    made = scene.run(told=told, name="w")
    assert told.phases[-1][1] >= 3, "seconds that it has waited"
    assert told.reports[-1][2]["ring.idle"] > 50
    assert {name for name, _ in told.phases} == {"waiting_for_readers_s"}
    scene.publish()
    assert made.put == scene.ring.newest().inserted > 200, "nobody has read any"


def test_told_to_stop_it_stores_the_pack_that_is_not_full() -> None:
    scene, told = Scene(pack=4), Told()

    def stopping(seed: int) -> Any:
        told.should_stop = seed == 5
        return one(seed)

    assert scene.run(stopping, told, name="w").put == 6
    assert len(scene.readable()) == 6


def test_taken_for_dead_it_begins_again_and_taken_over_it_leaves() -> None:
    scene = Scene(lease_s=1.0)
    collector = GarbageCollector(scene.ring, LeaseWatch(scene.clock))

    def suspended(seed: int) -> Any:
        if seed == 3:
            for _ in range(3):
                collector.collect()
                scene.clock.advance(3)
                scene.publish()
        return one(seed)

    assert scene.run(suspended, count=6, name="w").put == 6
    found = scene.readable()
    assert len(found) == 6
    assert {slot.object.epoch for slot in scene.ring.newest().slots} > {1}

    def overtaken(seed: int) -> Any:
        if seed == 8:
            scene.generation(name="w")
        return one(seed)

    with pytest.raises(WriterFenced, match="another process generates as w"):
        scene.run(overtaken, count=20, name="w")


class Flaky(MortalStore):
    """The store of which each third operation fails, once `begun` is true."""

    begun = False

    def _do(self, operation: Callable[[], Any]) -> Any:
        self.operations += 1
        if self.begun and self.operations % 3 == 0:
            raise OSError("no route")
        return operation()


def test_a_place_that_cannot_be_reached_for_a_while_costs_nothing() -> None:
    scene = Scene()
    flaky = Flaky(scene.store)
    generation = scene.generation(store=flaky, count=20, name="w")
    flaky.begun = True
    made = generation.run()
    seeds = [seed for _, seed in scene.readable()]
    assert made.put == 20 == len(seeds) == len(set(seeds))


def test_what_is_told_says_how_the_ring_stands() -> None:
    scene, told = Scene(), Told()
    generation = scene.generation(Slow(scene.clock), told, count=8, name="w")
    turns = iter(range(100))

    def look(seed: int) -> Any:
        generation._maintainer.turn()
        next(turns)
        return Slow(scene.clock)(seed)

    generation._samples = adapt_generator(look, {})
    generation.run()
    step, total, metrics = told.reports[-2]
    assert (step, total) == (8, 8)
    assert metrics["ring.fill"] == pytest.approx(87.5)
    assert metrics["ring.put_rate"] == pytest.approx(1.0, rel=0.5)
    assert metrics["ring.put_bytes"] > 0
    assert metrics["ring.get_rate"] == metrics["ring.idle"] == metrics["data.reuse"] == 0


def test_seeds_are_fetched_for_about_a_second_and_never_before_the_first() -> None:
    clock, store = Clock(), MemoryStore()
    fast = SeedSource(store, 100, clock=clock)
    given = []
    for _ in range(100):
        given.append(next(fast))
        clock.advance(0.01)
    assert given == list(range(100, 200))
    assert store.record(SEEDS) is not None
    other = next(SeedSource(store, clock=clock))
    assert 200 <= other <= 300, "a second's worth was fetched ahead"
    slow = SeedSource(store, clock=clock)
    numbers = []
    for _ in range(5):
        numbers.append(next(slow))
        clock.advance(10)
    assert numbers == [other + 1 + offset for offset in range(5)], "one at a time: a kill passes over none"


@pytest.mark.parametrize("damaged", [b"", b"{}", b'{"next": -1}', b'{"next": true}', b"[]"])
def test_a_record_of_seeds_that_cannot_be_read_is_an_error(damaged: bytes) -> None:
    store = MemoryStore()
    store.swap(SEEDS, damaged, None)
    with pytest.raises(RingMismatch, match="seeds"):
        next(SeedSource(store))
