"""The forecast of cost and finish, and the estimate of waiting jobs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.elastic.nodes import NodesSpec
from baton.contract.jobs.job import JobCounters, Progress
from baton.contract.jobs.policy import Policy
from functions.domain.records import Job
from functions.fleet.offers.forecast import BOOT_SPREAD, Forecast, forecast
from functions.fleet.offers.offer_ranking import Workload, expected_cost
from functions.fleet.offers.workload import ASSUMED, estimate, hours_of_recipes, typical
from functions.fleet.records import Offer
from tests.kits.api.factories import make_job


def offer(**changes: Any) -> Offer:
    return Offer(**{"provider": "loopback", "ref": "o", "usd_per_hour": 0.4, "boot_s": 180, **changes})


def needed(offers: list[Offer], works: list[Workload], idle_timeout_s: float = 300) -> Forecast:
    found = forecast(offers, works, idle_timeout_s=idle_timeout_s)
    assert found is not None
    return found


OFFERS = st.builds(
    offer,
    usd_per_hour=st.floats(0.01, 10),
    usd_per_gb=st.floats(0, 0.1),
    boot_s=st.floats(0, 3600),
    interruptions_per_hour=st.floats(0, 0.5),
)
WORKS = st.builds(
    Workload,
    hours=st.floats(0.1, 100),
    checkpoint_every_s=st.floats(5, 3600),
    traffic_gb=st.floats(0, 100),
)


@given(OFFERS, WORKS, st.floats(0, 0.5))
def test_more_interruptions_make_a_run_dearer_later_and_less_certain(one: Offer, work: Workload, more: float) -> None:
    other = one.model_copy(update={"interruptions_per_hour": one.interruptions_per_hour + more})
    calm, wild = needed([one], [work]), needed([other], [work])
    for before, after in ((calm.usd, wild.usd), (calm.hours, wild.hours)):
        assert after.high >= before.high - 1e-9 and after.expected >= before.expected - 1e-9
        assert after.high - after.low >= (before.high - before.low) * (1 - 1e-9)


@given(st.lists(OFFERS, min_size=1, max_size=4), st.lists(WORKS, min_size=1, max_size=8))
def test_a_forecast_is_ordered_and_never_below_the_price_of_the_work(
    offers: list[Offer], works: list[Workload]
) -> None:
    found = needed(offers, works)
    for span in (found.usd, found.hours):
        assert 0 < span.low <= span.expected <= span.high
    cheapest = min(one.usd_per_hour for one in offers)
    assert found.usd.low >= cheapest * sum(one.hours for one in works) * (1 - 1e-9)
    assert found.hours.low >= max(one.hours for one in works) * (1 - 1e-9)


@given(OFFERS, WORKS)
def test_the_expectation_is_the_total_by_which_offers_are_ranked(one: Offer, work: Workload) -> None:
    """Besides the end of the rent, which is the same for every offer of a price."""
    calm = one.model_copy(update={"interruptions_per_hour": min(one.interruptions_per_hour, 0.45)})
    tail_usd = (300 + 120) / 3600 * calm.usd_per_hour
    assert needed([calm], [work]).usd.expected == pytest.approx(expected_cost(calm, work).total_usd + tail_usd)


def test_machines_share_the_work_and_spare_machines_cost_nothing() -> None:
    works = [Workload(hours=hours) for hours in (3.0, 2.0, 1.0)]
    one, two = needed([offer()], works), needed([offer(), offer()], works)
    assert one.hours.expected == pytest.approx(6 + 0.05) and two.hours.expected == pytest.approx(3 + 0.05)
    assert needed([offer()] * 9, works).usd == needed([offer()] * 3, works).usd
    assert forecast([], works, idle_timeout_s=0) is None and forecast([offer()], [], idle_timeout_s=0) is None


@pytest.mark.parametrize(
    ("rate", "boot_s", "hours"), [(0.0, 180, 2.0), (0.05, 180, 8.0), (0.2, 900, 4.0), (0.3, 60, 20)]
)
def test_four_of_five_simulated_runs_end_within_the_range(rate: float, boot_s: float, hours: float) -> None:
    rented, chance = offer(interruptions_per_hour=rate, boot_s=boot_s), random.Random(18)
    found = needed([rented], [Workload(hours=hours)], idle_timeout_s=0)
    ends = [_simulate(rented, hours, chance) for _ in range(400)]
    inside = sum(found.hours.low <= end <= found.hours.high for end in ends)
    assert inside >= 0.8 * len(ends), (inside, found.hours, sorted(ends)[:: len(ends) // 10])


def _simulate(rented: Offer, hours: float, chance: random.Random) -> float:
    """Return the hours of one run: interruptions at random, work since the last checkpoint is done again."""
    clock, done, every = 0.0, 0.0, 600 / 3600
    while True:
        boot = rented.boot_s / 3600 * chance.triangular(BOOT_SPREAD[0], BOOT_SPREAD[2], BOOT_SPREAD[1])
        rate = rented.interruptions_per_hour
        alive = chance.expovariate(rate) if rate else float("inf")
        if alive >= boot + hours - done:
            return clock + boot + hours - done
        clock += alive
        done += max(0.0, alive - boot) // every * every


def job(**changes: Any) -> Job:
    spec: dict[str, Any] = {name: changes.pop(name) for name in ("recipe", "policy", "nodes") if name in changes}
    made = make_job(**changes)
    return made.model_copy(update={"spec": made.spec.model_copy(update=spec)})


def ended(recipe: str, hours: float) -> Job:
    return job(recipe=recipe, counters=JobCounters(runtime_s=int(hours * 3600)))


def test_hours_are_given_or_from_progress_or_from_history_or_assumed() -> None:
    together = job(recipe="digits@1", nodes=NodesSpec(max=8), counters=JobCounters(runtime_s=10**6))
    found = [*(ended("digits@1", hours) for hours in (1, 2, 3, 4, 5)), together, ended("other@1", 9)]
    history = hours_of_recipes(found)
    assert set(history) == {"digits@1"}, "one run says nothing about the spread"
    halfway = job(
        recipe="digits@1",
        checkpoint_step=50,
        progress=Progress(step=60, total_steps=100),
        counters=JobCounters(runtime_s=7200),
    )
    assert estimate(halfway, history) == (Workload(hours=2.0), "progress")
    assert estimate(halfway, history, hours=10) == (Workload(hours=5.0, least_hours=5.0, most_hours=5.0), "given")
    work, source = estimate(job(recipe="digits@1"), history)
    assert (source, work.hours, work.least_hours, work.most_hours) == ("history", 3.0, 1.4, 4.6)
    assert estimate(job(), history) == (Workload(least_hours=0.5, most_hours=2.0), "assumed")


def test_the_policy_gives_the_checkpoint_interval_and_offers_are_compared_by_the_mean() -> None:
    works = [estimate(job(policy=Policy(checkpoint_every=every)), {}, hours=2)[0] for every in (60, "auto")]
    assert [one.checkpoint_every_s for one in works] == [60, ASSUMED.checkpoint_every_s]
    assert typical(works) == Workload(hours=2, checkpoint_every_s=330)
    assert typical([]) == ASSUMED
