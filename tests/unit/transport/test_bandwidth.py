"""The cap and its shares, on a clock that is turned by hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_client.transport.limits.bandwidth import WEIGHTS, Bandwidth, Traffic
from tests.kits.clock import Clock

RATE = 1_000_000.0
PIECE = 256 * 1024


def drive(cap: Bandwidth, clock: Clock, seconds: float, greedy: Sequence[Traffic]) -> dict[Traffic, int]:
    """Let each kind take all available bytes, in the given order, a hundred times a second."""
    moved = dict.fromkeys(greedy, 0)
    with ExitStack() as stack:
        for traffic in dict.fromkeys(greedy):
            stack.enter_context(cap.using(traffic))
        for _ in range(round(seconds * 100)):
            clock.advance(0.01)
            for traffic in greedy:
                moved[traffic] += cap.take(traffic, PIECE)[0]
    return moved


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_one_kind_gets_all_of_it_and_not_more(clock: Clock) -> None:
    cap = Bandwidth(RATE, clock=clock)
    moved = drive(cap, clock, 60, ["artifact"])["artifact"]
    assert 60 * RATE * 0.99 <= moved <= 60 * RATE + 2 * cap.burst_bytes


def test_all_together_move_no_more_than_the_cap(clock: Clock) -> None:
    cap = Bandwidth(RATE, clock=clock)
    moved = drive(cap, clock, 60, ["artifact", "checkpoint", "data"])
    assert 60 * RATE * 0.99 <= sum(moved.values()) <= 60 * RATE + 4 * cap.burst_bytes


@pytest.mark.parametrize("first", ["artifact", "checkpoint"])
def test_none_starves_whoever_asks_first(clock: Clock, first: Traffic) -> None:
    """Shares go by weight also if one kind has ten connections and asks first each time."""
    second: Traffic = "checkpoint" if first == "artifact" else "artifact"
    cap = Bandwidth(RATE, clock=clock)
    moved = drive(cap, clock, 60, [first] * 10 + [second])
    total = sum(WEIGHTS[kind] for kind in (first, second))
    for kind in (first, second):
        share = moved[kind] / (60 * RATE)
        assert share == pytest.approx(WEIGHTS[kind] / total, rel=0.05), kind


def test_what_one_leaves_the_others_get(clock: Clock) -> None:
    """A kind whose own connection is slow (here: 5 % of the cap) does not cost the others what it cannot use."""
    cap = Bandwidth(RATE, clock=clock)
    moved = 0
    with cap.using("checkpoint"), cap.using("artifact"):
        for _ in range(6000):
            clock.advance(0.01)
            cap.take("checkpoint", 500)
            moved += cap.take("artifact", PIECE)[0]
    assert moved >= 0.93 * 60 * RATE


def test_a_share_ends_with_its_use(clock: Clock) -> None:
    cap = Bandwidth(RATE, clock=clock)
    drive(cap, clock, 1, ["checkpoint", "artifact"])
    assert drive(cap, clock, 10, ["artifact"])["artifact"] >= 10 * RATE * 0.99


def test_calls_of_the_api_do_not_wait_but_count(clock: Clock) -> None:
    cap = Bandwidth(RATE, clock=clock)
    cap.spend(5_000_000)
    moved = drive(cap, clock, 10, ["checkpoint"])["checkpoint"]
    assert 4.9 * RATE <= moved <= 5.1 * RATE + 2 * cap.burst_bytes


def test_who_gets_nothing_is_told_when_to_ask_again(clock: Clock) -> None:
    cap = Bandwidth(RATE, clock=clock)
    with cap.using("checkpoint"):
        while cap.take("checkpoint", PIECE)[0]:
            pass
        granted, wait_s = cap.take("checkpoint", PIECE)
        assert granted == 0
        assert 0 < wait_s <= 0.25
        clock.advance(wait_s + 0.001)
        granted, wait_s = cap.take("checkpoint", PIECE)
        assert granted > 0
        assert wait_s == 0


def test_a_few_bytes_are_granted_as_a_few(clock: Clock) -> None:
    """The last piece of a file is smaller than what is handed out at least."""
    cap = Bandwidth(RATE, clock=clock)
    with cap.using("checkpoint"):
        assert cap.take("checkpoint", 1) == (1, 0.0)


def test_what_was_not_used_is_given_back(clock: Clock) -> None:
    cap = Bandwidth(RATE, clock=clock)
    with cap.using("checkpoint"):
        granted, _ = cap.take("checkpoint", PIECE)
        cap.give_back(granted)
        assert cap.take("checkpoint", PIECE)[0] == granted


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        Bandwidth(0)


@given(
    rate=st.floats(10_000, 1e9),
    steps=st.lists(
        st.tuples(st.floats(0, 0.5), st.sampled_from(["checkpoint", "artifact", "data"]), st.integers(1, 10**7)),
        max_size=200,
    ),
)
def test_whatever_is_asked_for_the_cap_holds(rate: float, steps: list[tuple[float, Traffic, int]]) -> None:
    clock = Clock()
    began = clock.now
    cap = Bandwidth(rate, clock=clock)
    moved = 0
    with ExitStack() as stack:
        for pause_s, traffic, wanted in steps:
            clock.advance(pause_s)
            stack.enter_context(cap.using(traffic))
            granted, wait_s = cap.take(traffic, wanted)
            assert 0 <= granted <= wanted
            assert (granted == 0) == (wait_s > 0)
            moved += granted
    assert moved <= (clock.now - began) * rate + 4 * cap.burst_bytes + 1
