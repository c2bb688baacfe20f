"""Lead a node from any situation into a group: join, fetch the outer state, propose epochs without lost peers.

The methods are generators of actions (`round_actions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from baton.contract.elastic.world import EpochProposal, JoinRequest, LostNode, NodeView, WorldView
from gpu_client.elastic.engines.engine import EpochGroup, Peer
from gpu_client.elastic.errors import (
    NoMajorityError,
    NotAMemberError,
    PeerLostError,
    WorldChangedError,
    WorldUnavailableError,
)
from gpu_client.elastic.outer_optimizer import hash_values
from gpu_client.elastic.recovery.catch_up import choose_target, plan_parts
from gpu_client.elastic.recovery.part_reader import PartNotAskedError
from gpu_client.elastic.recovery.state_transfer import PartRequest, StateDescription
from gpu_client.elastic.rounds.outer_replica import OuterReplica
from gpu_client.elastic.rounds.round_actions import (
    Action,
    CallWorld,
    DescribePeers,
    FetchParts,
    ReadWorld,
    Sleep,
    WorldRequest,
)

Result = TypeVar("Result")
Steps = Generator[Action, Any, Result]

PREFETCHED_PARTS = 64
MAX_FETCH_FAILURES = 5
REFUSALS_BEFORE_RETRY = 10
"""Refused proposals after which a minority proposes all members again, because a partition may have healed."""


@dataclass(frozen=True)
class RoundTiming:
    """Pauses of the round thread in seconds.

    poll_s: between the views of the world. admission_s: between the views of a joining node and of the member that
    proposes the node's admission: once the node is admitted, the members wait for the node.
    """

    tick_s: float = 0.25
    poll_s: float = 2.0
    admission_s: float = 0.5
    report_s: float = 15.0
    retry_s: float = 1.0


@dataclass(frozen=True)
class ElasticEvent:
    """Incident of an elastic training for the log and for the user."""

    kind: str
    round: int
    message: str


@dataclass(frozen=True)
class PartRead:
    """Read of a part. base: round of the bucket's values before. state_hash: hash of the bucket in the target state."""

    peer: Peer
    part: PartRequest
    base: int
    state_hash: int


@dataclass(frozen=True)
class Fetched:
    """Effect of one fetch. ended: share of the reads that have ended. goes_on: a part has arrived or is on the way."""

    ended: float
    goes_on: bool


class EpochProtocol:
    """Membership of one node."""

    def __init__(
        self, request: JoinRequest, replica: OuterReplica, timing: RoundTiming, tell: Callable[[ElasticEvent], None]
    ) -> None:
        self.node = request.node
        self.synced_epoch = 0
        """Newest epoch in which the node had the group's state; 0 after an exclusion."""
        self.epoch = 0
        """Newest epoch whose group the node has opened, or has failed to open."""
        self._request = request
        self._replica = replica
        self._progress = replica.progress
        self._timing = timing
        self._tell = tell
        self._view: WorldView | None = None
        self._lost: dict[str, LostNode] = {}
        self._refusals = 0
        self._is_cut_off = False
        self._reads: list[PartRead] = []
        """Reads that go on."""
        self._has_fetched = False
        """The node has had the newest state of live members, or has left the rest to the group."""
        self._needs_newest = False
        """The node has left a group that it could not catch up with, and asks for admission with the newest state."""

    def tell(self, kind: str, message: str) -> None:
        """Report an incident."""
        self._tell(ElasticEvent(kind, self._replica.state.round, message))

    def note_loss(self, error: PeerLostError) -> None:
        """Remember the peers that the present epoch has lost."""
        message = error.message[:256]
        self._lost |= {node: LostNode(node=node, cause=error.cause, message=message) for node in error.nodes}
        self._lost.pop(self.node, None)
        self.tell("peer_lost", str(error))

    def give_up(self, message: str) -> None:
        """Note that the group does not wait any longer for this node's fetch of the state."""
        self._has_fetched, self._needs_newest = False, True
        self.tell("behind", f"{message}; this node leaves the group, and joins again once it has the newest round")

    def next_group(self) -> Steps[EpochGroup | None]:
        """Return the group of the next epoch with this node; None if the node has left, or if the world has ended."""
        view: WorldView | None = None
        refused_epoch = -1
        while True:
            if self._progress.is_leaving and self._progress.contribution is None:
                return None
            try:
                if view is None:
                    view = yield from self._call(ReadWorld())
                    if view.epoch == refused_epoch:
                        yield Sleep(self._timing.tick_s)
                if view.state == "ended":
                    return None
                if self._find(view.members) is None:
                    view = yield from self._wait_for_admission(view)
                elif view.epoch > self.epoch:
                    self.epoch, self._refusals = view.epoch, 0
                    self._lost.clear()
                    return _make_group(view, self.node)
                else:
                    view = yield from self._propose_survivors(view)
            except WorldUnavailableError as error:
                if not self._is_cut_off:
                    self.tell("world_unavailable", str(error))
                self._is_cut_off = True
                yield from self._pause_apart()
                view = None
            except (WorldChangedError, NotAMemberError, NoMajorityError) as error:
                refused_epoch = view.epoch if view else -1
                view = None
                if isinstance(error, NotAMemberError):
                    # Members with expired leases may renew these, until a sweep ends their attempts.
                    yield Sleep(self._timing.poll_s)

    def _find(self, nodes: Sequence[NodeView]) -> NodeView | None:
        return next((one for one in nodes if one.node == self.node), None)

    def _pause_apart(self) -> Steps[None]:
        """Release the main thread from waiting for a round, and sleep one retry interval."""
        self._progress.notify(is_apart=True)
        yield Sleep(self._timing.retry_s)

    def _call(self, request: WorldRequest) -> Steps[WorldView]:
        view: WorldView = yield CallWorld(request)
        self._is_cut_off = False
        return view

    # --- members -----------------------------------------------------------------------------------------------------

    def _propose_survivors(self, view: WorldView) -> Steps[WorldView]:
        """Propose the next epoch without the lost peers, or wait for the proposal of another member."""
        lost = self._lost
        if not self.synced_epoch and self.epoch > 1:
            # Joiners that lack the state must not outvote the holders of the state while these may be alive.
            lost = {one.node: self._lost[one.node] for one in view.members if one.node in lost and not one.lease_live}
        is_retry = self._refusals % REFUSALS_BEFORE_RETRY == REFUSALS_BEFORE_RETRY - 1
        if not lost and not is_retry:
            self._refusals += 1
            yield from self._pause_apart()
            return (yield from self._call(ReadWorld()))
        excluded = {} if is_retry else lost
        members = [one for one in view.members if one.node not in excluded]
        try:
            return (yield from self._call(self._propose(view, members, list(excluded.values()))))
        except NoMajorityError as error:
            self._refusals += 1
            self.tell("no_majority", str(error))
            yield from self._pause_apart()
            raise

    def _propose(self, view: WorldView, members: Sequence[NodeView], lost: Sequence[LostNode] = ()) -> EpochProposal:
        names = [one.node for one in members]
        number = self._replica.state.round
        return EpochProposal(node=self.node, epoch=view.epoch, members=names, round=number, lost=list(lost))

    # --- joiners -----------------------------------------------------------------------------------------------------

    def _wait_for_admission(self, view: WorldView) -> Steps[WorldView]:
        """Fetch the outer state, ask to be admitted, and return the next view."""
        if self.synced_epoch:
            self.synced_epoch = 0
            self._has_fetched = self._needs_newest = False
            self.tell("excluded", f"epoch {view.epoch} goes on without this node, which joins again")
        self._progress.notify(is_apart=True)
        live = [_make_peer(one) for one in view.members if one.lease_live]
        found = "nothing"
        if live:
            known = self._find(view.joining)
            if not self._has_fetched and (known is None or known.ready):
                view = yield from self._call(self._join(ready=False))
            found = yield from self._fetch_from(live, once=self._has_fetched)
            # A peer without an answer has to wait for the group: there, members bring each other to one state.
            self._has_fetched = found == "newest" or not self._needs_newest
            if not self._has_fetched:
                yield Sleep(self._timing.poll_s)
                return (yield from self._call(ReadWorld()))
        known = self._find(view.joining)
        if known is None or not known.ready or known.round != self._replica.state.round:
            return (yield from self._call(self._join(ready=True)))
        if found == "part":
            # The fetch has taken its time, and the members may have admitted this node meanwhile.
            return (yield from self._call(ReadWorld()))
        ready = [one for one in view.joining if one.ready and one.lease_live][: view.max]
        if not live and len(ready) >= view.min and known in ready:
            return (yield from self._call(self._propose(view, ready)))
        may_enter = bool(live) and can_enter(view, known)
        yield Sleep(self._timing.admission_s if may_enter else self._timing.poll_s)
        return (yield from self._call(ReadWorld()))

    def _join(self, *, ready: bool) -> JoinRequest:
        return self._request.model_copy(update={"ready": ready, "round": self._replica.state.round})

    def _fetch_from(self, peers: Sequence[Peer], *, once: bool) -> Steps[str]:
        """Approach the newest state of the peers, while they train on.

        once: by one fetch, because the members may admit this node at any time. Returns `newest` if the node has the
        state, `part` if the next fetch promises to bring more of the state, and `nothing` otherwise.
        Peers whose rounds are faster than the fetch, or who give no answer, are left alone after a while: in the group,
        members wait for each other's state.
        """
        least = len(self._replica.buckets)
        passes, patience = 0.0, 4 + 2 * least // PREFETCHED_PARTS
        while passes < patience:
            found = yield from self.describe(peers)
            if not found:
                return "nothing"
            target, holders = choose_target(found)
            if self._has(target):
                self._progress.notify(is_started=True)
                return "newest"
            fetched = yield from self.fetch_parts(target, holders, PREFETCHED_PARTS)
            left = len(self._replica.find_differences(target))
            if once and not self._has(target):
                return "part" if left and fetched.goes_on else "nothing"
            passes = 0.0 if left < least else passes + fetched.ended
            least = min(least, left)
        return "nothing"

    def describe(self, peers: Sequence[Peer]) -> Steps[dict[Peer, StateDescription]]:
        """Return the states of the peers that answer."""
        answers = yield DescribePeers(tuple(peers))
        found = {
            peer: one
            for peer, one in zip(peers, answers, strict=True)
            if isinstance(one, StateDescription) and len(one.hashes) == len(self._replica.buckets)
        }
        # A frozen peer would hold up its reads for minutes.
        self._reads = [one for one in self._reads if one.peer in found]
        return found

    def _has(self, target: StateDescription) -> bool:
        is_equal = self._replica.state.round == target.round and not self._replica.find_differences(target)
        return is_equal and not self._progress.is_adopting

    def fetch_parts(self, target: StateDescription, holders: Sequence[Peer], limit: int) -> Steps[Fetched]:
        """Read at most `limit` differing parts of the target's state, besides the parts that are on the way."""
        replica = self._replica
        reads, read = self._reads, {one.part.bucket for one in self._reads}
        differing = [bucket for bucket in replica.find_differences(target) if bucket not in read]
        for peer, part in plan_parts(
            target, holders, differing, replica.rounds, limit - len(reads), fragments=replica.fragments
        ):
            reads.append(PartRead(peer, part, replica.rounds[part.bucket], target.hashes[part.bucket]))
        results = yield FetchParts(tuple((one.peer, one.part) for one in reads))
        self._reads = [one for one, values in zip(reads, results, strict=True) if values is None]
        goes_on = not reads or bool(self._reads)
        for one, values in zip(reads, results, strict=True):
            part = one.part
            size = replica.size_of(part.bucket)
            if not isinstance(values, torch.Tensor) or replica.rounds[part.bucket] != one.base:
                continue
            if part.kind == "average" and values.numel() == size:
                replica.replay(part.bucket, values, part.round)
                goes_on = True
            elif values.numel() == 2 * size and hash_values(*values.chunk(2)) == one.state_hash:
                replica.adopt(part.bucket, values, part.round)
                goes_on = True
        if not replica.find_differences(target) and replica.finish_adoption(target):
            self.tell("delta_dropped", "the group may have counted this node's last delta, therefore the delta is gone")
        ended = [one for one in results if one is not None and not isinstance(one, PartNotAskedError)]
        return Fetched(len(ended) / len(reads) if reads else 1.0, goes_on)


def can_enter(view: WorldView, joining: NodeView) -> bool:
    """Return whether the members can admit a node: to a free seat, or to the seat of a member."""
    return len(view.members) < view.max or any(one.seat == joining.seat for one in view.members)


def _make_peer(one: NodeView) -> Peer:
    return Peer(one.node, tuple(one.addresses), one.certificate)


def _make_group(view: WorldView, node: str) -> EpochGroup:
    rank = [one.node for one in view.members].index(node)
    return EpochGroup(view.epoch, tuple(_make_peer(one) for one in view.members), rank)
