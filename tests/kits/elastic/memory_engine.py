"""An engine in memory: for threads (`MemoryEngine`), or call by call in an order that a test chooses (`PendingCall`).

Averages are exact (fp32, in the order of ranks), computed once per bucket, and therefore identical at all members.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gpu_client.elastic.codecs import Codec
from gpu_client.elastic.engines.engine import Bucket, EngineTraffic, EpochGroup, Peer
from gpu_client.elastic.errors import GroupAbortedError, PeerLostError
from gpu_client.elastic.recovery.state_transfer import PartRequest, StateDescription, StateSource


class NodeKilledError(BaseException):
    """End of a killed node's thread; no code of the product catches this error."""


@dataclass
class Reduce:
    """One reduce of a group. entries: each member's buckets and weights; averages: by bucket, once computed."""

    entries: dict[str, tuple[dict[int, Bucket], Sequence[float]]] = field(default_factory=dict)
    averages: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class GroupLog:
    """Calls of one epoch's members. lost: by member that has left, the peers that the member has lost."""

    members: tuple[str, ...]
    arrived: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    exchanges: dict[int, dict[str, bytes]] = field(default_factory=dict)
    reduces: dict[int, Reduce] = field(default_factory=dict)
    lost: dict[str, tuple[str, ...]] = field(default_factory=dict)


class MemoryNetwork:
    """Groups by epoch, dead nodes, and the outer states that nodes serve."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups: dict[int, GroupLog] = {}
        self.dead: set[str] = set()
        self.hung: set[str] = set()
        self.sources: dict[str, StateSource] = {}
        self.codec: Codec | None = None
        """Codec that deltas and averages pass through, as in the wire."""
        self.distort: Callable[[str, int, torch.Tensor], None] = lambda node, bucket, average: None
        """Changes a member's copy of an average, as a faulty processor would."""
        self.averaged: Callable[[int, int, int, dict[str, float]], None] = lambda *_: None
        """Receives epoch, count of the call, bucket and weights by node of each computed average."""

    def kill(self, node: str) -> None:
        with self.changed:
            self.dead.add(node)
            self.changed.notify_all()

    def leave(self, node: str, lost: Sequence[str]) -> None:
        """Let a node leave its groups. lost: peers whose loss the other members learn; none after a clean end."""
        with self.changed:
            for log in self.groups.values():
                if node in log.arrived:
                    log.lost.setdefault(node, tuple(lost))
            self.changed.notify_all()

    def source(self, node: str, peer: str) -> StateSource:
        """Return the state that `peer` serves. Raises PeerLostError."""
        if peer in self.dead or peer in self.hung or peer not in self.sources:
            raise PeerLostError([peer], "silent")
        return self.sources[peer]


class PendingCall:
    """One call of a member, which `poll` brings forward."""

    def __init__(self, network: MemoryNetwork, node: str, group: EpochGroup) -> None:
        self.network, self.node, self.epoch = network, node, group.epoch
        self.peers = [one.node for one in group.peers]
        self.log = network.groups.setdefault(group.epoch, GroupLog(tuple(self.peers)))
        assert self.log.members == tuple(self.peers), "two memberships of one epoch"

    def missing(self) -> list[str]:
        """Return the members whose part of the call has not arrived."""
        raise NotImplementedError

    def poll(self, *, prefers_loss: bool = False) -> bool:
        """Bring the call forward, and return True once the call is done. Raises PeerLostError.

        prefers_loss: raise the error although all parts have arrived, which a late answer of a lost peer permits.
        """
        missing = self.missing()
        gone = [one for one in self.peers if one in self.network.dead or one in self.log.lost]
        if gone and (missing or prefers_loss):
            self.fail(self.name_lost(gone), "connection_reset")
        return not missing and self.advance()

    def name_lost(self, gone: Sequence[str]) -> list[str]:
        """Return the peers that a broken group has lost: messengers stand for the peers that they have lost."""
        found: set[str] = set()
        for one in gone:
            dead = one in self.network.dead
            found |= {one} if dead or not self.log.lost[one] else set(self.log.lost[one])
        return sorted(found - {self.node}) or [one for one in gone if one != self.node]

    def fail(self, lost: Sequence[str], cause: str) -> None:
        """Leave the group because of lost peers. Raises PeerLostError."""
        self.network.leave(self.node, lost)
        raise PeerLostError(lost, cause)

    def advance(self) -> bool:
        """Do the next part of the call, and return True after the last part."""
        return True


class OpenCall(PendingCall):
    def __init__(self, network: MemoryNetwork, node: str, group: EpochGroup) -> None:
        super().__init__(network, node, group)
        for epoch, log in network.groups.items():
            if epoch != group.epoch and node in log.arrived:
                log.lost.setdefault(node, ())
        self.log.arrived.add(node)

    def missing(self) -> list[str]:
        return [one for one in self.peers if one not in self.log.arrived]


class ExchangeCall(PendingCall):
    def __init__(self, network: MemoryNetwork, node: str, group: EpochGroup, payload: bytes) -> None:
        super().__init__(network, node, group)
        self.count = self.log.counts[node] = self.log.counts.get(node, 0) + 1
        assert self.count not in self.log.reduces, "a member exchanges while another one reduces"
        self.payloads = self.log.exchanges.setdefault(self.count, {})
        self.payloads[node] = payload

    def missing(self) -> list[str]:
        return [one for one in self.peers if one not in self.payloads]

    @property
    def result(self) -> list[bytes]:
        return [self.payloads[one] for one in self.peers]


class ReduceCall(PendingCall):
    def __init__(
        self,
        network: MemoryNetwork,
        node: str,
        group: EpochGroup,
        buckets: Sequence[Bucket],
        weights: Sequence[float],
        completed: Callable[[int], None],
    ) -> None:
        super().__init__(network, node, group)
        self.count = self.log.counts[node] = self.log.counts.get(node, 0) + 1
        assert self.count not in self.log.exchanges, "a member reduces while another one exchanges"
        self.reduce = self.log.reduces.setdefault(self.count, Reduce())
        self.reduce.entries[node] = ({one.index: one for one in buckets}, tuple(weights))
        assert len({entry[1] for entry in self.reduce.entries.values()}) == 1, "members disagree about the weights"
        assert len({frozenset(entry[0]) for entry in self.reduce.entries.values()}) == 1, "members disagree on buckets"
        assert abs(sum(weights) - 1) < 1e-9
        self.weights = dict(zip(self.peers, weights, strict=True))
        self.left = list(buckets)
        self.completed = completed

    def missing(self) -> list[str]:
        """Return contributors only: a member without weight contributes nothing, not even its presence."""
        return [one for one in self.peers if self.weights[one] and one not in self.reduce.entries]

    def advance(self) -> bool:
        """Finish one bucket."""
        if self.left:
            bucket = self.left.pop(0)
            if bucket.index not in self.reduce.averages:
                self.reduce.averages[bucket.index] = self.compute(bucket.index)
                self.network.averaged(self.epoch, self.count, bucket.index, self.weights)
            bucket.average.copy_(self.reduce.averages[bucket.index])
            self.network.distort(self.node, bucket.index, bucket.average)
            self.completed(bucket.index)
        return not self.left

    def compute(self, index: int) -> torch.Tensor:
        average: torch.Tensor | None = None
        for one in self.peers:
            if self.weights[one]:
                part = self.coded(self.reduce.entries[one][0][index].values) * self.weights[one]
                average = part if average is None else average + part
        assert average is not None
        return self.coded(average)

    def coded(self, values: torch.Tensor) -> torch.Tensor:
        codec = self.network.codec
        if codec is None:
            return values
        data, out = torch.empty(codec.encoded_bytes(len(values)), dtype=torch.uint8), torch.empty_like(values)
        codec.encode(values, data)
        codec.decode(data, out)
        return out


class MemoryEngine:
    """Engine of one node for threads. `at_call`: runs before each call, to kill or hang the node there."""

    def __init__(self, network: MemoryNetwork, node: str) -> None:
        self.network, self.node = network, node
        self.group: EpochGroup | None = None
        self.is_aborted = False
        self.at_call: Callable[[str], None] = lambda name: None

    def open(self, group: EpochGroup, timeout_s: float) -> None:
        self.group = group
        self._finish("open", lambda: OpenCall(self.network, self.node, group), timeout_s)

    def exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        group = self._opened()
        call = self._finish("exchange", lambda: ExchangeCall(self.network, self.node, group, payload), timeout_s)
        assert isinstance(call, ExchangeCall)
        return call.result

    def reduce(
        self,
        round_number: int,
        buckets: Sequence[Bucket],
        weights: Sequence[float],
        timeout_s: float,
        completed: Callable[[int], None],
    ) -> None:
        group = self._opened()
        self._finish(
            "reduce", lambda: ReduceCall(self.network, self.node, group, buckets, weights, completed), timeout_s
        )

    def _opened(self) -> EpochGroup:
        assert self.group is not None
        return self.group

    def _finish(self, name: str, begin: Callable[[], PendingCall], timeout_s: float) -> PendingCall:
        self.at_call(name)
        network = self.network
        with network.changed:
            self._check()
            call = begin()
            network.changed.notify_all()
            while not call.poll():
                self.at_call(f"in {name}")
                network.changed.notify_all()
                if call.missing() and not network.changed.wait_for(lambda: self._may_move(call), timeout_s):
                    call.fail(call.missing(), "silent")
                self._check()
            return call

    def _may_move(self, call: PendingCall) -> bool:
        gone = self.network.dead | set(call.log.lost)
        return not call.missing() or bool(gone & set(call.peers)) or self.is_aborted

    def _check(self) -> None:
        self.network.changed.wait_for(lambda: self.node not in self.network.hung or self.node in self.network.dead)
        if self.node in self.network.dead:
            raise NodeKilledError
        if self.is_aborted:
            self.network.leave(self.node, [])
            raise GroupAbortedError("aborted")

    def abort(self) -> None:
        with self.network.changed:
            self.is_aborted = True
            self.network.changed.notify_all()

    def close(self) -> None:
        self.network.leave(self.node, [])

    @property
    def traffic(self) -> EngineTraffic:
        return EngineTraffic()


class MemoryTransfer:
    """Reads of peers' outer states by node `node`."""

    def __init__(self, network: MemoryNetwork, node: str) -> None:
        self.network, self.node = network, node

    def describe(self, peer: Peer) -> StateDescription:
        return StateDescription.decode(self.network.source(self.node, peer.node).describe().encode())

    def read(self, peer: Peer, request: PartRequest) -> torch.Tensor:
        return self.network.source(self.node, peer.node).read(request)

    def close(self) -> None:
        """End nothing: each read ends at once."""
