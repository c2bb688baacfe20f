"""Format fleets, machines, receipts and events as lines and tables. Pure; all times are of the fleets' clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from baton.contract.fleets.fleet import (
    BoundView,
    FleetEventView,
    FleetSpec,
    FleetView,
    MachineState,
    MachineView,
    Receipt,
)
from baton.contract.fleets.money import Budget
from gpu_client.cli.core.formats import age, count, moment
from gpu_client.cli.core.output import CUT, FOLDED, TableColumn, build_fields, build_table
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS

Row = list[str]

FLEETS = (
    "fleet",
    "state",
    "machines",
    TableColumn("USD/h", right=True),
    TableColumn("spent", right=True),
    TableColumn("budget", FOLDED),
    TableColumn("waits", FOLDED),
)
_BOUNDS = (
    "budget",
    "period",
    TableColumn("USD", right=True),
    TableColumn("spent", right=True),
    TableColumn("reserved", right=True),
    TableColumn("left", right=True),
)
_WIDE = 140
"""Least width of a terminal for what machines have measured."""
_MACHINES = (
    TableColumn("machine", FOLDED),
    "state",
    "for",
    TableColumn("GPU", CUT),
    TableColumn("driver", from_width=_WIDE),
    TableColumn("write MB/s", right=True, from_width=_WIDE),
    TableColumn("down Mbit/s", right=True, from_width=_WIDE),
    TableColumn("USD/h", right=True),
    TableColumn("spent", right=True),
    "job",
    TableColumn("reason", FOLDED),
)
RECEIPTS = (
    TableColumn("machine", FOLDED),
    TableColumn("ended", FOLDED),
    TableColumn("USD/h", right=True),
    TableColumn("observed", right=True),
    TableColumn("charged", right=True),
    TableColumn("not listed", FOLDED, from_width=100),
    TableColumn("reason", FOLDED),
)
EVENTS = (
    TableColumn("when", FOLDED),
    "event",
    TableColumn("machine", FOLDED),
    TableColumn("USD", right=True),
    TableColumn("reason", FOLDED),
)
_BUDGET_NAMES = {"total_usd": "in total", "per_day_usd": "a day", "per_month_usd": "a month"}


def usd(amount: float) -> str:
    """Format an amount of money: cents, and below one dollar also their fractions."""
    return f"{amount:,.2f}" if amount >= 1 or round(amount, 2) == round(amount, 4) else f"{amount:.4f}"


def summary(spec: FleetSpec) -> str:
    """Return what a fleet permits: `up to 2 machines of loopback, 0.50 USD/h each; budget 20.00 USD in total`."""
    machines = count(spec.max, "machine")
    least = f", at least {spec.min}" if spec.min else ""
    price = f"{usd(spec.max_usd_per_hour)} USD/h{' each' if spec.max > 1 else ''}"
    return (
        f"up to {machines} of {', '.join(spec.providers)}{least}, {price} at most; budget {format_budget(spec.budget)}"
    )


def format_budget(budget: Budget) -> str:
    """Return `20.00 USD in total, 5.00 USD a day`."""
    bounds = ((getattr(budget, name), words) for name, words in _BUDGET_NAMES.items())
    return ", ".join(f"{usd(cap)} USD {words}" for cap, words in bounds if cap is not None)


def replacement(fleet: FleetView) -> Iterator[str]:
    """Yield what a stored document changed: fields, machines that are given back, money that is spent already."""
    before, now = fleet.replaced, fleet.spec
    if before is None:
        return
    changes = [
        f"{name} {_format_value(getattr(before.spec, name))} -> {_format_value(getattr(now, name))}"
        for name in type(now).model_fields
        if getattr(before.spec, name) != getattr(now, name)
    ]
    if changes:
        yield f"The document replaces an earlier one: {'; '.join(changes)}."
    if before.given_back:
        lost = [one.provider for one in fleet.machines if one.id in before.given_back]
        number = count(len(before.given_back), "machine", "machines")
        yield f"{number} of {', '.join(sorted(set(lost)))} {'is' if len(lost) == 1 else 'are'} given back."
    if before.spent_usd:
        yield f"{usd(before.spent_usd)} USD are spent already and count against the budget."


def _format_value(value: object) -> str:
    """Return the value of a field for people: `vast, salad`, `0.50`, `20.00 USD in total`, `none`."""
    if isinstance(value, Budget):
        return format_budget(value)
    if isinstance(value, list):
        return ", ".join(value) or "any"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def condition(fleet: FleetView) -> tuple[str, ...]:
    """Return what changes with a transition and not with time: state, machines, why the fleet waits."""
    return _format_state(fleet), _format_machines(fleet), fleet.waits


def headline(fleet: FleetView) -> str:
    """Return a fleet on one line: state, machines, price and money."""
    parts = [*condition(fleet)[:2], f"{usd(_usd_per_hour(fleet))} USD/h"]
    parts += [f"{usd(one.spent_usd)} of {usd(one.cap_usd)} USD {_bound_name(one)}" for one in fleet.bounds]
    return ", ".join(parts) + (f"; waits: {fleet.waits}" if fleet.waits else "")


def fleet_row(fleet: FleetView) -> Row:
    """Return the row of a fleet under FLEETS; `budget` is the bound of the fleet's own with the least room."""
    tightest = min((one for one in fleet.bounds if one.scope == "fleet"), key=_room_usd)
    return [
        fleet.spec.name,
        _format_state(fleet),
        _format_machines(fleet),
        usd(_usd_per_hour(fleet)),
        usd(fleet.spent_usd),
        f"{usd(tightest.spent_usd)} of {usd(tightest.cap_usd)} USD {_bound_name(tightest)}",
        fleet.waits,
    ]


def deployment_text(fleets: Sequence[FleetView]) -> str:
    """Return what all fleets together have spent by bound of the deployment's budget; empty without such a budget."""
    bounds = [one for one in (fleets[0].bounds if fleets else ()) if one.scope == "deployment"]
    spent = [f"{usd(one.spent_usd)} of {usd(one.cap_usd)} USD {_BUDGET_NAMES[one.name]}" for one in bounds]
    return f"All fleets of the deployment have spent {', '.join(spent)}." if spent else ""


def standing_text(spec: FleetSpec) -> str:
    """Return what the machines of `min` cost without jobs; empty for a fleet that rents only for jobs."""
    if not spec.min:
        return ""
    machines = count(spec.min, "machine is", "machines are")
    cost = usd(spec.min * spec.max_usd_per_hour * 24)
    return f"min is {spec.min}: {machines} rented also without jobs, for up to {cost} USD a day within the budget."


def render(fleet: FleetView) -> RenderableType:
    """Render a fleet: its document, its money by bound, its machines, the reason of its wait."""
    parts: list[RenderableType] = [build_fields(_details(fleet)), Text()]
    tables = (
        (_BOUNDS, map(_bound_row, fleet.bounds)),
        (_MACHINES, (_machine_row(one, fleet.at) for one in fleet.machines)),
    )
    for columns, rows in tables:
        table = build_table(columns, rows)
        if table is not None:
            parts += [table, Text()]
    return Group(*parts[:-1])


def receipt_rows(machines: Sequence[MachineView]) -> Iterator[Row]:
    """Yield the rows of ended machines under RECEIPTS, and the row of their sum."""
    receipts = [(one, one.receipt) for one in machines if one.receipt is not None]
    for machine, receipt in receipts:
        yield [
            machine.id,
            moment(machine.since),
            usd(receipt.quoted_usd_per_hour),
            usd(receipt.observed_usd),
            "" if receipt.charged_usd is None else usd(receipt.charged_usd),
            _format_absence(receipt),
            machine.reason,
        ]
    charges = [receipt.charged_usd for _, receipt in receipts if receipt.charged_usd is not None]
    charged = usd(sum(charges)) if charges else ""
    if charges and len(charges) < len(receipts):
        # Some providers record no charges: their sum is no total.
        charged += f" ({len(charges)} of {len(receipts)})"
    total = usd(sum(receipt.observed_usd for _, receipt in receipts))
    yield ["total", count(len(receipts), "machine"), "", total, charged, "", ""]


def event_row(event: FleetEventView) -> Row:
    """Return the row of an event under EVENTS."""
    return [moment(event.at), event.type, event.machine or "", usd(event.usd) if event.usd else "", event.reason]


def has_ended(fleet: FleetView) -> bool:
    """Return True if a fleet is stopped and nothing of the fleet can cost money any more."""
    return fleet.stopped and not fleet.machines


def _details(fleet: FleetView) -> Iterator[tuple[str, str]]:
    spec = fleet.spec
    yield "fleet", spec.name
    yield "state", _format_state(fleet)
    yield "permits", summary(spec)
    gpu = ", ".join(spec.gpu_models) or "any GPU"
    vram = f", {spec.min_vram_gib:g} GiB VRAM or more" if spec.min_vram_gib else ""
    market = "" if spec.market == "either" else f", {spec.market}"
    yield "machines", f"{gpu}{vram}, {spec.disk_gib:g} GiB disk{market}"
    yield "queues", ", ".join(spec.queues)
    yield "tags", ", ".join(f"{name}={value}" for name, value in sorted(spec.tags.items()))
    yield "job", fleet.job_id or ""
    yield "ends", f"after {spec.idle_timeout_s} s without a job, at the latest after {spec.max_hours:g} h"
    yield "changed", moment(fleet.updated_at)
    yield "waits", fleet.waits


def _bound_row(bound: BoundView) -> Row:
    left = usd(max(0.0, _room_usd(bound)))
    return [_bound_name(bound), bound.period, usd(bound.cap_usd), usd(bound.spent_usd), usd(bound.reserved_usd), left]


def _bound_name(bound: BoundView) -> str:
    whole = ", deployment" if bound.scope == "deployment" else ""
    return f"{_BUDGET_NAMES[bound.name]}{whole}"


def _machine_row(machine: MachineView, now: int) -> Row:
    measured = machine.measured
    return [
        machine.id,
        machine.state.value,
        age(now - machine.since),
        machine.gpu_model or "",
        (measured and measured.driver) or "",
        f"{measured.disk_write_mb_s:.0f}" if measured else "",
        f"{measured.download_mbit_s:.0f}" if measured else "",
        usd(machine.usd_per_hour),
        usd(machine.spent_usd),
        (machine.job_id or "")[:SHOWN_ID_CHARACTERS],
        machine.reason,
    ]


def _room_usd(bound: BoundView) -> float:
    return bound.cap_usd - bound.spent_usd - bound.reserved_usd


def _usd_per_hour(fleet: FleetView) -> float:
    """Return the price of all machines that the providers may bill."""
    return sum(one.usd_per_hour for one in fleet.machines if one.state is not MachineState.PLANNED)


def _format_state(fleet: FleetView) -> str:
    if not fleet.stopped:
        return "active"
    return "stopping" if fleet.machines else "stopped"


def _format_machines(fleet: FleetView) -> str:
    """Return `3 of 4: 2 busy, 1 booting`."""
    counts: dict[str, int] = {}
    for machine in fleet.machines:
        counts[machine.state.value] = counts.get(machine.state.value, 0) + 1
    states = ", ".join(f"{number} {state}" for state, number in counts.items())
    return f"{len(fleet.machines)} of {fleet.spec.max}" + (f": {states}" if states else "")


def _format_absence(receipt: Receipt) -> str:
    """Return the proof that the machine is gone: the times of two complete lists of the provider."""
    if len(receipt.absent_at) == 2:
        first, second = receipt.absent_at
        return f"{moment(first)[11:]} + {age(second - first)}"
    return "never created" if receipt.requested_at is None else "never made"
