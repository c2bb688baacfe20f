"""Provide the store and the clock of the calls about fleets."""

from __future__ import annotations

from functions.api.http.context import ApiCall, Context
from functions.fleet.clock import FleetClock
from functions.fleet.store import FleetStore


def require_store(context: Context) -> FleetStore:
    """Return the store. Raises RuntimeError in a function that does not serve fleets."""
    if context.fleet is None:
        raise RuntimeError("this function has no store of fleets")
    return context.fleet


def fleet_clock(context: Context) -> FleetClock:
    """Return the clock of the fleets."""
    return FleetClock(require_store(context), context.settings.fleet_clock_speed)


def fleet_time(context: Context, call: ApiCall) -> int:
    """Return the time of a call by the clock of the fleets."""
    return fleet_clock(context).at(call.now)
