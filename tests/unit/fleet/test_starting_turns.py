"""A provider that permits few searches serves every fleet in turn, whichever fleets find nothing there."""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.fleets.fleet import FleetSpec
from functions.fleet.records import Offer, StoredFleet
from tests.kits.api.factories import make_job
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import TENANT, Night, Training
from tests.unit.fleet.test_fleet_nights import spec
from tests.unit.fleet.test_fleet_providers import waits

INTERVAL_S = 12


class SlowSearch(VirtualProvider):
    """Provider that permits one search in INTERVAL_S, and counts the searches of each fleet."""

    searches: list[str]

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        self.searches.append(spec.name)
        return super().quote(spec)


def make_night(names: Sequence[str], *, queue: str = "") -> tuple[Night, SlowSearch]:
    """Make a night whose fleets find no offer below their price caps; each has a job in a queue of its own."""
    provider = SlowSearch(min_interval_s={"quote": INTERVAL_S})
    provider.searches = []
    first, *others = (spec(name=one, queues=[queue or one], max_usd_per_hour=0.1) for one in names)
    night = Night(first, {"loopback": provider})
    for one in others:
        stored = StoredFleet(tenant=TENANT, spec=one, version=1, created_at=night.now, updated_at=night.now)
        night.store.put_fleet(stored)
    for one in dict.fromkeys(queue or one for one in names):
        night.trainings.append(Training(make_job(id=f"job-{one}", queue=one), left_s=600))
    return night, provider


def step(night: Night, minutes: int) -> None:
    for _ in range(minutes):
        night.time_left_s = 55.0
        night.step()


def raise_cap(night: Night, name: str) -> None:
    fleet = night.store.fleet(TENANT, name)
    assert fleet is not None
    capped = fleet.spec.model_copy(update={"max_usd_per_hour": 1.0})
    night.store.put_fleet(fleet.model_copy(update={"spec": capped, "version": fleet.version + 1}))


def test_fleets_that_find_no_offer_leave_the_next_search_to_the_fleet_behind_them() -> None:
    night, provider = make_night(["a", "b", "c", "z"])
    raise_cap(night, "z")
    step(night, 1)
    assert provider.searches == ["a", "b", "c"] and "may be asked again only in a later tick" in waits(night, "z")
    step(night, 1)
    assert [one.fleet for one in night.machines()] == ["z"] and waits(night, "z") == ""


def test_a_fallback_on_the_same_queue_is_reached_behind_any_number_of_fleets() -> None:
    night, _ = make_night(["a", "b", "c", "d", "e", "z"], queue="nightly")
    raise_cap(night, "z")
    step(night, 4)
    assert [one.fleet for one in night.machines()] == ["z"]


def test_each_of_many_fleets_is_served_as_often_as_the_others() -> None:
    names = [f"f{number:02}" for number in range(11)]
    night, provider = make_night(names)
    step(night, 44)
    counts = [provider.searches.count(name) for name in names]
    assert sum(counts) == 3 * 44
    assert min(counts) >= 11 and max(counts) <= 13, counts


def test_fleets_rent_in_the_order_of_their_names_while_all_are_served() -> None:
    night, provider = make_night(["a", "b", "c"], queue="nightly")
    step(night, 6)
    assert provider.searches == ["a", "b", "c"] * 6
