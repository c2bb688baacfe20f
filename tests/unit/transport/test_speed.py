"""Test the measured speed of recent transfers, with a fake clock."""

from __future__ import annotations

import pytest

from gpu_client.transport.limits.transfer_channel import HALF_LIFE_S, LEAST_BYTES, SpeedMeter
from tests.kits.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def move(speed: SpeedMeter, clock: Clock, seconds: int, bytes_per_s: int) -> None:
    with speed.under_way():
        for _ in range(seconds):
            clock.advance(1)
            speed.moved(bytes_per_s)


def test_nothing_is_known_before_enough_has_moved(clock: Clock) -> None:
    speed = SpeedMeter(clock=clock)
    assert speed.bytes_per_s() is None
    move(speed, clock, 1, LEAST_BYTES - 1)
    assert speed.bytes_per_s() is None
    move(speed, clock, 1, 1)
    assert speed.bytes_per_s() == pytest.approx(LEAST_BYTES / 2, rel=0.05)


def test_only_time_in_which_something_moves_counts(clock: Clock) -> None:
    speed = SpeedMeter(clock=clock)
    for _ in range(5):
        move(speed, clock, 2, 8_000_000)
        clock.advance(3600)
    assert speed.bytes_per_s() == pytest.approx(8_000_000, rel=0.05)


def test_several_at_once_are_one_line(clock: Clock) -> None:
    speed = SpeedMeter(clock=clock)
    with speed.under_way(), speed.under_way(), speed.under_way():
        clock.advance(2)
        for _ in range(3):
            speed.moved(4_000_000)
    assert speed.bytes_per_s() == pytest.approx(6_000_000, rel=0.05)


def test_what_is_long_ago_counts_less(clock: Clock) -> None:
    speed = SpeedMeter(clock=clock)
    move(speed, clock, 100, 100_000_000)
    move(speed, clock, int(HALF_LIFE_S), 2_000_000)
    found = speed.bytes_per_s()
    assert found == pytest.approx(51_000_000, rel=0.1)
    move(speed, clock, int(8 * HALF_LIFE_S), 2_000_000)
    assert speed.bytes_per_s() == pytest.approx(2_000_000, rel=0.15)


def test_a_stall_is_seen(clock: Clock) -> None:
    speed = SpeedMeter(clock=clock)
    with speed.under_way():
        clock.advance(1)
        speed.moved(10_000_000)
        clock.advance(9)
        assert speed.bytes_per_s() == pytest.approx(1_000_000, rel=0.2)
