"""Define the interface of the engines that reduce deltas among the members of one epoch.

`wire` is the product's own engine (TCP, mutual TLS, quantized); its `relay` moves the bytes of two nodes that do not
reach each other through the object store. `gloo` uses torch.distributed inside a LAN and is the oracle of tests.

One background thread of a node calls an engine. Only `abort` may be called by other threads.

A group fails as a whole: a member that loses a peer names the lost peer to the other members before its connections
close, and their calls raise PeerLostError with the name of the lost peer, never with the name of the messenger.
Otherwise each member would propose an epoch without the members that are only ahead in leaving the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from gpu_client.elastic.errors import NotFiniteError

MAX_EXCHANGE_BYTES = 64 * 1024
"""Limit of the payload of `Engine.exchange`."""


@dataclass(frozen=True)
class Peer:
    """Member of an epoch. addresses: `host:port`, best first. certificate: pinned X.509, DER in base64."""

    node: str
    addresses: tuple[str, ...] = ()
    certificate: str = ""


@dataclass(frozen=True)
class EpochGroup:
    """Members of one epoch in the order of their ranks; `rank` is the caller's own."""

    epoch: int
    peers: tuple[Peer, ...]
    rank: int

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.peers)


@dataclass(frozen=True)
class Bucket:
    """Part of a delta. Both tensors are one-dimensional, float32, on the CPU, contiguous, and of equal length.

    values: the node's own delta, which the engine never changes. average: receives the weighted average.
    """

    index: int
    values: torch.Tensor
    average: torch.Tensor


@contextmanager
def named_in_errors(bucket: Bucket, round_number: int) -> Iterator[None]:
    """Add the bucket to NotFiniteError."""
    try:
        yield
    except NotFiniteError as error:
        raise NotFiniteError(f"bucket {bucket.index} of round {round_number}: {error}") from error


@dataclass(frozen=True)
class EngineTraffic:
    """Bytes that an engine has sent and received since its start."""

    sent_bytes: int = 0
    received_bytes: int = 0


class Engine(Protocol):
    """Reduce deltas among the members of one epoch at a time."""

    def open(self, group: EpochGroup, timeout_s: float) -> None:
        """Connect to all peers of the group, and close the group before. Raises PeerLostError."""
        ...

    def exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the payloads of all members by rank, at most MAX_EXCHANGE_BYTES each. Raises PeerLostError."""
        ...

    def reduce(
        self,
        round_number: int,
        buckets: Sequence[Bucket],
        weights: Sequence[float],
        timeout_s: float,
        completed: Callable[[int], None],
    ) -> None:
        """Write the weighted average of all members' values to each bucket's `average`.

        weights: by rank, equal at all members; they sum to 1, and a member of weight 0 contributes nothing. `completed`
        receives the index of each bucket whose average is final at this member. All members receive identical bytes.
        timeout_s: limit without any progress of a peer. After PeerLostError the averages of incomplete buckets are
        undefined. Raises NotFiniteError for the node's own values.
        """
        ...

    def abort(self) -> None:
        """Let the call that another thread makes raise GroupAbortedError at once."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...

    @property
    def traffic(self) -> EngineTraffic:
        """Return the bytes moved since the start."""
        ...
