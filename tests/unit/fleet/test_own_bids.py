"""A host that is sold on demand and to bids: a second machine there would outbid the first one of the same account."""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.fleets.fleet import FleetSpec
from functions.fleet.records import Offer
from tests.twins.provider import Faults, VirtualProvider
from tests.unit.fleet.night import Night
from tests.unit.fleet.test_fleet_providers import add_fleet, make_night


class OneHost(VirtualProvider):
    """Provider of one host, which lists a host with a bid on it, at a higher bid with each search."""

    bid = 0.2

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        self.bid += 0.01
        (on_demand,) = super().quote(spec)
        bid = {"ref": f"{self.bid:.4f}", "ask": "7", "spot": True, "usd_per_hour": self.bid}
        return [on_demand.model_copy(update={"ref": "7", "usd_per_hour": 0.4}), on_demand.model_copy(update=bid)]


def make_host(**changes: object) -> OneHost:
    return OneHost(name="vast", slots=1, **changes)  # type: ignore[arg-type]


def rented(night: Night) -> list[bool]:
    """Return for each create at the provider whether the machine was a bid."""
    return [one.offer.spot for one in night.providers["vast"].creates]


def test_a_fleet_never_outbids_its_own_machine() -> None:
    night = make_night(make_host(), providers=["vast"], min=2)
    night.step()
    assert rented(night) == [True], "neither by the same host on demand"
    night.step(10)
    assert rented(night) == [True], "nor by a later bid"


def test_a_fleet_never_outbids_the_machine_of_another_fleet() -> None:
    night = make_night(make_host(), providers=["vast"], min=1)
    add_fleet(night, name="second", providers=["vast"], min=1, queues=["other"])
    night.step(10)
    assert rented(night) == [True]


def test_a_refused_bid_leaves_the_host_on_demand() -> None:
    night = make_night(make_host(faults=Faults(snatched=1)), providers=["vast"], min=1)
    night.step()
    assert rented(night) == [True, False]
    assert len(night.billing()) == 1
