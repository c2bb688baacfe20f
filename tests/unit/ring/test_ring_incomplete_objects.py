"""Test writers that die or fail while they write an object under its own name: nothing lists what they leave."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.repair import inspect_ring, repair_ring
from gpu_client.ring.core.ring import Ring, make_ring, open_ring
from gpu_client.ring.errors import StoreFull
from gpu_client.ring.format.objects import EncodedObject, Provenance, encode
from gpu_client.ring.format.records import MANIFESTS, SAMPLES
from gpu_client.ring.format.sample_tree import flatten
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import DirectoryStore
from tests.kits.clock import Clock
from tests.unit.ring.test_ring_directory import largest_file

LEASE_S, TURN_S = 12.0, 0.25
KEY = f"{SAMPLES}w/00000002-0000000001"
"""The first object of the second writer named w."""


def encoded(array: object) -> EncodedObject:
    return encode([flatten({"x": array})], Provenance("w", 2, 1, 0.0))


FLOATS, BYTES = np.arange(200_000.0), np.ones(2_000_000, np.uint8)
"""The second one is so large that its header, which holds its digest, is written last."""


class Writers:
    """Processes named w of one ring, on a clock of the test."""

    def __init__(self, place: Path) -> None:
        self.place, self.clock = str(place), Clock()
        ring = make_ring(self.place, RingSettings(cap=8, lease_s=LEASE_S, publish_interval_s=TURN_S))
        self.keeper = Maintainer(ring, "k", clock=self.clock)

    @property
    def ring(self) -> Ring:
        """Open the ring as a new process does."""
        return open_ring(self.place)

    def begin(self) -> RingWriter:
        return RingWriter(
            self.ring, "w", maintainer=self.keeper, threads=False, clock=self.clock, pause=self.clock.advance
        )

    def readable(self) -> list[int]:
        while self.ring.publish() is not None:
            pass
        with RingReader(self.ring, threads=False) as reader:
            return [int(reader.sample(slot)["x"][-1]) for slot in reader.newest().slots]


@pytest.fixture
def writers(tmp_path: Path) -> Writers:
    return Writers(tmp_path / "ring")


def put_and_be_killed(writers: Writers, array: object, written_bytes: int) -> None:
    """Put two samples; a second process named w dies as soon as its object has this many bytes."""
    writer = writers.begin()
    for number in range(2):
        writer.put({"x": np.full_like(array, number)})

    write = os.writev

    def write_some(fd: int, pieces: Sequence[memoryview]) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(KEY):  # noqa: PTH115
            return write(fd, pieces)
        os.write(fd, b"".join(pieces)[:written_bytes])
        os._exit(0)

    pid = os.fork()
    if pid == 0:
        try:
            writer = writers.begin()
            os.writev = write_some  # type: ignore[assignment]
            writer.put({"x": array})
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "the process died while it wrote"
    assert (Path(writers.place) / KEY).exists()
    assert writers.readable() == [0, 1]


@pytest.mark.parametrize("written_bytes", [0, 20, 300, 1_000_000])
@pytest.mark.parametrize("array", [FLOATS, BYTES], ids=["header first", "header last"])
def test_what_a_killed_writer_leaves_is_never_listed_and_is_gone_within_two_leases(
    writers: Writers, array: object, written_bytes: int
) -> None:
    put_and_be_killed(writers, array, written_bytes)
    assert inspect_ring(writers.ring).damaged == {}
    died_at = writers.clock()
    while writers.ring.store.read(KEY) is not None:
        assert writers.clock() - died_at <= 2 * LEASE_S
        writers.clock.advance(TURN_S)
        writers.keeper.turn()
    assert writers.readable() == [0, 1]


@pytest.mark.parametrize("array", [FLOATS, BYTES], ids=["header first", "header last"])
def test_a_repair_lists_no_incomplete_object(writers: Writers, array: object) -> None:
    put_and_be_killed(writers, array, 1_000_000)
    with writers.begin() as successor:  # after it no object of the killed process is in the making
        successor.put({"x": np.full_like(array, 2)})
    assert writers.readable() == [0, 1, 2]
    ring = writers.ring
    ring.store.delete(ring.store.keys(MANIFESTS))
    repair_ring(ring)
    assert writers.readable() == [0, 1, 2]


@pytest.mark.parametrize("array", [FLOATS, BYTES], ids=["header first", "header last"])
def test_an_object_that_did_not_fit_leaves_nothing_and_is_stored_when_there_is_room(
    tmp_path: Path, array: object
) -> None:
    store, made = DirectoryStore(tmp_path / "ring"), encoded(array)
    with largest_file(made.size_bytes - 100), pytest.raises(StoreFull, match="there is no space in"):
        store.create(KEY, made)
    assert store.keys(SAMPLES) == []
    assert store.create(KEY, made)
    found = store.read(KEY)
    assert found is not None
    assert bytes(found) == b"".join(encoded(array))


def test_an_object_whose_name_is_taken_is_left_as_it_is(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "ring")
    assert store.create(KEY, [memoryview(b"of another process")])
    assert not store.create(KEY, encoded(FLOATS))
    found = store.read(KEY)
    assert found is not None
    assert bytes(found) == b"of another process"
