"""Require that a ring with `fsync` holds after a loss of power each sample that `put` has returned for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.liveness import LeaseWatch
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.repair import verify_objects
from gpu_client.ring.core.ring import Ring, make_ring, open_ring
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.generating.seeds import SeedSource
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.filesystem import DirectoryStore
from gpu_client.ring.store.memory import MemoryStore
from tests.kits.clock import Clock
from tests.unit.ring.power_loss import Disk, recorded

CAP = 4


class Run:
    """Make a ring, put samples, publish and collect in one process, and note when each sample was acknowledged."""

    def __init__(self, place: Path, disk: Disk, *, puts: int, **settings: Any) -> None:
        self.disk = disk
        self.acknowledged: list[tuple[int, int]] = []
        """Numbers of calls, and the sample for which `put` returned behind them."""
        self.seeds: list[tuple[int, int]] = []
        """Numbers of calls, and the seed that was given out behind them."""
        clock = Clock()
        ring = make_ring(str(place), RingSettings(cap=CAP, retain=2, max_ahead=100, **settings))
        self.made = len(disk.calls)
        keeper = Maintainer(ring, "k", clock=clock)
        writer = RingWriter(ring, "w", maintainer=keeper, threads=False, clock=clock, pause=clock.advance)
        collector = GarbageCollector(ring, LeaseWatch(clock))
        seeds = SeedSource(ring.store)
        for sample in range(puts):
            seed = next(seeds)
            self.seeds.append((len(disk.calls), seed))
            writer.put(np.full(3, sample), seed=seed)
            self.acknowledged.append((len(disk.calls), sample))
            if sample % 2:
                ring.publish()
                collector.collect()
        writer.close()
        self.closed = len(disk.calls)

    def require_held(self, found: Path, place: int) -> None:
        """Open the ring that is left behind `place` calls, and find each sample that was acknowledged by then."""
        ring = open_ring(str(found))
        clock = Clock()
        with RingWriter(ring, "w", maintainer=Maintainer(ring, "k2", clock=clock), threads=False, clock=clock):
            while ring.publish() is not None:
                pass
        newest = ring.newest()
        assert not any(why for _, why in verify_objects(ring, newest)), "what is listed can be read"
        with RingReader(ring, threads=False) as reader:
            held = [int(reader.sample(slot)[0]) for slot in newest.slots]
        acknowledged = [sample for calls, sample in self.acknowledged if calls <= place]
        # The sample in the making may be there as well, and have replaced the oldest.
        assert held in (acknowledged[-CAP:], [*acknowledged, len(acknowledged)][-CAP:])
        given = [seed for calls, seed in self.seeds if calls <= place]
        assert next(SeedSource(ring.store)) > max(given, default=-1), "no seed comes twice"


def below(calls: list[tuple[str, str]], keys: str = "") -> list[tuple[str, str]]:
    """Return the calls about `keys`, with one name for all files that have no name of their own yet."""
    return [(call, "a new file" if path.startswith("tmp/") else path) for call, path in calls if path.startswith(keys)]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    with recorded(tmp_path / "ring", monkeypatch) as disk:
        return Run(tmp_path / "ring", disk, puts=7, fsync=True)


def test_whenever_the_power_is_lost_everything_acknowledged_is_held(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)  # of those that open what is left: it takes time
    found, chance = tmp_path / "found", random.Random(3)
    for place in range(made.made - 1, made.closed):
        for all_names, drawn in ((False, None), (True, None), (False, chance)):
            made.disk.after(place, found, drawn, all_names=all_names)
            made.require_held(found, place + 1)


def test_without_fsync_a_loss_of_power_takes_samples_that_were_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prove that the model takes what was not flushed, and that nothing is flushed without the setting."""
    with recorded(tmp_path / "ring", monkeypatch) as disk:
        run = Run(tmp_path / "ring", disk, puts=3)
    assert all(call != "fsync" for call, _ in disk.calls)
    for all_names in (False, True):
        disk.after(run.closed - 1, tmp_path / "found", None, all_names=all_names)
        with pytest.raises((RingMismatch, AssertionError)):
            run.require_held(tmp_path / "found", run.closed)


def test_each_step_flushes_what_the_next_one_relies_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Require sample before claim, manifest before pointer, and pointer before the removal of what it replaced."""
    ring = make_ring(str(tmp_path / "ring"), RingSettings(cap=CAP, fsync=True))
    clock = Clock()
    writer = RingWriter(ring, "w", maintainer=Maintainer(ring, "k", clock=clock), threads=False, clock=clock)
    for _ in range(2):  # all directories are there, and flushed
        writer.put(np.zeros(3))
        ring.publish()
    with recorded(tmp_path / "ring", monkeypatch) as disk:
        writer.put(np.zeros(3))
        put = len(disk.calls)
        assert ring.publish() is not None
    sample, claim = "samples/w/00000001-0000000003", disk.calls[put - 2][1]
    assert claim.startswith("inbox/")
    assert below(disk.calls[:put]) == [
        ("open", sample), ("fsync", sample), ("fsync", "samples/w"), ("link", claim), ("fsync", "inbox"),
    ]  # fmt: skip
    assert below(disk.calls[put:]) == [
        ("open", "a new file"), ("fsync", "a new file"), ("link", "manifests/000000000003"), ("fsync", "manifests"),
        ("unlink", "a new file"), ("open", "a new file"), ("fsync", "a new file"), ("replace", "pointer"),
        ("fsync", "."), ("fsync", "."), ("unlink", claim),
    ]  # fmt: skip


def test_whoever_finds_an_object_there_flushes_its_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush for a maker that may have died before its own flush: a pointer to the object could outlive the object."""
    DirectoryStore(tmp_path / "ring").create("manifests/1", [memoryview(b"1")])
    store = DirectoryStore(tmp_path / "ring")
    with recorded(tmp_path / "ring", monkeypatch) as disk:
        store.sync_writes()
        assert not store.create("manifests/1", [memoryview(b"2")])
        assert [path for call, path in disk.calls if call == "fsync" and not path.startswith("tmp/")] == [
            ".", ".", "manifests",
        ]  # fmt: skip


def test_a_store_that_is_no_directory_refuses_fsync_and_nothing_is_made(tmp_path: Path) -> None:
    store = MemoryStore()
    with pytest.raises(RingMismatch, match=r"fsync is for rings in directories.*Omit fsync"):
        Ring.make(store, RingSettings(cap=CAP, fsync=True))
    assert store.keys("") == []


def test_a_file_system_that_flushes_no_directories_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(RingMismatch, match=r"ring cannot be flushed to the disk: Invalid argument. Omit fsync"):
        make_ring(str(tmp_path / "ring"), RingSettings(cap=CAP, fsync=True))
    assert not (tmp_path / "ring/ring.json").exists()


def test_older_versions_can_open_a_ring_that_does_not_ask_for_it(tmp_path: Path) -> None:
    make_ring(str(tmp_path / "ring"), RingSettings.model_validate_strings({"cap": "4", "fsync": "false"}))
    assert "fsync" not in (tmp_path / "ring/ring.json").read_text(encoding="utf-8")


def test_where_files_cannot_be_linked_the_rename_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "ring")
    store.sync_writes()

    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    store.create("inbox/0", [])
    with recorded(tmp_path / "ring", monkeypatch) as disk:
        monkeypatch.setattr("os.link", refuse)
        assert store.create("samples/1", [memoryview(b"1")])
        assert store.create("inbox/1", [])
    assert below(disk.calls) == [
        ("open", "a new file"), ("fsync", "a new file"), ("mkdir", "samples"), ("rename", "samples/1"),
        ("fsync", "."), ("fsync", "samples"), ("open", "inbox/1"), ("fsync", "inbox"),
    ]  # fmt: skip
