"""A joining node is admitted with the newest round, and soon, because the members wait for an admitted node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baton.contract.elastic.world import EpochProposal, JoinRequest, NodeProgram, NodeView, WorldView
from gpu_client.elastic.engines.engine import EpochGroup, Peer
from gpu_client.elastic.outer_optimizer import OuterOptimizer, OuterState
from gpu_client.elastic.recovery.state_transfer import PartUnavailableError
from gpu_client.elastic.rounds.epoch_protocol import EpochProtocol, RoundTiming
from gpu_client.elastic.rounds.local_progress import LocalProgress
from gpu_client.elastic.rounds.member_status import MemberStatus
from gpu_client.elastic.rounds.outer_replica import OuterReplica
from gpu_client.elastic.rounds.round_actions import (
    CallWorld,
    DescribePeers,
    ReadWorld,
    Sleep,
    StartWorldCall,
    TakeWorldAnswer,
)
from gpu_client.elastic.rounds.world_steward import MAX_ADMISSION_S, WorldSteward

FIRST, SECOND, JOINER = "0.1.0000000a", "1.1.0000000b", "2.1.0000000c"
TIMING = RoundTiming()


def see(*joining: NodeView, most: int = 3) -> WorldView:
    members = [NodeView(node=node, seat=seat, member=True) for seat, node in enumerate((FIRST, SECOND))]
    return WorldView(
        job="j", state="training", epoch=4, round=7, min=1, max=most, nodes=[*members, *joining], advice=""
    )


def joining(number: int, *, ready: bool = True, seat: int = 2) -> NodeView:
    return NodeView(node=JOINER, seat=seat, member=False, ready=ready, round=number)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class StewardCalls:
    """Steward of the first member, whose calls a test answers."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._steward = WorldSteward(FIRST, self.clock, TIMING)
        self._group = EpochGroup(4, (Peer(FIRST), Peer(SECOND)), 0)
        self._statuses = [MemberStatus(node, 7, 1) for node in (FIRST, SECOND)]

    def work(self, number: int, answer: WorldView | None = None) -> Sequence[Any]:
        """Return the requests that the steward begins after an answer."""
        begun, result = [], None
        steps = self._steward.work(self._group, self._statuses, number)
        try:
            while True:
                action = steps.send(result)
                result = answer if isinstance(action, TakeWorldAnswer) else None
                if isinstance(action, StartWorldCall):
                    begun.append(action.request)
        except StopIteration:
            return begun

    def view(self, number: int, view: WorldView) -> Sequence[Any]:
        """Return the requests after a view of the world."""
        self.clock.now += TIMING.poll_s
        assert self.work(number) == [ReadWorld()]
        return self.work(number, view)


def test_a_joiner_with_the_newest_round_is_proposed_at_once() -> None:
    (proposal,) = StewardCalls().view(7, see(joining(7)))
    assert isinstance(proposal, EpochProposal) and proposal.members == [FIRST, SECOND, JOINER]


def test_a_joiner_behind_the_newest_round_fetches_the_round_first() -> None:
    calls = StewardCalls()
    assert calls.view(7, see(joining(6))) == []
    (proposal,) = calls.view(7, see(joining(7)))
    assert proposal.members == [FIRST, SECOND, JOINER]


def test_a_joiner_whose_fetch_is_slower_than_the_rounds_is_proposed_after_two_rounds() -> None:
    calls = StewardCalls()
    assert calls.view(7, see(joining(5))) == calls.view(8, see(joining(7))) == []
    (proposal,) = calls.work(9)
    assert proposal.members == [FIRST, SECOND, JOINER]


def test_a_joiner_that_no_round_awaits_is_proposed_after_a_while() -> None:
    calls = StewardCalls()
    assert calls.view(7, see(joining(5))) == []
    calls.clock.now += MAX_ADMISSION_S
    (proposal,) = calls.work(7)
    assert proposal.members == [FIRST, SECOND, JOINER]


@pytest.mark.parametrize(
    ("view", "pause_s"),
    [
        (see(joining(0, ready=False)), TIMING.admission_s),
        (see(joining(0, ready=False), most=2), TIMING.poll_s),
        (see(joining(0, ready=False, seat=1), most=2), TIMING.admission_s),
        (see(), TIMING.poll_s),
    ],
    ids=["room", "full", "replaces a member", "nobody"],
)
def test_a_steward_looks_often_while_a_node_can_be_admitted(view: WorldView, pause_s: float) -> None:
    calls = StewardCalls()
    assert calls.view(7, view) == []
    calls.clock.now += pause_s / 2
    assert calls.work(7) == []
    calls.clock.now += pause_s / 2
    assert calls.work(7) == [ReadWorld()]


@pytest.mark.parametrize(
    ("view", "pause_s"),
    [
        (see(joining(0)), TIMING.admission_s),
        (see(joining(0), most=2), TIMING.poll_s),
        (see(joining(0, seat=1), most=2), TIMING.admission_s),
    ],
    ids=["room", "full", "replaces a member"],
)
def test_a_joiner_looks_often_while_the_members_can_admit_the_joiner(view: WorldView, pause_s: float) -> None:
    values = torch.zeros(4)
    replica = OuterReplica(JOINER, OuterState.begin(values), OuterOptimizer(), [slice(0, 4)], LocalProgress(values))
    program = NodeProgram(torch="2", engine="wire", codec="int8", parameters=4, model_sha256="0" * 64)
    protocol = EpochProtocol(JoinRequest(node=JOINER, program=program), replica, TIMING, lambda _: None)
    steps, result = protocol.next_group(), None
    while True:
        action = steps.send(result)
        if isinstance(action, Sleep):
            break
        if isinstance(action, DescribePeers):
            result = [PartUnavailableError("no state")] * len(action.peers)
        else:
            assert isinstance(action, CallWorld)
            result = view
    assert action.seconds == pause_s
