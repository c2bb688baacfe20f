"""The offers of the demo's market, and why the fleet takes one of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.contract.fleet import FleetSpec
from functions.fleet.offer_ranking import RankedOffer, Workload, rank
from functions.fleet.records import Offer
from gpu_client.cli.core.output import FOLDED, TableColumn

CHEAP = {"usd_per_hour": 0.25, "boot_s": 900, "interruptions_per_hour": 1.0, "spot": True}
STEADY = {"usd_per_hour": 0.40, "boot_s": 120, "interruptions_per_hour": 0.02}
DEAR = {"usd_per_hour": 0.90, "boot_s": 60}
HOSTS = {"cheap-1": CHEAP, "cheap-2": CHEAP, "steady-1": STEADY, "steady-2": STEADY, "dear-1": DEAR}
COLUMNS = (
    "host",
    TableColumn("USD/h", right=True),
    TableColumn("boot", right=True),
    TableColumn("interruptions/h", right=True),
    TableColumn("expected USD", right=True),
    TableColumn("the fleet", FOLDED),
)


def make_offers() -> list[Offer]:
    """Return an offer of each host."""
    fixed = {"provider": "loopback", "gpus": 0, "disk_gib": 10, "usd_per_gb": 0.01}
    return [Offer.model_validate({**fixed, **kind, "ref": host, "machine_ref": host}) for host, kind in HOSTS.items()]


def rank_offers(spec: FleetSpec) -> list[RankedOffer]:
    """Rank the offers as the fleet's controller does, for an hour of work."""
    return rank(make_offers(), spec, Workload())


def offer_rows(ranked: Sequence[RankedOffer]) -> Iterator[list[str]]:
    """Yield the rows of ranked offers under COLUMNS."""
    for one in ranked:
        offer = one.offer
        yield [
            offer.ref,
            f"{offer.usd_per_hour:.2f}",
            f"{offer.boot_s / 60:.0f} min",
            f"{offer.interruptions_per_hour:g}",
            f"{one.expected_usd:.2f}",
            explain(one, ranked[0]),
        ]


def explain(one: RankedOffer, best: RankedOffer) -> str:
    """Return why the fleet takes an offer, or does not."""
    if one.rejected:
        return f"rejects it: {one.rejected}"
    if one is best:
        return "takes it: the lowest expected total"
    if one.expected_usd == best.expected_usd:
        return "takes it next"
    if one.offer.usd_per_hour < best.offer.usd_per_hour:
        return "passes it over: boot and interruptions cost more than the lower price saves"
    return "passes it over: the expected total is higher"
