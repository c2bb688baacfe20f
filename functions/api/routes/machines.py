"""The calls for fleets, for users and for the workers of rented machines."""

from __future__ import annotations

from functools import partial

from baton.contract.errors import ErrorCode as E
from baton.contract.fleet import (
    EnrollAnswer,
    EnrollRequest,
    FleetEventPage,
    FleetPage,
    FleetQuery,
    FleetSpec,
    FleetView,
    MachineHeartbeat,
    MachineOrders,
    MachinePage,
)
from baton.contract.fleet_plan import FleetPlan, OfferPage, OffersRequest, PlanRequest
from functions.api.fleet import fleet_calls, machine_calls, plan_calls
from functions.api.http.route import ENROLL, SUBMIT, WORKER, Route

_FLEET = (E.FLEET_NOT_FOUND,)
_MACHINE = (E.MACHINE_UNKNOWN, E.CONFLICT)
_fleet = partial(Route, function="machines", scopes=SUBMIT)

ROUTES: tuple[Route, ...] = (
    _fleet("GET", "/fleets", fleet_calls.list_fleets, answer=FleetPage),
    _fleet(
        "PUT",
        "/fleets/{fleet}",
        fleet_calls.put,
        body=(FleetSpec,),
        answer=FleetView,
        refuses=(*_FLEET, E.CONFLICT),
    ),
    _fleet("GET", "/fleets/{fleet}", fleet_calls.show, answer=FleetView, refuses=_FLEET),
    _fleet("POST", "/fleets/{fleet}/stop", fleet_calls.stop, answer=FleetView, refuses=(*_FLEET, E.CONFLICT)),
    _fleet(
        "GET", "/fleets/{fleet}/machines", fleet_calls.machines, query=FleetQuery, answer=MachinePage, refuses=_FLEET
    ),
    _fleet(
        "GET", "/fleets/{fleet}/events", fleet_calls.events, query=FleetQuery, answer=FleetEventPage, refuses=_FLEET
    ),
    _fleet(
        "POST",
        "/fleets/{fleet}/plan",
        plan_calls.plan,
        body=(PlanRequest,),
        answer=FleetPlan,
        refuses=(E.FLEET_NOT_FOUND, E.UNKNOWN_RECIPE),
    ),
    _fleet("POST", "/offers", plan_calls.offers, body=(OffersRequest,), answer=OfferPage),
    Route(
        "POST",
        "/machines/enroll",
        machine_calls.enroll,
        function="machines",
        scopes=ENROLL,
        body=(EnrollRequest,),
        answer=EnrollAnswer,
        refuses=(*_MACHINE, E.ENROLMENT_EXPIRED, E.ENROLMENT_USED, E.PREFLIGHT_FAILED),
    ),
    Route(
        "POST",
        "/machines/heartbeat",
        machine_calls.heartbeat,
        function="machines",
        scopes=WORKER,
        body=(MachineHeartbeat,),
        answer=MachineOrders,
        refuses=_MACHINE,
    ),
)
