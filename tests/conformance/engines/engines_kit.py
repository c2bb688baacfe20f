"""Groups of engines: one thread or one process for each member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from gpu_client.elastic.codecs import CODECS
from gpu_client.elastic.engines.engine import Bucket, Engine, EpochGroup, Peer
from gpu_client.elastic.engines.relay import relay_connection, relay_port
from gpu_client.elastic.engines.relay.relay_connection import RelayCall, RelayConnection
from gpu_client.elastic.engines.relay.relay_port import RelayPort
from gpu_client.elastic.engines.wire import mesh
from gpu_client.elastic.engines.wire.identity import NodeIdentity
from gpu_client.elastic.engines.wire.listener import Listener
from gpu_client.elastic.engines.wire.wire_engine import WireEngine

TIMEOUT_S = 20.0
ROUND = 7


class Crew:
    """Engines of the members of one world. `together` calls all members at once, each in a thread of its own."""

    def __init__(self, engines: Sequence[Engine], peers: Sequence[Peer]) -> None:
        self.engines = list(engines)
        self.peers = tuple(peers)
        self.epoch = 0
        self._threads = ThreadPoolExecutor(len(self.engines))

    def start(self, call: Callable[[int, Engine], Any]) -> list[Future[Any]]:
        """Begin a call of every member."""
        return [self._threads.submit(call, rank, engine) for rank, engine in enumerate(self.engines)]

    def together(self, call: Callable[[int, Engine], Any]) -> list[Any]:
        """Return the results or exceptions of all members."""
        return [one.exception(60) or one.result() for one in self.start(call)]

    def group(self, rank: int) -> EpochGroup:
        """Return the present group as one member sees the group."""
        return EpochGroup(self.epoch, self.peers, rank)

    def open(self, timeout_s: float = TIMEOUT_S) -> None:
        """Open the next epoch with all members."""
        self.epoch += 1
        found = self.together(lambda rank, engine: engine.open(self.group(rank), timeout_s))
        assert found == [None] * len(self.peers), found

    def reduce(self, deltas: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]) -> list[list[torch.Tensor]]:
        """Return the averages of all members; each bucket was completed once, and no delta changed."""
        before = [[delta.clone() for delta in own] for own in deltas]
        averages = [[torch.full_like(delta, torch.nan) for delta in own] for own in deltas]
        completed: list[list[int]] = [[] for _ in self.engines]

        def reduce(rank: int, engine: Engine) -> None:
            buckets = [Bucket(i, *pair) for i, pair in enumerate(zip(deltas[rank], averages[rank], strict=True))]
            engine.reduce(ROUND, buckets, weights, TIMEOUT_S, completed[rank].append)

        found = self.together(reduce)
        assert found == [None] * len(self.engines), found
        assert [sorted(indices) for indices in completed] == [[*range(len(own))] for own in deltas]
        for old, own in zip(before, deltas, strict=True):
            assert all(map(same_bits, old, own))
        return averages

    def close(self) -> None:
        """Close all engines."""
        for engine in self.engines:
            engine.close()
            if isinstance(engine, SocketMember):
                engine.listener.close()
            elif isinstance(engine, RelayMember):
                engine.port.close()
        self._threads.shutdown()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare float32 values; NaN equals itself."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def weighted_sum(deltas: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Add the weighted deltas in the order of ranks, rounded to float32 after each product and sum."""
    total = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        if weight:
            total += delta * weight
    return total


class SocketMember(WireEngine):
    """Wire engine with a listener of its own."""

    def __init__(self, port: int, peers: Sequence[Peer], codec: str, identity: NodeIdentity | None) -> None:
        super().__init__(identity, CODECS[codec])
        certificates = [peer.certificate for peer in peers]
        self.listener = Listener(identity, self.handlers, lambda: certificates, "127.0.0.1", port)


HASTE: tuple[tuple[object, str, float], ...] = (
    (relay_connection, "POLL_S", 0.01),
    (relay_connection, "LONGEST_POLL_S", 0.05),
    (relay_port, "BUSY_POLL_S", 0.05),
    (mesh, "HEAD_START_S", 0.0),
    (mesh, "RELAY_OPEN_S", 2.0),
    (mesh, "LONGEST_CALM_S", 0.2),
    (RelayConnection, "ping_s", 0.3),
    (RelayConnection, "silence_s", 5.0),
)
"""Times of relayed members that share a machine with the store."""


class RelayMember(WireEngine):
    """Wire engine that no peer reaches: all its frames pass the store."""

    def __init__(self, call: RelayCall, node: str, codec: str) -> None:
        super().__init__(None, CODECS[codec])
        self.port = self.dialer.relay = RelayPort(call, node, self.handlers)


def make_hasty_member(call: RelayCall, node: str, codec: str) -> RelayMember:
    """Return a relayed member in a process of its own."""
    for owner, name, value in HASTE:
        setattr(owner, name, value)
    return RelayMember(call, node, codec)
