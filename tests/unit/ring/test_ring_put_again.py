"""Test a repeated `put` after an exception: no sample is lost or stored twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import pytest

from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import StoreFull, WriterFenced
from gpu_client.ring.format.records import INBOX, SAMPLES
from gpu_client.ring.generating.writer import RingWriter
from tests.unit.ring.ring_kit import MortalStore
from tests.unit.ring.ring_scene import Scene

T = TypeVar("T")
SAMPLES_PUT = 6
"""Number of samples that fills whole packs, so that the last `put` stores."""


class FailsOnce(MortalStore):
    """The store that fails once, before or after its operation number `at`, and then goes on."""

    def __init__(self, scene: Scene, error: BaseException, at: int, *, done_first: bool) -> None:
        super().__init__(scene.store)
        self.error, self.at, self.done_first = error, at, done_first

    def _do(self, operation: Callable[[], T]) -> T:
        self.at -= 1
        if self.at == 0:
            if self.done_first:
                operation()
            raise self.error
        return operation()


def put_until_taken(writer: RingWriter, number: int) -> int:
    """Put a sample with the repeats that docs/ring.md advises; return how many calls raised."""
    raised = 0
    while True:
        sample = np.array([number])
        try:
            writer.put(sample)
        except (KeyboardInterrupt, StoreFull, OSError):
            raised += 1
            if writer.commit_uncertain:
                return raised
        else:
            return raised
        finally:
            sample[:] = -1


@pytest.mark.parametrize("done_first", [False, True])
@pytest.mark.parametrize("pack", [1, 3])
@pytest.mark.parametrize("error", [StoreFull("there is no room"), OSError("no route"), KeyboardInterrupt()], ids=repr)
def test_put_again_where_it_is_not_unsure_a_sample_is_there_once(
    error: BaseException, pack: int, done_first: bool
) -> None:
    """Whichever operation of the store fails, those that store and those that claim among them."""
    raised = 0
    for at in range(1, 40):
        scene = Scene(cap=20, pack=pack)
        store = FailsOnce(scene, error, 0, done_first=done_first)
        ring = Ring(store, scene.ring.settings, clock=scene.clock)
        # Without patience a full store is told at once.
        writer = RingWriter(ring, "w", maintainer=scene.keeper, threads=False, patience_s=-1.0, clock=scene.clock)
        store.at = at
        for number in range(SAMPLES_PUT):
            raised += put_until_taken(writer, number)
        writer.flush()
        scene.publish()
        assert [int(value[0]) for value in scene.values()] == list(range(SAMPLES_PUT)), at
        assert writer.put_samples == SAMPLES_PUT
        listed = {slot.object.key for slot in scene.ring.newest().slots}
        assert writer.put_bytes == sum(len(scene.store.read(key) or b"") for key in listed)
        assert writer.waited_s == 0
    assert raised >= 3 * SAMPLES_PUT // pack, "each pack takes three operations at least"


@pytest.mark.parametrize("prefix", [SAMPLES, INBOX], ids=["to store", "to claim"])
def test_samples_of_earlier_calls_stay(prefix: str) -> None:
    scene = Scene(cap=20, pack=3)
    writer = scene.writer(patience_s=-1.0)
    create, full = scene.store.create, True

    def refuse(key: str, pieces: Sequence[memoryview]) -> bool:
        if full and key.startswith(prefix):
            raise StoreFull("there is no room")
        return create(key, pieces)

    scene.store.create = refuse  # type: ignore[method-assign]
    for number in range(2):
        writer.put(np.array([number]))
    for _ in range(3):
        with pytest.raises(StoreFull):
            writer.put(np.array([2]))
        if writer.commit_uncertain:
            break
    assert (writer.commit_uncertain, writer.put_samples) == (prefix == INBOX, 0)
    full = False
    writer.flush()
    scene.publish()
    assert [int(value[0]) for value in scene.values()] == list(range(3 if prefix == INBOX else 2))


def test_one_that_is_behind_a_sample_without_a_claim_is_not_unsure() -> None:
    """And the one before it stays so for the thread that has put it."""
    scene = Scene(cap=20)
    writer = scene.writer(patience_s=-1.0)
    create, full = scene.store.create, True

    def refuse(key: str, pieces: Sequence[memoryview]) -> bool:
        if full and key.startswith(INBOX):
            raise StoreFull("there is no room")
        return create(key, pieces)

    scene.store.create = refuse  # type: ignore[method-assign]
    told: list[bool] = []

    def put_another() -> None:
        with pytest.raises(StoreFull):
            writer.put(np.array([1]))
        told.append(writer.commit_uncertain)

    with pytest.raises(StoreFull):
        writer.put(np.array([0]))
    thread = threading.Thread(target=put_another)
    thread.start()
    thread.join()
    assert (told, writer.commit_uncertain) == ([False], True)
    full = False
    writer.put(np.array([1]))
    assert not writer.commit_uncertain
    scene.publish()
    assert [int(value[0]) for value in scene.values()] == [0, 1]


def test_fenced_behind_its_storing_it_is_unsure() -> None:
    scene = Scene()
    first = scene.writer("same")
    scene.writer("same")
    with pytest.raises(WriterFenced):
        first.put(np.array([1]))
    assert first.commit_uncertain
