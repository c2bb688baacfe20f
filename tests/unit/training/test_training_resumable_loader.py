"""The resumable data order: every sample once per epoch, continued exactly, with and without workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from baton import BatchSampler, CheckpointMismatchError, ResumableLoader, SessionError


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    taken=st.integers(0, 80),
    drop_last=st.booleans(),
)
def test_continuing_gives_what_would_have_followed(
    size: int, batch_size: int, seed: int, taken: int, drop_last: bool
) -> None:
    if drop_last and batch_size > size:
        batch_size = size
    sampler = BatchSampler(size, batch_size, seed=seed, drop_last=drop_last)
    for _ in range(taken):
        next(sampler)
    state = sampler.state_dict()
    expected = list(islice(sampler, 20))
    resumed = BatchSampler(size, batch_size, seed=seed, drop_last=drop_last)
    resumed.load_state_dict(state)
    assert list(islice(resumed, 20)) == expected
    assert resumed.state_dict() == sampler.state_dict()


@given(size=st.integers(1, 60), batch_size=st.integers(1, 12), epoch=st.integers(0, 5))
def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(size: int, batch_size: int, epoch: int) -> None:
    sampler = BatchSampler(size, batch_size, drop_last=False)
    batches = [sampler.batch(epoch, position) for position in range(sampler.batches_per_epoch)]
    assert sorted(index for batch in batches for index in batch) == list(range(size))
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_seeds_and_epochs_change_the_order_and_shuffle_off_keeps_it() -> None:
    sampler = BatchSampler(100, 100)
    assert sampler.batch(0, 0) != sampler.batch(1, 0)
    assert sampler.batch(0, 0) != BatchSampler(100, 100, seed=1).batch(0, 0)
    assert BatchSampler(100, 100, shuffle=False).batch(3, 0) == list(range(100))


def test_the_order_is_the_same_everywhere_and_for_ever() -> None:
    # A change here would make running jobs continue with other data.
    assert next(BatchSampler(10, 5, seed=7)) == [8, 4, 6, 5, 1]


def test_ranks_share_an_epoch_without_overlap() -> None:
    ranks = [BatchSampler(25, 3, rank=rank, world_size=4) for rank in range(4)]
    assert all(sampler.batches_per_epoch == 2 for sampler in ranks)
    seen = [index for sampler in ranks for position in range(2) for index in sampler.batch(0, position)]
    assert len(seen) == len(set(seen)) == 24
    ranks[1].load_state_dict(ranks[0].state_dict())  # one state serves all


def test_no_global_random_state_is_touched() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    loader = ResumableLoader(list(range(40)), BatchSampler(40, 4))
    list(islice(loader, 25))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()  # type: ignore[index]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (BatchSampler(11, 2), "size was 10, is 11"),
        (BatchSampler(10, 3), "batch_size was 2, is 3"),
        (BatchSampler(10, 2, seed=1), "seed was 0, is 1"),
        (BatchSampler(10, 2, shuffle=False), "shuffle was True, is False"),
        (BatchSampler(10, 1, world_size=2), "world_size was 1, is 2"),
    ],
)
def test_another_order_is_refused_and_changes_nothing(other: BatchSampler, says: str) -> None:
    sampler = BatchSampler(10, 2)
    next(sampler)
    with pytest.raises(CheckpointMismatchError, match=says):
        other.load_state_dict(sampler.state_dict())
    assert (other.epoch, other.position) == (0, 0)


def test_a_torch_with_other_permutations_is_noticed() -> None:
    sampler = BatchSampler(10, 2)
    state = sampler.state_dict()
    state["order"]["digest"] = "0" * 16
    with pytest.raises(CheckpointMismatchError, match="digest"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 0, "batch_size": 1},
        {"size": 5, "batch_size": 0},
        {"size": 5, "batch_size": 6},
        {"size": 5, "batch_size": 1, "rank": 1},
        {"size": 5, "batch_size": 2, "world_size": 2, "drop_last": False},
    ],
)
def test_impossible_orders_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SessionError):
        BatchSampler(**arguments)


class Augmented(Dataset[torch.Tensor]):
    """A dataset that mixes each sample with random numbers of every kind, as augmentations do."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


# Newer Pythons warn about forking a process that has threads; torch's own workers are meant here.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_with_prefetching_workers_the_state_counts_what_was_taken() -> None:
    def loader(workers: int) -> ResumableLoader:
        return ResumableLoader(Augmented(), BatchSampler(24, 4, seed=3), num_workers=workers, prefetch_factor=4)

    through = list(islice(loader(2), 15))
    first = loader(2)
    taken = list(islice(first, 5))
    state = first.state_dict()
    assert (state["epoch"], state["position"]) == (0, 5)
    second = loader(1)  # another number of workers
    second.load_state_dict(state)
    rest = list(islice(second, 10))
    assert all(torch.equal(a, b) for a, b in zip(through, taken + rest, strict=True))
    second.load_state_dict(state)  # also in the middle of an iteration
    assert all(torch.equal(a, b) for a, b in zip(rest, islice(second, 10), strict=True))


def test_the_loader_refuses_streams_and_second_opinions() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(SessionError, match="StatefulDataLoader"):
        ResumableLoader(Stream(), BatchSampler(4, 2))
    with pytest.raises(SessionError, match="shuffle"):
        ResumableLoader([1, 2, 3, 4], BatchSampler(4, 2), shuffle=True)
