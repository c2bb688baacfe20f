"""The calls about fleets: store, list, show, stop; ended machines; events."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

from baton.contract.base import AnswerModel
from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import (
    BoundView,
    FleetEventPage,
    FleetEventView,
    FleetPage,
    FleetQuery,
    FleetSpec,
    FleetView,
    MachinePage,
    MachineView,
    ReplacedDocument,
)
from baton.contract.fleets.registries import registry_of
from baton.contract.names import RENT_FLEET_PATTERN
from functions.api.fleet.account_calls import secrets_readable
from functions.api.fleet.store import fleet_time, require_store
from functions.api.http.context import ApiCall, Context, WithHeaders
from functions.domain.errors import Refusal, WriteConflict
from functions.fleet.accounts import no_account
from functions.fleet.ledger import bounds, reserved_usd
from functions.fleet.records import Machine, StoredFleet
from functions.fleet.store import DamagedRecord
from functions.fleet.ticks.document_changes import given_back

MAX_FLEETS = 100
"""Fleets of a tenant, stopped ones included. Each tick reads all fleets of all tenants in less than a minute."""

NO_LOGIN = "ec2: machines do not log in at {}: name a machine image whose Docker can pull the image"


def put(context: Context, call: ApiCall) -> FleetView:
    """Store a fleet in place of an earlier document of this name; a stopped fleet rents again."""
    spec: FleetSpec = call.body
    name = call.path["fleet"]
    if spec.name != name:
        detail = f"The path names the fleet {name}, the document names {spec.name}."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="name")
    now = fleet_time(context, call)
    before = require_store(context).fleet(call.tenant, name)
    if before is None and re.fullmatch(RENT_FLEET_PATTERN, name):
        detail = f"{name} is the name of a fleet that a job rents by itself; choose another name."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="name")
    if before is not None and before.retired:
        detail = f"The fleet {name} has ended with its job {before.job_id}; a retry of the job opens the fleet again."
        raise Refusal(ErrorCode.CONFLICT, detail, field="name")
    if before is None and sum(one.job_id is None for one in require_store(context).fleets(call.tenant)) >= MAX_FLEETS:
        detail = f"The tenant has {MAX_FLEETS} fleets, the maximum; give the document the name of an unused fleet."
        raise Refusal(ErrorCode.CONFLICT, detail, field="name")
    fleet = StoredFleet(
        tenant=call.tenant,
        spec=spec,
        version=before.version + 1 if before else 1,
        job_id=before.job_id if before else None,
        created_at=before.created_at if before else now,
        updated_at=now,
    )
    with secrets_readable():
        unusable = [no_account(provider) for provider in spec.providers if provider not in context.drivers]
        logs_in = spec.image and context.accounts and context.accounts.find_login(call.tenant, spec.image)
    if "ec2" in spec.providers and spec.image and logs_in:
        unusable.append(NO_LOGIN.format(registry_of(spec.image)))
    replaced = None if before is None else _describe_replaced(context, before, spec)
    return _store(context, call, fleet).model_copy(update={"warnings": unusable, "replaced": replaced})


def _describe_replaced(context: Context, before: StoredFleet, spec: FleetSpec) -> ReplacedDocument:
    store, name = require_store(context), spec.name
    return ReplacedDocument(
        spec=before.spec,
        stopped=before.stopped,
        spent_usd=round(store.ledger(before.tenant, name).spent_usd, 6),
        # A stopped fleet gives all its machines back anyway.
        given_back=[] if before.stopped else given_back(store.machines(before.tenant, name), spec),
    )


def list_fleets(context: Context, call: ApiCall) -> WithHeaders:
    """List the tenant's fleets by name, without those of ended jobs and those whose records cannot be read."""
    damaged: list[DamagedRecord] = []
    found: list[FleetView] = []
    for fleet in require_store(context).fleets(call.tenant, damaged=damaged):
        try:
            found.append(view_fleet(context, call, fleet))
        except DamagedRecord as error:
            damaged.append(error)
    listed = [one for one in found if one.job_id is None or one.machines or not one.stopped]
    unread = FleetPage(fleets=[], damaged=[one.message for one in damaged])
    return revalidating(unread.model_copy(update={"fleets": listed}), [*listed, unread])


def show(context: Context, call: ApiCall) -> WithHeaders:
    """Return a fleet with its money and its machines."""
    fleet = view_fleet(context, call, require_fleet(context, call))
    return revalidating(fleet, [fleet])


def revalidating(answer: AnswerModel, parts: Iterable[AnswerModel]) -> WithHeaders:
    """Return the answer with an ETag of `parts` without their `at`: the time of the answer alone is no news."""
    digest = blake2b(digest_size=12)
    for one in parts:
        digest.update(one.model_copy(update={"at": 0}).model_dump_json().encode())
    return WithHeaders(answer, {"etag": f'W/"{digest.hexdigest()}"'})


def stop(context: Context, call: ApiCall) -> FleetView:
    """Stop a fleet: machines with a job save a checkpoint, then all machines are given back; idempotent."""
    fleet = require_fleet(context, call)
    if fleet.stopped:
        return view_fleet(context, call, fleet)
    stopped = {"stopped": True, "version": fleet.version + 1, "updated_at": fleet_time(context, call)}
    return _store(context, call, fleet.model_copy(update=stopped))


def machines(context: Context, call: ApiCall) -> MachinePage:
    """List the fleet's ended machines with their receipts, the newest first."""
    query: FleetQuery = call.query
    fleet, store = require_fleet(context, call), require_store(context)
    watched = [one for one in store.machines(call.tenant, fleet.spec.name) if one.state.ended]
    ended = [*watched, *store.ended(call.tenant, fleet.spec.name, limit=query.limit)]
    ended.sort(key=lambda one: (one.since, one.id), reverse=True)
    return MachinePage(machines=[view_machine(one) for one in ended[: query.limit]])


def events(context: Context, call: ApiCall) -> FleetEventPage:
    """List the fleet's newest events, the newest first."""
    query: FleetQuery = call.query
    fleet = require_fleet(context, call)
    found = require_store(context).events(call.tenant, fleet.spec.name, limit=query.limit)
    return FleetEventPage(events=[FleetEventView.model_validate(one.model_dump()) for one in found])


def _store(context: Context, call: ApiCall, fleet: StoredFleet) -> FleetView:
    try:
        require_store(context).put_fleet(fleet)
    except WriteConflict as conflict:
        raise Refusal(ErrorCode.CONFLICT, f"Another call changed the fleet {fleet.spec.name}.") from conflict
    try:
        return view_fleet(context, call, fleet)
    except DamagedRecord as error:
        detail = f"The change of fleet {fleet.spec.name} is stored. {error.detail}"
        raise Refusal(error.code, detail, remedy=error.remedy) from error


def require_fleet(context: Context, call: ApiCall) -> StoredFleet:
    """Return the fleet of the path; refuse unknown fleets and other tenants' fleets alike."""
    fleet = require_store(context).fleet(call.tenant, call.path["fleet"])
    if fleet is None:
        raise Refusal(ErrorCode.FLEET_NOT_FOUND, f"No fleet {call.path['fleet']}.", field="fleet")
    return fleet


def view_fleet(context: Context, call: ApiCall, fleet: StoredFleet) -> FleetView:
    """Return a fleet with its money and its machines that have not ended. Raises DamagedRecord."""
    store, name, now = require_store(context), fleet.spec.name, fleet_time(context, call)
    ledger, machines = store.holdings(fleet.tenant, name)
    alive = [one for one in machines if not one.state.ended]
    found = [(one, reserved_usd(alive)) for one in bounds(fleet.spec.budget, ledger, now)]
    whole = context.settings.fleet_budget
    if whole is not None:
        spending = store.spending()
        found += [(one, spending.reserved_usd) for one in bounds(whole, spending, now)]
    return FleetView(
        spec=fleet.spec,
        stopped=fleet.stopped,
        job_id=fleet.job_id,
        spent_usd=round(ledger.spent_usd, 6),
        bounds=[
            BoundView.model_validate(
                {**one.model_dump(), "spent_usd": round(one.spent_usd, 6), "reserved_usd": round(reserved, 6)}
            )
            for one, reserved in found
        ],
        machines=[view_machine(one) for one in alive],
        waits=ledger.waits,
        created_at=fleet.created_at,
        updated_at=fleet.updated_at,
        at=now,
    )


def view_machine(machine: Machine) -> MachineView:
    """Return a machine for users."""
    return MachineView(
        id=machine.id,
        fleet=machine.fleet,
        state=machine.state,
        provider=machine.provider,
        provider_id=machine.handle,
        gpu_model=machine.offer.gpu_model,
        usd_per_hour=machine.usd_per_hour,
        spent_usd=round(machine.spent_usd, 6),
        job_id=machine.job_id,
        since=machine.since,
        reason=machine.reason,
        measured=machine.measured,
        receipt=machine.receipt,
    )
