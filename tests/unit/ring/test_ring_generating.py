"""Generators: seeds that are given out once, samples that stay, whoever dies; what is wrong with one is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.collector import Collector
from gpu_client.ring.errors import RingError, RingMismatch, WriterFenced
from gpu_client.ring.generating import (
    MOST_FAILURES,
    STOPPING_PATIENCE_S,
    STORE_PATIENCE_S,
    Generation,
    GeneratorFault,
    Made,
    put_under,
    samples_of,
)
from gpu_client.ring.keeper import Keeper
from gpu_client.ring.leases import Watch
from gpu_client.ring.objects import StoredSamples
from gpu_client.ring.ring import Ring
from gpu_client.ring.seeds import SEEDS, Seeds
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store import RingStore
from gpu_client.ring.store_memory import MemoryStore
from tests.unit.ring.ring_kit import Clock, Died, MortalStore


def one(seed: int) -> np.ndarray[Any, Any]:
    return np.array([seed])


class Told:
    """Who is told; wants to stop when a test says so."""

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
    """One ring on one clock, without threads: who waits lets the keeper have its turn."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.settings = RingSettings(**{"cap": 8, "max_ahead": 1000, "retain": 1000, **settings})
        self.ring = Ring.make(self.store, self.settings, clock=self.clock)

    def generation(
        self, generator: Callable[..., Any] = one, told: Told | None = None, store: RingStore | None = None, **more: Any
    ) -> Generation:
        options = more.pop("options", {})
        ring = Ring(store or self.store, self.settings, clock=self.clock)
        keeper = Keeper(ring, "k", clock=self.clock)

        def turn(seconds: float) -> None:
            self.clock.go_on(seconds)
            keeper.turn()

        keeper.wait_turn = turn  # type: ignore[method-assign]
        return Generation(
            ring,
            samples_of(generator, options),
            told or Told(),
            keeper=keeper,
            threads=False,
            clock=self.clock,
            pause=self.clock.go_on,
            **more,
        )

    def run(self, generator: Callable[..., Any] = one, told: Told | None = None, **more: Any) -> Made:
        return self.generation(generator, told, **more).run()

    def publish(self) -> None:
        while self.ring.publish() is not None:
            pass

    def readable(self) -> list[tuple[str, int]]:
        """Writer and seed of each sample that has ever become readable; its value is what its seed makes."""
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
    """What the killed process had put stays; the next one of that name makes the rest, and one or two more at most."""
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
            scene.clock.go_on(5)
            made = scene.run(slow, count=count, name="job-1")
            found = scene.readable()
            seeds = [seed for _, seed in found]
            assert len(set(seeds)) == len(seeds), "a seed was given twice"
            assert made.put >= count and len(found) in range(count, count + pack + 1), (dies_after, before, found)
        if not kills and dies_after > 1:
            break
    assert kills > 40


class Slow:
    """A generator whose samples take a second each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, seed: int) -> np.ndarray[Any, Any]:
        self.clock.go_on(1.0)
        return one(seed)


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
    assert len(calls) == MOST_FAILURES
    with pytest.raises(GeneratorFault, match=r"10 samples in a row .* not finite"):
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
        samples_of(form, {"colour": "red"})


def test_generators_that_lose_count_are_told_so() -> None:
    def unasked(seeds: Iterator[int]) -> Iterator[Any]:
        yield one(0)

    def lazy(seeds: Iterator[int]) -> Iterator[Any]:
        yield from ()

    with pytest.raises(GeneratorFault, match="without having taken a seed"):
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
    collector = Collector(scene.ring, Watch(scene.clock))

    def suspended(seed: int) -> Any:
        if seed == 3:
            for _ in range(3):
                collector.collect()
                scene.clock.go_on(3)
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


@pytest.mark.parametrize("mode", ["rolling", "generation"])
@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("published", [False, True])
def test_a_sample_that_was_claimed_by_one_taken_for_dead_is_not_put_again(
    mode: str, pack: int, published: bool
) -> None:
    """Its claim may still count: until it is published that its epoch has ended, or for a whole generation."""
    scene = Scene(lease_s=1.0, mode=mode, pack=pack)
    collector = Collector(scene.ring, Watch(scene.clock))

    def suspended(seed: int) -> Any:
        if seed == 3:
            collector.collect()
            scene.clock.go_on(3)
            assert collector.collect().fenced
            if published:
                scene.publish()
        return one(seed)

    made = scene.run(suspended, count=11, name="w")
    seeds = [seed for _, seed in scene.readable()]
    assert len(set(seeds)) == len(seeds), "a seed came twice"
    assert made.put == 11
    if mode == "rolling":
        assert scene.ring.newest().slots[-1].object.epoch > 1
        assert set(range(12)) - set(seeds) <= {3, 4 - pack}, "none but those of one pack is lost"


def test_a_sample_that_was_not_claimed_is_put_again() -> None:
    """It is known before the sample is stored that the writer was taken for dead."""
    scene = Scene(lease_s=1.0)
    collector = Collector(scene.ring, Watch(scene.clock))

    def suspended(seed: int) -> Any:
        if seed == 3:
            collector.collect()
            scene.clock.go_on(3)
            assert collector.collect().fenced
            generation._writer.renew()
        return one(seed)

    generation = scene.generation(suspended, count=6, name="w")
    assert generation.run().put == 6
    assert [seed for _, seed in scene.readable()] == list(range(6))


class Flaky(MortalStore):
    """Each third operation fails, once it has begun to."""

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


class Outage(MortalStore):
    """Cannot be reached for a while; behind it one more operation fails, before it is done or after."""

    cut_off = False
    fails_after = -1
    fails_done = False

    def _do(self, operation: Callable[[], Any]) -> Any:
        if self.cut_off:
            raise OSError("no route")
        self.fails_after -= 1
        if self.fails_after == 0:
            if self.fails_done:
                operation()
            raise OSError("reset by peer")
        return operation()


def outage(scene: Scene, pack: int, fails_after: int, fails_done: bool, told: Told | None = None) -> Generation:
    """A generation that cannot reach its ring from seed 3 on for so long that it is taken for dead."""
    store = Outage(scene.store)
    collector = Collector(scene.ring, Watch(scene.clock))

    def cut_off(seed: int) -> Any:
        if seed == 3:
            store.cut_off = True
        return one(seed)

    def pause(seconds: float) -> None:
        scene.clock.go_on(seconds)
        if store.cut_off and collector.collect().fenced:
            store.cut_off, store.fails_after, store.fails_done = False, fails_after, fails_done

    generation = scene.generation(cut_off, told, store=store, count=8, name="w")
    generation._pause = pause
    return generation


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("fails_done", [False, True])
def test_an_outage_in_which_it_is_taken_for_dead_ends_no_generator(pack: int, fails_done: bool) -> None:
    for fails_after in range(40):
        scene = Scene(lease_s=1.0, pack=pack)
        made = outage(scene, pack, fails_after, fails_done).run()
        seeds = [seed for _, seed in scene.readable()]
        assert len(set(seeds)) == len(seeds), (fails_after, seeds)
        assert made.put == 8 <= len(seeds) <= 8 + pack, (fails_after, seeds)
        assert scene.ring.newest().slots[-1].object.epoch > 1


def test_taken_over_in_an_outage_it_leaves() -> None:
    scene = Scene(lease_s=1.0)
    generation = outage(scene, 1, 0, False)
    pause = generation._pause

    def taken_over(seconds: float) -> None:
        pause(seconds)
        if not generation._ring.store.cut_off:  # type: ignore[attr-defined]
            scene.generation(name="w")

    generation._pause = taken_over
    with pytest.raises(WriterFenced, match="another process generates as w"):
        generation.run()


def test_told_to_stop_while_it_cannot_begin_again_it_ends() -> None:
    scene, told = Scene(lease_s=1.0), Told()
    generation = outage(scene, 1, 0, False, told)
    store, fenced = generation._ring.store, generation._begin_again

    def cut_off_again() -> Any:
        store.cut_off = told.should_stop = True  # type: ignore[attr-defined]
        return fenced()

    generation._begin_again = cut_off_again  # type: ignore[method-assign]
    with pytest.raises(RingError, match="could not be stored"):
        generation.run()
    seeds = [seed for _, seed in scene.readable()]
    assert seeds[:3] == [0, 1, 2] and len(set(seeds)) == len(seeds) <= 4


def ending(scene: Scene, told: Told, stops: bool, lasts_s: float) -> Generation:
    """One whose last pack is not full, and whose store cannot be reached as it ends."""
    store = Outage(scene.store)
    began_at = scene.clock()

    def last(seed: int) -> Any:
        if seed == 4:
            store.cut_off = True
            told.should_stop = stops
        return one(seed)

    def pause(seconds: float) -> None:
        scene.clock.go_on(seconds)
        store.cut_off = scene.clock() - began_at < lasts_s

    generation = scene.generation(last, told, store=store, count=None if stops else 5, name="w")
    generation._pause = pause
    return generation


@pytest.mark.parametrize(("stops", "lasts_s"), [(False, STORE_PATIENCE_S - 20), (True, STOPPING_PATIENCE_S - 5)])
def test_the_last_pack_is_stored_when_the_store_is_back(stops: bool, lasts_s: float) -> None:
    scene = Scene(pack=4)
    assert ending(scene, Told(), stops, lasts_s).run().put == 5 == put_under(scene.store, "w")
    assert [seed for _, seed in scene.readable()] == list(range(5))


@pytest.mark.parametrize("stops", [False, True])
def test_a_last_pack_that_cannot_be_stored_is_an_error(stops: bool) -> None:
    scene = Scene(pack=4)
    began_at = scene.clock()
    with pytest.raises(RingError, match="what was put last could not be stored: no route"):
        ending(scene, Told(), stops, 1e9).run()
    patience_s = STOPPING_PATIENCE_S if stops else STORE_PATIENCE_S
    assert patience_s < scene.clock() - began_at < patience_s + 20
    assert len(scene.readable()) == 4


def test_told_to_stop_late_in_an_outage_it_tries_its_last_pack_once_more_for_a_while() -> None:
    scene, told = Scene(), Told()
    store = Outage(scene.store)
    began_at = scene.clock()

    def cut_off(seed: int) -> Any:
        store.cut_off = seed == 1
        return one(seed)

    def pause(seconds: float) -> None:
        scene.clock.go_on(seconds)
        told.should_stop = scene.clock() - began_at > 100
        store.cut_off = scene.clock() - began_at < 120

    generation = scene.generation(cut_off, told, store=store, count=9, name="w")
    generation._pause = pause
    assert generation.run().put == 2 == put_under(scene.store, "w")
    assert [seed for _, seed in scene.readable()] == [0, 1]


def test_fenced_before_its_last_pack_it_makes_others() -> None:
    scene = Scene(pack=4, lease_s=1.0)
    collector = Collector(scene.ring, Watch(scene.clock))

    def suspended(seed: int) -> Any:
        if seed == 4:
            collector.collect()
            scene.clock.go_on(3)
            assert collector.collect().fenced
            scene.publish()
        return one(seed)

    assert scene.run(suspended, count=5, name="w").put == 5 == put_under(scene.store, "w")
    assert [seed for _, seed in scene.readable()] == [0, 1, 2, 3, 5]


def leaves_late(scene: Scene) -> Generation:
    """It has put some samples that are not noted; another one of its name is begun before it ends."""
    told = Told()

    def stopping(seed: int) -> Any:
        told.should_stop = seed == 2
        return one(seed)

    generation = scene.generation(stopping, told, count=20, name="w")
    while not generation._over():
        generation._some()
    assert generation._put == 3 and put_under(scene.store, "w") == 1
    return generation


def test_one_that_was_taken_over_notes_no_count_any_more() -> None:
    scene = Scene()
    before = leaves_late(scene)
    after = scene.generation(name="w", count=5)
    before._end()
    assert after.run().put == 5 == put_under(scene.store, "w")
    assert scene.run(name="w", count=7).put == 7 == put_under(scene.store, "w")
    assert len(scene.readable()) == 2 + 7, "those that were not noted, and no more"


def test_a_count_that_was_taken_by_one_that_is_fenced_is_taken_back() -> None:
    """It had begun before, but came to its count only after the next one."""
    scene = Scene()
    before = leaves_late(scene)
    after = scene.generation(name="w", count=5)
    assert before._tally is not None
    before._tally.take(before._put)
    before._end()
    assert after.run().put == 5 == put_under(scene.store, "w")


def test_begun_again_it_counts_on_from_what_others_of_its_name_have_put() -> None:
    scene = Scene(lease_s=1.0)
    collector = Collector(scene.ring, Watch(scene.clock))

    def overtaken(seed: int) -> Any:
        if seed == 3:
            collector.collect()
            scene.clock.go_on(3)
            assert collector.collect().fenced
            assert scene.run(name="w", count=8).put == 8
        return one(seed)

    assert scene.run(overtaken, name="w", count=10).put == 10 == put_under(scene.store, "w")
    assert len(scene.readable()) == 3 + 10, "the first ones were not noted, and no more were made"


@pytest.mark.parametrize("fails_done", [False, True])
def test_a_count_of_which_the_answer_was_lost_is_noted_all_the_same(fails_done: bool) -> None:
    for fails_after in range(60):
        scene = Scene()
        store = Outage(scene.store)
        generation = scene.generation(Slow(scene.clock), store=store, count=8, name="w")
        store.fails_after, store.fails_done = fails_after, fails_done
        assert generation.run().put == 8 == put_under(scene.store, "w"), fails_after


def test_what_is_told_says_how_the_ring_stands() -> None:
    scene, told = Scene(), Told()
    generation = scene.generation(Slow(scene.clock), told, count=8, name="w")
    turns = iter(range(100))

    def look(seed: int) -> Any:
        generation._keeper.turn()
        next(turns)
        return Slow(scene.clock)(seed)

    generation._samples = samples_of(look, {})
    generation.run()
    step, total, metrics = told.reports[-2]
    assert (step, total) == (8, 8)
    assert metrics["ring.fill"] == pytest.approx(87.5)
    assert metrics["ring.put_rate"] == pytest.approx(1.0, rel=0.5)
    assert metrics["ring.get_rate"] == metrics["ring.idle"] == metrics["data.reuse"] == 0


def test_seeds_are_fetched_for_about_a_second_and_never_before_the_first() -> None:
    clock, store = Clock(), MemoryStore()
    fast = Seeds(store, 100, clock=clock)
    given = []
    for _ in range(100):
        given.append(next(fast))
        clock.go_on(0.01)
    assert given == list(range(100, 200))
    assert store.record(SEEDS) is not None
    other = next(Seeds(store, clock=clock))
    assert 200 <= other <= 300, "a second's worth was fetched ahead"
    slow = Seeds(store, clock=clock)
    numbers = []
    for _ in range(5):
        numbers.append(next(slow))
        clock.go_on(10)
    assert numbers == [other + 1 + offset for offset in range(5)], "one at a time: a kill passes over none"


@pytest.mark.parametrize("damaged", [b"", b"{}", b'{"next": -1}', b'{"next": true}', b"[]"])
def test_a_record_of_seeds_that_cannot_be_read_is_an_error(damaged: bytes) -> None:
    store = MemoryStore()
    store.swap(SEEDS, damaged, None)
    with pytest.raises(RingMismatch, match="seeds"):
        next(Seeds(store))
