"""Test batches of a stock DataLoader: one generation each, although a generator swaps meanwhile."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import open_ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.tools.wirehead_datasets import MongoheadDataset, MongoTupleheadDataset
from gpu_client.ring.tools.wirehead_log import WireheadConfig

CAP = 4


class Swapping:
    """Swap a whole new generation in behind each image that is read, faster than any generator."""

    def __init__(self, config_path: str) -> None:
        self.config_path = config_path

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        ring = WireheadConfig.read(self.config_path).ring()
        with open(self.config_path, "rb") as file:  # noqa: PTH123 - one worker at a time makes a generation
            fcntl.flock(file, fcntl.LOCK_EX)
            number = ring.newest().inserted // CAP
            writer = RingWriter(ring, threads=False, maintainer=Maintainer(ring, "test"))
            for _ in range(CAP):
                writer.put({"data": np.full(3, float(number)), "label": np.full(3, number)})
            writer.close()
        return image


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"DBNAME": "t", "SWAP_CAP": CAP, "SAMPLE": ["data", "label"]}))
    Swapping(str(path))(torch.zeros(1))
    return str(path)


def batches_of_ids() -> Iterator[tuple[int, ...]]:
    """Yield batches of indices as elements of a sampler, as the sampler of mindfultensors does."""
    for _ in range(2):
        yield tuple(np.random.default_rng(1).permutation(CAP).tolist())


def as_it_is(batch: Any) -> Any:
    return batch


def generations(values: Any) -> set[int]:
    return {int(value) for value in torch.as_tensor(values).flatten()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_batches_of_a_stock_loader_are_of_one_generation(config_path: str, workers: int) -> None:
    dataset = MongoheadDataset(config_path, normalize=Swapping(config_path))
    seen = []
    for batch in DataLoader(dataset, batch_size=2, num_workers=workers):
        assert batch["input"].shape == (2, 3)
        found = generations(batch["input"])
        assert len(found) == 1 and generations(batch["label"]) == found
        seen.append(found)
    pairs = MongoTupleheadDataset(config_path, normalize=Swapping(config_path))
    for images, labels in DataLoader(pairs, batch_size=2, num_workers=workers):
        assert images.shape == (2, 3)
        assert len(generations(images)) == 1 and generations(labels) == generations(images)
        seen.append(generations(images))
    assert len(seen) == CAP
    assert open_ring(WireheadConfig.read(config_path).place).newest().inserted == CAP * (1 + 2 * CAP), (
        "each read has swapped"
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_so_are_wirehead_s_batches_of_ids(config_path: str, workers: int) -> None:
    """The sampler gives whole batches. torch asks for one of them, or for several, at a time."""
    for size in (None, 1, 2):
        dataset = MongoheadDataset(config_path, normalize=Swapping(config_path))
        loader = DataLoader(
            dataset, batch_size=size, sampler=list(batches_of_ids()), collate_fn=as_it_is, num_workers=workers
        )
        read = 0
        for asked in loader:
            given = [asked] if size is None else asked
            read += len(given)
            assert all(sorted(batch) == list(range(CAP)) for batch in given)
            assert len({int(one[name][0]) for batch in given for one in batch.values() for name in one}) == 1
        assert read == 2
