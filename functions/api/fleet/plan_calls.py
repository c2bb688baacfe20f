"""The calls that show offers, and what a fleet would rent. They store nothing and rent nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from functions.fleet.accounts import AccountsUnreadable
from functions.fleet.ledger import Bound, bounds, tightest
from functions.fleet.offers.forecast import Quantiles, forecast
from functions.fleet.offers.known_offers import rank_known
from functions.fleet.offers.offer_ranking import RankedOffer, Workload
from functions.fleet.offers.start_plan import choose
from functions.fleet.offers.workload import estimate, hours_of_recipes, typical
from functions.fleet.records import Machine, Offer, StoredFleet
from functions.fleet.store import FleetStore
from functions.fleet.ticks.demand import FleetMachines, completed_jobs, unservable, waiting_jobs

THE_JOB = "the job of the request"
"""Id of the request's job beside the ids of stored jobs."""


def offers(context: Context, call: ApiCall) -> OfferPage:
    """List the offers of the moment by expected total, then those that do not fit."""
    body: OffersRequest = call.body
    store, now = require_store(context), fleet_time(context, call)
    try:
        names = list(dict.fromkeys(body.providers or context.drivers))
    except AccountsUnreadable as error:
        raise Refusal(ErrorCode.CONFLICT, f"{error}; delete it, then store all accounts again.") from error
    limits = body.model_dump(exclude={"providers", "hours", "limit"})
    # A document that permits what the request asks for; neither image nor budget restrict offers.
    spec = FleetSpec(
        name="offers", providers=names or ["loopback"], image="any", budget=Budget(total_usd=1_000_000), **limits
    )
    found, silent = ask(context.drivers, store, names, spec, now)
    ranked = rank_known(store, found, spec, Workload(hours=body.hours), now)
    return OfferPage(
        offers=[_view(one) for one in ranked[: body.limit]],
        omitted=max(0, len(ranked) - body.limit),
        silent=_silent(silent),
    )


def plan(context: Context, call: ApiCall) -> FleetPlan:
    """Show what a fleet with this document would rent now, why not more, and what that would cost."""
    body: PlanRequest = call.body
    spec, store, now = body.fleet, require_store(context), fleet_time(context, call)
    if spec.name != call.path["fleet"]:
        detail = f"The path names the fleet {call.path['fleet']}, the document names {spec.name}."
        raise Refusal(ErrorCode.INVALID_VALUE, detail, field="fleet.name")
    waiting = _waiting(context, call, body, now)
    reasons = [unservable(job, spec) for job in waiting]
    servable = [job for job, reason in zip(waiting, reasons, strict=True) if reason is None]
    works = _works(context, call, body, servable)
    found, silent = ask(context.drivers, store, spec.providers, spec, now)
    ranked = rank_known(store, found, spec, typical([work for work, _ in works]), now)
    machines = store.machines(call.tenant, spec.name)
    bound, room_usd = money = _tightest(context, call, spec, machines, now)
    taken, why = choose(spec, (machines, _others(context, call, spec)), servable, ranked, money)
    forecasted = forecast(taken, [work for work, _ in works], idle_timeout_s=spec.idle_timeout_s)
    usable = [one for one in ranked if not one.rejected]
    price = usable[0].offer.usd_per_hour if usable else 0.0
    return FleetPlan(
        start=len(taken),
        why=why,
        waits=_waits(store, call.tenant, spec.name),
        alive=sum(not one.state.ended for one in machines),
        works=[
            PlannedWork(job=_id(job), name=job.spec.name, hours=round(work.hours, 3), hours_from=source)
            for job, (work, source) in zip(servable, works, strict=True)
        ],
        unservable=[
            UnservableJob(job=_id(job), reason=reason)
            for job, reason in zip(waiting, reasons, strict=True)
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


def _waiting(context: Context, call: ApiCall, body: PlanRequest, now: int) -> list[Job]:
    """Return the waiting jobs of the fleet's queues, after the job of the request."""
    fleet = StoredFleet(tenant=call.tenant, spec=body.fleet, created_at=now, updated_at=now)
    stored = waiting_jobs(context.jobs, fleet, shards=context.settings.ready_shards)
    return stored if body.job is None else [_unsubmitted(context, call, body.job), *stored]


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


def _unsubmitted(context: Context, call: ApiCall, job: JobSubmit) -> Job:
    """Return the job that the request describes, with the requirements of its recipe."""
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
    return Job(id=THE_JOB, tenant=call.tenant, queue=job.queue, spec=spec, created_at=call.now, updated_at=call.now)


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


def _id(job: Job) -> str | None:
    return None if job.id == THE_JOB else job.id


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
