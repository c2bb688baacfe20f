"""Test the prefetching of one batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from gpu_client.ring.reading.loader import POLL_S, BatchPrefetcher
from tests.kits.waiting import soon


def test_one_batch_is_taken_before_it_is_asked_for_and_no_more() -> None:
    taken: list[int] = []
    second = threading.Event()

    def batches() -> Iterator[int]:
        for number in range(5):
            if number == 1:
                second.wait(60)
            taken.append(number)
            yield number

    ahead = BatchPrefetcher(batches())
    soon(lambda: taken == [0])
    second.set()
    soon(lambda: taken == [0, 1])  # the first is waiting to be asked for, the second to wait
    assert next(ahead) == 0
    soon(lambda: taken == [0, 1, 2])
    assert [next(ahead) for _ in range(4)] == [1, 2, 3, 4]
    ahead.close()


def test_what_a_batch_raises_is_raised_where_it_is_asked_for_however_often() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    ahead = BatchPrefetcher(batches())
    assert next(ahead) == 1
    for _ in range(3):
        with pytest.raises(KeyError, match="lost"):
            next(ahead)
    ahead.close()


class Slow(IterableDataset[Any]):  # type: ignore[misc, unused-ignore]
    """A dataset whose second batch waits for an event."""

    def __init__(self, go_on: Any) -> None:
        self.go_on = go_on

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        self.go_on.wait()
        yield torch.ones(1)


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_waits_for_workers_waits_for_as_long_as_it_takes_and_can_be_closed(goes_on: bool) -> None:
    go_on = torch.multiprocessing.get_context("fork").Event()
    loader = DataLoader(Slow(go_on), batch_size=None, num_workers=1, timeout=POLL_S)
    batches = iter(loader)
    ahead = BatchPrefetcher(batches)
    assert next(ahead) == torch.zeros(1)
    threading.Event().wait(3 * POLL_S)  # so that torch gives up several times
    if goes_on:
        go_on.set()
        assert next(ahead) == torch.ones(1)
    ahead.close()
    assert not ahead._thread.is_alive()
    go_on.set()
