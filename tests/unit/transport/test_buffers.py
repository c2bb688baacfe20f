"""Memory of ranges: within the budget, reused, given up when the batch ends."""

from __future__ import annotations

import threading

import pytest

from gpu_client.transport.errors import TransferCanceled
from gpu_client.transport.net.buffers import BufferPool

MIB = 1024**2
NEVER = threading.Event()


def test_a_buffer_is_reused_and_has_the_size_asked_for() -> None:
    pool = BufferPool(8 * MIB)
    with pool.buffer(1_000_000, NEVER) as first:
        assert len(first) == 1_000_000
        memory = first.obj
    with pool.buffer(900_000, NEVER) as second:
        assert len(second) == 900_000
        assert second.obj is memory
    assert pool.allocated_bytes == MIB


def test_a_large_buffer_is_not_spent_on_a_small_range_while_there_is_room() -> None:
    pool = BufferPool(8 * MIB)
    with pool.buffer(4 * MIB, NEVER):
        pass
    with pool.buffer(1000, NEVER) as small:
        assert len(small.obj) == 256 * 1024  # type: ignore[arg-type]


def test_many_threads_stay_within_the_budget() -> None:
    pool = BufferPool(4 * MIB)
    most = 0
    lock = threading.Lock()

    def work(seed: int) -> None:
        nonlocal most
        for number in range(50):
            with pool.buffer((seed * 7 + number) % 30 * 100_000 + 1, NEVER), lock:
                most = max(most, pool.allocated_bytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert 2 * MIB < most <= 4 * MIB
    pool.clear()
    assert pool.allocated_bytes == 0


def test_one_that_is_larger_than_the_budget_comes_alone_and_is_not_kept() -> None:
    pool = BufferPool(MIB)
    with pool.buffer(1000, NEVER):
        canceled = threading.Event()
        canceled.set()
        with pytest.raises(TransferCanceled), pool.buffer(5 * MIB, canceled):
            pass
    with pool.buffer(5 * MIB, NEVER) as view:
        assert len(view) == 5 * MIB
        assert pool.allocated_bytes == 5 * MIB
    assert pool.allocated_bytes == 0


def test_waiting_for_memory_ends_when_canceled() -> None:
    pool = BufferPool(MIB)
    cancel = threading.Event()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            with pool.buffer(MIB, cancel):
                pass
        except TransferCanceled as error:
            caught.append(error)

    with pool.buffer(MIB, NEVER):
        thread = threading.Thread(target=wait)
        thread.start()
        cancel.set()
        thread.join(60)
    assert len(caught) == 1
