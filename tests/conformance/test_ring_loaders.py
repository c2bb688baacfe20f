"""Test trainings with workers, forked and spawned, and on several ranks, at every place."""

from __future__ import annotations

import json
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
from tests.kits.runner.fork_server import fork_context

SAMPLES = 24
FORK_SERVER = fork_context("torch.distributed", "torch.utils.data", "gpu_client.ring.reading.loader")


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


# Each spawned worker imports torch, for two seconds.
@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_read_every_sample_once_however_they_are_begun(place: Place, start: str, workers: int) -> None:
    dataset = RingDataset(place.text)
    # A training may read a sample before its workers start: no worker may use the reader that is open then.
    assert int(dataset[3]["number"]) == 3
    stock = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=start)
    assert sorted(number for batch in stock for number in whole(batch)) == list(range(SAMPLES))
    dataset.close()


def test_a_loader_with_workers_reads_what_one_without_reads(place: Place) -> None:
    require_equal_batches(place.text, "fork")


def test_a_loader_with_spawned_workers_reads_what_one_without_reads(tmp_path: Path) -> None:
    """At one place: that a spawned worker reads at every place is shown above."""
    place = str(tmp_path / "ring")
    fill(place)
    require_equal_batches(place, "spawn")


def require_equal_batches(place: str, start: str) -> None:
    plain = some(RingLoader(place, batch_size=3, seed=4, group="plain"), 10)
    loader = RingLoader(place, batch_size=3, seed=4, workers=2, group=start, multiprocessing_context=start)
    begun = some(loader, 4)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = RingLoader(place, batch_size=3, seed=4, group=start)
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
    arguments = (place, str(tmp_path / "meeting"), str(tmp_path / "told"))
    ranks = [FORK_SERVER.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
    names = [name for batches in found for batch in batches for name in batch]
    assert len(names) == len(set(names)) == SAMPLES
