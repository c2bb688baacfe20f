"""The tick compares offers by the waiting jobs and by the history of providers and hosts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.jobs.policy import Policy
from functions.fleet.offers.known_offers import rank_known
from functions.fleet.offers.offer_ranking import Workload
from functions.fleet.records import Offer, Quarantine
from tests.twins.fleet import MemoryFleetStore
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import Night

SPEC = FleetSpec.model_validate(
    {"name": "nights", "providers": ["loopback"], "max_usd_per_hour": 1, "budget": {"total_usd": 9}}
)


def an_offer(ref: str, usd_per_hour: float, interruptions_per_hour: float = 0.0) -> Offer:
    return Offer(
        provider="loopback",
        ref=ref,
        machine_ref=ref,
        vram_gib=24,
        disk_gib=80,
        boot_s=60,
        usd_per_hour=usd_per_hour,
        interruptions_per_hour=interruptions_per_hour,
    )


class Market(VirtualProvider):
    """A calm machine, and a cheaper one that is interrupted each second hour."""

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        return [an_offer("calm", 0.2), an_offer("fragile", 0.17, 0.5)]


@pytest.mark.parametrize(("checkpoint_every", "taken"), [(60, "fragile"), (3600, "calm")])
def test_jobs_that_save_seldom_get_the_machine_that_is_seldom_interrupted(checkpoint_every: int, taken: str) -> None:
    night = Night(SPEC, {"loopback": Market()})
    training = night.submit(hours=1)
    policy = {"policy": Policy(checkpoint_every=checkpoint_every)}
    training.job = training.job.model_copy(update={"spec": training.job.spec.model_copy(update=policy)})
    night.step()
    assert [one.offer.ref for one in night.providers["loopback"].creates] == [taken]


def test_a_quarantined_host_is_rejected_and_one_that_failed_lately_is_dearer() -> None:
    store = MemoryFleetStore()
    store.put_quarantine(Quarantine(host="loopback:now", until=200))
    store.put_quarantine(Quarantine(host="loopback:lately", until=50, failures=3))
    offers = [an_offer(ref, 0.2) for ref in ("now", "lately", "never")]
    ranked = rank_known(store, offers, SPEC, Workload(), 100)
    assert [(one.offer.ref, one.rejected) for one in ranked] == [
        ("never", ""),
        ("lately", ""),
        ("now", "the host is quarantined"),
    ]
    assert ranked[0].expected_usd < ranked[1].expected_usd
    assert rank_known(store, [], SPEC, Workload(), 100) == []
