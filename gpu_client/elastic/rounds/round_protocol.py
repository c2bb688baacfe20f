"""Run the rounds of one node among the members of an epoch, as a generator of actions (`round_actions.py`).

All members exchange their statuses in lockstep and decide alike (`round_decisions.py`). A failure of the engine ends
the group; the unfinished round then continues in the group of the next epoch.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from baton.contract.elastic.data import DataProgress
from baton.contract.elastic.world import MAX_LINK_MBIT_S, JoinRequest, NodeReport, RoundReport
from gpu_client.elastic.engines.engine import Bucket, EpochGroup
from gpu_client.elastic.errors import PeerLostError, StateLostError
from gpu_client.elastic.outer_optimizer import combine_hashes
from gpu_client.elastic.recovery.part_reader import PartNotAskedError
from gpu_client.elastic.recovery.state_transfer import PartRequest
from gpu_client.elastic.rounds.epoch_protocol import (
    MAX_FETCH_FAILURES,
    ElasticEvent,
    EpochProtocol,
    RoundTiming,
    Steps,
)
from gpu_client.elastic.rounds.local_progress import Contribution
from gpu_client.elastic.rounds.member_status import MemberStatus
from gpu_client.elastic.rounds.outer_replica import OuterReplica
from gpu_client.elastic.rounds.round_actions import (
    ExchangeStatus,
    FetchParts,
    OpenGroup,
    ReduceBuckets,
    Sleep,
)
from gpu_client.elastic.rounds.round_decisions import (
    Abandon,
    CatchUp,
    Conclude,
    Dismiss,
    GiveUp,
    Hurry,
    Reduce,
    Reform,
    choose_repairs,
    compute_grace_s,
    decide,
    decide_unfinished,
    normalize_weights,
)
from gpu_client.elastic.rounds.world_metrics import (
    Orders,
    RoundObserver,
    SilentObserver,
    measure_link,
    measure_round,
    reduce_metrics,
)
from gpu_client.elastic.rounds.world_steward import WorldSteward

PARTS_BETWEEN_TICKS = 64
MAX_CATCH_UP_S = 30.0
"""Longest time that the members of a group wait for a member that fetches the group's state."""
MAX_REPAIRS = 5
"""Comparisons of one round after which the members whose hashes still differ are lost."""
MAX_REPAIR_S = 8.0
"""Time after which a member reads no further repairs before the next comparison, for which the others wait."""
REMEMBERED_LAGS = 64
MAX_COMMITTED_ORDERS = 16
"""Orders of a committed round that a status repeats, beside as many of the next round and the settings for joiners."""
MAX_SENT_SPANS = 1000
"""Size of the largest counted data that fits into a status; at the end of the data, a few spans are left."""


class RoundProtocol:
    """Rounds of one node. `clock`: monotonic seconds. `traffic`: bytes that the engine has sent."""

    def __init__(
        self,
        request: JoinRequest,
        replica: OuterReplica,
        *,
        clock: Callable[[], float],
        timing: RoundTiming,
        tell: Callable[[ElasticEvent], None],
        traffic: Callable[[], int] = lambda: 0,
        observer: RoundObserver | None = None,
    ) -> None:
        self.node = request.node
        self.epochs = EpochProtocol(request, replica, timing, tell)
        self._replica = replica
        self._progress = replica.progress
        self._clock = clock
        self._timing = timing
        self._traffic = traffic
        self._observer: RoundObserver = observer or SilentObserver()
        self._offered: Contribution | None = None
        """Contribution of the newest status, which the next round takes."""
        self._is_new = False
        """This node has joined a training group, which would wait for the rest of the node's first inner steps."""
        self._leaving_at: float | None = None
        """Time at which this node has asked the others for its last round."""
        self._lags_s: deque[float] = deque(maxlen=REMEMBERED_LAGS)
        self.steward = WorldSteward(self.node, clock, timing)
        self._committed_at = clock()
        self._reduced: dict[str, float] = {}
        """Metrics of the newest round that has begun, over its contributors."""
        self._concluding: Sequence[str] = ()
        """Members of the newest round whose averages this node has announced."""
        self._committed: tuple[Mapping[str, Any], ...] = ()
        """Orders of the newest committed round, for members that a death has kept from the commit."""

    def run(self) -> Steps[None]:
        """Take part in rounds until the node leaves or the world ends."""
        while (group := (yield from self.epochs.next_group())) is not None:
            try:
                yield OpenGroup(group)
                names = ", ".join(one.node for one in group.peers)
                self.epochs.tell("epoch_opened", f"epoch {group.epoch} has {group.size} members: {names}")
                yield from self._take_part(group)
            except PeerLostError as error:
                self.epochs.note_loss(error)

    def _take_part(self, group: EpochGroup) -> Steps[None]:
        """Follow the decisions of the group until a newer epoch, or until this node has left."""
        failures, began_at = 0, self._clock()
        while True:
            statuses = yield from self._meet(group)
            decision = decide(statuses, group.epoch)
            if isinstance(decision, GiveUp):
                raise StateLostError(
                    "all nodes with a complete outer state are lost, while the others fetched the state"
                )
            if isinstance(decision, CatchUp):
                target = next(one for one in statuses if one.node == decision.reference)
                arrived = yield from self._catch_up(group, statuses, target)
                failures = 0 if arrived else failures + 1
                # While no member has had the group's state, no member may exclude this one before its lease ends.
                is_late = self._lacks(target) and target.synced_epoch and self._clock() > began_at + MAX_CATCH_UP_S
                if is_late or failures >= MAX_FETCH_FAILURES:
                    yield from self._leave_behind(group, target.round, is_late=bool(is_late))
                    return
            else:
                self._note_epoch(group, statuses)
            if isinstance(decision, Reform):
                return
            if isinstance(decision, Reduce):
                yield from self._reduce(group, decision, statuses)
                yield from self._conclude(group, decision.members)
                continue
            if isinstance(decision, Conclude):
                yield from self._conclude(group, decision.members)
                continue
            if isinstance(decision, Abandon):
                self._replica.abandon()
            elif isinstance(decision, Dismiss):
                self._progress.finish_round(included=0)
            elif isinstance(decision, Hurry) or (self._is_new and any(one.ready for one in statuses)):
                self._progress.notify(is_hurried=self._offered is None)
            if all(one.leaving and not one.ready for one in statuses):
                yield from self.steward.conclude(group, statuses)
                return
            yield from self.steward.work(group, statuses, self._replica.state.round)
            # The main thread may be waiting: the last member's delta should be seen soon.
            yield Sleep(self._timing.tick_s if self._offered is None else self._timing.tick_s / 5)

    # --- statuses ----------------------------------------------------------------------------------------------------

    def _describe(
        self, group: EpochGroup, done: int | None = None, hashes: Sequence[int] = (), *, enters: bool = False
    ) -> MemberStatus:
        replica, progress = self._replica, self._progress
        # A status with the hashes of all buckets has no room for orders.
        orders = () if hashes else self._observer.describe(leads=group.rank == 0, enters=enters)
        with progress.changed:
            offered = self._offered = progress.contribution
            leaving = progress.is_leaving or (progress.is_stopping and offered is not None)
            now = self._clock()
            self._leaving_at = (self._leaving_at or now) if leaving else None
            return MemberStatus(
                self.node,
                replica.state.round,
                replica.hash,
                synced_epoch=self.epochs.synced_epoch,
                complete=not progress.is_adopting,
                ready=offered is not None,
                weight=0 if offered is None else progress.weigh(offered, replica.fragment_of(replica.state.round + 1)),
                ready_for_s=0.0 if offered is None else now - offered.ready_at,
                step_s=progress.step_s,
                leaving=leaving,
                leaving_for_s=0.0 if self._leaving_at is None else now - self._leaving_at,
                next_epoch=self.steward.next_epoch,
                joining=self.steward.is_joining,
                cut_off=self.steward.is_cut_off,
                grace_s=compute_grace_s(self._lags_s),
                metrics={} if offered is None or hashes else progress.metrics,
                orders=tuple(orders),
                committed=self._committed if enters else (),
                data=None if hashes else self._describe_data(offered),
                idle=progress.is_idle,
                attempt=None if replica.unfinished is None else replica.unfinished.status(),
                done=done,
                hashes=tuple(hashes),
            )

    def _note_epoch(self, group: EpochGroup, statuses: Sequence[MemberStatus]) -> None:
        """Note that all members have one state, and what members without a delta have counted."""
        if self.epochs.synced_epoch != group.epoch:
            joins = any(one.synced_epoch for one in statuses) and not self.epochs.synced_epoch
            self._is_new = joins or self._is_new
            self.epochs.synced_epoch = group.epoch
            self._progress.notify(is_started=True, is_apart=False)
        if decide_unfinished(statuses) is None:
            self._replica.concluded_epoch = group.epoch
        for one in statuses:
            if one.data is not None and not one.ready:
                self._replica.count(one.data)

    def _describe_data(self, offered: Contribution | None) -> DataProgress | None:
        """Return what the delta has trained; without a delta and further data, all that is counted."""
        if offered is not None:
            return offered.data
        counted, progress = self._replica.data, self._progress
        is_short = len(counted.finished) + len(counted.offsets) <= MAX_SENT_SPANS
        return counted if is_short and (progress.is_idle or progress.is_leaving) else None

    def _meet(self, group: EpochGroup) -> Steps[list[MemberStatus]]:
        """Exchange statuses between two rounds; the first ones of an epoch bring this node up to date."""
        enters = self.epochs.synced_epoch != group.epoch
        statuses = yield from self._exchange(group, self._describe(group, enters=enters))
        if enters:
            self._observer.enter([one.orders for one in statuses])
        return statuses

    def _exchange(self, group: EpochGroup, own: MemberStatus) -> Steps[list[MemberStatus]]:
        statuses = [own] if group.size == 1 else self._decode(group, (yield ExchangeStatus(own.encode())))
        for one in statuses:
            fits = not one.hashes or len(one.hashes) == len(self._replica.buckets)
            if one.attempt is not None:
                fits = fits and len(one.attempt.tags) == len(self._replica.places_of(one.attempt.round))
            if not fits:
                raise PeerLostError([one.node], "protocol", "the status is about other buckets")
        behind = [one.node for one in statuses if one.behind]
        if behind:
            raise PeerLostError(behind, "behind", "the newest round did not reach the member in time, which fetches on")
        self._replica.keeps_averages = any(one.joining for one in statuses)
        return statuses

    @staticmethod
    def _decode(group: EpochGroup, payloads: Sequence[bytes]) -> list[MemberStatus]:
        """Read the statuses. Raises PeerLostError for a peer that sends anything else."""
        statuses = []
        for peer, payload in zip(group.peers, payloads, strict=True):
            try:
                status = MemberStatus.decode(payload)
            except ValueError as error:
                raise PeerLostError([peer.node], "protocol", str(error)) from error
            if status.node != peer.node:
                raise PeerLostError([peer.node], "protocol", f"the status is of node {status.node}")
            statuses.append(status)
        return statuses

    # --- one round ---------------------------------------------------------------------------------------------------

    def _reduce(self, group: EpochGroup, decided: Reduce, statuses: Sequence[MemberStatus]) -> Steps[None]:
        replica, progress = self._replica, self._progress
        self._concluding = decided.members
        if not decided.kept:
            waits = [one.ready_for_s for one in statuses if one.ready]
            self._lags_s.extend(max(waits) - one for one in waits)
            self._reduced = reduce_metrics(statuses, decided.weights, self._observer.reducers)
        progress.begin_round()
        data = {one.node: one.data for one in statuses if one.data is not None}
        unfinished = replica.begin_reduce(decided, group.epoch, self._offered, data)
        own = unfinished.contribution
        missing = [bucket for place, bucket in enumerate(unfinished.places) if place not in decided.kept]
        parts = {index: replica.buckets[index] for index in missing}
        buckets = tuple(
            Bucket(
                index,
                # A node without a part in the average may be computing its next delta at this moment.
                progress.prepare(part, is_exact=group.size == 1) if own else progress.delta[part],
                replica.average[part],
            )
            for index, part in parts.items()
        )
        if group.size == 1:
            for bucket in buckets:
                bucket.average.copy_(bucket.values)
                replica.complete(bucket.index)
            return
        weights = normalize_weights(decided.weights, [one.node for one in group.peers])
        began_at, sent_bytes = self._clock(), self._traffic()
        try:
            yield ReduceBuckets(decided.round, buckets, tuple(weights), replica.complete)
        finally:
            # A try that loses a peer has used the line, too.
            unfinished.reduce_s += self._clock() - began_at
            unfinished.sent_bytes += self._traffic() - sent_bytes

    def _conclude(self, group: EpochGroup, members: Sequence[str]) -> Steps[None]:
        """Commit once all `members` have announced all averages and equal hashes."""
        replica = self._replica
        unfinished = replica.unfinished if self.node in members else None
        self._concluding = members
        if unfinished:
            tokens = sum(unfinished.tokens.values())
            number, round_s = unfinished.round, self._clock() - self._committed_at
            measured = measure_round(number, group.size, tokens, round_s=round_s, reduced=self._reduced)
            self._observer.observe(number, {**self._reduced, **measured})
        for _ in range(MAX_REPAIRS):
            own = unfinished.candidates if unfinished else []
            done = replica.candidate[1] if unfinished and replica.candidate else None
            statuses = yield from self._exchange(group, self._describe(group, done))
            if len({one.done for one in statuses if one.node in members}) == 1:
                if unfinished:
                    self._commit(group, statuses)
                else:
                    self._observer.commit(0, [one.orders for one in statuses], saves=False)
                return
            statuses = yield from self._exchange(group, self._describe(group, done, own))
            hashes = {one.node: one.hashes for one in statuses if one.node in members}
            silent = [node for node, own in hashes.items() if not own]
            if silent:
                raise PeerLostError(silent, "protocol", "the status has no hashes")
            repairs = choose_repairs(hashes)
            self.epochs.tell(
                "hashes_differ", f"{len(repairs)} buckets take the bytes of {', '.join({*repairs.values()})}"
            )
            if unfinished:
                unfinished.redone.update(repairs)
                yield from self._repair(group, statuses, repairs)
        wrong = [
            node
            for node, own in hashes.items()
            if any(own[bucket] != hashes[right][bucket] for bucket, right in repairs.items())
        ]
        message = f"the hashes of {', '.join(wrong)} differ after repairs"
        raise PeerLostError([node for node in wrong if node != self.node], "protocol", message)

    def _repair(self, group: EpochGroup, statuses: Sequence[MemberStatus], repairs: dict[int, str]) -> Steps[None]:
        replica = self._replica
        assert replica.unfinished is not None
        number, candidates = replica.unfinished.round, replica.unfinished.candidates
        hashes = {one.node: one.hashes for one in statuses}
        peers = {one.node: one for one in group.peers}
        wrong = [bucket for bucket, node in repairs.items() if candidates[bucket] != hashes[node][bucket]]
        until = self._clock() + MAX_REPAIR_S
        while wrong and self._clock() < until:
            part, late = wrong[:PARTS_BETWEEN_TICKS], []
            requests = tuple((peers[repairs[bucket]], PartRequest("candidate", number, bucket)) for bucket in part)
            results = yield FetchParts(requests)
            for bucket, values in zip(part, results, strict=True):
                if isinstance(values, torch.Tensor) and values.numel() == 2 * replica.size_of(bucket):
                    replica.repair(bucket, values)
                elif values is None or isinstance(values, PartNotAskedError):
                    late.append(bucket)
            wrong[:PARTS_BETWEEN_TICKS] = late

    def _finish(self, orders: Sequence[Orders]) -> None:
        """Commit the averages, with the orders for all members and this node's turn to save."""
        replica, members = self._replica, self._concluding
        assert replica.unfinished is not None
        number = replica.unfinished.round
        self._is_new = False
        turn, is_last = number // replica.fragments, number % replica.fragments == 0
        saves = is_last and members[turn % len(members)] == self.node
        # The main thread may go on as soon as the round is committed, and all nodes act after the same round.
        self._observer.commit(number, orders, saves=saves)
        with self._progress.changed:
            replica.commit()
            self._progress.notify(is_checkpoint_due=saves)
        self._committed_at = self._clock()
        found = [one for some in orders for one in some]
        unique = [one for place, one in enumerate(found) if one not in found[:place]]
        self._committed = tuple(unique[:MAX_COMMITTED_ORDERS])

    def _commit(self, group: EpochGroup, statuses: Sequence[MemberStatus]) -> None:
        unfinished = self._replica.unfinished
        assert unfinished is not None
        number, tokens, committed_at = unfinished.round, unfinished.tokens, self._committed_at
        self._finish([one.orders for one in statuses])
        one = RoundReport(
            round=number,
            epoch=group.epoch,
            contributors=len(tokens),
            tokens=sum(tokens.values()),
            round_s=self._committed_at - committed_at,
            reduce_s=unfinished.reduce_s,
            sent_bytes=unfinished.sent_bytes,
            repaired=len(unfinished.redone),
        )
        self.steward.note_round(one, [_report_node(status, tokens) for status in statuses])
        self._progress.world_metrics = {
            **measure_round(number, group.size, one.tokens, round_s=one.round_s, reduced=self._reduced),
            **measure_link(one.sent_bytes, one.reduce_s),
        }
        self.epochs.tell("round_committed", f"{len(tokens)} of {group.size} members contributed")

    # --- members behind the group ------------------------------------------------------------------------------------

    def _lacks(self, target: MemberStatus) -> bool:
        return (self._replica.state.round, self._replica.hash) != target.state or self._progress.is_adopting

    def _leave_behind(self, group: EpochGroup, number: int, *, is_late: bool) -> Steps[None]:
        """Let the others go on without this node, which cannot reach their state, of round `number`, in this group."""
        late = f"the state of round {number} has not arrived within {MAX_CATCH_UP_S:.0f} s: the line is too slow"
        self.epochs.give_up(late if is_late else "no peer gives the outer state of the group")
        own = MemberStatus(self.node, self._replica.state.round, self._replica.hash, complete=False, behind=True)
        with contextlib.suppress(PeerLostError):
            yield from self._exchange(group, own)
        yield Sleep(self._timing.retry_s)

    def _catch_up(self, group: EpochGroup, statuses: Sequence[MemberStatus], target: MemberStatus) -> Steps[bool]:
        """Bring this node closer to the state of `target`; return False if no part has arrived or is on the way."""
        replica = self._replica
        if not self._lacks(target):
            return True
        if replica.candidate == target.state:
            # The reference has committed the averages that this member holds, too.
            self._finish([target.committed])
            return True
        holders = [
            peer
            for peer, one in zip(group.peers, statuses, strict=True)
            if one.state == target.state and one.complete and one.node != self.node
        ]
        found = yield from self.epochs.describe(holders)
        same = {peer: one for peer, one in found.items() if (one.round, combine_hashes(one.hashes)) == target.state}
        if not same:
            return False
        parts = yield from self.epochs.fetch_parts(next(iter(same.values())), list(same), PARTS_BETWEEN_TICKS)
        return parts.goes_on


def _report_node(one: MemberStatus, tokens: Mapping[str, int]) -> NodeReport:
    # Metrics of a member have any value, and a report with an impossible one would end the reporting member.
    speed = one.metrics.get("world.link_mbit_s", math.nan)
    return NodeReport(
        node=one.node,
        state="leaving" if one.leaving else "training",
        tokens=tokens.get(one.node, 0),
        link_mbit_s=speed if 0 <= speed <= MAX_LINK_MBIT_S else None,
    )
