"""Test `put`: refusals, waits, full stores, taken names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import RingMismatch, SampleRefused, StoreFull, WaitedTooLong, WriterFenced
from gpu_client.ring.format.records import SAMPLES
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.unit.ring.ring_scene import Scene


def refusals() -> list[tuple[object, str]]:
    return [
        ({"x": np.zeros(4, "f8"), "y": torch.zeros(2)}, "the ring expects"),
        ({"x": np.zeros(5, "f4"), "y": torch.zeros(2)}, "the ring expects"),
        ({"x": np.zeros(4, "f4")}, "the ring expects"),
        (
            {"x": np.array([0, np.nan, 0, 0], "f4"), "y": torch.zeros(2)},
            r"sample\['x'\] has non-finite values",
        ),
        ({"x": np.zeros(4, "f4"), "y": torch.tensor([0, -torch.inf])}, r"sample\['y'\] has non-finite values"),
        ({"x": object(), "y": torch.zeros(2)}, "builtins.object"),
        ({"only": "text"}, "no array"),
    ]


@pytest.mark.parametrize(("sample", "reason"), refusals(), ids=lambda value: str(value)[:16])
def test_a_refused_sample_is_counted_and_nothing_of_it_stored(sample: object, reason: str) -> None:
    scene = Scene()
    with scene.writer() as writer:
        writer.put({"x": np.ones(4, "f4"), "y": torch.ones(2)})
        with pytest.raises(SampleRefused, match=reason):
            writer.put(sample)
        assert (writer.refused, writer.put_samples) == (1, 1)
        assert len(scene.store.keys(SAMPLES)) == 1
        writer.put({"x": np.ones(4, "f4"), "y": torch.ones(2)})
    assert len(scene.ring.newest()) == 2


def test_large_finite_values_are_no_reason_to_refuse() -> None:
    with Scene().writer() as writer:
        writer.put({"x": np.full(9, np.finfo("f4").max, "f4"), "y": torch.full((9,), 60000.0, dtype=torch.float16)})


def test_a_generator_s_refused_samples_are_left_out() -> None:
    scene = Scene()
    with scene.writer() as writer:
        assert writer.run(np.full(3, value) for value in (1.0, np.nan, 2.0)) == 2
        assert writer.refused == 1


def test_a_writer_that_is_too_far_ahead_waits_and_what_it_made_is_kept() -> None:
    scene = Scene(max_ahead=3)
    writer = scene.writer(patience_s=5.0)
    publish = scene.ring.publish
    scene.ring.publish = lambda **_: None  # type: ignore[method-assign]
    turns: list[float] = []

    def turn(seconds: float) -> None:
        turns.append(seconds)
        scene.clock.advance(seconds)
        scene.keeper.turn()

    scene.keeper.wait_turn = turn  # type: ignore[method-assign]
    scene.keeper.turn()
    for number in range(3):
        writer.put(np.array([number]))
    with pytest.raises(WaitedTooLong, match="3 finished samples wait"):
        writer.put(np.array([3]))
    assert sum(turns) > 5
    scene.ring.publish = publish  # type: ignore[method-assign]
    writer.swap()
    writer.put(np.array([4]))
    assert [slot.object.seq for slot in scene.ring.newest().slots] == [1, 2, 3]


def test_whoever_takes_the_name_fences_the_one_before() -> None:
    scene = Scene()
    first = scene.writer("same")
    first.put(np.array([1]))
    second = scene.writer("same")
    with pytest.raises(WriterFenced, match="same"):
        first.put(np.array([2]))
    second.put(np.array([3]))
    while scene.ring.publish() is not None:
        pass
    assert [slot.object.epoch for slot in scene.ring.newest().slots] in ([1, 2], [1, 1, 2])


def test_whoever_was_silent_for_too_long_is_fenced_and_its_orphans_go() -> None:
    scene = Scene(lease_s=10.0, retain=2)
    silent = scene.writer("silent")
    silent.put(np.array([1]))
    scene.store.create("samples/silent/00000001-0000000002", [])
    other = scene.writer("other")
    collector = GarbageCollector(scene.ring, LeaseWatch(scene.clock))
    for _ in range(6):
        scene.clock.advance(6.0)
        other.renew()
        scene.ring.publish()
        collector.collect()
    with pytest.raises(WriterFenced):
        silent.put(np.array([2]))
    for _ in range(5):
        other.put(np.array([3]))
        scene.keeper.turn()
        collector.collect()
    assert scene.store.keys("samples/silent/") == []
    assert len(scene.ring.newest()) == 4


def test_a_full_store_makes_it_wait_and_loses_nothing() -> None:
    scene = Scene()
    writer = scene.writer(patience_s=3.0)
    create = scene.store.create
    full = 3

    def refuse(key: str, pieces: list[memoryview]) -> bool:
        nonlocal full
        if key.startswith(SAMPLES) and full:
            full -= 1
            raise StoreFull("there is no room", "Free some")
        return create(key, pieces)

    scene.store.create = refuse  # type: ignore[method-assign, assignment]
    writer.put(np.array([1]))
    full = 10**6
    with pytest.raises(StoreFull):
        writer.put(np.array([2]))
    full = 0
    writer.put(np.array([2]))
    writer.close()
    assert len(scene.ring.newest()) == 2


def test_a_generator_may_fill_the_same_arrays_again_before_its_pack_is_stored() -> None:
    scene = Scene(pack=3, finite=True)
    writer = scene.writer()
    array, tensor = np.zeros(3, "f4"), torch.zeros(2)
    for number in range(3):
        array[:], tensor[:] = number, number
        writer.put({"x": array, "y": tensor})
    scene.ring.publish()
    reader = RingReader(scene.ring, threads=False)
    found = [reader.sample(slot) for slot in scene.ring.newest().slots]
    assert [(one["x"][0], one["y"][0]) for one in found] == [(0, 0), (1, 1), (2, 2)]


def test_packs_are_stored_when_they_are_full_and_at_the_end() -> None:
    scene = Scene(pack=3, cap=6)
    writer = scene.writer()
    for number in range(4):
        writer.put(np.array([number]))
    assert len(scene.store.keys(SAMPLES)) == 1
    writer.close()
    assert len(scene.store.keys(SAMPLES)) == 2
    assert [(slot.object.seq, slot.number) for slot in scene.ring.newest().slots] == [(1, 0), (1, 1), (1, 2), (2, 0)]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"min_size": 9}, "min_size is 9"),
        ({"pack": 9}, "pack is 9"),
        ({"pack_bytes": 8 * 2**20}, "pack_bytes is 8388608 and pack 1"),
        ({"pack": 2, "pack_bytes": 4095}, "greater than or equal to 4096"),
        ({"pack": 2, "pack_bytes": 2**30 + 1}, "less than or equal to 1073741824"),
        ({"cap": 0}, "cap"),
        ({"mode": "x"}, "mode"),
        ({"mode": "generation", "max_ahead": 3}, "before a generation is complete"),
        ({"publish_interval_s": 1e-9}, "publish_interval_s"),
        ({"publish_every_samples": 0}, "publish_every_samples"),
        ({"publish_every_samples": 5}, "cap only 4: the number would exceed the ring"),
        ({"publish_every_samples": 2, "mode": "generation"}, "a generation is published when complete"),
        ({"publish_every_samples": 3, "max_ahead": 2}, "writers would wait first"),
        ({"lease_s": 1e-9}, "lease_s"),
        ({"max_age_s": float("inf")}, "max_age_s"),
        ({"max_age_s": float("nan")}, "max_age_s"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RingSettings(**{"cap": 4, **more})


def test_two_rings_of_one_name_are_told_apart() -> None:
    scene = Scene()
    with pytest.raises(RingMismatch, match="cap 4 instead of 5"):
        Ring.make(scene.store, RingSettings(cap=5))
    with pytest.raises(RingMismatch, match="no ring"):
        Ring.open(MemoryStore())


def test_clocks_that_differ_put_nobody_s_samples_out_of_order() -> None:
    scene = Scene(cap=6)
    ahead = Ring(scene.store, scene.ring.settings, clock=_shifted(scene.clock, 5000.0))
    early, late = scene.writer("early"), RingWriter(ahead, "late", maintainer=scene.keeper, threads=False)
    for number in range(3):
        late.put(np.array([number]))
        early.put(np.array([number]))
        scene.clock.advance(-7.0)
    while scene.ring.publish() is not None:
        pass
    slots = scene.ring.newest().slots
    for name in ("early", "late"):
        assert [slot.object.seq for slot in slots if slot.object.writer == name] == [1, 2, 3]


def _shifted(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    return lambda: clock() + seconds


def test_who_leaves_publishes_its_last_samples_although_others_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    ring = Ring.make(store, RingSettings(cap=10))
    writer = RingWriter(ring, "w", threads=False)
    for number in range(3):
        writer.put(np.array([number]))
    swap, lost = store.swap, []

    def overtaken(key: str, data: bytes, seen: str | None) -> str | None:
        if key == "pointer" and len(lost) < 3:
            lost.append(key)
            return None
        return swap(key, data, seen)

    monkeypatch.setattr(store, "swap", overtaken)
    writer.close()
    assert len(lost) == 3
    assert ring.newest().inserted == 3
