"""Test the number of connections on simulated lines of all kinds, with a fake clock."""

from __future__ import annotations

import random

import pytest

from gpu_client.transport.limits.concurrency import COOLDOWN_EPOCHS, EPOCH_S, FIRST, AdaptiveLimit
from tests.kits.clock import Clock
from tests.unit.transport.fake_line import run_line

MB = 1e6


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_starts_with_a_few_and_never_more_than_most(clock: Clock) -> None:
    assert AdaptiveLimit(16, clock=clock).allowed == FIRST
    assert AdaptiveLimit(2, clock=clock).allowed == 2
    with pytest.raises(ValueError, match="at least one"):
        AdaptiveLimit(0, clock=clock)


def test_where_each_connection_is_limited_all_are_used(clock: Clock) -> None:
    limit = AdaptiveLimit(16, clock=clock)
    seen = run_line(limit, clock, 40, lambda count: count * 85 * MB)
    assert limit.allowed == 16
    assert max(seen) == 16
    assert sorted(seen) == seen, "none was taken back on the way"


def test_it_stops_where_the_line_is_full(clock: Clock) -> None:
    """10 connections of 10 MB/s fill the line; the few that were tried in vain are taken back."""
    limit = AdaptiveLimit(64, clock=clock)
    seen = run_line(limit, clock, 60, lambda count: min(count * 10 * MB, 100 * MB))
    assert 9 <= limit.allowed <= 12
    assert max(seen) <= 15


def test_one_connection_that_fills_the_line_is_not_joined_by_many(clock: Clock) -> None:
    limit = AdaptiveLimit(64, clock=clock)
    chance = random.Random(7)
    seen = run_line(limit, clock, 300, lambda _: 1.25 * MB * chance.uniform(0.9, 1.1))
    assert max(seen) <= FIRST + 2


def test_a_line_that_gets_wider_is_noticed_after_a_while(clock: Clock) -> None:
    limit = AdaptiveLimit(16, clock=clock)
    run_line(limit, clock, 30, lambda _: 10 * MB)
    assert limit.allowed <= FIRST + 1
    run_line(limit, clock, 3 * COOLDOWN_EPOCHS * EPOCH_S, lambda count: count * 50 * MB)
    assert limit.allowed == 16


def test_slow_down_halves_once_for_all_that_are_refused_together(clock: Clock) -> None:
    limit = AdaptiveLimit(16, clock=clock)
    run_line(limit, clock, 40, lambda count: count * MB)
    for _ in range(16):
        limit.slow_down()
    assert limit.allowed == 8
    clock.advance(EPOCH_S)
    limit.slow_down()
    assert limit.allowed == 4
    for _ in range(5):
        clock.advance(EPOCH_S)
        limit.slow_down()
    assert limit.allowed == 1, "one is always allowed"


def test_after_slowing_down_it_waits_before_it_tries_more(clock: Clock) -> None:
    """A store that throttles above 8 connections: it settles below, and its refusals are rare."""
    limit = AdaptiveLimit(32, clock=clock)
    refusals = 0
    for _ in range(300):
        run_line(limit, clock, 1, lambda count: min(count, 8) * MB)
        if limit.allowed > 8:
            limit.slow_down()
            refusals += 1
    assert refusals <= 300 / COOLDOWN_EPOCHS
    assert 4 <= limit.allowed <= 8


def test_times_with_little_to_do_say_nothing(clock: Clock) -> None:
    limit = AdaptiveLimit(16, clock=clock)
    seen = set()
    for second in range(50):
        assert limit.enter()
        clock.advance(1)
        limit.moved(second * 10_000_000)
        limit.leave()
        seen.add(limit.allowed)
    assert seen == {FIRST}


def test_buffers_that_fill_up_are_not_taken_for_speed(clock: Clock) -> None:
    """A new connection takes some megabytes at once into buffers of the kernel; the line is as full as before."""
    limit = AdaptiveLimit(16, clock=clock)
    known = FIRST
    steps_of_more = 0

    def line(count: int) -> float:
        nonlocal known, steps_of_more
        if count > known:
            steps_of_more = 5
        known = count
        steps_of_more -= 1
        return 10 * MB if steps_of_more < 0 else 30 * MB

    seen = run_line(limit, clock, 300, line)
    assert max(seen) == FIRST + 1


def test_no_more_than_allowed_enter(clock: Clock) -> None:
    limit = AdaptiveLimit(3, clock=clock)
    assert [limit.enter() for _ in range(4)] == [True, True, True, False]
    limit.leave()
    assert limit.enter()
