"""Test the clock of the fleets."""

from __future__ import annotations

from functions.fleet.clock import ClockAnchor, FleetClock, anchor_at_speed

NOW = 1_790_000_000


def test_the_usual_clock_is_the_servers() -> None:
    clock = FleetClock()
    assert (clock.at(NOW + 0.9), clock.server_time(NOW), clock.server_seconds(900)) == (NOW, NOW, 900)


def test_a_fast_clock_runs_from_its_anchor() -> None:
    clock = FleetClock(anchor_at_speed(None, NOW, 60))
    assert clock.at(NOW) == NOW
    assert clock.at(NOW + 1.5) == NOW + 90
    assert clock.server_time(NOW + 3600) == NOW + 60
    assert clock.server_time(NOW + 61) == NOW + 2, "never before the fleets' time"
    assert (clock.server_seconds(900), clock.server_seconds(20)) == (15, 1)
    assert clock.server_price(0.25) == 15


def test_another_speed_goes_on_where_the_clock_is() -> None:
    fast = anchor_at_speed(None, NOW, 60)
    assert anchor_at_speed(fast, NOW + 600, 60) is fast
    shown = FleetClock(fast).at(NOW + 600)
    slow = FleetClock(anchor_at_speed(fast, NOW + 600, 1))
    assert (slow.at(NOW + 600), slow.at(NOW + 610)) == (shown, shown + 10)
    assert slow.server_time(shown + 10) == NOW + 610
    again = FleetClock(anchor_at_speed(ClockAnchor(server=NOW + 600, fleet=shown, speed=1), NOW + 700, 10))
    assert (again.at(NOW + 700), again.at(NOW + 701)) == (shown + 100, shown + 110)
