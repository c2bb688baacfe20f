"""Forecast the cost and the finish of waiting jobs on rented machines, as a range. Pure.

Three things make a run cheaper or dearer than expected: the hours of the work, the time of a boot, and the number of
interruptions with the work that each destroys. The lower end of the range takes the 10 % quantile of all three, the
upper end the 90 % quantile of all three. They are rarely all low or all high at once, therefore more than 80 % of runs
end within the range. In detail:

- work: `Workload.least_hours` and `most_hours`, from the history of the job's recipe; one number if the user gave it
- boot: BOOT_SPREAD times the offer's usual boot
- interruptions: with rate r and H hours of rent m = r * H are expected, and m -/+ Z_90 * sqrt(m) are the quantiles of
  Poisson's distribution in normal approximation; each destroys 10 %, 50 % or 90 % of a checkpoint interval and needs a
  further boot and the traffic of a further start
- end: the idle timeout of the fleet, and the time until the absence of the machine is proved
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from functions.fleet.offers.offer_ranking import Workload, rented_hours
from functions.fleet.records import Offer

Z_90 = 1.2816
"""Quantile of the normal distribution: 10 % of values exceed mean + Z_90 * deviation."""
BOOT_SPREAD = (0.5, 1.0, 2.0)
LOST_SHARE = (0.1, 0.5, 0.9)
"""Share of a checkpoint interval that one interruption destroys."""
PROOF_S = (60, 120, 240)
"""Time from the decision to give a machine back until its bill ends."""


@dataclass(frozen=True)
class Quantiles:
    """10 % quantile, expectation and 90 % quantile of a number."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """Range of the cost in USD and of the time in hours until the last job ends."""

    usd: Quantiles
    hours: Quantiles


def forecast(offers: Sequence[Offer], works: Sequence[Workload], *, idle_timeout_s: float) -> Forecast | None:
    """Return the forecast of doing `works` on one machine for each offer; None without a machine or work.

    The longest work goes first, always to the machine that is free first. Machines without work are not counted.
    """
    if not offers or not works:
        return None
    loads = [(offer, load) for offer, load in zip(offers, _assign(offers, works), strict=True) if load]
    runs = [[_run(offer, load, idle_timeout_s, at) for offer, load in loads] for at in range(3)]
    return Forecast(
        usd=Quantiles(*(sum(usd for _, usd in run) for run in runs)),
        hours=Quantiles(*(max(hours for hours, _ in run) for run in runs)),
    )


def _assign(offers: Sequence[Offer], works: Sequence[Workload]) -> list[list[Workload]]:
    loads: list[list[Workload]] = [[] for _ in offers]
    free_at = [offer.boot_s / 3600 for offer in offers]
    for work in sorted(works, key=lambda one: -one.hours):
        first = min(range(len(offers)), key=lambda at: (free_at[at], at))
        loads[first].append(work)
        free_at[first] += rented_hours(offers[first], work.hours, work.checkpoint_every_s)
    return loads


def _run(offer: Offer, load: Sequence[Workload], idle_timeout_s: float, at: int) -> tuple[float, float]:
    """Return the hours until the last work of one machine ends, and the machine's cost; at: index into Quantiles."""
    work_h = sum(_hours(one)[at] for one in load)
    checkpoint_s = sum(one.checkpoint_every_s for one in load) / len(load)
    traffic_gb = sum(one.traffic_gb for one in load)
    boot_h = BOOT_SPREAD[at] * offer.boot_s / 3600
    mean = offer.interruptions_per_hour * rented_hours(offer, work_h, checkpoint_s)
    interruptions = max(0.0, mean + (at - 1) * Z_90 * math.sqrt(mean))
    hours = boot_h + work_h + interruptions * (LOST_SHARE[at] * checkpoint_s / 3600 + boot_h)
    paid_hours = hours + (idle_timeout_s + PROOF_S[at]) / 3600
    downloaded_gb = traffic_gb + interruptions * traffic_gb / len(load)
    return hours, paid_hours * offer.usd_per_hour + downloaded_gb * offer.usd_per_gb


def _hours(work: Workload) -> tuple[float, float, float]:
    least = work.hours if work.least_hours is None else min(work.least_hours, work.hours)
    most = work.hours if work.most_hours is None else max(work.most_hours, work.hours)
    return least, work.hours, most
