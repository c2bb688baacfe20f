"""Test maintenance: lost answers, failing publishers and collectors, records changed by other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.core.liveness import LeaseHandle
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ManifestMissing, WaitedTooLong
from gpu_client.ring.format.manifest import ENDED, manifest_key
from gpu_client.ring.format.records import INBOX, READERS, WRITERS
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.unit.ring.ring_kit import Died, MortalStore
from tests.unit.ring.ring_scene import Scene


def test_an_answer_that_was_lost_costs_nobody_the_lease() -> None:
    store = MemoryStore()
    swap = store.swap
    lose = True

    def lost(key: str, data: bytes, seen: str | None) -> str | None:
        found = swap(key, data, seen)
        if lose and found is not None:
            raise OSError("the answer was lost")
        return found

    held = LeaseHandle(store, "writers/a", {}, None)
    store.swap = lost  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(OSError, match="lost"):
            held.renew()
    assert held.is_own()
    lose = False
    assert held.renew(put=1)
    assert held.is_own()
    other = LeaseHandle(store, "writers/a", {}, store.record("writers/a"))
    assert not held.renew(put=2)
    assert other.is_own()


def test_an_answer_that_the_store_itself_tried_to_get_again_costs_nobody_the_lease() -> None:
    store = MemoryStore()
    held = LeaseHandle(store, "writers/a", {}, None)
    swap = store.swap

    def tried_again(key: str, data: bytes, seen: str | None) -> str | None:
        swap(key, data, seen)
        return swap(key, data, seen)

    store.swap = tried_again  # type: ignore[method-assign]
    assert held.renew()
    assert held.renew()


def test_an_epoch_is_not_given_twice_though_it_is_published_in_between() -> None:
    scene = Scene()
    with scene.writer("same") as first:
        first.put(np.array([1]))
        newest = scene.ring.newest

        def and_then_published() -> Any:
            found = newest()
            scene.ring.newest = newest  # type: ignore[method-assign]
            scene.publish()
            return found

        first._lease.release()
        scene.ring.newest = and_then_published  # type: ignore[method-assign]
        assert scene.writer("same")._epoch == 2


def test_a_manifest_that_is_there_and_cannot_be_read_is_told_not_waited_for() -> None:
    scene = Scene()
    writer = scene.writer()
    writer.put(np.array([1]))
    scene.store.create(manifest_key(1), [memoryview(b"{")])
    with pytest.raises(ManifestMissing, match="manifest 1 cannot be read"):
        scene.ring.publish()


class Faulty(MemoryStore):
    """Raises what no store should when publishers list the inbox."""

    broken = False

    def keys(self, prefix: str) -> list[str]:
        if self.broken and prefix == INBOX:
            raise ValueError("the inbox has gone mad")
        return super().keys(prefix)


@pytest.mark.filterwarnings("error")
def test_trouble_that_a_keeper_has_does_not_end_it_and_is_told_to_who_waits() -> None:
    store = Faulty()
    ring = Ring.make(store, RingSettings(cap=4, publish_interval_s=0.01))
    keeper = Maintainer(ring, "k")
    store.broken = True
    turned = threading.Event()
    turn = keeper.turn

    def noted() -> bool:
        try:
            return turn()
        finally:
            if keeper.trouble:
                turned.set()

    keeper.turn = noted  # type: ignore[method-assign]
    with keeper:
        assert turned.wait(20), "it goes on turning behind its first trouble"
        assert keeper.trouble == "ValueError: the inbox has gone mad"
        store.broken = False
        keeper.wait_turn(20)
        assert keeper.turns > 0


def damaged(scene: Scene, error: Exception) -> None:
    """Let every garbage collection from now on raise `error`."""

    def collect() -> Any:
        raise error

    scene.keeper._collector.collect = collect  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [ManifestMissing("manifest 7 cannot be read", "Look"), OSError("no route")])
def test_what_cannot_be_removed_holds_up_neither_writers_nor_whoever_follows_another_keeper(error: Exception) -> None:
    """A keeper tells the flow before the garbage collection, whose failure holds up no writer."""
    scene = Scene(max_ahead=2)
    other = Maintainer(scene.ring, "other", clock=scene.clock)
    damaged(scene, error)
    writer = scene.writer()
    for number in (1, 2):
        writer.put(np.array([number]))
    for turn in (1, 2):
        with pytest.raises(type(error), match=str(error.args[0])):
            scene.keeper.turn()
        assert (scene.keeper.turns, scene.keeper.flow.inserted, scene.keeper.flow.finished) == (turn, 2, 0)
        scene.clock.advance(scene.ring.settings.lease_s)
        assert not other.turn(), "it is looked after, and not busy"
        assert other.flow == scene.keeper.flow
    for number in (3, 4):
        writer.put(np.array([number]))
    assert writer.waited_s == 0.0


def test_what_cannot_be_removed_is_told_until_it_can(caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring.make(MemoryStore(), RingSettings(cap=4, publish_interval_s=0.01))
    keeper = Maintainer(ring, "k")
    collect = keeper._collector.collect

    def broken() -> Any:
        raise PermissionError("nothing may be deleted here")

    keeper._collector.collect = broken  # type: ignore[method-assign]
    with keeper:
        for _ in range(4):  # it is collected in the first of these turns alone
            keeper.wait_turn(20)
        assert keeper.trouble == "PermissionError: nothing may be deleted here"
        keeper._collector.collect = collect  # type: ignore[method-assign]
        keeper._collected_at = -float("inf")
        while keeper.trouble:
            keeper.wait_turn(20)
    assert caplog.text.count("nothing may be deleted here") == 1


def test_nobody_takes_over_from_a_keeper_that_is_removing() -> None:
    scene = Scene(lease_s=10.0)
    other = Maintainer(scene.ring, "other", clock=scene.clock)
    collect = scene.keeper._collector.collect
    seen = []

    def slow() -> Any:
        other.turn()
        scene.clock.advance(15.0)
        seen.append(other.turn())
        return collect()

    scene.keeper._collector.collect = slow  # type: ignore[method-assign]
    assert scene.keeper.turn()
    assert seen == [False]
    scene.clock.advance(0.1)
    assert scene.keeper.turn()


@pytest.mark.parametrize("mode", ["rolling", "generation"])
def test_while_one_collects_or_has_died_in_it_another_publishes(mode: Any) -> None:
    """Another keeper publishes while one collects or has died in its collection; for two leases no keeper did."""
    scene = Scene(cap=4, mode=mode, lease_s=10.0, max_ahead=4)
    interval_s = scene.ring.settings.publish_interval_s
    other = Maintainer(scene.ring, "other", clock=scene.clock)
    other.wait_turn = lambda seconds: (scene.clock.advance(seconds), other.turn())  # type: ignore[method-assign, assignment]
    writer = RingWriter(scene.ring, "w", maintainer=other, threads=False, clock=scene.clock, patience_s=5.0)
    dead, dead_store = scene.keeper, MortalStore(scene.store)
    dead._collector._ring = Ring(dead_store, scene.ring.settings, clock=scene.clock)
    dead_store.dies_after = 3
    with pytest.raises(Died):
        dead.turn()
    collections = []
    collect = other._collector.collect
    other._collector.collect = lambda: (collections.append(scene.clock()), collect())[1]  # type: ignore[method-assign]
    died_at = scene.clock()
    assert not other.turn(), "it may be back in a moment"
    for number in range(4):
        writer.put(np.array([number]))
    scene.clock.advance(interval_s)
    assert not other.turn()
    assert [int(value[0]) for value in scene.values()] == [0, 1, 2, 3]
    assert (other.flow.inserted, other.flow.finished, collections) == (4, 0, []), "writers go on by what it measures"
    for number in range(4, 24):
        writer.put(np.array([number]))
        if scene.clock() - died_at < 15:
            writer.renew()
    assert writer.put_samples == 24 and collections == []
    while scene.clock() - died_at < 2 * 10.0 + max(1.0, 4 * interval_s):
        assert not other.turn(), "the collection is not taken over before"
        assert collections == []
        scene.clock.advance(interval_s)
    scene.clock.advance(interval_s)
    assert other.turn()
    assert len(collections) == 1
    assert int(scene.values()[-1][0]) == 23


def test_who_sees_another_at_work_asks_for_nothing_but_its_record() -> None:
    scene = Scene(lease_s=10.0)
    store = MortalStore(scene.store)
    other = Maintainer(Ring(store, scene.ring.settings, clock=scene.clock), "other", clock=scene.clock)
    asked: list[int] = []

    def looked() -> None:
        before = store.operations
        assert not other.turn()
        asked.append(store.operations - before)

    for _ in range(200):
        collecting(scene.keeper, looked)
        assert scene.keeper.turn()
        looked()
        scene.clock.advance(scene.ring.settings.publish_interval_s)
    assert set(asked) == {1}, "also in the midst of a collection that ends before its next look"


def collecting(keeper: Maintainer, meanwhile: Callable[[], object]) -> None:
    """Let `meanwhile` happen during the keeper's next collection."""
    collect = keeper._collector.collect

    def slow() -> Any:
        keeper._collector.collect = collect  # type: ignore[method-assign]
        meanwhile()
        return collect()

    keeper._collector.collect = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("closed", [False, True], ids=["died", "closed"])
def test_who_follows_a_publisher_tells_the_flow_that_was_known_until_it_has_measured(closed: bool) -> None:
    """A successor tells its predecessor's flow until its own first measure; zeros let writers put without end."""
    scene = Scene(max_ahead=4, mode="generation")
    others = Maintainer(scene.ring, "others", clock=scene.clock)
    follower = Maintainer(scene.ring, "follower", clock=scene.clock)
    first, second = (
        scene.writer("first"),
        RingWriter(scene.ring, "second", maintainer=others, threads=False, clock=scene.clock, patience_s=-1.0),
    )
    scene.keeper.turn()
    for number in range(3):
        first.put(np.array([number]))
    scene.keeper.turn()
    assert not others.turn()
    assert not follower.turn()
    if closed:
        scene.keeper.close()
    scene.clock.advance(3.0)
    put: list[int] = []

    def many() -> None:
        for number in range(20):
            assert not others.turn(), "the follower is busy"
            assert others.flow.finished == 3
            try:
                second.put(np.array([number]))
            except WaitedTooLong:
                continue
            put.append(number)

    collecting(follower, many)
    assert follower.turn()
    assert put == [0], "four wait to become readable by then"
    assert sum(claim.samples for claim in scene.ring.claims()) == 4
    assert not others.turn()
    assert (others.turns, others.flow.finished) == (2, 4)


def test_a_publisher_that_nothing_was_told_yet_tells_nothing_until_it_has_measured() -> None:
    scene = Scene()
    others, follower = (Maintainer(scene.ring, name, clock=scene.clock) for name in ("others", "follower"))
    collecting(scene.keeper, others.turn)
    scene.keeper.turn()
    assert others.turns == 0
    writer = scene.writer()
    writer.put(np.array([1]))
    scene.keeper.turn()
    assert not others.turn()
    assert others.turns == 1
    assert others.flow.inserted == 1
    scene.keeper.close()
    # The follower has heard no flow, and the publisher's record is gone.
    collecting(follower, others.turn)
    assert follower.turn()
    assert others.turns == 1
    assert others.flow.inserted == 1, "the last one that was told"
    assert not others.turn()
    assert others.turns == 2, "measured for the first time by who follows: news all the same"


def test_a_writer_counts_what_it_has_put_since_the_flow_was_measured_not_since_it_was_looked_at() -> None:
    scene = Scene(max_ahead=4, mode="generation")
    others = Maintainer(scene.ring, "others", clock=scene.clock)
    writer = RingWriter(scene.ring, "w", maintainer=others, threads=False, clock=scene.clock, patience_s=-1.0)
    scene.keeper.turn()
    for number in range(4):
        others.turn()
        writer.put(np.array([number]))
    others.turn()
    with pytest.raises(WaitedTooLong, match="4 finished samples wait"):
        writer.put(np.array([4]))


def test_a_writer_that_comes_back_in_time_is_not_fenced_for_what_was_seen_before() -> None:
    scene = Scene(lease_s=10.0)
    writer = scene.writer()
    scene.collector.collect()
    scene.clock.advance(21.0)
    record = scene.store.record
    asked: list[str] = []

    def renewed_in_between(key: str) -> Any:
        found = record(key)
        if key == f"{WRITERS}w" and not asked:
            asked.append(key)
            writer.renew()
        return found

    scene.store.record = renewed_in_between  # type: ignore[method-assign]
    assert scene.collector.collect().fenced == 0
    writer.put(np.array([1]))


def test_what_is_watched_does_not_grow_with_all_that_ever_were_there() -> None:
    scene = Scene()
    for number in range(20):
        with scene.writer(f"w{number}"):
            scene.collector.collect()
    scene.collector.collect()
    assert [key for key in scene.collector._watch._first_seen if key.startswith((WRITERS, READERS))] == []


def test_files_of_others_beside_manifests_are_left_alone() -> None:
    scene = Scene()
    scene.store.create("manifests/.nfs0001", [])
    with scene.writer() as writer:
        writer.put(np.array([1]))
    scene.collector.collect()
    assert scene.store.read("manifests/.nfs0001") is not None


def test_an_ending_counts_and_nothing_behind_it() -> None:
    scene = Scene()
    with scene.writer() as writer:
        writer.put(np.array([1]))
    scene.publish()
    passed = scene.ring.newest().passed["w"]
    assert (passed.epoch, passed.seq) == (1, ENDED)
    scene.store.create(f"{INBOX}w.00000001.0000000002.1.1", [])
    scene.publish()
    assert len(scene.ring.newest()) == 1
    assert scene.writer()._epoch == 2
