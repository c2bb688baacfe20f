"""Rank the offers of the moment, and plan what a fleet would rent; store nothing and rent nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.money import Budget
from baton.contract.fleets.plan import (
    MAX_OFFERS,
    ExpectedUsd,
    FleetPlan,
    OfferPage,
    OffersRequest,
    OfferView,
    PlannedWork,
    PlanRequest,
    SilentProvider,
    SpanView,
    UnservableJob,
)
from baton.contract.jobs.job import JobSubmit
from functions.api.fleet.quotes import ask
from functions.api.fleet.store import fleet_time, require_store
from functions.api.http.context import ApiCall, Context
from functions.domain.errors import Refusal
from functions.domain.records import Job
from functions.domain.seat_records import Seat
from functions.domain.worlds.world_record import WorldRecord
from functions.fleet.accounts import AccountsUnreadable
from functions.fleet.breaker import find_pause
from functions.fleet.ledger import Bound, bounds, tightest
from functions.fleet.offers.forecast import Quantiles, forecast
from functions.fleet.offers.known_offers import rank_known
from functions.fleet.offers.offer_ranking import RankedOffer, Workload
from functions.fleet.offers.start_plan import affordable, choose
from functions.fleet.offers.workload import estimate, hours_of_recipes, typical
from functions.fleet.records import Machine, Offer, StoredFleet
from functions.fleet.store import FleetStore
from functions.fleet.ticks.demand import FleetMachines, completed_jobs, unservable, waiting_jobs
from functions.fleet.ticks.gangs import leave_paused_out

THE_JOB = "the job of the request"
"""Id of the request's job beside the ids of stored jobs."""


def list_offers(context: Context, call: ApiCall) -> OfferPage:
    """List the offers of the moment by expected total, then those that do not fit."""
    body: OffersRequest = call.body
    store, now = require_store(context), fleet_time(context, call)
    try:
        names = list(dict.fromkeys(body.providers or context.drivers))
    except AccountsUnreadable as error:
        raise Refusal(ErrorCode.CONFLICT, f"{error}; delete it, then store all accounts again.") from error
    limits = body.model_dump(exclude={"providers", "hours", "limit", "nodes"})
    # A document that permits what the request asks for; neither image nor budget restrict offers.
    spec = FleetSpec(
        name="offers", providers=names or ["loopback"], image="any", budget=Budget(total_usd=1_000_000), **limits
    )
    found, silent = ask(context.drivers, store, names, spec, now)
    ranked = rank_known(store, found, spec, Workload(hours=body.hours), now)
    budget = Bound(name="total_usd", period="", cap_usd=math.inf, spent_usd=0)
    taken = affordable(ranked, (), (budget, math.inf), body.nodes or 0).offers
    limit = max(body.limit, len(taken))
    return OfferPage(
        offers=[_view(one, taken) for one in ranked[:limit]],
        omitted=max(0, len(ranked) - limit),
        silent=_silent(silent),
    )


def plan_fleet(context: Context, call: ApiCall) -> FleetPlan:
    """Show what a fleet with this document would rent now, why not more, and what that would cost."""
    body: PlanRequest = call.body
    spec, store, now = body.fleet, require_store(context), fleet_time(context, call)
    if spec.name != call.path["fleet"]:
        detail = f"The path names the fleet {call.path['fleet']}, the document names {spec.name}."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="fleet.name")
    fleet, ledger = _find_fleet(store, call, spec, now), store.ledger(call.tenant, spec.name)
    waiting = _waiting(context, call, body, fleet)
    reasons = [unservable(job, spec) for job in waiting]
    servable = [job for job, reason in zip(waiting, reasons, strict=True) if reason is None]
    trains = partial(_trains, context)
    servable, paused = leave_paused_out(servable, ledger.forming, fleet, now, trains=trains)
    works = _works(context, call, body, servable)
    found, silent = ask(context.drivers, store, spec.providers, spec, now)
    machines = store.machines(call.tenant, spec.name)
    pauses: dict[str, str] = {name: find_pause(ledger.breakers, fleet, name, machines, now) for name in spec.providers}
    known = rank_known(store, found, spec, typical([work for work, _ in works]), now)
    ranked = sorted((_reject(one, pauses[one.offer.provider]) for one in known), key=lambda one: bool(one.rejected))
    bound, room_usd = money = _tightest(context, call, spec, machines, now)
    there = machines, _others(context, call, spec)
    taken, why = choose(spec, there, servable, ranked, money, trains=trains)
    if paused:
        why = f"{paused}; {why}" if servable else paused
    forecasted = forecast(taken, _begin(servable, works, len(taken)), idle_timeout_s=spec.idle_timeout_s)
    usable = [one for one in ranked if not one.rejected]
    price = usable[0].offer.usd_per_hour if usable else 0.0
    return FleetPlan(
        start=len(taken),
        why=why,
        waits=_waits(store, call.tenant, spec.name),
        alive=sum(not one.state.ended for one in machines),
        works=_view_works(servable, works),
        unservable=[
            UnservableJob(job=job_id, reason=reason)
            for job_id, reason in {_id(job): reason for job, reason in zip(waiting, reasons, strict=True)}.items()
            if reason is not None
        ],
        room_usd=round(max(0.0, room_usd), 6),
        room_bound=bound.label,
        paid_hours=round(max(0.0, room_usd) / price, 2) if price else None,
        usd=_span(forecasted.usd) if forecasted else None,
        hours=_span(forecasted.hours) if forecasted else None,
        offers=[_view(one, taken) for one in ranked[:MAX_OFFERS]],
        omitted=max(0, len(ranked) - MAX_OFFERS),
        silent=_silent(silent),
        at=now,
    )


def _waits(store: FleetStore, tenant: str, name: str) -> str:
    """Return why the stored fleet waits, as a refusal that only a create call meets; empty for no active fleet."""
    fleet = store.fleet(tenant, name)
    return "" if fleet is None or fleet.stopped else store.ledger(tenant, name).waits


def _find_fleet(store: FleetStore, call: ApiCall, spec: FleetSpec, now: int) -> StoredFleet:
    """Return the active fleet of this document, or the fleet that an apply of the document makes, without pauses."""
    active = store.fleet(call.tenant, spec.name)
    if active is not None and not active.stopped and active.spec == spec:
        return active
    return StoredFleet(tenant=call.tenant, spec=spec, created_at=now, updated_at=now)


def _reject(ranked: RankedOffer, pause: str) -> RankedOffer:
    """Return the offer rejected for the pause of its provider, if there is one."""
    return replace(ranked, rejected=pause) if pause and not ranked.rejected else ranked


def _waiting(context: Context, call: ApiCall, body: PlanRequest, fleet: StoredFleet) -> list[Job]:
    """Return the waiting jobs of the fleet's queues, after the job of the request."""
    stored = waiting_jobs(context.jobs, fleet, shards=context.settings.ready_shards)
    if body.job is None:
        return stored
    own = require_store(context).fleet(call.tenant, body.fleet.name)
    if own is not None and own.job_id is not None:
        # A fleet that a job rents for itself serves that job alone, which is the job of the request.
        stored = []
    return [*_unsubmitted(context, call, body.job), *stored]


def _others(context: Context, call: ApiCall, spec: FleetSpec) -> list[FleetMachines]:
    """Return the tenant's other fleets that serve the same queues, with their machines."""
    store = require_store(context)
    found = [one.spec for one in store.fleets(call.tenant) if one.spec.name != spec.name]
    return [(one, store.machines(call.tenant, one.name)) for one in found if {*one.queues} & {*spec.queues}]


def _tightest(
    context: Context, call: ApiCall, spec: FleetSpec, machines: Sequence[Machine], now: int
) -> tuple[Bound, float]:
    """Return the bound with the least room, of the fleet or of the deployment, and its room in USD."""
    store = require_store(context)
    own = tightest(spec.budget, store.ledger(call.tenant, spec.name), machines, now)
    if context.settings.fleet_budget is None:
        return own
    spending = store.spending()
    common = bounds(context.settings.fleet_budget, spending, now)
    return min([own, *((one, one.room_usd(spending.reserved_usd)) for one in common)], key=lambda found: found[1])


def _unsubmitted(context: Context, call: ApiCall, job: JobSubmit) -> list[Job]:
    """Return the job that the request describes, with the requirements of its recipe; its seats if it has nodes."""
    # The calls of machines, which this function also serves, need no recipes.
    from functions.api.jobs.recipes import RecipeResolver

    try:
        spec = RecipeResolver(context, call).build_spec(job)
    except Refusal as refusal:
        raise Refusal(
            refusal.code,
            refusal.detail,
            field=f"job.{refusal.field}" if refusal.field else "job",
            problems=[fault._replace(field=f"job.{fault.field}") for fault in refusal.problems],
            remedy=refusal.remedy,
        ) from None
    there = Job(id=THE_JOB, tenant=call.tenant, queue=job.queue, spec=spec, created_at=call.now, updated_at=call.now)
    if job.nodes is None:
        return [there]
    seats = [Seat(job=THE_JOB, seat=at, min=job.nodes.min, max=job.nodes.max) for at in range(job.nodes.max)]
    return [there.model_copy(update={"spec": spec.model_copy(update={"nodes": None, "seat": seat})}) for seat in seats]


def _works(context: Context, call: ApiCall, body: PlanRequest, jobs: Sequence[Job]) -> list[tuple[Workload, str]]:
    """Return the work of each job, and where its hours are from."""
    history: Mapping[str, Workload] = {}
    if body.hours is None and any(job.spec.recipe for job in jobs):
        history = hours_of_recipes(completed_jobs(context.jobs, call.tenant))
    works = [estimate(job, history, hours=body.hours) for job in jobs]
    return [
        (replace(work, traffic_gb=work.traffic_gb + body.input_gb), source) if job.id == THE_JOB else (work, source)
        for job, (work, source) in zip(jobs, works, strict=True)
    ]


def _begin(jobs: Sequence[Job], works: Sequence[tuple[Workload, str]], machines: int) -> list[Workload]:
    """Return the works that the machines do: a node without a machine does not work after the others."""
    alone = [work for job, (work, _) in zip(jobs, works, strict=True) if job.spec.seat is None]
    nodes = [work for job, (work, _) in zip(jobs, works, strict=True) if job.spec.seat is not None]
    return [*alone, *nodes[: max(0, machines - len(alone))]]


def _trains(context: Context, job_id: str) -> bool:
    world, job = context.jobs.read(WorldRecord, job_id), context.jobs.get(job_id)
    return world is not None and job is not None and world.trains(job.seats)


def _view_works(jobs: Sequence[Job], works: Sequence[tuple[Workload, str]]) -> list[PlannedWork]:
    """Return one line for each job, with the number of its nodes that wait."""
    nodes = Counter(_id(job) for job in jobs if job.spec.seat is not None)
    found = {_id(job): (job, work) for job, work in zip(jobs, works, strict=True)}
    return [
        PlannedWork(
            job=job_id,
            name=job.spec.name,
            nodes=nodes.get(job_id),
            hours=round(work.hours, 3),
            hours_from=source,
        )
        for job_id, (job, (work, source)) in found.items()
    ]


def _id(job: Job) -> str | None:
    """Return the id of a job, of a seat that of its elastic job; None for the job of the request."""
    job_id = job.id if job.spec.seat is None else job.spec.seat.job
    return None if job_id == THE_JOB else job_id


def _silent(reasons: Mapping[str, str]) -> list[SilentProvider]:
    return [SilentProvider(provider=name, reason=reason) for name, reason in reasons.items()]


def _span(span: Quantiles) -> SpanView:
    return SpanView(low=round(span.low, 4), expected=round(span.expected, 4), high=round(span.high, 4))


def _view(ranked: RankedOffer, taken: Sequence[Offer] = ()) -> OfferView:
    offer, cost = ranked.offer, ranked.cost
    return OfferView.model_validate(
        {
            **offer.model_dump(include=set(OfferView.model_fields)),
            "expected": ExpectedUsd(
                total=round(cost.total_usd, 4),
                machine=round(cost.machine_usd, 4),
                traffic=round(cost.traffic_usd, 4),
                boot=round(cost.boot_usd, 4),
                lost=round(cost.lost_usd, 4),
                hours=round(cost.hours, 4),
            ),
            "taken": sum(one == offer for one in taken),
            "rejected": ranked.rejected,
        }
    )
