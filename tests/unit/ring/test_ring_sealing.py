"""Test checksummed records: every altered bit is detected, and repaired like a missing record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gpu_client.ring.core.repair import inspect_ring, repair_ring
from gpu_client.ring.core.ring import PointerRecord, Ring, make_ring, open_ring
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingError, RingMismatch
from gpu_client.ring.format.manifest import RingManifest, manifest_key
from gpu_client.ring.format.records import (
    POINTER,
    SEEDS,
    SETTINGS,
    decode_checksummed,
    decode_record,
    encode_checksummed,
)
from gpu_client.ring.generating.named_counter import NamedCounter
from gpu_client.ring.generating.seeds import SeedSource
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.batch_plan import BatchShape
from gpu_client.ring.reading.batch_stream import BatchStream, ReaderGroup
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore
from tests.unit.ring.reading_scene import Scene


def flips(data: bytes) -> Iterator[bytes]:
    """Yield the data once for each bit, with that bit altered."""
    for bit in range(8 * len(data)):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        yield bytes(altered)


def set_anew(store: MemoryStore, key: str, data: bytes) -> None:
    store._objects[key] = data


def without_digest(data: bytes) -> bytes:
    content = json.loads(data)
    del content["digest"]
    return json.dumps(content).encode()


def test_every_altered_bit_of_a_stored_manifest_is_noticed() -> None:
    scene = Scene()
    scene.put(6)
    newest = scene.ring.newest()
    key = manifest_key(newest.number)
    data = bytes(scene.store.read(key) or b"")
    assert RingManifest.from_bytes(data, newest.number) == newest
    for altered in flips(data):
        with pytest.raises(ValueError):
            RingManifest.from_bytes(altered, newest.number)
    assert scene.store.read(key) == data


@pytest.mark.parametrize("key", [POINTER, SETTINGS])
def test_every_altered_bit_of_the_pointer_and_of_the_settings_is_noticed(key: str) -> None:
    scene = Scene(samples_per_insert=(1, 4), quantise={"sample['image']": "uint8"})
    scene.store._objects.pop("writers/w")
    Ring(scene.store, RingSettings(cap=4)).publish()
    data = bytes(scene.store.read(key) or b"")
    assert Ring.open(scene.store).settings == scene.settings
    for altered in flips(data):
        set_anew(scene.store, key, altered)
        with pytest.raises(RingError, match="cannot be read"):
            Ring.open(scene.store).newest()


def test_a_manifest_in_the_place_of_another_is_noticed() -> None:
    scene = Scene()
    scene.put(3)
    newest = scene.ring.newest().number
    set_anew(scene.store, manifest_key(newest), bytes(scene.store.read(manifest_key(newest - 1)) or b""))
    with pytest.raises(
        ManifestMissing, match=f"manifest {newest} cannot be read .the content is manifest {newest - 1}"
    ):
        Ring.open(scene.store).newest()


def test_what_was_stored_without_a_digest_is_read() -> None:
    scene = Scene()
    scene.put(3)
    newest = scene.ring.newest()
    for key in (manifest_key(newest.number), POINTER, SETTINGS):
        set_anew(scene.store, key, without_digest(bytes(scene.store.read(key) or b"")))
    ring = Ring.open(scene.store, clock=scene.clock)
    assert (ring.settings, ring.newest()) == (scene.settings, newest)
    assert Ring.make(scene.store, scene.settings).newest() == newest
    assert inspect_ring(ring).damaged == {}
    scene.put(1)
    assert ring.newest().number == newest.number + 1
    assert b'"digest"' in bytes(scene.store.read(manifest_key(newest.number + 1)) or b"")


def test_nothing_goes_on_with_an_altered_manifest_until_it_is_mended(tmp_path: Path) -> None:
    """A ring refuses a manifest with one altered bit until a repair; the altered claim would discard new samples."""
    place = tmp_path / "ring"
    ring = make_ring(str(place), RingSettings(cap=20, max_ahead=100, retain=2))
    writer = RingWriter(ring, "w", threads=False)
    for number in range(3):
        writer.put(np.array([number]))
        ring.publish()
    path = place / manifest_key(ring.newest().number)
    data = path.read_bytes()
    altered = data.replace(b'"w":[1,3,', b'"w":[1,7,')
    assert sum((one ^ other).bit_count() for one, other in zip(data, altered, strict=True)) == 1
    path.write_bytes(altered)
    with pytest.raises(
        ManifestMissing,
        match=r"cannot be read \(the document was altered\). Repair the ring: baton ring verify RING --repair",
    ):
        open_ring(str(place)).publish()
    assert set(inspect_ring(open_ring(str(place))).damaged) == {POINTER, path.relative_to(place).as_posix()}
    repair_ring(open_ring(str(place)))
    again = open_ring(str(place))
    assert inspect_ring(again).damaged == {}
    writer = RingWriter(again, "w", threads=False)
    for number in range(3, 7):
        writer.put(np.array([number]))
    writer.close()
    with RingReader(again, threads=False) as reader:
        there = [int(reader.sample(slot)[0]) for slot in reader.newest().slots]
    assert there == [0, 1, 3, 4, 5, 6], "its writer might have been about to claim the last one that it had listed"


def test_settings_that_were_altered_are_written_anew_by_making_the_ring_again(tmp_path: Path) -> None:
    place = str(tmp_path / "ring")
    settings = RingSettings(cap=8)
    with RingWriter(make_ring(place, settings), "w", threads=False) as writer:
        writer.put(np.array([1]))
    path = tmp_path / "ring" / SETTINGS
    path.write_bytes(path.read_bytes().replace(b'"cap":8', b'"cap":9'))
    for use in (lambda: open_ring(place), lambda: make_ring(place, settings)):
        with pytest.raises(
            RingMismatch, match=r"cannot be read: the document was altered\. Delete the file and make the ring again"
        ):
            use()
    path.unlink()
    assert make_ring(place, settings).newest().inserted == 1
    assert len(open_ring(place).newest()) == 1


def run_ring(store: MemoryStore) -> Ring:
    """Make a ring with every record that writers, readers and trainings leave."""
    ring = Ring.make(store, RingSettings(cap=8))
    with RingWriter(ring, "w", threads=False) as writer:
        seeds = SeedSource(store)
        for _ in range(8):
            writer.put(np.array([next(seeds)]), seed=0)
    ring.publish()
    for _ in range(2):
        with RingReader(ring, name="r", threads=False) as reader:
            stream = BatchStream(reader, BatchShape(4), group="training")
            stream.next_batch()
            stream.state_dict()
    NamedCounter(store, "generators/g", lambda: True).acquire(5)
    RingWriter(ring, "left", threads=False)
    return ring


@pytest.mark.parametrize("prefix", ["writers/", "readers/", "pins/", "generators/", "read"])
def test_every_altered_bit_of_a_record_is_noticed(prefix: str) -> None:
    """A bit more in a pinned manifest's number, and what a training is to resume with would have been collected."""
    store = MemoryStore()
    RingReader(run_ring(store), name="alive", threads=False).flush_stats()
    (key, *_) = (key for key in store._objects if key.startswith(prefix))
    record = store.record(key)
    assert record is not None and decode_record(record)
    for altered in flips(bytes(record.data)):
        assert decode_record(record._replace(data=altered)) == {}
    assert decode_record(record._replace(data=without_digest(record.data))) == decode_record(record)


def test_every_altered_bit_of_the_seeds_is_told() -> None:
    """Seeds given out twice are the same sample twice."""
    store = MemoryStore()
    run_ring(store)
    data = bytes(store.read(SEEDS) or b"")
    for altered in flips(data):
        set_anew(store, SEEDS, altered)
        with pytest.raises(RingMismatch, match="record of seeds cannot be read"):
            next(SeedSource(store))
    set_anew(store, SEEDS, without_digest(data))
    assert next(SeedSource(store)) >= 8


def test_every_altered_bit_of_a_decision_is_told() -> None:
    """Ranks that read it at different times would train on different samples."""
    store = MemoryStore()
    ring = run_ring(store)
    (key, *_) = (key for key in store.keys("groups/"))
    data = bytes(store.read(key) or b"")
    run, number = (int(part) for part in key.rpartition("/")[2].split("."))
    with RingReader(ring, name="again", threads=False) as reader:
        group = ReaderGroup(reader, "training")
        assert group.resume(run)
        decision = group.decision(number)
        assert decision is not None
        for altered in flips(data):
            set_anew(store, key, altered)
            with pytest.raises(ObjectDamaged, match="cannot be read"):
                group.decision(number)
        set_anew(store, key, json.dumps(decision).encode())
        assert group.decision(number) == decision, "as it was stored before there were digests"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"text"', b"\xff", b'{"other":1}', b"7" * 100])
def test_what_is_no_document_is_told(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_checksummed(data, frozenset({"known"}))
    with pytest.raises(ValueError):
        PointerRecord.from_bytes(data)


def test_a_document_is_as_it_was() -> None:
    content = {"a": [1, {"digest": "x"}], "b": None, "c": 'text"}', "digest of": 0.1}
    assert decode_checksummed(encode_checksummed(content), frozenset()) == content
    assert decode_checksummed(memoryview(encode_checksummed(content)), frozenset()) == content


def test_the_pointer_summarizes_the_manifest_for_pages_that_read_records_alone() -> None:
    scene = Scene()
    scene.put(6)
    newest = scene.ring.newest()
    content = decode_record(scene.store.record(POINTER))
    claimed = [slot.at_ms for slot in newest.slots]
    assert content["readable"] == len(newest) == len(claimed) > 0
    assert (content["oldest_ms"], content["newest_ms"]) == (min(claimed), max(claimed))
