"""The slowest node of a training is replaced if that pays, and machines that wait for others in vain go back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.jobs.job import Progress
from functions.domain.worlds.world_record import WorldNode
from functions.fleet.drivers.protocol import Ambiguous, CreateIntent, CreateResult, NotCreated
from functions.fleet.offers.offer_ranking import RankedOffer, Workload, expected_cost
from functions.fleet.offers.replacement import SlowNode, find_better, find_slowest, hours_left
from functions.fleet.records import Machine, Offer
from tests.kits.api.fleets import make_machine
from tests.unit.fleet.elastic_night import ElasticNight, make_elastic_night
from tests.unit.fleet.night import TENANT
from tests.unit.fleet.test_gangs import NAME, ended, waits

EVEN = [1000] * 8


def machine(name: str, usd_per_hour: float = 0.4) -> Machine:
    made = make_machine(name, State.BUSY, usd_per_hour=usd_per_hour)
    return made.model_copy(update={"offer": made.offer.model_copy(update={"machine_ref": name})})


def members(*tokens: Sequence[int]) -> list[WorldNode]:
    return [
        WorldNode(node=f"{at}.1.{at:08x}", machine_id=f"m{at}", joined_at=1, recent_tokens=[*one])
        for at, one in enumerate(tokens)
    ]


@pytest.mark.parametrize(
    ("tokens", "prices", "slow"),
    [
        ((EVEN, EVEN, EVEN), (0.4, 0.4, 0.4), None),
        ((EVEN, EVEN, [490] * 8), (0.4, 0.4, 0.4), ("m2", 0.49)),
        ((EVEN, EVEN, [510] * 8), (0.4, 0.4, 0.4), None),
        # A late delta counts in a later round: the sum of the rounds tells the speed.
        ((EVEN, EVEN, [0, 1200] * 4), (0.4, 0.4, 0.4), None),
        ((EVEN, EVEN, [0, 0, 0, 1000] * 2), (0.4, 0.4, 0.4), ("m2", 0.25)),
        # A slow machine at a low price trains as much for its price.
        ((EVEN, EVEN, [400] * 8), (0.4, 0.4, 0.2), None),
        ((EVEN, EVEN, [400] * 8), (0.4, 0.4, 0.4), ("m2", 0.4)),
        # The others, not the machine, are unusual.
        (([4000] * 8, EVEN, EVEN), (0.4, 0.4, 0.4), None),
        # Too little history, too few nodes, a machine that nobody rents.
        ((EVEN, EVEN, [100] * 7), (0.4, 0.4, 0.4), None),
        ((EVEN, [100] * 8), (0.4, 0.4), None),
        ((EVEN, EVEN, [100] * 8), (0.4, 0.4), None),
        (([0] * 8, [0] * 8, [0] * 8), (0.4, 0.4, 0.4), None),
    ],
)
def test_a_node_is_slow_by_its_rounds_and_its_price(
    tokens: tuple[list[int], ...], prices: tuple[float, ...], slow: tuple[str, float] | None
) -> None:
    machines = {f"m{at}": machine(f"m{at}", usd) for at, usd in enumerate(prices)}
    found = find_slowest(members(*tokens), machines)
    assert (None if found is None else (found.machine.id, found.share)) == slow


def offer(usd_per_hour: float, host: str | None = "other", **more: object) -> RankedOffer:
    made = Offer(provider="loopback", ref="r", machine_ref=host, usd_per_hour=usd_per_hour, boot_s=120)
    return RankedOffer(made.model_copy(update=more), expected_cost(made, Workload()), "")


@pytest.mark.parametrize(
    ("offers", "hours", "share", "price"),
    [
        ([offer(0.4)], 2.0, 0.3, 0.4),
        ([offer(0.41), offer(0.35)], 2.0, 0.3, 0.35),
        ([offer(0.41)], 2.0, 0.3, None),
        ([offer(0.4, host="m2")], 2.0, 0.3, None),
        ([offer(0.4, host=None, repeatable=True)], 2.0, 0.3, 0.4),
        ([replace(offer(0.4), rejected="quarantined")], 2.0, 0.3, None),
        # Ten minutes of change cost 0.07 USD; what is left must gain twice as much.
        ([offer(0.4)], 0.5, 0.3, None),
        ([offer(0.4)], 0.7, 0.3, 0.4),
        ([offer(0.4)], 0.7, 0.45, None),
        ([offer(0.4, usd_per_gb=0.1)], 2.0, 0.3, None),
        ([], 9.0, 0.3, None),
    ],
)
def test_a_replacement_pays_twice_and_is_not_dearer(
    offers: list[RankedOffer], hours: float, share: float, price: float | None
) -> None:
    found = find_better(SlowNode(machine("m2"), share), offers, hours)
    assert (None if found is None else found[0].usd_per_hour) == price
    assert found is None or found[1] == pytest.approx(600 / 3600 * 0.4)


def test_the_rest_of_a_training_follows_from_its_progress() -> None:
    assert (hours_left(0.25, 2.0), hours_left(1.0, 5.0), hours_left(0.0, 9.0)) == (6.0, 0.0, 1.0)


def slow_night(**provider: object) -> tuple[ElasticNight, str]:
    """Return a night of three nodes whose third one is slow; its machine."""
    night = make_elastic_night(1, 3, hours=6, **provider)
    night.step(8)
    third = night.seats[2].on
    assert third is not None and night.rounds > 0
    night.tokens[third] = 300
    return night, third


def test_a_slow_node_leaves_and_another_host_takes_its_seat() -> None:
    night, slow = slow_night()
    night.step(20)
    (old,) = ended(night)
    assert old.id == slow and old.state is State.GONE
    assert old.reason == (
        "a slow node is replaced: its node trains 30% of the median, an offer of loopback for 0.2 USD/h takes its "
        "place, the change costs about 0.03 USD"
    )
    held = [one.on for one in night.seats]
    assert None not in held and slow not in held
    hosts = {one.id: one.offer.machine_ref for one in night.machines()}
    assert hosts[str(night.seats[2].on)] != hosts[slow]
    told = [one for one in night.store.events(TENANT, NAME, limit=99) if one.type == "machine.draining"]
    assert [(one.machine, one.reason) for one in told] == [(slow, old.reason)]


def test_one_node_an_hour_is_replaced() -> None:
    night, _ = slow_night()
    night.step(20)
    night.tokens[str(night.seats[1].on)] = 100
    night.step(30)
    assert len(ended(night)) == 1
    night.step(30)
    assert len(ended(night)) == 2


def test_a_slow_node_stays_without_a_better_offer() -> None:
    night, slow = slow_night()
    night.providers["loopback"].price = 0.21
    night.step(60)
    assert ended(night) == [] and night.seats[2].on == slow


def test_machines_that_wait_for_nodes_in_vain_go_back() -> None:
    night = make_elastic_night(3, 3, slots=3)
    night.providers["loopback"].faults.snatched = 1
    night.step()
    provider = night.providers["loopback"]
    assert len(provider.alive()) == 2
    provider.slots = 0
    night.step(30)
    assert len(night.billing()) == 2
    night.step(12)
    assert night.billing() == []
    assert {one.reason for one in ended(night) if one.state is State.GONE} == {
        "only 2 of 3 nodes could be rented within 30 minutes"
    }
    night.step(20)
    assert (night.billing(), night.formed) == ([], False)


def owned_by(night: ElasticNight, job_id: str | None) -> None:
    (fleet,) = night.store.fleets()
    night.store.put_fleet(fleet.model_copy(update={"job_id": job_id, "version": fleet.version + 1}))


def given_up(night: ElasticNight) -> list[str]:
    told = [one for one in night.store.events(TENANT, NAME, limit=99) if one.type == "machine.draining"]
    return [f"{one.machine}: {one.reason}" for one in told if "nodes could be rented" in one.reason]


def test_a_machine_that_its_provider_does_not_end_lets_no_others_wait() -> None:
    night = make_elastic_night(3, 3, slots=3)
    night.step()
    provider = night.providers["loopback"]
    third = provider.machines[2]
    night.silent.add(third.token)
    provider.slots, end = 0, provider.destroy
    provider.destroy = lambda handle: handle == third.handle or end(handle)  # type: ignore[method-assign]
    night.step(30)
    assert len(night.billing()) == 3 and given_up(night) == []
    night.step(12)
    assert night.billing() == [third.token]
    assert len(given_up(night)) == 2 and "only 2 of 3 nodes" in given_up(night)[0]


def test_a_machine_that_may_exist_lets_others_wait_for_an_hour_at_most() -> None:
    night = make_elastic_night(3, 3, slots=3)
    create = night.providers["loopback"].create
    night.providers["loopback"].create = lambda intent: (  # type: ignore[method-assign]
        create(intent) if len(night.providers["loopback"].machines) < 2 else Ambiguous(reason="reset")
    )
    night.step(3)
    night.providers["loopback"].faults.incomplete = 10**6
    night.step(2)
    assert [one.state for one in night.machines()].count(State.BUSY) == 2
    night.step(50)
    assert given_up(night) == []
    night.step(12)
    assert len(given_up(night)) == 2


def test_machines_of_a_shared_fleet_that_wait_for_nodes_in_vain_go_back() -> None:
    night = make_elastic_night(3, 3, slots=3)
    owned_by(night, None)
    night.submit(hours=2)
    night.step(5)
    provider = night.providers["loopback"]
    alone = next(one for one in night.trainings if one.job.spec.seat is None)
    alone.on, waits = night.seats[0].on, night.seats[0]
    waits.on = None
    (held,) = [one for one in night.machines() if one.id == alone.on]
    night.store.update_machine(held.model_copy(update={"job_id": alone.job.id, "version": held.version + 1}))
    night.formed, provider.slots = False, 0
    night.step(24)
    assert given_up(night) == []
    night.step(25)
    assert night.billing() == [held.id] and alone.on == held.id
    assert len(given_up(night)) == 2 and "only 2 of 3 nodes" in given_up(night)[0]


def test_the_rest_of_a_training_is_estimated_from_its_rounds_not_from_its_wait() -> None:
    night = make_elastic_night(1, 3, hours=6, slots=0)
    night.progress = Progress(step=50, total_steps=100)
    night.step(12 * 60)
    night.providers["loopback"].slots = 100
    night.step(8)
    third = str(night.seats[2].on)
    night.tokens[third] = 300
    night.step(18)
    assert 16 < night.rounds < 26 and ended(night) == [], "at most 25 minutes are left, and a change takes nine"
    night.round_s = 1800
    night.step(25)
    assert [one.id for one in ended(night)] == [third]


def test_the_progress_of_the_present_attempts_counts() -> None:
    night, slow = slow_night()
    night.progress, night.newest = Progress(step=1, total_steps=100), Progress(step=99, total_steps=100)
    night.step(40)
    assert night.seats[2].on == slow
    night.newest = night.progress
    night.step(25)
    assert night.seats[2].on != slow


def test_a_slow_node_stays_if_the_budget_does_not_pay_for_the_next_machine() -> None:
    night = make_elastic_night(1, 3, hours=6)
    night.step(8)
    (fleet,) = night.store.fleets()
    held = night.spent_usd() + sum(one.reserved_usd for one in night.machines())
    poor = fleet.spec.model_copy(update={"budget": fleet.spec.budget.model_copy(update={"total_usd": held})})
    night.store.put_fleet(fleet.model_copy(update={"spec": poor, "version": fleet.version + 1}))
    night.step(30)
    third = str(night.seats[2].on)
    night.tokens[third] = 300
    night.step(12)
    assert [one.state for one in night.machines()] == [State.BUSY] * 3 and ended(night) == []


def test_a_training_that_cannot_begin_is_tried_again_after_longer_and_longer_pauses() -> None:
    """The provider offers a kind of machine, of which it has two."""
    night = make_elastic_night(3, 3, hours=1, slots=1, repeatable=True)
    provider = night.providers["loopback"]
    create, capacity = provider.create, [2]

    def refuse(intent: CreateIntent) -> CreateResult:
        return NotCreated(reason="no capacity") if len(provider.alive()) >= capacity[0] else create(intent)

    provider.create = refuse  # type: ignore[method-assign]
    night.step(40)
    told = waits(night)
    assert told.startswith("only 2 of 3 nodes could be rented within 30 minutes; next try at ") and told.endswith("UTC")
    night.step(7 * 60 + 10)
    assert len(provider.machines) == 10, "five tries in eight hours"
    assert night.billed_usd() < 10 * 0.2 * 0.75
    capacity[0] = 3
    night.step(5 * 60)
    assert all(one.left_s <= 0 for one in night.seats) and night.billing() == []


def test_a_pause_of_a_training_ends_with_a_change_of_the_document() -> None:
    night = make_elastic_night(3, 3, slots=3)
    night.providers["loopback"].faults.snatched = 1
    night.step()
    night.providers["loopback"].slots = 0
    night.step(40)
    night.providers["loopback"].slots = 3
    night.step(2)
    assert night.billing() == [] and "next try at" in waits(night)
    (fleet,) = night.store.fleets()
    night.store.put_fleet(fleet.model_copy(update={"updated_at": night.now, "version": fleet.version + 1}))
    night.step()
    assert len(night.billing()) == 3
