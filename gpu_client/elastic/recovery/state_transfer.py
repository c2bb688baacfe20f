"""Define how a node reads the outer state of a peer, bucket by bucket; the engine's listener serves the same reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self

import torch

from baton.contract.elastic.data import DataProgress
from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.errors import ElasticError

MAX_ROUND = 10**9
MAX_HASH = 2**64 - 1


class PartUnavailableError(ElasticError):
    """Report that a peer does not hold the requested part (any more); the message names the part."""


@dataclass(frozen=True)
class PartRequest:
    """Request for one bucket of a peer's outer state.

    state: parameters, then momentum, after the commit of `round`. average: averaged delta of `round`. candidate:
    parameters, then momentum, that the commit of `round` will produce.
    """

    kind: Literal["state", "average", "candidate"]
    round: int
    bucket: int


@dataclass(frozen=True)
class Inclusion:
    """Buckets of one round whose averages contain the deltas of `nodes`. buckets: bitmap, lowest bit first."""

    nodes: tuple[str, ...]
    buckets: int


@dataclass(frozen=True)
class StateDescription:
    """Outer state of a node.

    hashes: by bucket. averages: newest rounds whose averages the node keeps. inclusions: by round, newest last; a round
    names the nodes that have contributed to no newer round. forgotten: newest round whose contributors are unknown.
    data: shards that the committed rounds have trained.
    """

    round: int
    hashes: tuple[int, ...]
    averages: tuple[int, ...] = ()
    inclusions: tuple[tuple[int, tuple[Inclusion, ...]], ...] = ()
    forgotten: int = 0
    data: DataProgress = field(default_factory=DataProgress)
    relayed: bool = field(default=False, compare=False)
    """The reads of this state pass the object store."""

    def encode(self) -> bytes:
        """Return the description as JSON."""
        return json.dumps({**asdict(self), "data": self.data.model_dump()}).encode()

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Read the description. Raises ValueError for any other text."""
        try:
            fields = json.loads(text)
            return cls(
                round=_read_number(fields["round"]),
                hashes=tuple(_read_number(one, MAX_HASH) for one in fields["hashes"]),
                averages=tuple(_read_number(one) for one in fields["averages"]),
                inclusions=tuple(
                    (_read_number(number), tuple(_read_inclusion(one) for one in parts))
                    for number, parts in fields["inclusions"]
                ),
                forgotten=_read_number(fields["forgotten"]),
                data=DataProgress.model_validate(fields["data"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"no description of an outer state: {error!r}") from error


def _read_number(value: Any, most: int = MAX_ROUND) -> int:
    """Return a number. Raises ValueError for a number below 0 or above `most`."""
    number = int(value)
    if not 0 <= number <= most:
        raise ValueError("the number of a round, or a hash, is out of bounds")
    return number


def _read_inclusion(fields: Any) -> Inclusion:
    buckets = int(fields["buckets"])
    if buckets < 0:
        raise ValueError("a bitmap of buckets is negative")
    return Inclusion(tuple(map(str, fields["nodes"])), buckets)


class StateSource(Protocol):
    """Outer state that a node serves to its peers; any thread may call."""

    def describe(self) -> StateDescription:
        """Return the present state. Raises PartUnavailableError while the node itself is catching up."""
        ...

    def read(self, request: PartRequest) -> torch.Tensor:
        """Return a copy of the part, float32. Raises PartUnavailableError."""
        ...


class StateTransfer(Protocol):
    """Reads of peers' outer states; several threads may call at once.

    Each call raises PeerLostError for a peer without an answer, and PartUnavailableError.
    """

    def describe(self, peer: Peer) -> StateDescription:
        """Return the peer's present state."""
        ...

    def read(self, peer: Peer, request: PartRequest) -> torch.Tensor:
        """Return the part, float32, on the CPU."""
        ...

    def close(self) -> None:
        """End all reads, also those of other threads."""
        ...
