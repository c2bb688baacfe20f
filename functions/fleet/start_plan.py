"""Choose the offers on which a fleet would start machines now, and name what limits their number. Pure.

The tick of the controller decides the same one machine at a time, with a stored intent between two machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

from baton.contract.fleet import FleetSpec
from functions.domain.records import Job
from functions.fleet.demand import missing_machines
from functions.fleet.ledger import Bound, need_usd
from functions.fleet.machine_states import MAYBE_EXISTING
from functions.fleet.offer_ranking import RankedOffer
from functions.fleet.records import Machine, Offer


def choose(
    spec: FleetSpec,
    machines: Sequence[Machine],
    waiting: Sequence[Job],
    ranked: Sequence[RankedOffer],
    bound: Bound,
    room_usd: float,
) -> tuple[list[Offer], str]:
    """Return the offers that would be taken, and why not more.

    machines: those of the fleet that the tick watches. waiting: jobs that the fleet can run. bound, room_usd: of
    `ledger.tightest`.
    """
    alive = sum(not one.state.ended for one in machines)
    if alive >= spec.max:
        return [], f"max is {spec.max}, and the fleet has {alive} machines"
    missing = missing_machines(spec, machines, waiting)
    if missing == 0:
        free = "no job waits that the fleet can run"
        return [], f"the machines of the fleet suffice for {len(waiting)} waiting jobs" if waiting else free
    rented = {one.offer.ref for one in machines if one.state in MAYBE_EXISTING}
    usable = [one.offer for one in ranked if not one.rejected]
    usable = [offer for offer in usable if offer.repeatable or offer.ref not in rented]
    if not usable:
        return [], f"no offer fits, the nearest: {ranked[0].rejected}" if ranked else "no provider has an offer"
    taken: list[Offer] = []
    for offer in chain.from_iterable(repeat(offer, missing if offer.repeatable else 1) for offer in usable):
        need = need_usd(offer.usd_per_hour, offer.boot_s)
        if need > room_usd:
            left = f"{bound.name} has {max(0.0, room_usd):.2f} USD left"
            return taken, f"{left}, boot and one hour of the next offer need {need:.2f} USD"
        room_usd -= need
        taken.append(offer)
        if len(taken) == missing:
            return taken, _limit(spec, alive + missing, len(waiting))
    return taken, f"only {len(taken)} offers fit"


def _limit(spec: FleetSpec, machines: int, waiting: int) -> str:
    if machines == spec.max:
        return f"max is {spec.max}"
    return f"{waiting} jobs wait" if waiting > 1 else "one job waits" if waiting else f"min is {spec.min}"
