"""Parts of peers' states arrive beside the round thread: neither a slow line nor a slow peer holds up anything else."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.wire.wire_engine import WireEngine
from gpu_client.elastic.membership.solo_world import SoloWorld
from gpu_client.elastic.recovery import part_reader
from gpu_client.elastic.recovery.part_reader import PARALLEL_READS, PartNotAskedError, PartReader
from gpu_client.elastic.recovery.state_transfer import PartRequest, PartUnavailableError, StateDescription
from gpu_client.elastic.rounds.local_progress import LocalProgress
from gpu_client.elastic.rounds.round_actions import Action, DescribePeers, FetchParts
from gpu_client.elastic.rounds.round_runner import EngineTimeouts, RoundRunner

FAST, SLOW = Peer("0.1.0000000a"), Peer("1.1.0000000b")


class Lines:
    """Transfer whose slow peer sends no part until a test lets the parts arrive."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.reads: Counter[tuple[Peer, PartRequest]] = Counter()

    def describe(self, peer: Peer) -> StateDescription:
        return StateDescription(1, (1,))

    def read(self, peer: Peer, request: PartRequest) -> torch.Tensor:
        self.reads[peer, request] += 1
        if peer == SLOW:
            assert self.arrived.wait(30)
        if request.bucket < 0:
            raise PartUnavailableError("no such bucket")
        return torch.tensor([float(request.bucket)])

    def close(self) -> None:
        self.arrived.set()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    monkeypatch.setattr(part_reader, "READ_S", 1.0)
    lines = Lines()
    yield lines
    lines.close()


def ask(peer: Peer, *buckets: int) -> list[tuple[Peer, PartRequest]]:
    return [(peer, PartRequest("state", 1, bucket)) for bucket in buckets]


def test_the_round_thread_does_not_wait_for_a_slow_line_and_reads_each_part_once(lines: Lines) -> None:
    """In a group, the other members lose a member that exchanges no status for 20 s."""
    found: list[Any] = []

    def protocol() -> Generator[Action, Any, None]:
        requests = tuple(ask(SLOW, 0, 1))
        began = time.monotonic()
        found.append((yield FetchParts(requests)))
        # Nor do the running reads hold up the descriptions.
        found.append((yield DescribePeers((FAST, SLOW))))
        found.append(time.monotonic() - began)
        lines.arrived.set()
        found.append((yield FetchParts(requests)))

    runner = RoundRunner(
        protocol(),
        LocalProgress(torch.zeros(1)),
        engine=WireEngine(None),
        world=SoloWorld(),
        transfer=lines,
        timeouts=EngineTimeouts(),
    )
    runner.start()
    runner.join(10)
    lines.close()
    assert not runner.is_running and runner.error is None
    assert found[0] == [None, None]
    assert found[1] == [StateDescription(1, (1,))] * 2
    assert found[2] < 8
    assert [one.item() for one in found[3]] == [0, 1]
    assert set(lines.reads.values()) == {1}


def test_a_slow_peer_takes_its_share_of_the_reads_only(lines: Lines) -> None:
    reader = PartReader(lines)
    left, kept = list(range(60)), list[tuple[Peer, PartRequest]]()
    for _ in range(60):
        peers = [FAST, SLOW] * 30
        plan = [*kept, *((peer, PartRequest("state", 1, one)) for one, peer in zip(left, peers, strict=False))]
        results = list(zip(plan, reader.read(plan, lambda: False), strict=True))
        kept = [one for one, result in results if result is None]
        left = [part.bucket for (_, part), result in results if isinstance(result, PartNotAskedError)]
        if not left:
            break
    assert not left
    assert len(kept) == PARALLEL_READS // 2 and {peer for peer, _ in kept} == {SLOW}
    lines.arrived.set()
    assert all(isinstance(one, torch.Tensor) for one in reader.read(kept, lambda: False))
    reader.close()


def test_an_error_of_one_read_is_the_result_of_this_read(lines: Lines) -> None:
    reader = PartReader(lines)
    failed, found = reader.read(ask(FAST, -1, 3), lambda: False)
    assert isinstance(failed, PartUnavailableError) and found.item() == 3
    failed, found = reader.read(ask(FAST, -1, 3), lambda: False)
    assert isinstance(failed, PartUnavailableError) and lines.reads[ask(FAST, -1)[0]] == 2
    reader.close()


def test_reads_that_nobody_waits_for_hold_up_no_other_reads(lines: Lines) -> None:
    reader = PartReader(lines)
    assert reader.read(ask(SLOW, *range(PARALLEL_READS)), lambda: False) == [None] * PARALLEL_READS
    (found,) = reader.read(ask(FAST, 3), lambda: False)
    assert found.item() == 3
    reader.close()
