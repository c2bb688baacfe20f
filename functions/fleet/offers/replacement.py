"""Decide whether another machine takes the place of the slowest node of an elastic training. Pure.

A machine is replaced only if it trains far less than the others, for its price as well, over several rounds, and if
what the replacement trains more is worth twice what the change costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from functions.domain.worlds.world_record import RECENT_ROUNDS, WorldNode, WorldRecord
from functions.fleet.machine_states import CHECKPOINT_GRACE_S
from functions.fleet.offers.offer_ranking import RankedOffer, Workload
from functions.fleet.records import Machine, Offer

SLOW_SHARE = 0.5
"""Part of the median below which a node is slow."""
LEAST_NODES = 3
"""Nodes with a full history: a median of two says nothing about either, and two others train on meanwhile."""
PAYBACK = 2.0
"""Factor by which the gain exceeds the cost of the change, because the next machine may be slow as well."""
HOST_CHANGE_S = CHECKPOINT_GRACE_S + 180
"""Time for the last round of the old machine and for the proof of its absence, besides the boot of the new machine."""


@dataclass(frozen=True)
class SlowNode:
    """Machine of a node that trains less than SLOW_SHARE of what the others train. share: of the median, 0 to 1."""

    machine: Machine
    share: float


def find_slowest(members: Sequence[WorldNode], machines: Mapping[str, Machine]) -> SlowNode | None:
    """Return the slowest node; None if no node is slow, also for its price.

    A node counts by its tokens in the newest RECENT_ROUNDS rounds together: a late delta counts in a later round.
    machines: rented machines that hold nodes, by id.
    """
    known = [one for one in members if len(one.recent_tokens) >= RECENT_ROUNDS]
    if len(known) < LEAST_NODES:
        return None
    tokens = {one.machine_id or one.node: sum(one.recent_tokens) for one in known}
    usual = median(tokens.values())
    rented = {name: machines[name] for name in tokens if name in machines and machines[name].usd_per_hour > 0}
    if not rented or usual <= 0:
        return None
    per_usd = {name: tokens[name] / one.usd_per_hour for name, one in rented.items()}
    slowest = min(rented, key=lambda name: tokens[name])
    if tokens[slowest] >= SLOW_SHARE * usual or per_usd[slowest] >= SLOW_SHARE * median(per_usd.values()):
        return None
    return SlowNode(rented[slowest], tokens[slowest] / usual)


def find_better(slow: SlowNode, ranked: Sequence[RankedOffer], hours_left: float) -> tuple[Offer, float] | None:
    """Return the first offer whose machine pays in place of the slow one, and the cost of the change in USD.

    The offer is not dearer and is of another host. The new machine is assumed to train as the median does.
    """
    old = slow.machine
    for one in ranked:
        offer = one.offer
        same = (offer.provider, offer.machine_ref) == (old.provider, old.offer.machine_ref)
        if one.rejected or (same and not offer.repeatable) or offer.usd_per_hour > old.usd_per_hour:
            continue
        change_s = offer.boot_s + HOST_CHANGE_S
        cost_usd = change_s / 3600 * old.usd_per_hour + Workload().traffic_gb * offer.usd_per_gb
        gained_h = hours_left - change_s / 3600
        if gained_h * (1 - slow.share) * old.usd_per_hour >= PAYBACK * cost_usd:
            return offer, cost_usd
    return None


def hours_trained(world: WorldRecord) -> float:
    """Return the hours that all rounds of a training take at the pace of the newest ones, without waits and pauses."""
    return world.round * fmean(one.round_s for one in world.rounds) / 3600 if world.rounds else 0.0


def hours_left(done: float, trained_h: float) -> float:
    """Return the hours that a training still needs, from the part that is done; the usual hours of a job if unknown."""
    return trained_h * (1 - done) / done if 0 < done <= 1 and trained_h > 0 else Workload().hours
