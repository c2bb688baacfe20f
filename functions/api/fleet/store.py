"""Provide the store and the clock of the calls about fleets."""

from __future__ import annotations

from functions.api.http.context import ApiCall, Context
from functions.fleet.clock import ClockAnchor, FleetClock
from functions.fleet.store import FleetStore
from functions.settings import ControlPlaneSettings


def require_store(context: Context) -> FleetStore:
    """Return the store. Raises RuntimeError in a function that does not serve fleets."""
    if context.fleet is None:
        raise RuntimeError("this function has no store of fleets")
    return context.fleet


def clock_of(settings: ControlPlaneSettings) -> FleetClock:
    """Return the clock of the fleets as the settings anchor the clock."""
    return FleetClock(
        ClockAnchor(
            server=settings.fleet_clock_server_s, fleet=settings.fleet_clock_fleet_s, speed=settings.fleet_clock_speed
        )
    )


def fleet_clock(context: Context) -> FleetClock:
    """Return the clock of the fleets."""
    return clock_of(context.settings)


def fleet_time(context: Context, call: ApiCall) -> int:
    """Return the time of a call by the clock of the fleets."""
    return fleet_clock(context).at(call.now)
