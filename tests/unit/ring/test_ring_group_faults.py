"""Test trainings that share or resume a group: no stale samples, no endless wait."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.core.back_pressure import RingFlow, writer_wait_reason
from gpu_client.ring.errors import RingError, RingMismatch
from gpu_client.ring.format.records import GROUPS, PINS, SAMPLES
from gpu_client.ring.reading.batch_plan import BatchPlan, BatchShape, ManifestDecision
from gpu_client.ring.reading.batch_stream import PINNED_S, BatchStream, ReaderGroup
from gpu_client.ring.settings import RingSettings
from tests.unit.ring.reading_scene import Scene, batch


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"batch_size": 0}, "is empty"),
        ({"batch_size": 5}, "more than the ring's 4 samples"),
        ({"batch_size": 2, "world_size": 3}, "more than the ring's 4 samples"),
        ({"batch_size": 1, "policy": 0}, "no policy 0"),
        ({"batch_size": 1, "policy": "newest"}, "no policy 'newest'"),
    ],
)
def test_what_can_never_be_read_is_refused_at_once(shape: dict[str, Any], reason: str) -> None:
    scene = Scene()
    with scene.reader() as reader, pytest.raises(RingError, match=reason):
        BatchStream(reader, BatchShape(**shape))
    with scene.reader() as reader, pytest.raises(RingError, match="no rank 2 of 2"):
        BatchStream(reader, BatchShape(1, world_size=2), rank=2)


def test_another_training_of_that_group_begins_with_the_newest_samples() -> None:
    scene = Scene()
    reader = scene.reader("first")
    first = BatchStream(reader, BatchShape(2, policy="latest"))
    for _ in range(20):
        scene.put(1)
        if scene.next >= 2:
            first.next_batch()
    reader.close()
    scene.put(8)
    with scene.reader("second") as again:
        second = BatchStream(again, BatchShape(4))
        assert batch(second) == [24, 25, 26, 27]
        for _ in range(30):
            scene.put(4)
            assert min(batch(second)) >= scene.next - 4


def test_who_begins_beside_a_training_of_that_group_that_goes_on_is_told() -> None:
    scene = Scene()
    going = scene.reader("going")
    first = BatchStream(going, BatchShape(2, policy="latest"))
    for _ in range(30):
        scene.put(2)
        first.next_batch()
    with scene.reader("late", patience_s=1000.0) as late, pytest.raises(RingMismatch, match="a group of its own"):
        BatchStream(late, BatchShape(2)).next_batch()
    first.next_batch()


def test_processes_that_decide_at_once_take_the_first_decision() -> None:
    scene = Scene()
    with scene.reader("first") as first, scene.reader("second") as second:
        groups = ReaderGroup(first, "train"), ReaderGroup(second, "train")
        assert all(group.join() for group in groups)
        decision = ManifestDecision(1, at_ms=10)
        assert groups[0].decide(1, decision) == decision
        assert groups[1].decide(1, ManifestDecision(2, at_ms=20)) == decision


def test_a_training_that_is_resumed_after_days_goes_on_with_the_newest_samples() -> None:
    scene = Scene()
    scene.put(4)
    reader = scene.reader()
    stream = BatchStream(reader, BatchShape(2))
    stream.next_batch()
    state = json.loads(json.dumps(stream.state_dict()))
    stream.checkpointed(state)
    reader.close()
    scene.clock.advance(PINNED_S + 60)
    scene.put(12)
    scene.bury()
    assert scene.store.keys(PINS) == scene.store.keys(GROUPS) == []
    with scene.reader() as again:
        resumed = BatchStream(again, BatchShape(2))
        resumed.load_state_dict(state)
        assert min(batch(resumed)) >= 12
        assert resumed.plan.batch == 2


def test_decisions_of_trainings_that_nobody_resumes_go_with_their_pins() -> None:
    scene = Scene()
    scene.put(4)
    for number in range(5):
        with scene.reader() as reader:
            BatchStream(reader, BatchShape(1), group=f"run-{number}").next_batch()
    assert len(scene.store.keys(GROUPS)) == 5
    scene.clock.advance(PINNED_S + 60)
    scene.bury()
    scene.put(8)
    scene.bury()
    assert scene.store.keys(GROUPS) == scene.store.keys(PINS) == []
    assert scene.manifests() <= 2


def test_readers_that_may_read_nothing_of_what_is_there_are_not_waited_for() -> None:
    scene = Scene(samples_per_insert=4.0, max_age_s=60.0)
    scene.put(4)
    scene.keeper.turn()
    scene.clock.advance(3600.0)
    scene.writer.renew()
    scene.put(62)
    scene.keeper.turn()
    scene.clock.advance(3600.0)
    assert writer_wait_reason(scene.keeper.flow, scene.settings, 256), "writers are ahead of readers"
    with scene.reader(patience_s=30.0) as reader:
        stream = BatchStream(reader, BatchShape(4, max_age_s=60.0))
        pause = reader._pause
        writes: list[int] = []

        def meanwhile(seconds: float) -> None:
            pause(seconds)
            scene.writer.renew()
            scene.keeper.turn()
            if not writer_wait_reason(scene.keeper.flow, scene.settings, 256):
                writes.append(1)
                scene.put(1)

        reader._pause = meanwhile
        assert min(batch(stream)) >= 66
        assert len(writes) >= 4


def test_batches_larger_than_what_writers_are_ahead_of_readers_come() -> None:
    settings = RingSettings(cap=4096, samples_per_insert=1.0)
    flow = RingFlow(inserted=300, read=0, readable=300)
    assert writer_wait_reason(flow, settings, 256)
    assert not writer_wait_reason(RingFlow(inserted=300, read=0, readable=300, wanted=1024), settings, 256)
    scene = Scene()
    with scene.reader() as reader:
        BatchStream(reader, BatchShape(3))
        reader.flush_stats()
        assert scene.keeper.measure_flow(scene.ring.newest()).wanted == 3


def test_packs_are_read_about_once_a_pass() -> None:
    scene = Scene(cap=4000, pack=20)
    for number in range(4000):
        scene.writer.put(np.array([number]))
    while scene.ring.publish() is not None:
        pass
    read, opened = scene.store.read, []

    def noted(key: str) -> Any:
        if key.startswith(SAMPLES):
            opened.append(key)
        return read(key)

    scene.store.read = noted  # type: ignore[method-assign]
    with scene.reader() as reader:
        stream = BatchStream(reader, BatchShape(40))
        found = [value for _ in range(100) for value in (int(one[0]) for one in stream.next_batch()[1])]
    assert sorted(found) == list(range(4000))
    assert found[:20] != sorted(found[:20])
    assert len(opened) <= 1.2 * 200


def test_a_state_does_not_grow_with_the_ring() -> None:
    scene = Scene(cap=64)
    scene.put(64)
    with scene.reader() as reader:
        stream = BatchStream(reader, BatchShape(8))
        for _ in range(40):
            stream.next_batch()
        assert len(json.dumps(stream.state_dict())) < 300


def test_a_plan_that_has_left_its_manifest_wants_another() -> None:
    scene = Scene()
    scene.put(4)
    newest = scene.ring.newest()
    plan = BatchPlan(BatchShape(1))
    plan.decide(ManifestDecision(newest.number, 0), newest, None)
    plan.next_batch(newest)
    plan.reset()
    assert plan.wants_decision(newest)
    assert plan.batch == 1
