"""Rank offers by what the deployment knows: the history of their providers and hosts, and the waiting jobs."""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.fleets.fleet import FleetSpec
from functions.fleet.offers.offer_ranking import RankedOffer, Workload, rank
from functions.fleet.offers.reputation import weigh
from functions.fleet.records import Offer
from functions.fleet.store import FleetStore


def rank_known(
    store: FleetStore, offers: Sequence[Offer], spec: FleetSpec, work: Workload, now: int
) -> list[RankedOffer]:
    """Return all offers in the order in which the fleet takes them, then the rejected ones with their reasons.

    work: of `workload.typical`.
    """
    if not offers:
        return []
    failed = store.quarantined(0)
    excluded = {host for host, one in failed.items() if one.until > now}
    return rank(weigh(offers, store.reputations(), failed), spec, work, excluded, now=now)
