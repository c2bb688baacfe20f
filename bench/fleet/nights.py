"""Money lost in simulated nights, by Baton's controller and by a naive one, with the same faults.

A night has five hours of jobs and faults in virtual time; then the fleet is stopped, and an hour passes. Money is lost
while a machine is billed and does no work that counts: boots, idle time, repeated work, machines that nobody ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from baton.contract.fleets.fleet import FleetSpec
from bench.fleet.naive_controller import NaiveController
from bench.harness.figures import Figure
from functions.fleet.records import StoredFleet
from tests.twins.provider import Faults, VirtualProvider
from tests.unit.fleet.night import Killed, Night

PRICE = 0.2
MINUTES = 300
AFTER_MINUTES = 60
BUDGET_USD = 6.0
OVERRUN_USD = 0.2
"""Overrun that is not counted: the last destroys of a night can be ignored by the provider for some minutes."""


class NaiveNight(Night):
    """Night whose machines the naive controller rents."""

    def controller(self) -> Any:
        provider = self.providers["loopback"]
        return NaiveController(
            self.store,
            provider,
            waiting=lambda: [one.job for one in self.trainings if one.on is None and one.left_s > 0],
            now=lambda: self.now,
            interrupt=self.interrupt,
            random_token=self._token,
        )


@dataclass(frozen=True)
class Outcome:
    """Money of one night in USD."""

    billed_usd: float
    worked_usd: float
    """Price of the work that counted."""
    stray_usd_per_hour: float
    """Price of the machines that are billed an hour after the fleet was stopped."""

    @property
    def lost_usd(self) -> float:
        """Return what was billed without work that counted."""
        return self.billed_usd - self.worked_usd

    @property
    def lost_until_noon_usd(self) -> float:
        """Return the loss if a person ends the strays eight hours later."""
        return self.lost_usd + 8 * self.stray_usd_per_hour


def run_night(seed: int, kind: type[Night], fault_rate: float) -> Outcome:
    """Simulate one night; the faults depend on the seed alone. fault_rate: faults that begin in a minute."""
    draw = random.Random(seed)
    spec = FleetSpec.model_validate(
        {
            "name": "nights",
            "providers": ["loopback"],
            "max_usd_per_hour": 1,
            "budget": {"total_usd": BUDGET_USD},
            "max": draw.randint(1, 4),
        }
    )
    night = kind(spec, {"loopback": VirtualProvider(price=PRICE)})
    provider = night.providers["loopback"]
    jobs = [night.submit(hours=draw.uniform(0.1, 2)) for _ in range(draw.randint(1, 5))]
    asked_s = sum(one.left_s for one in jobs)
    for _ in range(MINUTES):
        if draw.random() < fault_rate:
            setattr(provider.faults, draw.choice([one.name for one in fields(Faults)]), draw.randint(1, 4))
        vanishes, which = draw.random() < fault_rate / 10, draw.random()
        dies, at = draw.random() < fault_rate / 2, draw.randint(0, 12)
        alive = provider.alive()
        if vanishes and alive:
            provider.vanish(alive[int(which * len(alive))])
        night.interrupt = _die(at) if dies else _go_on
        night.step()
    provider.faults = Faults()
    night.interrupt = _go_on
    (fleet,) = night.store.fleets()
    stopped: StoredFleet = fleet.model_copy(update={"stopped": True, "version": fleet.version + 1})
    night.store.put_fleet(stopped)
    night.step(AFTER_MINUTES)
    left_s = sum(max(0, one.left_s) + one.since_checkpoint_s for one in jobs)
    return Outcome(
        billed_usd=night.billed_usd(),
        worked_usd=(asked_s - left_s) / 3600 * PRICE,
        stray_usd_per_hour=len(night.billing()) * PRICE,
    )


def measure(nights: int, fault_rate: float) -> list[Figure]:
    """Simulate the nights with both controllers and return the figures."""
    own = [run_night(seed, Night, fault_rate) for seed in range(nights)]
    naive = [run_night(seed, NaiveNight, fault_rate) for seed in range(nights)]
    title = f"{nights} nights, {fault_rate * 60:g} faults an hour"

    def compared(name: str, unit: str, value: Callable[[Outcome], float], at_most: float | None = None) -> Figure:
        found, baseline = sum(map(value, own)), sum(map(value, naive))
        # A ratio needs a baseline; without one the value itself is compared with the target.
        other: dict[str, Any] = {"baseline_name": "naive", "baseline": [baseline]} if baseline else {}
        return Figure(name=f"{title}: {name}", unit=unit, rounds=[found], at_most=at_most, counted=True, **other)

    return [
        compared("with a stray at the end", "nights", lambda one: one.stray_usd_per_hour > 0, 0),
        compared("price of all strays", "USD/h", lambda one: one.stray_usd_per_hour, 0),
        compared("lost by the end", "USD", lambda one: one.lost_usd, 1),
        compared("lost eight hours later", "USD", lambda one: one.lost_until_noon_usd, 1),
        compared("over the budget", "nights", lambda one: one.billed_usd > BUDGET_USD + OVERRUN_USD),
        compared("work that counted", "USD", lambda one: one.worked_usd),
    ]


def _go_on(call: str) -> None:
    """Let the call pass."""


def _die(at: int) -> Callable[[str], None]:
    """Return a function that ends the controller's process once, before the call number `at`."""
    left = [at]

    def interrupt(call: str) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise Killed

    return interrupt
