"""Test the schema record: damage is detected, and the schema restored from samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.core.repair import inspect_ring, repair_ring
from gpu_client.ring.core.ring import Ring, decode_schema
from gpu_client.ring.errors import ObjectDamaged, SampleRefused
from gpu_client.ring.format.records import SCHEMA
from gpu_client.ring.format.sample_tree import flatten
from gpu_client.ring.generating.writer import RingWriter
from tests.unit.ring.reading_scene import Scene


def document(scene: Scene) -> bytes:
    return bytes(scene.store.read(SCHEMA) or b"")


def newcomer(scene: Scene, name: str = "new") -> RingWriter:
    """A process that remembers nothing."""
    ring = Ring.open(scene.store, clock=scene.clock)
    return RingWriter(ring, name, maintainer=scene.keeper, threads=False, clock=scene.clock)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "no JSON": lambda data: b"\x7f" + data[1:],
    "no text": lambda data: b"\xff" + data[1:],
    "dtype": lambda data: data.replace(b"<i8", b"<i0"),
    "empty": lambda _: b"",
    "another": lambda _: b"{}",
    "list": lambda _: b"[]",
}


def test_every_altered_bit_of_a_schema_is_noticed() -> None:
    scene = Scene()
    scene.put(1)
    data = document(scene)
    assert decode_schema(memoryview(data)) == flatten(np.array([1])).schema(shapes=True)
    for bit in range(8 * len(data)):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError):
            decode_schema(memoryview(altered))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("shapes", ["same", "any"])
def test_a_damaged_schema_is_told_and_set_anew_from_a_sample(damage: str, shapes: str) -> None:
    scene = Scene(shapes=shapes)
    scene.put(3)
    good = document(scene)
    scene.store._objects[SCHEMA] = DAMAGES[damage](good)
    scene.store._objects[scene.ring.newest().slots[-1].object.key] = b"rot"
    writer = newcomer(scene)
    with pytest.raises(ObjectDamaged, match=r"schema\.json is damaged: .*: baton ring verify RING --repair"):
        writer.put(np.array([3]))
    assert (writer.put_samples, writer.refused) == (0, 0)
    assert SCHEMA in inspect_ring(scene.ring).damaged
    repair_ring(scene.ring)
    assert document(scene) == good
    assert inspect_ring(scene.ring).damaged == {}
    writer.put(np.array([3]))
    with pytest.raises(SampleRefused):
        writer.put(np.array([3.0]))


def test_a_damaged_schema_of_a_ring_without_samples_is_the_next_sample_s() -> None:
    scene = Scene()
    scene.ring.require_schema(flatten(np.array([1])).schema(shapes=True))
    scene.store._objects[SCHEMA] = b"rot"
    assert list(repair_ring(scene.ring).damaged) == [SCHEMA]
    assert scene.store.read(SCHEMA) is None
    newcomer(scene).put(np.array([1.0]))
    assert decode_schema(memoryview(document(scene))) == flatten(np.array([1.0])).schema(shapes=True)


def test_a_schema_that_was_lost_is_that_of_the_samples() -> None:
    scene = Scene()
    scene.put(2)
    good = document(scene)
    scene.store.delete([SCHEMA])
    assert repair_ring(scene.ring).damaged == {SCHEMA: "missing, although samples exist"}
    assert document(scene) == good


@pytest.mark.parametrize("altered", [False, True])
def test_a_schema_that_was_stored_without_a_digest_is_read_and_compared(altered: bool) -> None:
    scene = Scene()
    scene.put(2)
    good = document(scene)
    old = flatten(np.array([1])).schema(shapes=True).encode()
    scene.store._objects[SCHEMA] = old.replace(b"<i8", b"<i0") if altered else old
    assert list(inspect_ring(scene.ring).damaged) == ([SCHEMA] if altered else [])
    repair_ring(scene.ring)
    assert document(scene) == (good if altered else old)
    newcomer(scene).put(np.array([1]))


@pytest.mark.parametrize(
    "sample",
    [
        {"x": np.zeros((2, 3), np.float16), "y": (1, "text", [None, True]), "z": np.float32(1)},
        (b"bytes", np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))])),
    ],
)
def test_stored_samples_say_their_schema_as_it_was_put(sample: Any) -> None:
    scene = Scene()
    newcomer(scene).put(sample)
    good = document(scene)
    scene.store.delete([SCHEMA])
    scene.ring.publish()
    repair_ring(scene.ring)
    assert document(scene) == good


@pytest.mark.parametrize("other", [True, 1.0, "1", None], ids=repr)
def test_a_plain_value_of_another_type_is_refused_also_if_it_is_equal(other: object) -> None:
    writer = newcomer(Scene())
    for number in (2, 1, 1):
        writer.put({"x": np.zeros(3), "n": number})
    with pytest.raises(SampleRefused, match="the ring expects"):
        writer.put({"x": np.zeros(3), "n": other})
    assert (writer.put_samples, writer.refused) == (3, 1)
