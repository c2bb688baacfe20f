"""Test trainings with workers, forked and spawned, and on several ranks, at every place."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader

from gpu_client.ring.core.ring import make_ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.loader import RingDataset, RingLoader
from gpu_client.ring.settings import RingSettings
from tests.kits.ring.places import KINDS, Place, place_of

SAMPLES = 24


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    for place in place_of(request.param, request, tmp_path):
        fill(place.text)
        yield place


def fill(place: str) -> None:
    ring = make_ring(place, RingSettings(cap=SAMPLES, max_ahead=1000, pack=2))
    with RingWriter(ring, "w", threads=False) as writer:
        for number in range(SAMPLES):
            writer.put({"x": np.full(1000, number), "number": number})


def whole(batch: dict[str, torch.Tensor]) -> list[int]:
    """The numbers of a batch's samples, which are what they should be."""
    numbers = [int(one) for one in batch["number"]]
    assert batch["x"].tolist() == [[number] * 1000 for number in numbers]
    return numbers


def some(loader: RingLoader, count: int) -> list[list[str]]:
    """Names of the samples in the next so many batches."""
    found: list[list[str]] = []
    for batch in loader:
        assert [int(name.split("-")[2]) for name in loader.ids] == [number // 2 + 1 for number in whole(batch)]
        found.append(loader.ids)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_read_every_sample_once_however_they_are_begun(place: Place, start: str) -> None:
    dataset = RingDataset(place.text)
    # As in a training that has looked at a sample before: what is open then is no worker's to use.
    assert int(dataset[3]["number"]) == 3
    stock = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, multiprocessing_context=start)
    assert sorted(number for batch in stock for number in whole(batch)) == list(range(SAMPLES))
    dataset.close()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_loader_with_workers_reads_what_one_without_reads(place: Place, start: str) -> None:
    plain = some(RingLoader(place.text, batch_size=3, seed=4, group="plain"), 10)
    loader = RingLoader(place.text, batch_size=3, seed=4, workers=2, group=start, multiprocessing_context=start)
    begun = some(loader, 4)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = RingLoader(place.text, batch_size=3, seed=4, group=start)
    resumed.load_state_dict(state)
    assert begun + some(resumed, 6) == plain
    assert len({name for batch in plain[:8] for name in batch}) == SAMPLES, "the first pass has all of them"


def _rank(rank: int, place: str, meeting: str, told: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        found = some(RingLoader(place, batch_size=3, seed=2), 4)
    finally:
        distributed.destroy_process_group()
    Path(f"{told}-{rank}").write_text(json.dumps(found))


def test_two_ranks_of_one_training_share_all_samples(tmp_path: Path) -> None:
    place = str(tmp_path / "ring")
    fill(place)
    context = multiprocessing.get_context("spawn")
    arguments = (place, str(tmp_path / "meeting"), str(tmp_path / "told"))
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
    names = [name for batches in found for batch in batches for name in batch]
    assert len(names) == len(set(names)) == SAMPLES
