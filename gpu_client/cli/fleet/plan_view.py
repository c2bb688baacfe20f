"""Format offers and the plan of a fleet as lines and tables that fit 80 columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.plan import FleetPlan, OfferPage, OfferView, SilentProvider, SpanView
from gpu_client.cli.core.formats import count, duration, moment, plain
from gpu_client.cli.core.output import FOLDED, TableColumn, build_fields, build_table
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS
from gpu_client.cli.fleet.view import usd

SHOWN_OFFERS = 12
"""Offers of a kind that a table lists; `--json` lists all."""

_COSTS = (
    "provider",
    TableColumn("machine", FOLDED),
    TableColumn("USD/h", right=True),
    TableColumn("total", right=True),
    TableColumn("work", right=True),
    TableColumn("traffic", right=True),
    TableColumn("boot", right=True),
    TableColumn("lost", right=True),
)
_REJECTED = (
    "provider",
    TableColumn("machine", FOLDED),
    TableColumn("USD/h", right=True),
    TableColumn("reason", FOLDED),
)
_UNSERVABLE = ("job", TableColumn("reason", FOLDED))
_SILENT = ("provider", TableColumn("reason", FOLDED))
_BOUNDS = {"total_usd": "in total", "per_day_usd": "today", "per_month_usd": "this month"}


def plan_page(spec: FleetSpec, plan: FleetPlan) -> RenderableType:
    """Render a plan: how many machines start and why not more, money, cost, finish, offers."""
    taken = [one for one in plan.offers if one.taken]
    free = [one for one in plan.offers if not one.taken and not one.rejected]
    unservable = [((one.job or "the new job")[:SHOWN_ID_CHARACTERS], one.reason) for one in plan.unservable]
    parts: list[RenderableType] = [build_fields(_details(spec, plan))]
    parts += _section("starts on, with the expected USD", _COSTS, map(_cost_row, taken))
    parts += _section("further offers", _COSTS, map(_cost_row, free[:SHOWN_OFFERS]), len(free))
    parts += _rejected(plan.offers)
    parts += _section("jobs that this fleet cannot run", _UNSERVABLE, unservable[:SHOWN_OFFERS], len(unservable))
    parts += _silent(plan.silent)
    return Group(*parts)


def offers_page(page: OfferPage, nodes: int | None = None) -> RenderableType:
    """Render offers with the parts of their expected totals, then the rejected ones with the reasons.

    nodes: of the request, whose cost a line sums up.
    """
    free = [one for one in page.offers if not one.rejected]
    parts = _section("offers, with the expected USD", _COSTS, map(_cost_row, free), len(free) + page.omitted)
    parts += _rejected(page.offers)
    if not free and any("disk_gib is" in one.rejected for one in page.offers):
        parts += [Text(), Text("For work that needs less disk than 40 GiB, give --disk.")]
    parts += [Text(), Text(_nodes_line(page, nodes))] if nodes else []
    parts += _silent(page.silent)
    return Group(*(parts[1:] or [Text("No offers. Configure a provider with: baton fleet login PROVIDER")]))


def _nodes_line(page: OfferPage, nodes: int) -> str:
    taken = sum(one.taken for one in page.offers)
    if taken < nodes:
        return f"{taken} of {count(nodes, 'node')} can be rented."
    price = sum(one.taken * one.usd_per_hour for one in page.offers)
    total = sum(one.taken * one.expected.total for one in page.offers)
    return f"{count(nodes, 'node')} on the first offers: {usd(price)} USD/h, {usd(total)} USD expected in total."


def _details(spec: FleetSpec, plan: FleetPlan) -> Iterator[tuple[str, str]]:
    machines = count(plan.start, "machine")
    yield "plan", f"{spec.name} would start {machines} now; {plan.why}"
    if plan.waits and plan.waits not in plan.why:
        yield "last tick", f"started none: {plan.waits}"
    if plan.works or plan.unservable:
        cannot = f", {len(plan.unservable)} cannot" if plan.unservable else ""
        nodes = sum(one.nodes or 0 for one in plan.works)
        waiting = f" with {count(nodes, 'waiting node')}" if nodes else ""
        yield "jobs", f"{count(len(plan.works), 'job')}{waiting} can run{cannot}"
    paid = "" if plan.paid_hours is None else f", {plan.paid_hours:.1f} hours of the first machine below"
    bound, _, scope = plan.room_bound.partition(" ")
    yield "budget", " ".join([f"{usd(plan.room_usd)} USD left", _BOUNDS[bound], *([scope] if scope else [])]) + paid
    if plan.usd is not None and plan.hours is not None:
        over = "; the budget may end before the jobs" if plan.usd.high > plan.room_usd else ""
        yield "cost", f"{usd(plan.usd.low)} to {usd(plan.usd.high)} USD, expected {usd(plan.usd.expected)}{over}"
        yield "finish", _finish(plan.hours, plan.at)
    sources = [one.hours_from for one in plan.works]
    if "assumed" in sources:
        yield "hours", f"unknown for {count(sources.count('assumed'), 'job')}, 1 h is assumed; give --hours"


def _finish(hours: SpanView, at: int) -> str:
    low, high = (moment(at + round(value * 3600))[:16] for value in (hours.low, hours.high))
    return f"after {duration(hours.low * 3600)} to {duration(hours.high * 3600)}: {low} to {high}"


def _section(
    title: str,
    columns: Sequence[TableColumn | str],
    rows: Iterator[Sequence[str]] | Sequence[Sequence[str]],
    of: int = 0,
) -> list[RenderableType]:
    """Return an empty line, the title and the table; nothing without rows. of: number of all rows."""
    listed = list(rows)
    table = build_table(columns, listed)
    if table is None:
        return []
    more = [Text(f"and {of - len(listed):,} more: --json lists all")] if of > len(listed) else []
    return [Text(), Text(title, "bold"), table, *more]


def _rejected(offers: Sequence[OfferView]) -> list[RenderableType]:
    rejected = [one for one in offers if one.rejected]
    rows = [(one.provider, _machine(one), usd(one.usd_per_hour), one.rejected) for one in rejected[:SHOWN_OFFERS]]
    return _section("rejected", _REJECTED, rows, len(rejected))


def _silent(silent: Sequence[SilentProvider]) -> list[RenderableType]:
    return _section("providers without an answer", _SILENT, [(one.provider, one.reason) for one in silent])


def _cost_row(offer: OfferView) -> list[str]:
    expected = offer.expected
    parts = (expected.total, expected.machine, expected.traffic, expected.boot, expected.lost)
    return [offer.provider, _machine(offer), usd(offer.usd_per_hour), *(usd(part) if part else "" for part in parts)]


def _machine(offer: OfferView) -> str:
    """Return `2x RTX 4090 24 GiB spot US`, with `3x` machines of a kind in front."""
    number = f"{offer.gpus}x " if offer.gpus > 1 else ""
    gpu = f"{number}{offer.gpu_model} {offer.vram_gib:.3g} GiB" if offer.gpu_model else "no GPU"
    times = f"{offer.taken} of " if offer.taken > 1 else ""
    return plain(" ".join([f"{times}{gpu}", *(["spot"] if offer.spot else []), *offer.regions]))
