"""The calls for fleets, for users and for the workers of rented machines."""

from __future__ import annotations

from functools import partial

from baton.contract.errors import ErrorCode as E
from baton.contract.fleets.doctor import DoctorReport, FixAnswer, FixRequest
from baton.contract.fleets.fleet import (
    EnrollAnswer,
    EnrollRequest,
    FleetEventPage,
    FleetPage,
    FleetQuery,
    FleetSpec,
    FleetView,
    MachineHeartbeat,
    MachineLog,
    MachineOrders,
    MachinePage,
    MachineShell,
    PreflightDownload,
)
from baton.contract.fleets.job_machines import JobMachines
from baton.contract.fleets.machine_history import MachineHistory, MachineHistoryQuery
from baton.contract.fleets.plan import FleetPlan, OfferPage, OffersRequest, PlanRequest
from baton.contract.fleets.providers import (
    Ec2Account,
    ProviderPage,
    ProviderView,
    RunpodAccount,
    SaladAccount,
    SshAccount,
    VastAccount,
)
from baton.contract.fleets.registries import RegistryLogin, RegistryPage, RegistryView
from functions.api.fleet import (
    account_calls,
    doctor_calls,
    fleet_calls,
    job_machines,
    machine_access,
    machine_history,
    plan_calls,
    registry_calls,
)
from functions.api.http.route import ADMIN, ENROLL, JOB, SUBMIT, WORKER, Route
from functions.api.machines import machine_calls

_FLEET = (E.FLEET_NOT_FOUND,)
_MACHINE = (E.MACHINE_UNKNOWN, E.CONFLICT)
_fleet = partial(Route, function="machines", scopes=SUBMIT)
_operator = partial(Route, function="machines", scopes=ADMIN, operator=True)
_PROVIDER = (
    E.PROVIDER_KEY_REFUSED,
    E.PROVIDER_PERMISSION_MISSING,
    E.PROVIDER_CREDIT_EXHAUSTED,
    E.PROVIDER_QUOTA_REACHED,
    E.PROVIDER_IMAGE_REFUSED,
    E.PROVIDER_REQUEST_REFUSED,
    E.PROVIDER_UNAVAILABLE,
)
"""Refusals of a provider that a call asks."""
_ACCESS = (E.MACHINE_NOT_FOUND, E.PROVIDER_NOT_FOUND, *_PROVIDER)
_account = partial(_operator, "PUT", answer=ProviderView, refuses=(E.CONFLICT, *_PROVIDER))
_login = partial(Route, function="machines", scopes=ADMIN, refuses=(E.REGISTRY_NOT_FOUND, E.CONFLICT))

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
        "GET",
        "/fleets/{fleet}/machines/{machine}/logs",
        machine_access.logs,
        answer=MachineLog,
        refuses=(*_FLEET, *_ACCESS),
    ),
    _fleet(
        "GET",
        "/fleets/{fleet}/machines/{machine}/shell",
        machine_access.shell,
        answer=MachineShell,
        refuses=(*_FLEET, *_ACCESS, E.MACHINE_HAS_NO_SHELL),
    ),
    _fleet(
        "GET", "/fleets/{fleet}/events", fleet_calls.events, query=FleetQuery, answer=FleetEventPage, refuses=_FLEET
    ),
    _fleet(
        "GET",
        "/fleets/{fleet}/history",
        machine_history.machine_history,
        query=MachineHistoryQuery,
        answer=MachineHistory,
        refuses=_FLEET,
    ),
    _fleet(
        "POST",
        "/fleets/{fleet}/plan",
        plan_calls.plan,
        body=(PlanRequest,),
        answer=FleetPlan,
        refuses=(E.FLEET_NOT_FOUND, E.UNKNOWN_RECIPE),
    ),
    _fleet("POST", "/offers", plan_calls.offers, body=(OffersRequest,), answer=OfferPage, refuses=(E.CONFLICT,)),
    _account("/providers/vast", account_calls.put_vast, body=(VastAccount,)),
    _account("/providers/salad", account_calls.put_salad, body=(SaladAccount,)),
    _account("/providers/runpod", account_calls.put_runpod, body=(RunpodAccount,)),
    _account("/providers/ec2", account_calls.put_ec2, body=(Ec2Account,)),
    _account("/providers/ssh", account_calls.put_ssh, body=(SshAccount,)),
    _operator("GET", "/providers", account_calls.list_providers, answer=ProviderPage, refuses=(E.CONFLICT,)),
    _operator(
        "DELETE",
        "/providers/{provider}",
        account_calls.remove,
        status=204,
        refuses=(E.PROVIDER_NOT_FOUND, E.PROVIDER_UNAVAILABLE, E.CONFLICT),
    ),
    _login("GET", "/registries", registry_calls.list_registries, answer=RegistryPage),
    _login(
        "PUT",
        "/registries/{registry}",
        registry_calls.put_registry,
        body=(RegistryLogin,),
        answer=RegistryView,
    ),
    _login("DELETE", "/registries/{registry}", registry_calls.remove_registry, status=204),
    _operator("GET", "/fleet-doctor", doctor_calls.examine_fleets, answer=DoctorReport, refuses=(E.CONFLICT,)),
    _operator(
        "POST",
        "/fleet-doctor/fix",
        doctor_calls.fix_findings,
        body=(FixRequest,),
        answer=FixAnswer,
        refuses=(E.CONFLICT,),
    ),
    _fleet("GET", "/job/{id}/machines", job_machines.job_machines, answer=JobMachines, refuses=JOB),
    Route(
        "POST",
        "/machines/preflight",
        machine_calls.preflight,
        function="machines",
        scopes=ENROLL,
        answer=PreflightDownload,
        refuses=(E.MACHINE_UNKNOWN, E.ENROLMENT_EXPIRED),
    ),
    Route(
        "POST",
        "/machines/enroll",
        machine_calls.enroll,
        function="machines",
        scopes=ENROLL,
        body=(EnrollRequest,),
        answer=EnrollAnswer,
        refuses=(
            *_MACHINE,
            E.ENROLMENT_EXPIRED,
            E.ENROLMENT_USED,
            E.IDENTITY_REFUSED,
            E.HOST_QUARANTINED,
            E.PREFLIGHT_FAILED,
        ),
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
