"""Keep the spending of a fleet within its budget: what was spent, what is reserved, what may be reserved.

Machines hold reservations (`Machine.reserved_usd`), the ledger holds what was spent. A machine may run only as long as
its reservation pays for the machine, and the tick extends reservations an hour ahead while the budget has room.
Therefore spent and reserved money together never exceed the budget, even if the controller stops at any instruction.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal, Self, TypeVar

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from functions.domain.record_base import Record
from functions.fleet.breaker import Breaker, FormingPause
from functions.fleet.machine_states import STARTING, USABLE
from functions.fleet.records import Machine

HORIZON_S = 3600
"""Time for which a running machine holds a reservation."""
CLOCK_SKEW_S = 3600
"""Time by which a clock may be behind the one that began the ledger's day: the day goes on, and its sum stays."""
EXTENDED = STARTING | USABLE | {State.DRAINING}
"""States whose reservation grows with time; a machine in another state is on its way out."""
CHARGE_TOLERANCE = 0.05
"""Fraction of the observed cost by which a provider's charge may differ."""
CHARGE_TOLERANCE_S = 120
"""Rent by which a provider's charge may differ, because a tick sees a begin and an end a minute late each."""
WARN_AT = 0.8
"""Fraction of a bound at which the fleet warns."""


class Ledger(Record):
    """Money that a fleet spent: in total, on its current day and in its current month (UTC)."""

    version: int = 0
    spent_usd: float = 0
    day: str = ""
    day_usd: float = 0
    month: str = ""
    month_usd: float = 0
    warned: list[str] = []
    """Bounds whose warning was published, with their period: `day 2026-11-25`."""
    waits: str = ""
    """Why the last tick did not start a machine that the fleet lacks; empty if the fleet lacks none."""
    exhausted: str = ""
    """Bound without the money for the machine that the fleet lacks; empty while the money suffices."""
    breakers: dict[str, Breaker] = {}
    """By provider: machines that are gone without having held a job; those on their way out are counted beside."""
    forming: dict[str, FormingPause] = {}
    """By elastic job: pauses of trainings whose machines went back because too few nodes could be rented."""

    def at(self, now: int) -> Self:
        """Return the ledger with the counters of a day or month that has ended set to zero."""
        day = _day(now)
        if day == self.day or day < self.day <= _day(now + CLOCK_SKEW_S):
            return self
        same_month = day[:7] == self.month
        updates = {"day": day, "day_usd": 0.0, "month": day[:7], "month_usd": self.month_usd if same_month else 0.0}
        return self.model_copy(update=updates)

    def spend(self, usd: float, now: int, *, since: int | None = None) -> Self:
        """Return the ledger after spending; counted on the day and in the month of `now`.

        usd: negative for a machine that turned out never to have existed, which has been counted from `since`. A day or
        month that began later keeps its sum, because that sum holds a part of the machine's cost at most.
        """
        current = self.at(now)
        from_day = current.day if since is None or usd > 0 else min(_day(since), current.day)
        counted = {"spent_usd": True, "day_usd": from_day == current.day, "month_usd": from_day[:7] == current.month}
        sums = {name: max(0.0, getattr(current, name) + usd) for name, holds in counted.items() if holds}
        return current.model_copy(update=sums) if usd else current


class DeploymentLedger(Ledger):
    """Money that all fleets of all tenants spent together, with the money that their machines have reserved."""

    reserved_usd: float = 0
    watch_until: int = 0
    """Time until which a provider may list a late machine of a fleet that has retired."""

    def follow(self, before: Ledger, after: Ledger, now: int) -> Self:
        """Return the ledger after the change of a fleet's ledger."""
        current, before, after = self.at(now), before.at(now), after.at(now)
        names = ("spent_usd", "day_usd", "month_usd")
        sums = {name: max(0.0, getattr(current, name) + getattr(after, name) - getattr(before, name)) for name in names}
        return current.model_copy(update=sums)


def _day(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


L = TypeVar("L", bound=Ledger)


class Bound(Record):
    """Bound of a budget, with the spending that counts against the bound."""

    name: str
    period: str
    cap_usd: float
    spent_usd: float
    scope: Literal["fleet", "deployment"] = "fleet"
    """`deployment`: the bound holds for all fleets of all tenants together."""

    @property
    def label(self) -> str:
        """Name of the bound for people and for events."""
        return self.name if self.scope == "fleet" else f"{self.name} of the deployment"

    def room_usd(self, reserved_usd: float) -> float:
        """Return what may still be reserved in USD; negative if spending and reservations exceed the bound."""
        return self.cap_usd - self.spent_usd - reserved_usd


def bounds(budget: Budget, ledger: Ledger, now: int) -> list[Bound]:
    """Return the bounds that the budget names, with the spending up to `now`."""
    scope: Literal["fleet", "deployment"] = "deployment" if isinstance(ledger, DeploymentLedger) else "fleet"
    current = ledger.at(now)
    rows = (
        ("total_usd", "", budget.total_usd, current.spent_usd),
        ("per_day_usd", current.day, budget.per_day_usd, current.day_usd),
        ("per_month_usd", current.month, budget.per_month_usd, current.month_usd),
    )
    return [
        Bound(name=name, period=period, cap_usd=cap, spent_usd=spent, scope=scope)
        for name, period, cap, spent in rows
        if cap
    ]


def reserved_usd(machines: Iterable[Machine]) -> float:
    """Return the sum of all reservations in USD."""
    return sum(machine.reserved_usd for machine in machines if not machine.state.ended)


def tightest(budget: Budget, ledger: Ledger, machines: Iterable[Machine], now: int) -> tuple[Bound, float]:
    """Return the bound with the least room, and its room in USD. A budget has at least one bound."""
    reserved = reserved_usd(machines)
    found = bounds(budget, ledger, now)
    bound = min(found, key=lambda one: one.room_usd(reserved))
    return bound, bound.room_usd(reserved)


def need_usd(usd_per_hour: float, boot_s: float) -> float:
    """Return the reservation in USD that a new machine needs: its boot and one horizon."""
    return usd_per_hour * (boot_s + HORIZON_S) / 3600


def tell_shortage(bound: Bound, room_usd: float, need_usd: float) -> str:
    """Return that the room of a bound does not pay for a machine, with as many digits as show the difference."""
    left = max(0.0, room_usd)
    digits = 2 if f"{left:.2f}" != f"{need_usd:.2f}" else 4
    need = f"boot and one hour of the cheapest offer need {need_usd:.{digits}f} USD"
    return f"{bound.label} has {left:.{digits}f} USD left, {need}"


def describe_charge(machine: Machine) -> str:
    """Return how the provider's charge differs from the observed cost; empty for no large difference or no charge."""
    if machine.charged_usd is None:
        return ""
    difference = machine.charged_usd - machine.spent_usd
    tolerated = max(CHARGE_TOLERANCE * machine.spent_usd, machine.usd_per_hour * CHARGE_TOLERANCE_S / 3600)
    if abs(difference) <= tolerated:
        return ""
    share = f"{100 * abs(difference) / machine.spent_usd:.0f} % " if machine.spent_usd else ""
    return (
        f"{machine.provider} charges {machine.charged_usd:.4f} USD, {share}{'more' if difference > 0 else 'less'} than "
        f"the observed {machine.spent_usd:.4f} USD; compare the receipt with the provider's bill"
    )


def extend(machine: Machine, room_usd: float) -> Machine:
    """Return the machine with its reservation filled up to one horizon, or by as much as there is room.

    Without room, because the document of the fleet has a smaller budget or another machine costs more than its
    reservation, the machine gives of its reservation back what is missing.
    """
    if machine.priced_until is None or machine.state not in EXTENDED:
        return machine
    missing = max(0.0, machine.usd_per_hour * HORIZON_S / 3600 - machine.reserved_usd)
    reserved = max(0.0, machine.reserved_usd + min(missing, room_usd))
    return machine if reserved == machine.reserved_usd else machine.model_copy(update={"reserved_usd": reserved})


def release(machine: Machine) -> Machine:
    """Return an ended machine without its reservation."""
    return machine.model_copy(update={"reserved_usd": 0.0}) if machine.state.ended and machine.reserved_usd else machine


def new_warnings(budget: Budget, ledger: L, now: int) -> tuple[L, list[Bound]]:
    """Return the bounds that have passed WARN_AT since the last call, and the ledger that remembers them."""
    passed = [
        bound
        for bound in bounds(budget, ledger, now)
        if bound.spent_usd >= WARN_AT * bound.cap_usd and f"{bound.name} {bound.period}" not in ledger.warned
    ]
    if not passed:
        return ledger, []
    warned = [*ledger.warned, *(f"{bound.name} {bound.period}" for bound in passed)]
    return ledger.model_copy(update={"warned": warned[-8:]}), passed
