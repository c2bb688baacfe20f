"""Choose the offers on which a fleet would start machines now, and name what limits their number. Pure.

The tick of the controller decides the same one machine at a time, with a stored intent between two machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.contract.fleets.fleet import FleetSpec
from functions.domain.records import Job
from functions.fleet.ledger import Bound, need_usd, tell_shortage
from functions.fleet.offers.offer_ranking import RankedOffer
from functions.fleet.records import Machine, Offer
from functions.fleet.ticks.demand import FleetMachines, missing_machines
from functions.fleet.ticks.gangs import Trains, select


@dataclass(frozen=True)
class Affordable:
    """Offers that a fleet can take now, and why not more.

    shortage: set if the room of the budget is too small for a further offer.
    """

    offers: list[Offer]
    why: str
    shortage: bool = False


def choose(
    spec: FleetSpec,
    there: tuple[Sequence[Machine], Sequence[FleetMachines]],
    waiting: Sequence[Job],
    ranked: Sequence[RankedOffer],
    money: tuple[Bound, float],
    *,
    trains: Trains = lambda _: False,
) -> tuple[list[Offer], str]:
    """Return the offers that would be taken, and why not more.

    there: machines of the fleet that the tick watches, and the other fleets of the tenant with theirs. waiting: jobs
    that the fleet can run. money: of `ledger.tightest`. trains: of `gangs.select`.
    """
    machines, others = there
    alive = sum(not one.state.ended for one in machines)
    if alive >= spec.max:
        return [], f"max is {spec.max}, and the fleet has {alive} machines"
    missing = missing_machines(spec, machines, waiting, others)
    if missing == 0:
        served = f"machines that are there take the {len(waiting)} waiting jobs"
        return [], served if waiting else "no job waits that the fleet can run"
    found = affordable(ranked, machines, money, missing)
    wanted = select(waiting, spec, machines, others, startable=len(found.offers), trains=trains)
    taken = found.offers[: missing_machines(spec, machines, wanted.jobs, others)]
    if wanted.held:
        return taken, "; ".join([wanted.held, *([found.why] if found.why else [])])
    if len(taken) == missing:
        return taken, _limit(spec, alive + missing, len(waiting))
    return taken, found.why


def affordable(
    ranked: Sequence[RankedOffer], machines: Sequence[Machine], money: tuple[Bound, float], most: int
) -> Affordable:
    """Return the offers for up to `most` machines, in the order in which the fleet takes them.

    machines: at whose places nothing is rented a second time. money: of `ledger.tightest`.
    """
    bound, room_usd = money
    rented = rented_places(machines)
    usable = [one.offer for one in ranked if not one.rejected and one.offer.place not in rented]
    if not usable:
        return Affordable(
            [], f"no offer fits, the nearest: {ranked[0].rejected}" if ranked else "no provider has an offer"
        )
    taken: list[Offer] = []
    for _ in range(most):
        # An offer that the budget does not pay for never hides a cheaper one behind it.
        offer = next((one for one in usable if _need_usd(one) <= room_usd), None)
        if offer is None:
            break
        taken.append(offer)
        room_usd -= _need_usd(offer)
        usable = [one for one in usable if one.place is None or one.place != offer.place]
    if len(taken) == most:
        return Affordable(taken, "")
    if not usable:
        return Affordable(taken, f"only {len(taken)} offers fit" if len(taken) > 1 else "only one offer fits")
    return Affordable(taken, tell_shortage(bound, room_usd, min(map(_need_usd, usable))), shortage=True)


def rented_places(machines: Iterable[Machine]) -> set[tuple[str, str] | None]:
    """Return the places (`Offer.place`) of the machines that exist or will, without None."""
    return {one.offer.place for one in machines if not one.state.ended} - {None}


def _need_usd(offer: Offer) -> float:
    return need_usd(offer.usd_per_hour, offer.boot_s)


def _limit(spec: FleetSpec, machines: int, waiting: int) -> str:
    if machines == spec.max:
        return f"max is {spec.max}"
    return f"{waiting} jobs wait" if waiting > 1 else "one job waits" if waiting else f"min is {spec.min}"
