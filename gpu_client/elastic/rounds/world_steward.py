"""Keep the world up to date beside the rounds: admit joiners, let leaving members go, report rounds.

One member, the steward, calls the control plane while the group exchanges statuses, which never wait for an answer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from baton.contract.elastic.world import (
    EpochProposal,
    LostNode,
    NodeReport,
    NodeView,
    RoundReport,
    WorldReport,
    WorldView,
)
from gpu_client.elastic.engines.engine import EpochGroup
from gpu_client.elastic.errors import WorldCallError, WorldUnavailableError
from gpu_client.elastic.rounds.epoch_protocol import RoundTiming, Steps, can_enter
from gpu_client.elastic.rounds.member_status import MemberStatus
from gpu_client.elastic.rounds.round_actions import CallWorld, ReadWorld, StartWorldCall, TakeWorldAnswer, WorldRequest

log = logging.getLogger("baton.elastic")

MAX_REPORTED = 32
CUT_OFF_S = 30.0
"""Time after a call without an answer in which another member calls."""
MAX_ADMISSION_ROUNDS, MAX_ADMISSION_S = 2, 60.0
"""Rounds and time after which a joiner that lacks the newest round is admitted: its fetch may be slower than the
rounds, or may need the group."""


class WorldSteward:
    """Background calls of node `node`."""

    def __init__(self, node: str, clock: Callable[[], float], timing: RoundTiming) -> None:
        self.next_epoch = 0
        """Newest epoch that this node knows of."""
        self.is_joining = False
        """A node is fetching the outer state."""
        self._node = node
        self._clock = clock
        self._timing = timing
        self._view: WorldView | None = None
        self._request: WorldRequest | None = None
        """Running call."""
        self._viewed_at = self._reported_at = self._failed_at = -float("inf")
        self._reported_round = 0
        self._ready_since: dict[str, tuple[int, float]] = {}
        """Round and time at which a joiner was first seen to be ready."""
        self._rounds: deque[RoundReport] = deque(maxlen=MAX_REPORTED)
        self._nodes: list[NodeReport] = []

    @property
    def is_cut_off(self) -> bool:
        """Return True after a call without an answer: another member should call."""
        return self._clock() < self._failed_at + CUT_OFF_S

    def note_round(self, one: RoundReport, nodes: Sequence[NodeReport]) -> None:
        """Remember a committed round for the next report."""
        self._rounds.append(one)
        self._nodes = list(nodes)

    def work(self, group: EpochGroup, statuses: Sequence[MemberStatus], number: int) -> Steps[None]:
        """Take the answer of the running call, and begin the next call.

        One member calls: the first one that wants to leave, or else the first one that stays. Members that reach the
        control plane come first.
        """
        if self._request is not None:
            yield from self._take_answer(self._request)
        ordered = sorted(statuses, key=lambda one: one.cut_off)
        left = [one.node for one in ordered if one.leaving and not one.ready]
        staying = [one.node for one in ordered if not one.leaving]
        if (left or staying)[:1] != [self._node]:
            self.is_joining = False
        elif self._request is None:
            self._request = self._choose(group, statuses, number)
            if self._request is not None:
                yield StartWorldCall(self._request)

    def conclude(self, group: EpochGroup, statuses: Sequence[MemberStatus]) -> Steps[None]:
        """Report the last rounds, which no later report would contain, as the first of the last members."""
        rounds = self._unreported
        if rounds and statuses[0].node == self._node:
            try:
                yield CallWorld(WorldReport(node=self._node, epoch=group.epoch, rounds=rounds, nodes=self._nodes))
            except WorldCallError as error:
                log.warning("the last %d rounds are not reported: %s", len(rounds), error)

    @property
    def _unreported(self) -> list[RoundReport]:
        return [one for one in self._rounds if one.round > self._reported_round]

    def _take_answer(self, request: WorldRequest) -> Steps[None]:
        answer = yield TakeWorldAnswer()
        if answer is None:
            return
        self._request = None
        if not isinstance(answer, WorldView):
            # The view is out of date, and the next call reads the world.
            self._view = None
            if isinstance(answer, WorldUnavailableError):
                self._failed_at = self._clock()
            return
        self._view = answer
        self.next_epoch = max(self.next_epoch, answer.epoch)
        self.is_joining = any(one.lease_live for one in answer.joining)
        if isinstance(request, WorldReport):
            self._reported_round = max(one.round for one in request.rounds)

    def _choose(self, group: EpochGroup, statuses: Sequence[MemberStatus], number: int) -> WorldRequest | None:
        now = self._clock()
        if self._view is not None and self._view.epoch == group.epoch:
            proposal = self._plan_epoch(self._view, statuses, number)
            if proposal is not None:
                return proposal
        rounds = self._unreported
        if rounds and now >= self._reported_at + self._timing.report_s:
            self._reported_at = now
            return WorldReport(node=self._node, epoch=group.epoch, rounds=rounds, nodes=self._nodes)
        if now >= self._viewed_at + self._poll_s:
            self._viewed_at = now
            return ReadWorld()
        return None

    @property
    def _poll_s(self) -> float:
        """Return the time between two views of the world."""
        view = self._view
        may_enter = view is not None and any(one.lease_live and can_enter(view, one) for one in view.joining)
        return self._timing.admission_s if may_enter else self._timing.poll_s

    def _list_ready(self, view: WorldView, number: int) -> list[NodeView]:
        """Return the joiners to admit.

        A joiner without the newest round fetches the round while the members train; in the group they would wait.
        """
        now = self._clock()
        ready = [one for one in view.joining if one.ready and one.lease_live]
        self._ready_since = {one.node: self._ready_since.get(one.node, (number, now)) for one in ready}

        def is_late(one: NodeView) -> bool:
            since_round, since = self._ready_since[one.node]
            return number >= since_round + MAX_ADMISSION_ROUNDS or now >= since + MAX_ADMISSION_S

        return [one for one in ready if one.round == number or is_late(one)]

    def _plan_epoch(self, view: WorldView, statuses: Sequence[MemberStatus], number: int) -> EpochProposal | None:
        """Return the epoch without this node, if the node has left, or with ready joiners; None if nothing changes.

        A joiner replaces the member at its seat, whose attempt has ended, although the process may live on.
        """
        ready = self._list_ready(view, number)
        seats = {one.seat for one in ready}
        causes = {one.node: "replaced" for one in view.members if one.seat in seats}
        causes |= {one.node: "left" for one in statuses if one.node == self._node and one.leaving}
        stay = [one for one in view.members if one.node not in causes]
        # At most as many joiners as members: so the members can exclude joiners that fail before they have the state.
        joiners = ready[: min(len(stay), max(0, view.max - len(stay)))]
        if not stay or not (causes or joiners):
            return None
        return EpochProposal(
            node=self._node,
            epoch=view.epoch,
            members=[one.node for one in (*stay, *joiners)],
            round=number,
            lost=[LostNode(node=node, cause=cause) for node, cause in causes.items()],
        )
