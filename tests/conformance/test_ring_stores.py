"""Test the promises of `RingBackend` at every place."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.format.objects import Provenance, StoredSamples, encode
from gpu_client.ring.format.sample_tree import flatten
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import DirectoryStore
from gpu_client.ring.store.memory import MemoryStore
from gpu_client.ring.store.protocol import RingBackend, SizedStore
from tests.kits.api.served_api import ServedApi
from tests.kits.clock import Clock
from tests.kits.clouds.emulator import unique
from tests.kits.ring.bucket import RingBucket

Opened = Callable[[], RingBackend]


@pytest.fixture(
    params=[
        "memory",
        "fs",
        "fs without links",
        pytest.param("s3", marks=pytest.mark.emulator),
        pytest.param("api", marks=pytest.mark.emulator),
    ]
)
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens the same place anew, as another process would."""
    if request.param.startswith("fs"):
        if "without" in request.param:
            monkeypatch.setattr(os, "link", without_links)
        yield lambda: DirectoryStore(tmp_path / "ring")
    elif request.param == "s3":
        with RingBucket.of(request.getfixturevalue("emulator")) as bucket:
            yield bucket.opened
    elif request.param == "api":
        served: ServedApi = request.getfixturevalue("served")
        name = unique("ring")
        assert served.store(name).create("ring.json", [memoryview(b"{}")])
        yield lambda: served.store(name)
    else:
        store = MemoryStore()
        yield lambda: store


def without_links(_source: object, target: object) -> None:
    """Refuse a hard link, as FAT and many file systems of clusters and clouds do."""
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))


def view(data: bytes) -> memoryview:
    return memoryview(data)


def test_stores_that_tell_how_much_they_have_count_every_byte(opened: Opened) -> None:
    store, other = opened(), opened()
    if not isinstance(store, SizedStore):
        pytest.skip("the control plane tells no sizes: there each object counts as the largest")
    before = store.stored_bytes()
    for number in range(3):
        assert other.create(f"samples/w/{number}", [view(bytes(1000 + number))])
        assert other.create(f"inbox/w.{number}", [])
    assert other.swap("record", b"record", None) is not None
    other.delete(["samples/w/1"])
    assert store.stored_bytes() - before == 1000 + 1002 + len(b"record")


def test_an_object_is_made_once(opened: Opened) -> None:
    store, other = opened(), opened()
    assert store.read("samples/w/1") is None
    assert store.create("samples/w/1", [view(b"one"), view(b""), view(b"two")])
    assert not other.create("samples/w/1", [view(b"other")])
    found = other.read("samples/w/1")
    assert found is not None
    assert bytes(found) == b"onetwo"
    assert store.keys("samples/") == ["samples/w/1"]


def test_a_large_sample_comes_back_bit_by_bit(opened: Opened) -> None:
    """A large sample keeps its bytes; a store that can hash while writing computes the digest during the write."""
    sample = {"image": np.random.default_rng(1).integers(0, 256, (5, 1024, 1024), np.uint8), "label": np.arange(9)}
    made = encode([flatten(sample)], Provenance("w", 1, 1, 0.0), seeds=[17])
    assert opened().create("samples/w/00000001-0000000001", made)
    assert not opened().create("samples/w/00000001-0000000001", made)
    data = opened().read("samples/w/00000001-0000000001")
    assert data is not None
    assert len(data) == made.size_bytes
    found = StoredSamples("samples/w/1", data)
    assert found.seed() == 17
    assert all(np.array_equal(found.sample()[name], sample[name]) for name in sample)


def test_what_is_read_may_be_altered_by_its_reader(opened: Opened) -> None:
    store = opened()
    store.create("samples/w/1", [view(b"as it was")])
    found = store.read("samples/w/1")
    assert found is not None
    found[:2] = b"XX"
    again = store.read("samples/w/1")
    assert again is not None
    assert bytes(again) == b"as it was"


def test_what_is_held_outlives_its_deletion(opened: Opened) -> None:
    store = opened()
    store.create("samples/w/1", [view(b"x" * 100_000)])
    found = store.read("samples/w/1")
    store.delete(["samples/w/1", "samples/w/2"])
    assert found is not None
    assert bytes(found) == b"x" * 100_000
    assert store.read("samples/w/1") is None
    assert store.create("samples/w/1", [])
    empty = store.read("samples/w/1")
    assert empty is not None
    assert bytes(empty) == b""


def test_records_are_compared_and_swapped(opened: Opened) -> None:
    store, other = opened(), opened()
    assert store.record("pointer") is None
    first = store.swap("pointer", b"1", None)
    assert first is not None
    assert other.swap("pointer", b"other", None) is None
    assert other.swap("pointer", b"other", "unheard of") is None
    second = other.swap("pointer", b"2", first)
    assert second not in (None, first)
    assert store.swap("pointer", b"3", first) is None
    found = store.record("pointer")
    assert found is not None
    assert (found.data, found.version) == (b"2", second)
    store.delete(["pointer"])
    assert other.record("pointer") is None
    assert other.swap("pointer", b"4", second) is None


def test_keys_are_those_below_a_prefix_in_order(opened: Opened) -> None:
    store = opened()
    assert store.keys("inbox/") == []
    made = ["inbox/b.2", "inbox/a.10", "inbox/a.9", "samples/a/1", "samples/b/1", "samples/a/0"]
    for key in made:
        store.create(key, [])
    store.swap("writers/a", b"{}", None)
    assert store.keys("inbox/") == ["inbox/a.10", "inbox/a.9", "inbox/b.2"]
    assert store.keys("samples/") == ["samples/a/0", "samples/a/1", "samples/b/1"]
    assert store.keys("samples/a/") == ["samples/a/0", "samples/a/1"]
    assert store.keys("writers/") == ["writers/a"]


def test_of_many_who_want_it_one_makes_it(opened: Opened) -> None:
    won: list[int] = []
    together = threading.Barrier(8)

    def run(number: int) -> None:
        store = opened()
        together.wait()
        for turn in range(20):
            if store.create(f"manifests/{turn:03d}", [view(str(number).encode())]):
                won.append(turn)
            seen = store.record("pointer")
            store.swap("pointer", f"{turn}-{number}".encode(), seen.version if seen else None)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(20))


def test_a_counter_that_many_swap_loses_nothing(opened: Opened) -> None:
    def run() -> None:
        store = opened()
        for _ in range(25):
            while True:
                seen = store.record("count")
                count = int(seen.data) if seen else 0
                if store.swap("count", str(count + 1).encode(), seen.version if seen else None):
                    break

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = opened().record("count")
    assert found is not None
    assert found.data == b"100"


def test_what_a_dead_process_was_storing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "ring")
    store.create("samples/w/1", [view(b"whole")])
    old, young = tmp_path / "ring/tmp/0123", tmp_path / "ring/tmp/4567"
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert store.tidy(60.0) == 1
    assert [path.name for path in (tmp_path / "ring/tmp").iterdir()] == ["4567"]
    assert store.keys("samples/") == ["samples/w/1"]


def test_as_many_samples_as_are_published_at_a_time_are_readable_at_once(opened: Opened) -> None:
    """The writer that puts the last of `publish_every_samples` samples publishes all of them at once."""
    settings = RingSettings(cap=6, publish_every_samples=4, publish_interval_s=3600)
    rings = [Ring(opened(), settings) for _ in range(3)]
    writers = [RingWriter(ring, name, threads=False) for ring, name in zip(rings, ("one", "two"), strict=False)]
    readable = []
    for number in range(9):
        writers[number % 2].put(np.array([number]))
        readable.append(rings[2].newest().inserted)
    assert readable == [0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert [slot.inserted for slot in rings[2].newest().slots] == list(range(2, 8))
    assert sum(claim.samples for claim in rings[2].claims()) == 1, "the ninth, which waits"
    clock = Clock()
    keeper = Maintainer(rings[2], "k", clock=clock)
    clock.advance(3600)
    assert keeper.turn()
    assert rings[2].newest().inserted == 9, "or after the interval, when a keeper looks"
