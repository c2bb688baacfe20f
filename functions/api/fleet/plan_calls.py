"""The calls that show offers, and what a fleet would rent. They store nothing and rent nothing.

The first of them loads the planner: the other calls of this function, those of rented machines above all, do not need
the forecast.
"""

from __future__ import annotations

from baton.contract.fleets.plan import FleetPlan, OfferPage
from functions.api.http.context import ApiCall, Context


def offers(context: Context, call: ApiCall) -> OfferPage:
    """List the offers of the moment by expected total, then those that do not fit."""
    from functions.api.fleet.planning import list_offers

    return list_offers(context, call)


def plan(context: Context, call: ApiCall) -> FleetPlan:
    """Show what a fleet with this document would rent now, why not more, and what that would cost."""
    from functions.api.fleet.planning import plan_fleet

    return plan_fleet(context, call)
