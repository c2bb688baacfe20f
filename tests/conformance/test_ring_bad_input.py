"""Test damage at every place: it is reported, nothing else suffers, the ring continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpu_client.ring.core.damage_report import list_quarantined
from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.repair import verify_objects
from gpu_client.ring.core.ring import Ring, make_ring, open_ring
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingMismatch, SampleRefused
from gpu_client.ring.format.manifest import manifest_key
from gpu_client.ring.format.records import POINTER, SAMPLES, SETTINGS
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.batch_plan import BatchShape
from gpu_client.ring.reading.batch_stream import BatchStream
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tools.status import read_status
from tests.kits.ring.places import KINDS, Place, place_of


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from place_of(request.param, request, tmp_path)


def filled(place: Place, count: int = 6, **settings: object) -> Ring:
    """A ring with numbered samples, all readable."""
    ring = make_ring(place.text, RingSettings.model_validate({"cap": 6, "max_ahead": 1000, **settings}))
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(count):
            writer.put({"x": np.full(64, number), "y": np.float32(number)}, seed=number)
    return ring


def flipped(place_of_bit: Callable[[bytes], int]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        altered = bytearray(data)
        altered[place_of_bit(data)] ^= 0x10
        return bytes(altered)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda data: data[:-100], "instead of", id="cut"),
        pytest.param(lambda data: data[:20], "ends after 20 bytes", id="stump"),
        pytest.param(lambda _: b"", "ends after 0 bytes", id="empty"),
        pytest.param(lambda data: data + b"\0", "instead of", id="longer"),
        pytest.param(flipped(lambda data: 0), "not an object of a ring", id="magic"),
        pytest.param(flipped(lambda data: 50), "header was altered", id="header"),
        pytest.param(flipped(lambda data: len(data) - 65), "were altered", id="array"),
        pytest.param(flipped(lambda data: len(data) - 1), "were altered", id="padding"),
        pytest.param(None, "is missing", id="lost"),
    ],
)
def test_damage_is_told_quarantined_and_read_around(
    place: Place, change: Callable[[bytes], bytes] | None, said: str
) -> None:
    ring = filled(place)
    key = ring.store.keys(SAMPLES)[2]
    place.lose(key) if change is None else place.alter(key, change)
    assert {name: why for name, why in verify_objects(ring) if why}.keys() == {key}
    with RingReader(open_ring(place.text), threads=False) as reader:
        slots = reader.newest().slots
        with pytest.raises(ObjectDamaged, match=said):
            reader.sample(slots[2])
        _, samples = BatchStream(reader, BatchShape(6)).next_batch()
    assert sorted(int(one["y"]) for one in samples) == [0, 1, 3, 3, 4, 5]
    assert list(list_quarantined(ring)) == [key]
    assert list(read_status(ring).damaged) == [key]
    with RingWriter(ring, "again", threads=False) as writer:
        for number in range(6, 12):
            writer.put({"x": np.full(64, number), "y": np.float32(number)})
    assert [why for _, why in verify_objects(ring) if why] == [], "what is damaged is replaced as everything is"


def test_a_pointer_to_a_missing_manifest_is_told_to_everybody(place: Place) -> None:
    number = filled(place).newest().number
    place.lose(manifest_key(number))
    ring = open_ring(place.text)
    for ask in (ring.newest, ring.publish, lambda: read_status(ring), lambda: list(verify_objects(ring))):
        with pytest.raises(ManifestMissing, match=f"manifest {number} is missing"):
            ask()
    with RingReader(ring, threads=False) as reader, pytest.raises(ManifestMissing):
        reader.newest()
    with pytest.raises(ManifestMissing):
        RingWriter(ring, "late", threads=False)


@pytest.mark.parametrize("said", [b"", b"{}", b'{"manifest": "1"}', b'{"manifest": 0}', b"[1]", b"\xff"])
def test_a_pointer_that_cannot_be_read_is_told(place: Place, said: bytes) -> None:
    filled(place)
    place.alter(POINTER, lambda _: said)
    with pytest.raises(ManifestMissing, match="the pointer cannot be read"):
        open_ring(place.text).newest()


@pytest.mark.parametrize("change", [lambda data: data[:-9], lambda _: b"", lambda _: b'{"version": 2}'])
def test_a_manifest_that_cannot_be_read_is_told(place: Place, change: Callable[[bytes], bytes]) -> None:
    number = filled(place).newest().number
    place.alter(manifest_key(number), change)
    with pytest.raises(ManifestMissing, match=f"manifest {number} cannot be read"):
        open_ring(place.text).newest()


@pytest.mark.parametrize(
    "change", [lambda _: b"", lambda _: b'{"cap": 0}', lambda data: data.replace(b'"cap"', b'"cup"')]
)
def test_settings_that_cannot_be_read_are_told(place: Place, change: Callable[[bytes], bytes]) -> None:
    filled(place)
    place.alter(SETTINGS, change)
    with pytest.raises(RingMismatch, match=r"ring\.json cannot be read"):
        open_ring(place.text)


def test_two_rings_of_one_name_are_told_apart_and_the_first_one_stays(place: Place) -> None:
    filled(place)
    with pytest.raises(RingMismatch, match="a ring exists with cap 6 instead of 7"):
        make_ring(place.text, RingSettings(cap=7, max_ahead=1000))
    assert make_ring(place.text, RingSettings(cap=6, max_ahead=1000)).newest().inserted == 6
    with pytest.raises(RingMismatch, match=r"no ring|no directory"):
        open_ring(f"{place.text}-two")


def test_the_schema_stays_for_every_writer_and_after_every_restart(place: Place) -> None:
    ring = filled(place)
    good = {"x": np.zeros(64, int), "y": np.float32(1)}
    wrong = {
        "dtype": {"x": np.zeros(64), "y": np.float32(1)},
        "shape": {"x": np.zeros(65, int), "y": np.float32(1)},
        "structure": {"x": np.zeros(64, int), "z": np.float32(1)},
        "order": (np.zeros(64, int), np.float32(1)),
    }
    for name in ("w", "other"):
        with RingWriter(open_ring(place.text), name, threads=False) as writer:
            for sample in wrong.values():
                with pytest.raises(SampleRefused, match="and the ring expects"):
                    writer.put(sample)
            writer.put(good)
            writer.renew()
            told = {row.name: (row.put, row.refused) for row in read_status(ring).writers}
            assert told[name] == (1, 4), "counted, and shown"
    assert ring.newest().inserted == 8


def test_a_reader_that_is_slower_than_the_retention_keeps_what_it_reads(place: Place) -> None:
    ring = filled(place, retain=2)
    keeper_ring = open_ring(place.text)
    with RingReader(open_ring(place.text), "slow", threads=False) as reader:
        old = reader.newest()
        with RingWriter(ring, "w2", threads=False) as writer:
            for number in range(6, 15):
                writer.put({"x": np.full(64, number), "y": np.float32(number)})
                ring.publish()
                GarbageCollector(keeper_ring).collect()
        assert [int(reader.sample(slot)["y"]) for slot in old.slots] == list(range(6))
        reader.keep_only([])
        GarbageCollector(keeper_ring).collect()
        with pytest.raises(ManifestMissing):
            open_ring(place.text).manifest(old.number)
    assert len(ring.store.keys("samples/")) <= 6 + 2


def test_a_reader_that_is_overtaken_while_it_pins_tries_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look at the pointer and its pin, all that was retained is replaced, and removed."""
    ring = filled(place, retain=2)
    writer = RingWriter(ring, "w2", threads=False)
    number = 6

    def overtake() -> None:
        nonlocal number
        for _ in range(3):
            writer.put({"x": np.full(64, number), "y": np.float32(number)})
            number += 1
            ring.publish()
        GarbageCollector(ring).collect()

    mine = open_ring(place.text)
    look, looks = mine.pointer, 0

    def interrupted() -> tuple[int, str | None]:
        nonlocal looks
        found = look()
        looks += 1
        if looks == 1:
            overtake()
        return found

    mine.pointer = interrupted  # type: ignore[method-assign]
    with RingReader(mine, threads=False) as reader:
        newest = reader.newest()
        assert looks == 4, "twice, and twice again"
        assert [int(reader.sample(slot)["y"]) for slot in newest.slots] == list(range(number - 6, number))

    def hopeless() -> tuple[int, str | None]:
        found = look()
        overtake()
        return found

    mine.pointer = hopeless  # type: ignore[method-assign]
    monkeypatch.setattr("gpu_client.ring.reading.reader._PIN_TRIES", 3)
    with (
        RingReader(mine, threads=False) as reader,
        pytest.raises(ManifestMissing, match=r"replaced faster than they can be read\. Raise retain"),
    ):
        reader.newest()


def test_records_that_are_no_records_harm_nobody(place: Place) -> None:
    """A damaged lease counts as an empty lease."""
    ring = filled(place)
    with RingReader(open_ring(place.text), "r", threads=False):
        for prefix, data in (("readers/", b"\xff"), ("writers/", b"[]"), ("pins/", b"{")):
            ring.store.swap(f"{prefix}spoiled", data, None)
        assert read_status(ring).readable == 6
        assert json.loads(json.dumps([row.name for row in read_status(ring).readers])) == ["r", "spoiled"]
        with RingWriter(ring, "spoiled", threads=False) as writer:
            writer.put({"x": np.full(64, 6), "y": np.float32(6)})
    assert ring.newest().inserted == 7
