"""Define the actions that a round protocol asks of its driver: calls of the engine, of the world, of peers, and waits.

The protocol is a generator that yields actions and receives results or errors. A thread performs the actions of a real
node; tests perform the actions of many nodes in any order and in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.contract.elastic.world import EpochProposal, JoinRequest, WorldReport, WorldView
from gpu_client.elastic.engines.engine import Bucket, EpochGroup, Peer
from gpu_client.elastic.membership.world_calls import WorldCalls
from gpu_client.elastic.recovery.state_transfer import PartRequest


@dataclass(frozen=True)
class ReadWorld:
    """Read the view of the world."""


WorldRequest = JoinRequest | EpochProposal | WorldReport | ReadWorld
"""Call to the world; except for ReadWorld, the body of the call."""


@dataclass(frozen=True)
class OpenGroup:
    """Open a group. Result: None, or PeerLostError."""

    group: EpochGroup


@dataclass(frozen=True)
class ExchangeStatus:
    """Exchange statuses with all members. Result: payloads by rank, or PeerLostError."""

    payload: bytes


@dataclass(frozen=True)
class ReduceBuckets:
    """Reduce buckets. Result: None, or PeerLostError."""

    round: int
    buckets: tuple[Bucket, ...]
    weights: tuple[float, ...]
    completed: Callable[[int], None]


@dataclass(frozen=True)
class CallWorld:
    """Call the control plane, and wait for the answer. Result: WorldView, or WorldCallError."""

    request: WorldRequest


@dataclass(frozen=True)
class StartWorldCall:
    """Begin a call beside the exchanges, which never wait for the control plane. Result: None."""

    request: WorldRequest


@dataclass(frozen=True)
class TakeWorldAnswer:
    """Take the answer of the started call. Result: WorldView or WorldCallError; None while the call runs."""


@dataclass(frozen=True)
class DescribePeers:
    """Ask peers for the descriptions of their states. Result: for each peer a StateDescription, or an ElasticError."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class FetchParts:
    """Read parts of peers' states, for a short time (`recovery/part_reader.py`).

    Result: for each request a tensor, an ElasticError, or None for a part that is on the way.
    """

    requests: tuple[tuple[Peer, PartRequest], ...]


@dataclass(frozen=True)
class Sleep:
    """Wait. Result: None, after the time or after a change of the local progress."""

    seconds: float


def call_world(calls: WorldCalls, request: WorldRequest) -> WorldView:
    """Make one call. Raises WorldCallError."""
    if isinstance(request, JoinRequest):
        return calls.join(request)
    if isinstance(request, EpochProposal):
        return calls.propose(request)
    if isinstance(request, WorldReport):
        return calls.report(request)
    return calls.view()


Action = (
    OpenGroup
    | ExchangeStatus
    | ReduceBuckets
    | CallWorld
    | StartWorldCall
    | TakeWorldAnswer
    | DescribePeers
    | FetchParts
    | Sleep
)
