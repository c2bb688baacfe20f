"""Rank offers by their expected total cost, and name the reason why an offer is not taken.

Cheap hosts that are slow to boot, far away or often interrupted lose by arithmetic: the expected total includes
storage, traffic, boot time and the work that interruptions destroy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton.contract.fleets.fleet import FleetSpec
from functions.domain.jobs.job_selection import names_model
from functions.fleet.machine_states import CHECKPOINT_MARGIN_S
from functions.fleet.offers.measurements import driver_branch
from functions.fleet.records import Offer

LEAST_WORK_S = 3600
"""Work for which a machine must be there at least, besides its boot."""


@dataclass(frozen=True)
class Workload:
    """Work that a machine will do, as far as it is known."""

    hours: float = 1.0
    checkpoint_every_s: float = 600.0
    traffic_gb: float = 5.0
    """Image, inputs and outputs together."""
    least_hours: float | None = None
    """Hours that 10 % of such jobs stay below; None: as `hours`."""
    most_hours: float | None = None
    """Hours that 90 % of such jobs stay below; None: as `hours`."""


@dataclass(frozen=True)
class ExpectedCost:
    """Expected total in USD of one workload on one offer, by cause."""

    hours: float
    """Hours of rent: work, boot, and the work that interruptions destroy."""
    machine_usd: float
    """GPU and disk for the hours of the work."""
    boot_usd: float
    """GPU and disk until the work begins."""
    lost_usd: float
    """GPU and disk while work is repeated after interruptions."""
    traffic_usd: float

    @property
    def total_usd(self) -> float:
        """Sum all causes."""
        return self.machine_usd + self.boot_usd + self.lost_usd + self.traffic_usd


@dataclass(frozen=True)
class RankedOffer:
    """An offer with its expected cost, and with the reason why the fleet does not take the offer, if there is one."""

    offer: Offer
    cost: ExpectedCost
    rejected: str = ""

    @property
    def expected_usd(self) -> float:
        """Return the expected total in USD."""
        return self.cost.total_usd


def rented_hours(offer: Offer, work_hours: float, checkpoint_every_s: float) -> float:
    """Return the expected hours of rent: work, boot, and what interruptions repeat.

    With rate r of interruptions per hour, each interruption repeats half a checkpoint interval and one boot:
    hours = (work + boot) / (1 - r * (checkpoint / 2 + boot)).
    """
    boot_h = offer.boot_s / 3600
    share = min(0.95, offer.interruptions_per_hour * (checkpoint_every_s / 7200 + boot_h))
    return (work_hours + boot_h) / (1 - share)


def expected_cost(offer: Offer, work: Workload) -> ExpectedCost:
    """Return the expected cost of doing `work` on the offer. The traffic of each start is paid again."""
    boot_h = offer.boot_s / 3600
    hours = rented_hours(offer, work.hours, work.checkpoint_every_s)
    starts = 1 + offer.interruptions_per_hour * hours
    return ExpectedCost(
        hours=hours,
        machine_usd=work.hours * offer.usd_per_hour,
        boot_usd=boot_h * offer.usd_per_hour,
        lost_usd=(hours - work.hours - boot_h) * offer.usd_per_hour,
        traffic_usd=starts * work.traffic_gb * offer.usd_per_gb,
    )


def rejection(offer: Offer, spec: FleetSpec, excluded: Collection[str], now: int = 0) -> str:
    """Return why the fleet does not take the offer; empty if the fleet may.

    excluded: `provider:machine_ref` of quarantined hosts. now: time of the decision, for offers that end.
    """
    if offer.usd_per_hour > spec.max_usd_per_hour == spec.budget.total_usd:
        total = f"the budget of {spec.max_usd_per_hour:g} USD (total_usd)"
        return f"{offer.usd_per_hour:g} USD/h: {total} does not pay for boot and one hour"
    if offer.usd_per_hour > spec.max_usd_per_hour:
        return f"{offer.usd_per_hour:g} USD/h exceeds max_usd_per_hour {spec.max_usd_per_hour:g}"
    problem = mismatch(offer, spec)
    if problem:
        return problem
    if offer.machine_ref and f"{offer.provider}:{offer.machine_ref}" in excluded:
        return "the host is quarantined"
    if offer.ends_at is not None and offer.ends_at < now + offer.boot_s + LEAST_WORK_S + CHECKPOINT_MARGIN_S:
        left_min = max(0, offer.ends_at - now) // 60
        return f"ends in {left_min} min, before its boot, an hour of work and a last checkpoint"
    return ""


def mismatch(offer: Offer, spec: FleetSpec) -> str:
    """Return how hardware, market or place differ from what the document asks for; empty if they do not."""
    if offer.vram_gib < spec.min_vram_gib:
        return f"{offer.vram_gib:g} GiB VRAM, min_vram_gib is {spec.min_vram_gib:g}"
    if offer.disk_gib < spec.disk_gib:
        return f"{offer.disk_gib:g} GiB disk, disk_gib is {spec.disk_gib:g}"
    if spec.min_driver and offer.driver and driver_branch(offer.driver) < spec.min_driver:
        return f"driver {offer.driver}, min_driver is {spec.min_driver}"
    if offer.download_mbit_s is not None and offer.download_mbit_s < spec.min_download_mbit_s:
        return f"{offer.download_mbit_s:g} Mbit/s download, min_download_mbit_s is {spec.min_download_mbit_s:g}"
    if spec.gpu_models and not any(names_model(wanted, offer.gpu_model or "") for wanted in spec.gpu_models):
        return f"{offer.gpu_model or 'no GPU'} is not among gpu_models"
    if spec.market != "either" and offer.spot != (spec.market == "spot"):
        return f"is {'spot' if offer.spot else 'on-demand'}, market is {spec.market}"
    if spec.regions and not {one.casefold() for one in spec.regions} & {one.casefold() for one in offer.regions}:
        return f"stands in {', '.join(offer.regions) or 'an unknown place'}, which is not among regions"
    return ""


def rank(
    offers: Sequence[Offer], spec: FleetSpec, work: Workload, excluded: Collection[str] = frozenset(), *, now: int = 0
) -> list[RankedOffer]:
    """Return all offers: those that fit first, in the order in which the fleet takes them, then the rejected ones.

    excluded: `provider:machine_ref` of quarantined hosts. now: time of the decision, for offers that end.
    """
    ranked = [RankedOffer(one, expected_cost(one, work), rejection(one, spec, excluded, now)) for one in offers]
    place: dict[str, int] = {name: at for at, name in enumerate(spec.providers)}

    def key(one: RankedOffer) -> tuple[bool, int, float, str]:
        first = place.get(one.offer.provider, len(place)) if spec.choose == "order" else 0
        return bool(one.rejected), first, one.expected_usd, one.offer.ref

    return sorted(ranked, key=key)
