"""Test Wirehead's classes, file and unit example on a ring."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from gpu_client.ring.core.garbage_collector import count_samples_read
from gpu_client.ring.core.ring import open_ring
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.format.records import READERS
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.tools.wirehead import WireheadGenerator
from gpu_client.ring.tools.wirehead_datasets import MongoheadDataset, MongoTupleheadDataset
from gpu_client.ring.tools.wirehead_log import WireheadConfig
from tests.kits.runner.fork_server import fork_context

FORK_SERVER = fork_context("torch.utils.data", "gpu_client.ring.tools.wirehead_datasets")
UNIT = {
    "MONGOHOST": "localhost", "DBNAME": "unit-test", "SWAP_CAP": 10, "SAMPLE": ["data", "label"],
    "WRITE_COLLECTION": "write", "READ_COLLECTION": "read", "TEMP_COLLECTION": "temp", "COUNTER_COLLECTION": "counter",
    "CHUNKSIZE": 10,
}  # fmt: skip


def config(folder: Path, **changed: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**UNIT, **changed}))
    return str(path)


def numbered() -> Iterator[tuple[Any, ...]]:
    number = 0
    while True:
        yield np.full(256, number + 0.5), torch.full((256,), number, dtype=torch.int16)
        number += 1


def test_its_unit_example_works_and_reads_what_was_put(tmp_path: Path) -> None:
    path = config(tmp_path)
    assert WireheadGenerator(generator=numbered(), config_path=path, n_samples=25).run() == 25
    dataset = MongoheadDataset(config_path=path)
    assert len(dataset) == 10
    for _ in range(10):
        found = dataset[list(range(10))]
        assert sorted(found) == list(range(10))
        assert [float(one["input"][0]) for one in found.values()] == [10.5 + index for index in range(10)]
        assert all(torch.equal(one["label"], torch.floor(one["input"]).to(torch.int16)) for one in found.values())
        assert found[0]["input"].dtype == torch.float32


def test_what_is_beyond_a_generation_belongs_to_the_next(tmp_path: Path) -> None:
    path = config(tmp_path)
    generator = WireheadGenerator(generator=numbered(), config_path=path, n_samples=25)
    generator.run_generator()
    ring = open_ring(str(tmp_path / "unit-test.ring"))
    assert ring.newest().inserted == 20
    assert sum(claim.samples for claim in ring.claims() if not ring.newest().settled(claim.object)) == 5
    more = WireheadGenerator(generator=numbered(), config_path=path, n_samples=5)
    more.run()
    assert ring.newest().inserted == 30


def test_a_sample_whose_put_failed_is_put_by_the_next_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = WireheadGenerator(generator=numbered(), config_path=config(tmp_path), n_samples=12)
    put, failures = RingWriter.put, [1, 4, 5]

    def fails(writer: RingWriter, sample: object) -> None:
        calls.append(sample)
        if len(calls) in failures:
            raise OSError("no route")
        put(writer, sample)

    calls: list[object] = []
    monkeypatch.setattr(RingWriter, "put", fails)
    for _ in failures:
        with pytest.raises(OSError, match="no route"):
            while True:
                generator.cycle()
    assert generator.run() == 2 + 12
    dataset = MongoheadDataset(config_path=str(tmp_path / "config.yaml"))
    assert [float(dataset[index]["input"][0]) for index in range(10)] == [index + 0.5 for index in range(10)]


def test_pairs_normalising_and_a_stock_loader(tmp_path: Path) -> None:
    path = config(tmp_path)
    WireheadGenerator(generator=numbered(), config_path=path, n_samples=10).run()
    pairs = MongoTupleheadDataset(config_path=path, normalize=lambda image: image * 2)
    (image, label), _ = pairs[[3, 4]]
    assert (float(image[0]), int(label[0])) == (7.0, 3)
    batches = list(DataLoader(pairs, batch_size=5))
    assert [batch[0].shape for batch in batches] == [(5, 256), (5, 256)]
    with pytest.raises(IndexError):
        pairs[[10]]


def test_put_and_swap_by_hand(tmp_path: Path) -> None:
    path = config(tmp_path, SAMPLE=["image", "label", "mask"])
    generator = WireheadGenerator(generator=iter(()), config_path=path)
    generator.put((np.zeros(3, np.float32), np.ones(3), np.ones(2)))
    generator.swap()
    assert float(MongoheadDataset(path, sample=("mask", "label"))[0]["input"].sum()) == 2.0
    with pytest.raises(RingMismatch, match="makes 2 arrays and SAMPLE names 3"):
        generator.put((np.zeros(3), np.ones(3)))
    generator.run()


def test_keys_of_mongodb_are_ignored_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "baton.ring"):
        WireheadGenerator(iter(()), config(tmp_path, SWAPCAP=3, RING=str(tmp_path / "here"))).run()
    assert "no MongoDB here, so these are ignored: MONGOHOST, CHUNKSIZE, WRITE_COLLECTION" in caplog.text
    assert "not known, and ignored: SWAPCAP" in caplog.text
    assert (tmp_path / "here" / "ring.json").exists()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"SWAP_CAP": 0}, "SWAP_CAP is 0"),
        ({"SWAP_CAP": "ten"}, "SWAP_CAP is 'ten'"),
        ({"SAMPLE": "data"}, "SAMPLE is 'data'"),
        ({"SAMPLE": []}, r"SAMPLE is \[\]"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(RingMismatch, match=reason):
        WireheadGenerator(iter(()), config(tmp_path, **changed))
    with pytest.raises(RingMismatch, match="cannot be read"):
        MongoheadDataset(str(tmp_path / "none.yaml"))


def test_a_volume_of_another_shape_is_a_sample_like_any_other(tmp_path: Path) -> None:
    path = config(tmp_path, SWAP_CAP=3)
    volumes = ((np.full(size, float(size)), np.zeros(size, np.uint8)) for size in (2, 3, 4))
    assert WireheadGenerator(volumes, path).run() == 3
    assert [len(one["input"]) for one in MongoheadDataset(path).get([0, 1, 2]).values()] == [2, 3, 4]


def test_a_sample_that_is_refused_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = config(tmp_path, SWAP_CAP=2)
    volumes = iter([(np.zeros(2), np.zeros(2)), (object(), np.zeros(2)), (np.ones(2), np.ones(2))])
    assert WireheadGenerator(volumes, path).run() == 2
    assert "a sample was refused" in caplog.text
    assert len(MongoheadDataset(path)) == 2


def test_for_a_damaged_sample_another_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = config(tmp_path)
    WireheadGenerator(generator=numbered(), config_path=path, n_samples=10).run()
    dataset = MongoheadDataset(path)
    objects = sorted(one for one in (tmp_path / "unit-test.ring/samples").rglob("*") if one.is_file())
    whole = bytearray(objects[4].read_bytes())
    whole[-200] ^= 1
    objects[4].write_bytes(whole)
    assert float(dataset[4]["input"][0]) == 5.5
    assert "reading " in caplog.text


def test_indices_behind_the_end_of_a_part_of_a_generation_begin_anew(tmp_path: Path) -> None:
    path = config(tmp_path)
    generator = WireheadGenerator(generator=numbered(), config_path=path, n_samples=10)
    generator.run()
    dataset = MongoheadDataset(path)
    assert float(dataset[9]["input"][0]) == 9.5
    first = dataset.generation
    more = WireheadGenerator(iter(()), path)
    for number in (100, 101, 102):
        more.put((np.full(3, float(number)), torch.zeros(3, dtype=torch.int16)))
    more.swap()
    assert [float(dataset[index]["input"][0]) for index in (0, 2, 3, 9)] == [100, 102, 100, 100]
    assert dataset.generation > first
    with pytest.raises(IndexError):
        dataset[10]
    more.run()


def test_a_generation_of_an_earlier_run_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path)
    with RingWriter(WireheadConfig.read(path).ring()) as writer:
        for one in range(10):
            writer.put((np.full(2, one), np.full(2, one)))
        writer.swap()
        MongoheadDataset(path)
        assert "another run" not in caplog.text
        monkeypatch.setattr("gpu_client.ring.tools.wirehead_datasets._OLD_S", -1.0)
        MongoheadDataset(path)
        assert "ago: if it is of another run, remove" in caplog.text
        monkeypatch.undo()
        caplog.clear()
    MongoheadDataset(path)
    assert "ago, and no generator is at work: if it is of another run, remove" in caplog.text


@pytest.mark.parametrize("method", ["fork", FORK_SERVER], ids=["fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_workers_of_a_stock_loader_read_is_counted_and_they_leave(tmp_path: Path, method: Any) -> None:
    """A DataLoader's workers count their last reads and give up their leases, although they close nothing."""
    path = config(tmp_path)
    WireheadGenerator(generator=numbered(), config_path=path, n_samples=10).run()
    dataset = MongoheadDataset(path)
    length = len(dataset)
    list(DataLoader(dataset, batch_size=None, sampler=range(length), num_workers=2, multiprocessing_context=method))
    ring = WireheadConfig.read(path).ring()
    assert count_samples_read(ring) == length
    assert len(ring.store.keys(READERS)) == 1
