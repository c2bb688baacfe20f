"""Run a member of an epoch in a process of its own, which reduces until a peer is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from gpu_client.elastic.engines.engine import Bucket, Engine, EpochGroup, Peer
from gpu_client.elastic.errors import PeerLostError
from tests.kits.runner.fork_server import fork_context

forkserver = fork_context("tests.conformance.engines.member_process")


def run(make: Callable[[], Engine], peers: Sequence[Peer], rank: int, timeout_s: float, reports: Connection) -> None:
    """Report `("inside", round)` in the middle of each reduce, and `("lost", nodes, cause, time)` at the end."""
    torch.set_num_threads(1)
    engine = make()
    reports.send(("made",))
    reports.recv()
    buckets = [Bucket(index, torch.ones(250_000), torch.empty(250_000)) for index in range(16)]
    weights = [1 / len(peers)] * len(peers)
    engine.open(EpochGroup(1, tuple(peers), rank), 30.0)
    try:
        for number in range(10**6):

            def completed(index: int, number: int = number) -> None:
                if index == 4:
                    reports.send(("inside", number))

            engine.exchange(b"begin", timeout_s)
            engine.reduce(number, buckets, weights, timeout_s, completed)
    except PeerLostError as error:
        reports.send(("lost", error.nodes, error.cause, time.monotonic()))
    # The connections stay open until the test ends: no member learns of a loss because another one left.
    reports.recv()


class Member:
    """Process of one member. `report` returns its next report."""

    def __init__(self, make: Callable[[], Engine], peers: Sequence[Peer], rank: int, timeout_s: float) -> None:
        self.reports, theirs = multiprocessing.Pipe()
        self._process = forkserver.Process(target=run, args=(make, peers, rank, timeout_s, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def report(self, kind: str, timeout_s: float = 60.0) -> Any:
        """Return the next report of a kind."""
        deadline = time.monotonic() + timeout_s
        while self.reports.poll(max(0.0, deadline - time.monotonic())):
            found = self.reports.recv()
            if found[0] == kind:
                return found
        raise AssertionError(f"no report {kind!r} within {timeout_s} s")

    def begin(self) -> None:
        """Let the member open its epoch, after all members' ports are open."""
        self.reports.send("begin")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
