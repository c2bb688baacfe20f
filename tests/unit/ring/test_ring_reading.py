"""Test reading: pins hold, damage is detected and reported, a loader resumes exactly."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gpu_client.ring.core.damage_report import list_quarantined
from gpu_client.ring.core.garbage_collector import count_samples_read
from gpu_client.ring.core.repair import repair_ring
from gpu_client.ring.core.ring import make_ring, open_ring
from gpu_client.ring.errors import ManifestMissing, ObjectDamaged, RingMismatch, WaitedTooLong
from gpu_client.ring.format.records import READERS, SAMPLES
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading import loader
from gpu_client.ring.reading.batch_plan import BatchShape
from gpu_client.ring.reading.batch_stream import BatchStream
from gpu_client.ring.reading.loader import RingDataset, RingLoader
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from tests.kits.runner.fork_server import fork_context
from tests.unit.ring.reading_scene import Scene

FORK_SERVER = fork_context("torch.utils.data", "gpu_client.ring.reading.loader")
"""Gives a worker a pickled data set, as `spawn` does, without the import of torch in each worker."""


class Generator:
    """Puts numbered samples into a ring in a directory, when told to."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.place = str(place)
        self.ring = make_ring(self.place, RingSettings(**{"cap": 12, "retain": 2, "max_ahead": 10_000, **settings}))
        self.writer = RingWriter(self.ring, "w", threads=False)
        self.next = 0

    def put(self, count: int) -> None:
        for number in range(self.next, self.next + count):
            self.writer.put({"x": torch.full((3,), float(number)), "number": number}, seed=number)
        self.next += count
        while self.ring.publish() is not None:
            pass


@pytest.fixture
def generator(tmp_path: Path) -> Generator:
    return Generator(tmp_path / "ring")


def damage(generator: Generator, key: str) -> None:
    path = Path(generator.place) / key
    data = bytearray(path.read_bytes())
    data[-64] ^= 1
    path.write_bytes(data)


def test_a_data_set_is_one_manifest_until_it_is_refreshed(generator: Generator) -> None:
    generator.put(12)
    dataset = RingDataset(generator.place)
    assert len(dataset) == 12
    assert sorted(dataset[index]["number"] for index in range(12)) == list(range(12))
    generator.put(60)
    assert [one["number"] for one in dataset[[0, 1]]] == [0, 1], "pinned, though long replaced"
    dataset.refresh()
    assert dataset[0]["number"] == 60
    dataset.close()


def test_a_stock_data_loader_reads_it_with_workers(generator: Generator) -> None:
    generator.put(12)
    dataset = RingDataset(generator.place)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, multiprocessing_context=FORK_SERVER)
    batches = list(loader)
    assert sorted(int(one) for batch in batches for one in batch["number"]) == list(range(12))
    assert batches[0]["x"].shape == (4, 3)
    dataset.close()


@pytest.mark.parametrize("method", ["fork", FORK_SERVER], ids=["fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_workers_of_a_stock_loader_read_is_counted(generator: Generator, method: Any) -> None:
    """The reads of a DataLoader's workers count, although the workers end without closing their readers."""
    generator.put(12)
    dataset = RingDataset(generator.place)
    list(DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=method))
    assert count_samples_read(generator.ring) == 12
    assert len(generator.ring.store.keys(READERS)) == 1, "the workers have left"
    dataset.close()
    assert generator.ring.store.keys(READERS) == []


@pytest.mark.parametrize(("name", "value"), [("max_uses", 2), ("max_age_s", 60.0)])
def test_a_ring_whose_limits_cannot_be_kept_to_by_index_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    generator = Generator(tmp_path / "limited", **{name: value})
    generator.put(2)
    with pytest.raises(RingMismatch, match=f"has {name}, and RingDataset .* Use RingLoader"):
        RingDataset(generator.place)
    assert generator.ring.store.keys(READERS) == []


def test_a_data_set_is_not_read_more_often_than_is_wanted(tmp_path: Path) -> None:
    generator = Generator(tmp_path / "slow", samples_per_insert=(1, 2))
    generator.put(4)
    dataset = RingDataset(generator.place, patience_s=0.05)
    assert [one["number"] for one in dataset[[0, 1, 2, 3]]] == [0, 1, 2, 3]
    assert dataset[3]["number"] == 3
    with pytest.raises(WaitedTooLong, match="as often as samples_per_insert permits"):
        dataset[[0, 1, 2, 3]]
    generator.put(1)
    assert [one["number"] for one in dataset[[0, 1, 2, 3]]] == [0, 1, 2, 3]
    dataset.close()
    assert count_samples_read(generator.ring) == 9


def test_damage_is_met_once_told_and_another_sample_read_for_it(generator: Generator) -> None:
    generator.put(12)
    key = generator.ring.store.keys(SAMPLES)[5]
    damage(generator, key)
    with RingReader(open_ring(generator.place), "r", threads=False) as reader:
        slots = reader.newest().slots
        with pytest.raises(ObjectDamaged, match="were altered"):
            reader.sample(slots[5])
        stream = BatchStream(reader, BatchShape(12))
        found, samples = stream.next_batch()
        assert len(found) == len(samples) == 12
        assert stream.substituted == 1
        numbers = [sample["number"] for sample in samples]
        assert sorted(numbers) == [0, 1, 2, 3, 4, 6, 6, 7, 8, 9, 10, 11]
        said = list_quarantined(generator.ring)
        assert list(said) == [key]
        assert "were altered" in next(iter(said.values()))


def test_provenance_is_told(generator: Generator) -> None:
    generator.put(3)
    with RingReader(open_ring(generator.place), threads=False) as reader:
        said = reader.provenance(reader.newest().slots[2])
    assert (said["writer"], said["epoch"], said["seq"], said["seed"], said["id"]) == ("w", 1, 3, 2, "w-1-3")


def test_who_waits_in_vain_is_told_why(generator: Generator) -> None:
    with (
        RingReader(open_ring(generator.place), threads=False, patience_s=0.05) as reader,
        pytest.raises(WaitedTooLong, match="too few samples are readable"),
    ):
        BatchStream(reader, BatchShape(1)).next_batch()


@pytest.mark.parametrize("policy", ["latest", "pass", 2])
def test_killed_after_any_batch_a_training_reads_what_it_would_have_read(tmp_path: Path, policy: Any) -> None:
    def taken(loader: RingLoader, count: int, generator: Generator | None) -> list[list[str]]:
        found = []
        for _ in loader:
            found.append(loader.ids)
            if generator is not None:
                generator.put(3)
            if len(found) == count:
                break
        return found

    for cut in range(1, 8):
        generator = Generator(tmp_path / f"ring-{cut}")
        generator.put(12)
        loader = RingLoader(generator.place, batch_size=3, seed=5, policy=policy)
        before = taken(loader, cut, generator)
        saved = json.loads(json.dumps(loader.state_dict()))
        loader.checkpointed()
        expected = taken(loader, 6, generator)
        resumed = RingLoader(generator.place, batch_size=3, seed=5, policy=policy)
        resumed.load_state_dict(saved)
        assert taken(resumed, 6, None) == expected, f"after batch {cut}"
        assert len(before) == cut


def test_two_ranks_with_two_workers_each_share_all_samples(tmp_path: Path) -> None:
    generator = Generator(tmp_path / "ring", cap=24)
    generator.put(24)
    found: list[list[str]] = []
    for rank in range(2):
        loader = RingLoader(generator.place, batch_size=3, workers=2, rank=rank, world_size=2, seed=1)
        ids: list[str] = []
        for count, _ in enumerate(loader, 1):
            ids += loader.ids
            if count == 4:
                break
        found.append(ids)
    assert [len(ids) for ids in found] == [12, 12]
    assert len({*found[0], *found[1]}) == 24


def test_workers_that_are_far_ahead_leave_the_loader_its_decisions(generator: Generator) -> None:
    generator.put(12)
    loader = RingLoader(generator.place, batch_size=2, workers=2, prefetch=12, policy="latest")
    plain = RingLoader(generator.place, batch_size=2, policy="latest", group="train")
    found: list[list[str]] = []
    for _ in loader:
        found.append(loader.ids)
        if len(found) == 20:
            break
    assert loader.state_dict()["decided"] == 20
    plain.load_state_dict(loader.state_dict())
    for _ in plain:
        break
    assert plain.state_dict()["batch"] == 21


def test_what_dead_writers_have_left_is_published_by_who_reads(generator: Generator) -> None:
    for number in range(12):
        generator.writer.put({"x": torch.zeros(3), "number": number})
    loader = RingLoader(generator.place, batch_size=12)
    for batch in loader:
        assert sorted(batch["number"].tolist()) == list(range(12))
        break


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_as_collate_has_made_them(generator: Generator, workers: int) -> None:
    generator.put(12)
    loader = RingLoader(generator.place, batch_size=2, workers=workers, collate=_stacked)
    for batch in loader:
        assert isinstance(batch, np.ndarray)
        assert batch.shape == (2, 3)
        break


def _stacked(samples: list[Any]) -> Any:
    return np.stack([sample["x"].numpy() for sample in samples])


def test_a_state_moves_between_numbers_of_workers(generator: Generator) -> None:
    generator.put(12)

    def some(loader: RingLoader, count: int) -> list[list[str]]:
        found = []
        for _ in loader:
            found.append(loader.ids)
            if len(found) == count:
                return found
        raise AssertionError

    whole = some(RingLoader(generator.place, batch_size=2, seed=3, group="a"), 8)
    loader = RingLoader(generator.place, batch_size=2, seed=3, group="b", workers=2)
    begun = some(loader, 3)
    resumed = RingLoader(generator.place, batch_size=2, seed=3, group="b")
    resumed.load_state_dict(loader.state_dict())
    assert begun + some(resumed, 5) == whole


def test_what_was_read_counts_on_when_a_reader_leaves(generator: Generator) -> None:
    generator.put(12)
    for _ in range(2):
        with RingReader(open_ring(generator.place), threads=False) as reader:
            BatchStream(reader, BatchShape(4), group=reader.name).next_batch()
    said = json.loads(generator.ring.store.record("read").data)  # type: ignore[union-attr]
    assert said["samples"] == 8


@pytest.mark.parametrize("dies", [False, True])
def test_what_was_read_is_counted_once_at_every_step_of_leaving(dies: bool) -> None:
    scene = Scene()
    scene.put(4)
    reader = scene.reader("r")
    reader.record_consumed(7)
    reader.flush_stats()
    counts: list[int] = []
    swap, delete = scene.store.swap, scene.store.delete

    def swapped(key: str, data: bytes, seen: str | None) -> str | None:
        found = swap(key, data, seen)
        counts.append(count_samples_read(scene.ring))
        return found

    def deleted(keys: Sequence[str]) -> None:
        if dies and "readers/r" in keys:
            raise OSError("it has died")
        delete(keys)
        counts.append(count_samples_read(scene.ring))

    scene.store.swap, scene.store.delete = swapped, deleted  # type: ignore[method-assign]
    reader.close()
    dies = False
    scene.bury()
    assert scene.store.keys(READERS) == []
    assert count_samples_read(scene.ring) == 7
    assert set(counts) == {7}


def test_readers_of_a_generation_keep_to_the_greater_one_of_a_pair() -> None:
    scene = Scene(mode="generation", samples_per_insert=(2, 3))
    scene.put(4)
    with scene.reader(patience_s=5.0) as reader:
        stream = BatchStream(reader, BatchShape(4), group=reader.name)
        for _ in range(3):
            stream.next_batch()
        with pytest.raises(WaitedTooLong, match="as often as samples_per_insert permits"):
            stream.next_batch()
        assert count_samples_read(scene.ring) == 12


@pytest.mark.parametrize("pin", [False, True])
def test_memory_is_pinned_where_it_is_asked_for(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, pin: bool
) -> None:
    generator.put(4)
    asked: list[bool] = []

    def made(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
        asked.append(pin_memory)
        return DataLoader(*args, **more)

    monkeypatch.setattr(loader, "DataLoader", made)
    RingLoader(generator.place, batch_size=2, pin_memory=pin)
    assert asked == [pin]


def test_arrays_belong_to_their_reader(generator: Generator) -> None:
    generator.put(2)
    with RingReader(open_ring(generator.place), threads=False) as reader:
        slot = reader.newest().slots[1]
        reader.sample(slot)["x"].zero_()
    with RingReader(open_ring(generator.place), threads=False) as reader:
        assert np.array_equal(reader.sample(slot)["x"], [1, 1, 1])


def test_a_pointer_that_was_lost_is_told_to_everybody_who_comes(generator: Generator) -> None:
    generator.put(3)
    generator.put(3)
    (Path(generator.place) / "pointer").unlink()
    with pytest.raises(ManifestMissing, match="the pointer is missing"):
        open_ring(generator.place).publish()
    with pytest.raises(ManifestMissing, match="the pointer is missing"):
        RingWriter(open_ring(generator.place), "late", threads=False)
    assert list((Path(generator.place) / "inbox").iterdir()) == []
    repair_ring(open_ring(generator.place))
    assert len(open_ring(generator.place).newest()) == 6


def test_checkpoints_between_iterations_let_go_of_what_came_before(generator: Generator) -> None:
    generator.put(12)
    loader = RingLoader(generator.place, batch_size=3, policy="latest")
    for _ in range(6):
        for _batch in islice(loader, 2):
            generator.put(1)
        loader.checkpointed()
    groups = [path.name for path in Path(generator.place).glob("groups/*/*")]
    assert len(groups) == 1, "the decision that the state is at"


def test_a_state_that_is_loaded_while_an_iteration_is_under_way_counts(generator: Generator) -> None:
    generator.put(12)
    loader = RingLoader(generator.place, batch_size=3)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    expected = loader.ids
    next(batches)
    loader.load_state_dict(state)
    next(iter(loader))
    assert loader.ids == expected
    with pytest.raises(RingMismatch):
        next(batches)


def test_workers_of_a_loader_that_cannot_begin_are_ended(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    generator.put(12)
    loader = RingLoader(generator.place, batch_size=3, workers=1)

    def refused(*_: object, **__: object) -> None:
        raise OSError("cannot be reached")

    monkeypatch.setattr("gpu_client.ring.reading.loader.BatchStream", refused)
    with pytest.raises(OSError, match="cannot be reached"):
        next(iter(loader))
    assert "ring-ahead" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 2}, "made with seed 1, and this has seed 2"),
        ({"batch_size": 4}, "batches of 3 for each of 1 processes, and this has batches of 4 for each of 1"),
        ({"world_size": 2, "rank": 1}, "batches of 3 for each of 1 processes, and this has batches of 3 for each of 2"),
    ],
)
def test_a_state_is_not_gone_on_with_in_another_order(generator: Generator, other: dict[str, Any], said: str) -> None:
    generator.put(12)
    loader = RingLoader(generator.place, batch_size=3, seed=1)
    next(iter(loader))
    state = loader.state_dict()
    resumed = RingLoader(generator.place, **{"batch_size": 3, "seed": 1, **other})
    before = resumed.state_dict()
    with pytest.raises(RingMismatch, match=said):
        resumed.load_state_dict(state)
    assert resumed.state_dict() == before
    # States had none of this once.
    old = {name: value for name, value in state.items() if name not in ("seed", "batch_size", "world_size")}
    resumed.load_state_dict(old)
    assert resumed.state_dict() == old


def test_ranks_may_share_out_the_same_batches_in_another_way(generator: Generator) -> None:
    generator.put(12)
    loader = RingLoader(generator.place, batch_size=4, seed=1)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    resumed = RingLoader(generator.place, batch_size=2, seed=1, rank=1, world_size=2)
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert resumed.ids == loader.ids[2:]
