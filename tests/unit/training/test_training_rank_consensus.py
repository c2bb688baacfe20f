"""All ranks learn of a request to one rank after the same step, once, and no step waits for the vote."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_client.training.distributed.process_group import Ranks
from gpu_client.training.distributed.rank_consensus import LONG_STEP_S, RankConsensus, Vote
from gpu_client.training.protocol import TrainerDirective
from gpu_client.training.session.loop_requests import LoopRequests
from tests.unit.controller.controller_kit import Together, together

CHECKPOINT = TrainerDirective("checkpoint")


class Training:
    """The directives of several processes, whose steps take as long as a test says."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.now = [0.0] * size
        self.step = 0
        peers = Together(size)
        self.ranks = [
            LoopRequests(cast(Ranks, peers.rank(number)), clock=partial(self.now.__getitem__, number))
            for number in range(size)
        ]

    def take_step(
        self, *, lasted: Sequence[float] = (), every: int = 0, busy: Sequence[int] = (), last: bool = False
    ) -> bool:
        """Ask every rank for a due checkpoint, check that all agree, and write the checkpoint."""
        self.step += 1
        for number in range(self.size):
            self.now[number] += lasted[number] if lasted else 0.1
        said: dict[int, bool] = {}

        def one(number: int, rank: LoopRequests) -> None:
            due = bool(every) and self.step % every == 0
            said[number] = rank.due(self.step, due, lambda: number in busy, last=last)

        together([partial(one, number, rank) for number, rank in enumerate(self.ranks)])
        assert len(set(said.values())) == 1, "all say the same"
        if said[0]:
            for rank in self.ranks:
                rank.starting_checkpoint()
                rank.checkpoint_written()
        return said[0]

    @property
    def stopped(self) -> bool:
        stops = {rank.should_stop for rank in self.ranks}
        assert len(stops) == 1, "all leave after the same step"
        return stops.pop()


def stop(checkpoint: bool = True) -> TrainerDirective:
    return TrainerDirective("stop", "release" if checkpoint else "lease_lost", checkpoint)


def test_a_wish_is_seen_by_all_after_the_next_step() -> None:
    training = Training(3)
    assert not training.take_step()
    training.ranks[0].receive(CHECKPOINT)
    assert [training.take_step() for _ in range(4)] == [False, True, False, False], "and once"


def test_what_was_asked_before_the_first_step_is_seen_after_it() -> None:
    training = Training(2)
    training.ranks[0].receive(CHECKPOINT)
    training.ranks[1].receive(stop())
    assert training.take_step()
    assert training.stopped


def test_all_leave_after_the_same_step_with_a_checkpoint_of_it() -> None:
    training = Training(4)
    training.take_step()
    training.ranks[2].receive(stop())
    assert not training.take_step() and not training.stopped
    assert training.take_step() and training.stopped
    assert {rank.stop_reason for rank in training.ranks} == {"release"}


def test_nothing_is_saved_when_one_of_them_may_not() -> None:
    training = Training(2)
    training.take_step()
    training.ranks[0].receive(stop(checkpoint=False))
    training.ranks[1].receive(stop())
    training.take_step()
    assert not training.take_step(every=1) and training.stopped


def test_where_all_steps_are_long_nobody_trains_another_one_first() -> None:
    """A machine that is taken away would have to last for one more step."""
    training = Training(2)
    long = [LONG_STEP_S, LONG_STEP_S + 1]
    for _ in range(3):
        training.take_step(lasted=long)
    training.ranks[1].receive(stop())
    assert training.take_step(lasted=long) and training.stopped


def test_one_process_with_short_steps_is_enough_for_nobody_to_wait() -> None:
    training = Training(2)
    for _ in range(3):
        training.take_step(lasted=[9.0, 0.1])
    training.ranks[1].receive(stop())
    assert not training.take_step(lasted=[9.0, 0.1])
    assert training.take_step(lasted=[9.0, 0.1]) and training.stopped


def test_a_checkpoint_at_its_interval_waits_for_the_one_that_is_busy() -> None:
    training = Training(2)
    assert [training.take_step(every=3, busy=[1] if step < 5 else []) for step in range(1, 8)] == [
        *[False] * 4,
        True,  # was due at 3
        True,
        False,
    ]


def test_a_wish_during_the_checkpoint_that_answers_it_is_not_answered_twice() -> None:
    training = Training(2)
    training.take_step()
    training.ranks[0].receive(CHECKPOINT)
    training.take_step()
    training.ranks[0].receive(CHECKPOINT)  # this one comes with the same checkpoint
    assert [training.take_step() for _ in range(3)] == [True, False, False]


def test_a_wish_while_one_is_put_off_is_answered_by_it() -> None:
    training = Training(2)
    training.take_step()
    training.take_step(every=1, busy=[0])
    training.ranks[0].receive(CHECKPOINT)
    assert [training.take_step(busy=[0] if step == 3 else []) for step in range(3, 7)] == [False, True, False, False]


def test_a_wish_is_answered_by_a_checkpoint_that_a_trainer_writes_on_its_own() -> None:
    """A checkpoint that a trainer writes by itself during the vote answers the request: no second one follows."""
    training = Training(2)
    training.take_step()
    training.ranks[0].receive(CHECKPOINT)
    assert not training.take_step()
    for rank in training.ranks:
        rank.starting_checkpoint()
        rank.checkpoint_written()
    assert [training.take_step() for _ in range(3)] == [False] * 3


def test_a_checkpoint_before_the_first_step_answers_no_later_wish() -> None:
    training = Training(2)
    for rank in training.ranks:
        rank.starting_checkpoint()
        rank.checkpoint_written()
    training.ranks[0].receive(CHECKPOINT)
    assert training.take_step()


EVENTS = st.sampled_from(["", "", "", "", "checkpoint", "stop", "stop without"])
STEPS = st.tuples(
    EVENTS,
    st.integers(0, 2),
    st.lists(st.sampled_from([0.1, LONG_STEP_S]), min_size=3, max_size=3),
    st.sets(st.integers(0, 2), max_size=1),
)


@given(st.lists(STEPS, min_size=4, max_size=14), st.sampled_from([0, 3]))
def test_whatever_comes_when_all_do_the_same_and_each_wish_is_answered_once(
    steps: list[tuple[str, int, list[float], set[int]]], every: int
) -> None:
    training = Training(3)
    asked_at = stopped_at = None
    answered = unasked = 0
    for step, (event, rank, lasted, busy) in enumerate(steps, 1):
        if event == "checkpoint":
            training.ranks[0].receive(CHECKPOINT)
            asked_at = asked_at or step
        elif event:
            training.ranks[rank].receive(stop(checkpoint=event == "stop"))
            stopped_at = stopped_at or step
        due = training.take_step(lasted=lasted, every=every, busy=sorted(busy))
        if training.stopped:
            assert stopped_at is not None and step <= stopped_at + 1
            return
        assert stopped_at is None or step == stopped_at, "seen after the next step at the latest"
        answered += due
        unasked += due and asked_at is None and not every
        if due:
            asked_at = None
        assert asked_at is None or busy or step <= asked_at, "answered after the next step, unless it is put off"
    assert not unasked, "a checkpoint for which nobody had asked"


class Contributions:
    """Numbers that travel with the votes: the step and the rank."""

    has_news = False

    def __init__(self, number: int) -> None:
        self.number = number
        self.step = 0
        self.rows: list[list[float]] = []

    def contribution(self) -> list[float]:
        self.step += 1
        return [float(self.step), float(self.number)]

    def receive_rows(self, rows: Sequence[Sequence[float]]) -> None:
        self.rows += [list(row) for row in rows]

    def share(self) -> None:
        raise AssertionError("there is no news")


def voters(size: int) -> list[tuple[RankConsensus, Contributions]]:
    peers = Together(size)
    found = []
    for number in range(size):
        voting = RankConsensus(peers.rank(number), clock=lambda: 0.0)
        voting.sharing = Contributions(number)
        found.append((voting, voting.sharing))
    return found


def vote(voting: RankConsensus) -> None:
    voting.collect(Vote)
    voting.send(Vote())


def test_a_rank_may_have_what_was_contributed_before_it_obeys() -> None:
    (first, heard), (second, others) = voters(2)
    for voting in (first, second):
        voting._unread = Vote(short_steps=1)  # they have asked each other already
    vote(first)
    vote(second)
    assert heard.rows == []
    first.settle()
    assert heard.rows == [[1.0, 0.0], [1.0, 1.0]]
    first.settle()
    together([partial(vote, first), partial(vote, second)])
    assert heard.rows == others.rows == [[1.0, 0.0], [1.0, 1.0]], "each once"


def test_no_rank_waits_for_another_one_in_a_step() -> None:
    """The first one is a step ahead before the second has begun."""
    (first, _), (second, _) = voters(2)
    together([partial(vote, first), partial(vote, second)])
    vote(first)
    done = threading.Event()
    ahead = threading.Thread(target=lambda: (vote(first), done.set()))
    ahead.start()
    assert not done.wait(0.05), "it would be two steps ahead"
    vote(second)
    assert done.wait(60)
    ahead.join()


def test_the_end_of_another_process_is_told_and_holds_up_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpu_client.training.distributed.rank_consensus.LAST_WAIT_S", 0.01)
    (first, heard), (second, _) = voters(2)
    together([partial(vote, first), partial(vote, second)])
    together([partial(first.collect, Vote), partial(second.collect, Vote)])
    first.send(Vote())
    with caplog.at_level(logging.WARNING, "baton.training"):
        first.close()
    assert "another process ended" in caplog.text
    assert heard.rows == [[1.0, 0.0], [1.0, 1.0]]
    first.close()


def test_a_forked_child_leaves_the_vote_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, heard), (second, _) = voters(2)
    together([partial(vote, first), partial(vote, second)])
    here: Callable[[], Any] = os.getpid
    monkeypatch.setattr(os, "getpid", lambda: here() + 1)
    first.close()
    assert heard.rows == []


def test_a_step_costs_no_message_that_is_waited_for() -> None:
    """A rank begins its next step before the other has ended its own."""
    training = Training(2)
    training.take_step()
    ahead = threading.Thread(target=lambda: training.ranks[0].due(2, on_interval=False))
    ahead.start()
    ahead.join(60)
    assert not ahead.is_alive()
    assert not training.ranks[1].due(2, on_interval=False)
    assert not training.take_step()
