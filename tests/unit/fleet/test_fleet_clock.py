"""Test the clock of the fleets."""

from __future__ import annotations

from functions.fleet.clock import FleetClock
from tests.twins.fleet import MemoryFleetStore

NOW = 1_790_000_000


def test_the_usual_clock_is_the_servers() -> None:
    clock = FleetClock(MemoryFleetStore())
    assert (clock.at(NOW + 0.9), clock.server_time(NOW), clock.server_seconds(900)) == (NOW, NOW, 900)


def test_a_fast_clock_runs_from_its_first_reading() -> None:
    store = MemoryFleetStore()
    clock = FleetClock(store, speed=60)
    assert clock.at(NOW) == NOW
    assert clock.at(NOW + 1.5) == NOW + 90
    assert FleetClock(store, speed=60).at(NOW + 60) == NOW + 3600, "every function has the same base"
    assert clock.server_time(NOW + 3600) == NOW + 60
    assert clock.server_time(NOW + 61) == NOW + 2, "never before the fleets' time"
    assert (clock.server_seconds(900), clock.server_seconds(20)) == (15, 1)
