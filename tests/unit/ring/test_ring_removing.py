"""Test the removal of a ring: all of the ring, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import make_ring, open_ring, remove_ring
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.format.records import GENERATORS, PINS, SETTINGS
from gpu_client.ring.generating.seeds import SeedSource
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import DirectoryStore


def filled(place: str) -> None:
    ring = make_ring(place, RingSettings(cap=4))
    keeper = Maintainer(ring, "k")
    with RingWriter(ring, "w", maintainer=keeper, threads=False, patience_s=5) as writer:
        for number in range(6):
            writer.put({"x": np.full(3, number)})
            keeper.turn()
    keeper.close()
    with RingReader(ring, "r", threads=False) as reader:
        reader.newest()
    ring.store.swap(f"{PINS}train", b"{}", None)
    ring.store.create("groups/train/0000000001", [memoryview(b"[1, 2]")])
    ring.store.swap("generators/name", b"{}", None)
    ring.store.create("quarantine/samples.w.1", [memoryview(b"why")])
    assert next(SeedSource(ring.store)) == 0
    ring.store.swap(f"{GENERATORS}job-1", b'{"put": 6}', None)


@pytest.mark.parametrize("kind", ["fs", "memory"])
def test_nothing_is_left(kind: str, tmp_path: Path) -> None:
    place = str(tmp_path / "ring") if kind == "fs" else f"memory:{tmp_path}"
    filled(place)
    assert remove_ring(place) >= 6
    if kind == "fs":
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(RingMismatch):
        open_ring(place)
    with pytest.raises(RingMismatch):
        remove_ring(place)
    filled(place)
    assert len(open_ring(place).newest()) == 4


def test_what_somebody_else_put_there_stays(tmp_path: Path) -> None:
    place = tmp_path / "ring"
    filled(str(place))
    (place / "notes.txt").write_text("mine")
    remove_ring(str(place))
    assert [path.name for path in place.iterdir()] == ["notes.txt"]


def test_a_directory_that_is_no_ring_is_left_alone(tmp_path: Path) -> None:
    photos = tmp_path / "samples" / "w"
    photos.mkdir(parents=True)
    (photos / "1.jpg").write_bytes(b"mine")
    with pytest.raises(RingMismatch, match="there is no ring at"):
        remove_ring(str(tmp_path))
    assert (photos / "1.jpg").read_bytes() == b"mine"
    with pytest.raises(RingMismatch, match="there is no directory"):
        remove_ring(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_a_removal_that_was_cut_off_can_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "ring")
    filled(place)
    whole, calls = DirectoryStore.delete, [0]

    def delete(self: DirectoryStore, keys: list[str]) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise OSError("the power went off")
        whole(self, keys)

    monkeypatch.setattr(DirectoryStore, "delete", delete)
    with pytest.raises(OSError, match="power"):
        remove_ring(place)
    assert (tmp_path / "ring" / SETTINGS).exists()
    remove_ring(place)
    assert list(tmp_path.iterdir()) == []
