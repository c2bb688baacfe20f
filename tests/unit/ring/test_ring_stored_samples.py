"""Test stored samples: alignment of arrays, and the second read before damage is raised."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from gpu_client.ring.errors import ObjectDamaged, SampleRefused
from gpu_client.ring.format.objects import StoredSamples
from tests.unit.ring.reading_scene import Scene


class Pair(NamedTuple):
    image: np.ndarray[Any, Any]
    label: int


def test_arrays_lie_at_multiples_of_64_bytes() -> None:
    """Arrays are aligned to 64 bytes, as vector instructions and copies to a GPU require."""
    scene = Scene(pack=2, shapes="any")
    for size in (1, 3):
        scene.writer.put({"odd": np.arange(size, dtype=np.uint8), "wide": np.arange(5.0), "text": "x" * size})
    scene.ring.publish()
    slots = scene.ring.newest().slots
    data = scene.store.read(slots[0].object.key)
    assert data is not None
    whole = np.frombuffer(data, np.uint8)
    stored = StoredSamples("samples/w", data)
    for slot in slots:
        sample = stored.sample(slot.number)
        assert [(sample[name].ctypes.data - whole.ctypes.data) % 64 for name in ("odd", "wide")] == [0, 0]


def test_what_was_damaged_on_the_way_is_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.put(1)
    read, times = scene.store.read, 0

    def damaged_at_first(key: str) -> memoryview | None:
        nonlocal times
        data = read(key)
        if data is None or not key.startswith("samples/"):
            return data
        times += 1
        altered = bytearray(data)
        altered[-1] ^= 1 if times <= damaged else 0
        return memoryview(altered)

    monkeypatch.setattr(scene.store, "read", damaged_at_first)
    damaged = 1
    reader = scene.reader()
    (slot,) = reader.newest().slots
    assert reader.sample(slot)[0] == 0
    assert (times, reader.quarantined) == (2, {})
    damaged, times = 2, 0
    with pytest.raises(ObjectDamaged):
        scene.reader("other").sample(slot)
    assert times >= 2


def test_the_mask_of_an_array_is_not_lost_unseen() -> None:
    scene = Scene()
    with pytest.raises(SampleRefused, match=r"sample\['x'\] is a masked array, whose mask would be lost"):
        scene.writer.put({"x": np.ma.masked_array([1, 2], [True, False])})
    assert (scene.writer.put_samples, scene.writer.refused) == (0, 1)


def test_a_named_tuple_comes_back_as_a_tuple() -> None:
    scene = Scene()
    scene.writer.put(Pair(np.array([1]), 2))
    scene.ring.publish()
    reader = scene.reader()
    found: Any = reader.sample(reader.newest().slots[0])
    assert type(found) is tuple and found[0][0] == 1 and found[1] == 2


@pytest.mark.filterwarnings("error")
def test_what_lies_too_far_apart_cannot_be_quantised() -> None:
    scene = Scene(quantise={"sample['x']": "uint8"})
    with pytest.raises(SampleRefused, match=r"has values from -1e\+308 to 1e\+308"):
        scene.writer.put({"x": np.array([-1e308, 1e308])})
    assert scene.ring.newest().inserted == 0
