"""Test directories that are full, read-only, or behave as network file systems do."""

from __future__ import annotations

import os
import random
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpu_client.ring.core.ring import make_ring, open_ring
from gpu_client.ring.errors import RingMismatch, StoreFull
from gpu_client.ring.format.objects import _NO_DIGEST, EncodedObject
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import IN_PLACE_BYTES, DirectoryStore
from tests.unit.ring.ring_kit import Died

NOBODY = 65534
"""A user who owns nothing."""


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """While inside, the kernel lets no file of this process grow beyond that: a write is cut short, the next fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def as_nobody() -> Iterator[None]:
    """While inside, this process has no more rights than a stranger has."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(mine)


def large_object(kind: type[EncodedObject] = EncodedObject) -> EncodedObject:
    """Make an object that is hashed during the write, and is too large to be written under its own name."""
    data = memoryview(random.Random(1).randbytes(IN_PLACE_BYTES))
    entry = ["bytes", "", [len(data)], len(data), "none", 0, len(data), _NO_DIGEST]
    return kind({"samples": [{"structure": {"a": 0}, "arrays": [entry], "seed": None}]}, [data], {0: entry})


@pytest.fixture
def others_directory() -> Iterator[Path]:
    """Yield a directory that all users can read, and only the owner and root can write."""
    with tempfile.TemporaryDirectory(prefix="ring-") as name:
        path = Path(name)
        path.chmod(0o755 if os.geteuid() == 0 else 0o555)
        yield path
        path.chmod(0o755)


def test_a_disk_that_is_full_in_the_middle_of_an_object_leaves_nothing_of_it(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "ring")
    pieces = [memoryview(bytes(30_000)) for _ in range(4)]
    with largest_file(100_000), pytest.raises(StoreFull, match=r"there is no space in .*ring\. Free space"):
        store.create("samples/w/1", pieces)
    assert store.read("samples/w/1") is None
    assert store.keys("samples/") == []
    assert list((tmp_path / "ring/tmp").iterdir()) == []
    assert store.create("samples/w/1", pieces)
    found = store.read("samples/w/1")
    assert found is not None
    assert len(found) == 120_000


def test_a_large_object_that_did_not_fit_is_stored_when_there_is_room(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "ring")
    made, expected = (large_object() for _ in range(2))
    with largest_file(made.size_bytes - 100), pytest.raises(StoreFull):
        store.create("samples/w/1", made)
    assert list((tmp_path / "ring/tmp").iterdir()) == []
    assert store.create("samples/w/1", made)
    found = store.read("samples/w/1")
    assert found is not None
    assert bytes(found) == b"".join(expected)


def test_an_object_without_its_head_is_seen_by_nobody(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "ring")
    sizes = []

    class Dying(EncodedObject):
        def head(self) -> memoryview:
            (beside,) = (tmp_path / "ring/tmp").iterdir()
            sizes.append(beside.stat().st_size)
            assert store.keys("samples/") == []
            raise Died

    made = large_object(Dying)
    with pytest.raises(Died):
        store.create("samples/w/1", made)
    assert sizes == [made.size_bytes]
    assert store.read("samples/w/1") is None


def test_a_full_disk_leaves_records_as_they_were(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "ring")
    first = store.swap("pointer", b"1", None)
    with largest_file(100), pytest.raises(StoreFull):
        store.swap("pointer", b"x" * 1000, first)
    found = store.record("pointer")
    assert found is not None
    assert (found.data, found.version) == (b"1", first)


def test_a_writer_waits_for_room_and_readers_go_on(tmp_path: Path) -> None:
    place = str(tmp_path / "ring")
    ring = make_ring(place, RingSettings(cap=4))
    waited = 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def room_after_three(_seconds: float) -> None:
        nonlocal waited
        waited += 1
        with RingReader(open_ring(place), threads=False) as reader:
            assert [int(reader.sample(slot)[0]) for slot in reader.newest().slots] == [0]
        if waited == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    writer = RingWriter(ring, "w", threads=False, pause=room_after_three)
    writer.put(np.full(100_000, 0))
    ring.publish()
    with largest_file(300_000):
        writer.put(np.full(100_000, 1))
    writer.close()
    assert waited == 3
    with RingReader(open_ring(place), threads=False) as reader:
        assert [int(reader.sample(slot)[0]) for slot in reader.newest().slots] == [0, 1]
    assert list((tmp_path / "ring/tmp").iterdir()) == []


def test_a_directory_that_may_not_be_written_to_is_refused(others_directory: Path) -> None:
    with as_nobody():
        for place in (others_directory, others_directory / "ring"):
            with pytest.raises(
                RingMismatch, match=r"cannot hold a ring: Permission denied\. Name a writable directory"
            ):
                make_ring(str(place), RingSettings(cap=4))
    assert list(others_directory.iterdir()) == []


def test_a_directory_that_is_closed_in_the_middle_of_it_costs_no_sample(others_directory: Path) -> None:
    others_directory.chmod(0o777)
    with as_nobody():
        ring = make_ring(str(others_directory / "ring"), RingSettings(cap=4))
        writer = RingWriter(ring, "w", threads=False)
        writer.put(np.array([0]))
        samples = others_directory / "ring/samples/w"
        samples.chmod(0o555)
        with pytest.raises(PermissionError):
            writer.put(np.array([1]))
        samples.chmod(0o755)
        writer.put(np.array([1]))
        writer.put(np.array([2]))
        writer.close()
        with RingReader(ring, threads=False) as reader:
            assert [int(reader.sample(slot)[0]) for slot in reader.newest().slots] == [0, 1, 2]


def test_a_link_whose_answer_was_lost_is_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats a request whose answer was lost, and the repetition finds the name taken by the first request."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    store = DirectoryStore(tmp_path / "ring")
    store.create("samples/w/0", [])
    monkeypatch.setattr(os, "link", twice)
    assert store.create("samples/w/1", [memoryview(b"mine")])
    assert not store.create("samples/w/1", [memoryview(b"mine")])
    assert store.keys("samples/") == ["samples/w/0", "samples/w/1"]
