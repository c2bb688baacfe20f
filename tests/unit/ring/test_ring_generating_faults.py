"""Test generators that were fenced or cannot reach the ring: no seed is used twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.errors import RingError, WriterFenced
from gpu_client.ring.generating.generation_loop import STOPPING_PATIENCE_S, STORE_PATIENCE_S, GenerationLoop
from gpu_client.ring.generating.named_counter import read_count
from tests.unit.ring.generating_kit import Scene, Slow, Told, but_at, one
from tests.unit.ring.ring_kit import MortalStore


@pytest.mark.parametrize("mode", ["rolling", "generation"])
@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("published", [False, True])
def test_a_sample_that_was_claimed_by_one_taken_for_dead_is_not_put_again(
    mode: str, pack: int, published: bool
) -> None:
    """A claimed sample is not put again: its claim may count until a manifest ends the writer's epoch."""
    scene = Scene(lease_s=1.0, mode=mode, pack=pack)

    def suspended() -> None:
        scene.bury()
        if published:
            scene.publish()

    made = scene.run(but_at(3, suspended), count=11, name="w")
    seeds = [seed for _, seed in scene.readable()]
    assert len(set(seeds)) == len(seeds), "a seed came twice"
    assert made.put == 11
    if mode == "rolling":
        assert scene.ring.newest().slots[-1].object.epoch > 1
        assert set(range(12)) - set(seeds) <= {3, 4 - pack}, "none but those of one pack is lost"


def test_a_sample_that_was_not_claimed_is_put_again() -> None:
    """A writer that learns of its lost lease before it stores a sample puts the sample again."""
    scene = Scene(lease_s=1.0)

    def suspended() -> None:
        scene.bury()
        generation._writer.renew()

    generation = scene.generation(but_at(3, suspended), count=6, name="w")
    assert generation.run().put == 6
    assert [seed for _, seed in scene.readable()] == list(range(6))


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


def outage(scene: Scene, pack: int, fails_after: int, fails_done: bool, told: Told | None = None) -> GenerationLoop:
    """A generation that cannot reach its ring from seed 3 on for so long that it is taken for dead."""
    store = Outage(scene.store)
    collector = GarbageCollector(scene.ring, LeaseWatch(scene.clock))

    def cut_off() -> None:
        store.cut_off = True

    def pause(seconds: float) -> None:
        scene.clock.advance(seconds)
        if store.cut_off and collector.collect().fenced:
            store.cut_off, store.fails_after, store.fails_done = False, fails_after, fails_done

    generation = scene.generation(but_at(3, cut_off), told, store=store, count=8, name="w")
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


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("fails_done", [False, True])
def test_a_sample_whose_put_failed_is_there_once(pack: int, fails_done: bool) -> None:
    for fails_after in range(60):
        scene = Scene(pack=pack)
        store = Outage(scene.store)
        made: list[int] = []

        def make(seed: int, made: list[int] = made) -> Any:
            made.append(seed)
            return one(seed)

        generation = scene.generation(make, store=store, count=8, name="w")
        store.fails_after, store.fails_done = fails_after, fails_done
        assert generation.run().put == 8
        assert [seed for _, seed in scene.readable()] == made, fails_after


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
    store, fenced = generation._ring.store, generation._reopen_writer

    def cut_off_again() -> Any:
        store.cut_off = told.should_stop = True  # type: ignore[attr-defined]
        return fenced()

    generation._reopen_writer = cut_off_again  # type: ignore[method-assign]
    with pytest.raises(RingError, match="could not be stored"):
        generation.run()
    seeds = [seed for _, seed in scene.readable()]
    assert seeds[:3] == [0, 1, 2] and len(set(seeds)) == len(seeds) <= 4


def ending(scene: Scene, told: Told, stops: bool, lasts_s: float) -> GenerationLoop:
    """Return a generation whose last pack is not full, and whose store is unreachable at its end."""
    store = Outage(scene.store)
    began_at = scene.clock()

    def last() -> None:
        store.cut_off = True
        told.should_stop = stops

    def pause(seconds: float) -> None:
        scene.clock.advance(seconds)
        store.cut_off = scene.clock() - began_at < lasts_s

    generation = scene.generation(but_at(4, last), told, store=store, count=None if stops else 5, name="w")
    generation._pause = pause
    return generation


@pytest.mark.parametrize(("stops", "lasts_s"), [(False, STORE_PATIENCE_S - 20), (True, STOPPING_PATIENCE_S - 5)])
def test_the_last_pack_is_stored_when_the_store_is_back(stops: bool, lasts_s: float) -> None:
    scene = Scene(pack=4)
    assert ending(scene, Told(), stops, lasts_s).run().put == 5 == read_count(scene.store, "w")
    assert [seed for _, seed in scene.readable()] == list(range(5))


@pytest.mark.parametrize("stops", [False, True])
def test_a_last_pack_that_cannot_be_stored_is_an_error(stops: bool) -> None:
    scene = Scene(pack=4)
    began_at = scene.clock()
    with pytest.raises(RingError, match="the last samples could not be stored: no route"):
        ending(scene, Told(), stops, 1e9).run()
    patience_s = STOPPING_PATIENCE_S if stops else STORE_PATIENCE_S
    assert patience_s < scene.clock() - began_at < patience_s + 20
    assert len(scene.readable()) == 4


def test_told_to_stop_late_in_an_outage_it_tries_its_last_pack_once_more_for_a_while() -> None:
    scene, told = Scene(), Told()
    store = Outage(scene.store)
    began_at = scene.clock()

    def cut_off() -> None:
        store.cut_off = True

    def pause(seconds: float) -> None:
        scene.clock.advance(seconds)
        told.should_stop = scene.clock() - began_at > 100
        store.cut_off = scene.clock() - began_at < 120

    generation = scene.generation(but_at(1, cut_off), told, store=store, count=9, name="w")
    generation._pause = pause
    assert generation.run().put == 2 == read_count(scene.store, "w")
    assert [seed for _, seed in scene.readable()] == [0, 1]


def test_fenced_before_its_last_pack_it_makes_others() -> None:
    scene = Scene(pack=4, lease_s=1.0)

    def suspended() -> None:
        scene.bury()
        scene.publish()

    assert scene.run(but_at(4, suspended), count=5, name="w").put == 5 == read_count(scene.store, "w")
    assert [seed for _, seed in scene.readable()] == [0, 1, 2, 3, 5]


def leaves_late(scene: Scene) -> GenerationLoop:
    """Return a generation that has put three samples, has noted one of them, and has not ended."""
    told = Told()

    def stopping() -> None:
        told.should_stop = True

    generation = scene.generation(but_at(2, stopping), told, count=20, name="w")
    while not generation._is_over():
        generation._run_generator()
    assert generation._put == 3 and read_count(scene.store, "w") == 1
    return generation


def test_one_that_was_taken_over_notes_no_count_any_more() -> None:
    scene = Scene()
    before = leaves_late(scene)
    after = scene.generation(name="w", count=5)
    before._end()
    assert after.run().put == 5 == read_count(scene.store, "w")
    assert scene.run(name="w", count=7).put == 7 == read_count(scene.store, "w")
    assert len(scene.readable()) == 2 + 7, "those that were not noted, and no more"


def test_a_count_that_was_taken_by_one_that_is_fenced_is_taken_back() -> None:
    """A generation that takes its count after its successor began loses the count to the successor."""
    scene = Scene()
    before = leaves_late(scene)
    after = scene.generation(name="w", count=5)
    assert before._counter is not None
    before._counter.acquire(before._put)
    before._end()
    assert after.run().put == 5 == read_count(scene.store, "w")


def test_begun_again_it_counts_on_from_what_others_of_its_name_have_put() -> None:
    scene = Scene(lease_s=1.0)

    def overtaken() -> None:
        scene.bury()
        assert scene.run(name="w", count=8).put == 8

    assert scene.run(but_at(3, overtaken), name="w", count=10).put == 10 == read_count(scene.store, "w")
    assert len(scene.readable()) == 3 + 10, "the first ones were not noted, and no more were made"


@pytest.mark.parametrize("fails_done", [False, True])
def test_a_count_of_which_the_answer_was_lost_is_noted_all_the_same(fails_done: bool) -> None:
    for fails_after in range(60):
        scene = Scene()
        store = Outage(scene.store)
        generation = scene.generation(Slow(scene.clock), store=store, count=8, name="w")
        store.fails_after, store.fails_done = fails_after, fails_done
        assert generation.run().put == 8 == read_count(scene.store, "w"), fails_after
