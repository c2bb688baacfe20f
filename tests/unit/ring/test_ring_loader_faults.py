"""Test misuse of loaders, datasets and recordings in a directory."""

from __future__ import annotations

import gc
import json
import multiprocessing
import pickle
import resource
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from gpu_client.ring.core.garbage_collector import GarbageCollector
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import make_ring, open_ring
from gpu_client.ring.errors import RingError, RingMismatch, WaitedTooLong
from gpu_client.ring.format.records import SAMPLES
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.batch_plan import BatchShape
from gpu_client.ring.reading.batch_stream import BatchStream
from gpu_client.ring.reading.loader import RingDataset, RingLoader
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tools.recording import Recorded, record


@pytest.fixture
def place(tmp_path: Path) -> Iterator[str]:
    found = str(tmp_path / "ring")
    ring = make_ring(found, RingSettings(cap=8, retain=2, max_ahead=10_000))
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(8):
            writer.put({"x": np.full(3, number)})
    yield found


def put_more(place: str, count: int, first: int) -> None:
    ring = open_ring(place)
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(first, first + count):
            writer.put({"x": np.full(3, number)})
            ring.publish()


def read_one(loader: RingLoader) -> list[int]:
    for found in loader:
        return sorted(int(one[0]) for one in found["x"])
    raise AssertionError


def test_a_new_training_does_not_read_what_the_last_one_read(place: str) -> None:
    assert read_one(RingLoader(place, batch_size=8)) == list(range(8))
    put_more(place, 8, 8)
    assert read_one(RingLoader(place, batch_size=8)) == list(range(8, 16))


def test_a_resumed_training_goes_on_in_its_own_group(place: str) -> None:
    loader = RingLoader(place, batch_size=4, seed=1)
    read_one(loader)
    resumed = RingLoader(place, batch_size=4, seed=1)
    resumed.load_state_dict(loader.state_dict())
    whole = sorted([*range(8)])
    put_more(place, 8, 8)
    for found in resumed:
        ids = resumed.ids
        assert all(int(one[0]) in whole for one in found["x"]), ids
        break
    assert resumed.state_dict()["batch"] == 2


def test_a_checkpoint_that_is_safe_late_keeps_what_it_needs(place: str) -> None:
    loader = RingLoader(place, batch_size=4, policy="latest", seed=1)
    states, read = [], []
    for number, found in enumerate(loader):
        states.append(json.loads(json.dumps(loader.state_dict())))
        read.append(sorted(int(one[0]) for one in found["x"]))
        put_more(place, 3, 8 + 3 * number)
        if number == 5:
            loader.checkpointed(states[2])
            break
    resumed = RingLoader(place, batch_size=4, policy="latest", seed=1)
    resumed.load_state_dict(states[2])
    assert read_one(resumed) == read[3]


def test_one_loader_is_iterated_once_at_a_time(place: str) -> None:
    loader = RingLoader(place, batch_size=2)
    first = iter(loader)
    next(first)
    ids = [loader.ids]
    second = iter(loader)
    next(second)
    ids.append(loader.ids)
    assert not {*ids[0]} & {*ids[1]}, "it goes on where the first one was"
    with pytest.raises(RingMismatch, match="a newer iteration of this loader"):
        next(first)
    next(second)
    assert loader.state_dict()["batch"] == 3


def test_a_worker_s_error_is_raised_as_what_it_is(tmp_path: Path) -> None:
    empty = str(tmp_path / "empty")
    make_ring(empty, RingSettings(cap=4))
    before = {*multiprocessing.active_children()}  # of other tests in this process
    with pytest.raises(WaitedTooLong, match=r"for 0\.05 s, too few samples are readable"):
        read_one(RingLoader(empty, batch_size=2, patience_s=0.05, workers=1))
    assert {*multiprocessing.active_children()} <= before, "the end of the process would wait for the worker"


def test_errors_go_from_process_to_process() -> None:
    error = pickle.loads(pickle.dumps(WaitedTooLong("it took too long", "Wait")))
    assert isinstance(error, WaitedTooLong)
    assert (error.problem, error.remedy, str(error)) == ("it took too long", "Wait", "it took too long. Wait")


def test_many_samples_leave_nothing_behind(tmp_path: Path) -> None:
    settings = RingSettings(cap=8, retain=2, pack=2, max_ahead=64)
    ring = make_ring(str(tmp_path / "ring"), settings)
    keeper = Maintainer(ring, "k")
    collector = GarbageCollector(ring)
    number = 0

    def go_on(rounds: int) -> None:
        nonlocal number
        for _ in range(rounds):
            for _ in range(8):
                writer.put({"x": np.full(500, number)})
                number += 1
            while ring.publish() is not None:
                pass
            keeper.turn()
            batch = stream.next_batch()
            assert len(batch[1]) == 8
            collector.collect()

    def held() -> tuple[int, int, int]:
        files = sum(path.is_file() for path in (tmp_path / "ring").rglob("*"))
        gc.collect()
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/gpu_client/ring/*")])
        held_bytes = sum(trace.size for trace in ours.traces)
        return files, len(list(Path("/proc/self/fd").iterdir())), held_bytes

    with (
        RingWriter(ring, "w", maintainer=keeper, threads=False) as writer,
        RingReader(open_ring(str(tmp_path / "ring")), "r", threads=False) as reader,
    ):
        stream = BatchStream(reader, BatchShape(8, policy="latest"))
        tracemalloc.start()
        go_on(20)
        before = held()
        go_on(40)
        after = held()
        tracemalloc.stop()
    assert after[0] <= before[0] + 2, "files"
    assert after[1] <= before[1] + 2, "descriptors"
    assert after[2] - before[2] < 200_000, "bytes of memory"


def test_workers_cannot_see_what_is_in_this_process_alone() -> None:
    make_ring("memory:alone", RingSettings(cap=4))
    with pytest.raises(RingMismatch, match="in this process alone"):
        RingLoader("memory:alone", batch_size=2, workers=1)
    with pytest.raises(RingError, match="more than the ring's 4 samples"):
        RingLoader("memory:alone", batch_size=5)


def test_who_is_patient_for_less_is_told_sooner(tmp_path: Path) -> None:
    empty = str(tmp_path / "empty")
    make_ring(empty, RingSettings(cap=4))
    with pytest.raises(WaitedTooLong, match=r"for 0\.05 s"):
        read_one(RingLoader(empty, batch_size=2, patience_s=0.05))
    with pytest.raises(WaitedTooLong, match=r"for 0\.05 s"):
        RingDataset(empty, patience_s=0.05)


def test_one_damaged_sample_does_not_end_a_stock_loader_s_epoch(place: str) -> None:
    key = open_ring(place).store.keys(SAMPLES)[3]
    (Path(place) / key).write_bytes(b"short")
    dataset = RingDataset(place)
    found = [int(one) for found in DataLoader(dataset, batch_size=4) for one in found["x"][:, 0]]
    assert sorted(found) == [0, 1, 2, 4, 4, 5, 6, 7]
    dataset.close()


def test_recording_holds_no_more_files_open_than_a_process_may_have(place: str, tmp_path: Path) -> None:
    put_more(place, 8, 8)
    ring = make_ring(str(tmp_path / "large"), RingSettings(cap=400))
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(400):
            writer.put({"x": np.full(3, number)})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 150, limits[1]))
    try:
        with RingReader(ring, threads=False) as reader:
            assert record(reader, tmp_path / "set", 400, shard=1) == 0
        found = Recorded(tmp_path / "set")
        assert sorted(int(found[index]["x"][0]) for index in range(400)) == list(range(400))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_recorded_set_is_read_without_writing_beside_it(place: str, tmp_path: Path) -> None:
    with RingReader(open_ring(place), threads=False) as reader:
        record(reader, tmp_path / "set", 8)
    shutil.rmtree(tmp_path / "set/tmp")
    (tmp_path / "set/lock").unlink()
    assert len({int(Recorded(tmp_path / "set")[index]["x"][0]) for index in range(8)}) == 8
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["index.json", "shards"]


@pytest.mark.parametrize("more", [{"samples": 0}, {"shard": 0}, {"shuffle": -1}])
def test_recordings_that_would_never_end_are_refused(place: str, tmp_path: Path, more: dict[str, Any]) -> None:
    with RingReader(open_ring(place), threads=False) as reader, pytest.raises(RingError, match="are empty"):
        record(reader, tmp_path / "set", **{"samples": 1, **more})


def test_a_part_of_a_recording_is_not_gone_on_with(place: str, tmp_path: Path) -> None:
    (tmp_path / "set/shards").mkdir(parents=True)
    (tmp_path / "set/shards/00000").touch()
    with (
        RingReader(open_ring(place), threads=False) as reader,
        pytest.raises(RingMismatch, match="a part of a data set"),
    ):
        record(reader, tmp_path / "set", 8)
