"""Test misused writers and misbehaving stores, clocks and processes: no sample is lost or altered."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.errors import RingError, RingMismatch, SampleRefused, StoreFull, WriterFenced
from gpu_client.ring.format.manifest import REMEMBERED_S, ObjectId
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.format.records import INBOX, SAMPLES, WRITERS
from tests.unit.ring.ring_scene import Scene

DAY_S = 86_400.0


@pytest.mark.parametrize("wrong_s", [-1.8e9, -30 * DAY_S, 30 * DAY_S])
def test_a_writer_whose_clock_is_wrong_is_read_like_any_other(wrong_s: float) -> None:
    scene = Scene()
    writer = scene.writer("wrong", clock=lambda: scene.clock() + wrong_s)
    for number in range(3):
        writer.put(np.array([number]))
    scene.publish()
    assert [int(value[0]) for value in scene.values()] == [0, 1, 2]
    assert scene.store.keys(INBOX) == []


def test_what_waited_for_a_generation_over_a_weekend_is_read_on_monday() -> None:
    scene = Scene(mode="generation", max_ahead=4, lease_s=10.0)
    friday = scene.writer("friday")
    for number in range(3):
        friday.put(np.array([number]))
    scene.publish()
    scene.bury()
    scene.clock.advance(3 * DAY_S)
    monday = scene.writer("monday")
    scene.keeper.turn()
    monday.put(np.array([3]))
    scene.publish()
    assert [int(value[0]) for value in scene.values()] == [0, 1, 2, 3]
    scene.bury(monday)
    assert scene.store.keys(INBOX) == []


def test_writers_that_have_gone_are_not_remembered_for_ever() -> None:
    scene = Scene(lease_s=10.0)
    for number in range(50):
        with scene.writer(f"short-{number}") as writer:
            writer.put(np.array([number]))
    scene.writer("dies").put(np.array([50]))
    stays = scene.writer("stays")
    scene.bury(stays)
    assert len(scene.ring.newest().passed) == 52
    scene.clock.advance(REMEMBERED_S + 1)
    stays.renew()
    for number in range(10):
        stays.put(np.array([number]))
        scene.publish()
    scene.collector.collect()
    assert set(scene.ring.newest().passed) == {"stays"}
    assert {key.split("/")[1] for key in scene.store.keys(SAMPLES)} == {"stays"}


def test_one_that_has_put_nothing_for_days_still_counts() -> None:
    scene = Scene()
    slow, quick = scene.writer("slow"), scene.writer("quick")
    scene.publish()
    for _ in range(10):
        scene.clock.advance(DAY_S)
        slow.renew()
        quick.renew()
        quick.put(np.array([1]))
        scene.publish()
    slow.put(np.array([7]))
    scene.publish()
    assert int(scene.values()[-1][0]) == 7


def test_what_a_forgotten_writer_leaves_late_is_removed() -> None:
    scene = Scene(lease_s=10.0)
    with scene.writer("late") as late:
        late.put(np.array([1]))
    stays = scene.writer("stays")
    scene.clock.advance(REMEMBERED_S + 1)
    for number in range(5):
        stays.put(np.array([number]))
        scene.publish()
    late_one = ObjectId("late", 1, 9)
    scene.store.create(late_one.key, [memoryview(b"late")])
    scene.store.create(f"{INBOX}late.00000001.0000000009.1.1", [])
    scene.publish()
    assert scene.store.keys(INBOX) == []
    scene.collector.collect()
    assert scene.store.read(late_one.key) is None
    assert len(scene.values()) == 4


def test_the_collector_leaves_what_a_writer_that_has_just_begun_has_stored() -> None:
    scene = Scene()
    writer = scene.writer("new")
    keys = scene.store.keys

    def before_its_claim_counts(prefix: str) -> list[str]:
        found = keys(prefix)
        if prefix == SAMPLES and not found:
            writer.put(np.array([1]))
            found = keys(prefix)
        return found

    scene.store.keys = before_its_claim_counts  # type: ignore[method-assign]
    assert scene.collector.collect().objects == 0
    scene.publish()
    assert len(scene.values()) == 1


def test_arrays_may_be_used_again_when_put_returns() -> None:
    scene = Scene(pack=3, cap=6)
    image = np.zeros(4)
    with scene.writer() as writer:
        for number in range(5):
            image[:] = number
            writer.put({"image": image})
    assert [int(value["image"][0]) for value in scene.values()] == [0, 1, 2, 3, 4]


def test_arrays_may_be_used_again_though_there_was_no_room_for_their_pack() -> None:
    scene = Scene(pack=2)
    writer = scene.writer(patience_s=0.5)
    create = scene.store.create
    full = True

    def refuse(key: str, pieces: Sequence[memoryview]) -> bool:
        if full and key.startswith(SAMPLES):
            scene.clock.advance(1.0)
            raise StoreFull("there is no room", "Free some")
        return create(key, pieces)

    scene.store.create = refuse  # type: ignore[method-assign]
    image = np.ones(4)
    writer.put(image)
    image[:] = 2
    with pytest.raises(StoreFull):
        writer.put(image)
    image[:] = 3
    full = False
    writer.close()
    assert [int(value[0]) for value in scene.values()] == [1]


@pytest.mark.parametrize(
    ("settings", "sample", "seed", "reason"),
    [
        ({"quantise": {"sample['x']": "uint8"}}, {"x": np.arange(3)}, None, "only floats can be quantized"),
        (
            {"quantise": {"sample['x']": "uint8"}, "finite": False},
            {"x": np.array([np.inf])},
            None,
            "non-finite values",
        ),
        ({}, {"x": np.ones(1)}, object(), "the seed cannot be encoded"),
        ({}, {"x": np.ones(1), "loss": float("nan")}, None, r"sample\['loss'\] is nan"),
        ({}, {"x": np.ones(1), "deep": [(1.0, float("inf"))]}, None, r"sample\['deep'\]\[0\]\[1\] is inf"),
    ],
)
def test_a_sample_that_cannot_be_stored_does_not_hold_up_those_behind_it(
    settings: dict[str, Any], sample: dict[str, Any], seed: object, reason: str
) -> None:
    scene = Scene(pack=2, **settings)
    good = {"x": np.array([0.0, 1.0])}
    with scene.writer() as writer:
        with pytest.raises(SampleRefused, match=reason):
            writer.put(sample, seed=seed)
        writer.put(good)
        writer.put(good)
        assert (writer.refused, writer.put_samples) == (1, 2)
    assert len(scene.values()) == 2


def test_seeds_of_numpy_are_noted_as_numbers() -> None:
    scene = Scene()
    with scene.writer() as writer:
        writer.put(np.ones(1), seed=np.int64(7))
    data = scene.store.read(scene.store.keys(SAMPLES)[0])
    assert data is not None
    assert StoredSamples("", data).seed() == 7


@pytest.mark.parametrize("name", ["a/b", "../up", "ünder", "x" * 65, "a b"])
def test_names_that_could_become_another_s_are_refused(name: str) -> None:
    with pytest.raises(RingMismatch, match="not a name of a writer"):
        Scene().writer(name)


def test_an_object_that_is_there_already_is_never_claimed() -> None:
    scene = Scene()
    writer = scene.writer()
    scene.store.create(ObjectId("w", 1, 1).key, [memoryview(b"of another")])
    writer.put(np.array([5]))
    scene.publish()
    assert [slot.object.seq for slot in scene.ring.newest().slots] == [2]
    assert int(scene.values()[0][0]) == 5


def test_a_claim_that_is_made_twice_counts_once() -> None:
    scene = Scene()
    writer = scene.writer()
    writer.put(np.array([5]))
    scene.store.create(f"{INBOX}w.00000001.0000000001.1.17", [])
    scene.publish()
    assert [slot.id for slot in scene.ring.newest().slots] == ["w-1-1"]
    assert scene.store.keys(INBOX) == []


def test_a_forked_process_cannot_go_on_in_its_parent_s_name() -> None:
    scene = Scene()
    writer = scene.writer()
    writer.put(np.array([1]))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            writer.put(np.array([2]))
        except WriterFenced:
            writer.close()  # of its parent's it closes nothing
            code = 0 if scene.store.keys(WRITERS) else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    writer.put(np.array([3]))


def test_a_writer_that_was_closed_says_so() -> None:
    writer = Scene().writer()
    writer.close()
    writer.close()
    with pytest.raises(WriterFenced, match="was closed"):
        writer.put(np.array([1]))


def test_one_that_leaves_late_does_not_take_the_lease_of_its_successor() -> None:
    scene = Scene()
    old = scene.writer("same")
    new = scene.writer("same")
    old.close()
    new.put(np.array([1]))
    scene.publish()
    assert [slot.object.epoch for slot in scene.ring.newest().slots] == [2]


def test_closing_ends_though_others_go_on_claiming() -> None:
    scene = Scene(cap=4, max_ahead=10_000)
    other, leaving = scene.writer("other"), scene.writer("leaving")
    leaving.put(np.array([1]))
    publish, published = scene.ring.publish, []

    def with_more_behind_it(*, at_once: bool = False) -> Any:
        other.put(np.array([2]))
        published.append(publish(at_once=at_once))
        assert len(published) < 1000, "it would never end"
        return published[-1]

    scene.ring.publish = with_more_behind_it  # type: ignore[method-assign]
    leaving.close()
    assert scene.ring.newest().settled(ObjectId("leaving", 1, 1))


def test_swap_makes_readable_what_was_put_though_another_publisher_is_faster() -> None:
    scene = Scene(mode="generation")
    writer = scene.writer()
    writer.put(np.array([1]))
    swap, lost = scene.store.swap, [3]

    def lose(key: str, data: bytes, seen: str | None) -> str | None:
        if key == "pointer" and lost[0]:
            lost[0] -= 1
            return None
        return swap(key, data, seen)

    scene.store.swap = lose  # type: ignore[method-assign]
    writer.swap()
    assert len(scene.values()) == 1


def test_a_handler_that_interrupts_a_put_is_refused_instead_of_waiting_for_ever() -> None:
    scene = Scene()
    writer = scene.writer()
    create, told = scene.store.create, []

    def interrupted(key: str, pieces: Sequence[memoryview]) -> bool:
        if key.startswith(SAMPLES):
            with pytest.raises(RingError, match="set a flag"):
                writer.close()
            told.append(key)
        return create(key, pieces)

    scene.store.create = interrupted  # type: ignore[method-assign]
    writer.put(np.array([1]))
    writer.put(np.array([2]))
    assert len(told) == 2
    writer.close()
    assert len(scene.values()) == 2
