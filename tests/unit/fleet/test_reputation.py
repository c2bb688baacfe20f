"""The history of providers, GPU models and hosts as a risk of their offers."""

from __future__ import annotations

import pytest

from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.offers.reputation import after_end, weigh
from functions.fleet.records import Offer, Quarantine, Reputation
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import Night
from tests.unit.fleet.test_fleet_nights import make_night, require_clean_end, spec
from tests.unit.fleet.test_machine_states import NOW, make_machine

OFFER = Offer(provider="vast", ref="o", machine_ref="h", gpu_model="RTX 4090", usd_per_hour=0.3, boot_s=100)


def test_an_end_adds_a_start_its_hours_and_its_loss() -> None:
    gone = make_machine(State.GONE, created_at=NOW, enrolled_at=NOW + 90, absences=[NOW + 7200, NOW + 7260])
    once = after_end(None, gone)
    assert once == Reputation(kind="loopback:none", starts=1, hours=2, registered=1, register_s=90)
    lost = gone.model_copy(update={"lost_at": NOW + 60, "enrolled_at": None})
    assert after_end(once, lost) == once.model_copy(update={"starts": 2, "hours": 4, "losses": 1})


def test_little_history_changes_little_and_much_decides() -> None:
    def rate(**known: float) -> float:
        return weigh([OFFER], {"vast:RTX 4090": Reputation(kind="vast:RTX 4090", **known)}, {})[
            0
        ].interruptions_per_hour

    assert rate(losses=1, hours=1) == pytest.approx(1 / 49)
    assert rate(losses=100, hours=1000) == pytest.approx(0.1, rel=0.05)
    other = Reputation(kind="vast:A100", losses=9, hours=1)
    assert weigh([OFFER], {"vast:A100": other}, {}) == [OFFER]


def test_slow_boots_and_failures_of_the_host_count() -> None:
    slow = Reputation(kind="vast:RTX 4090", registered=9, register_s=9 * 500, hours=1)
    assert weigh([OFFER], {"vast:RTX 4090": slow}, {})[0].boot_s == pytest.approx((3 * 100 + 4500) / 12)
    failed = Quarantine(host="vast:h", until=NOW, failures=2)
    (risky,) = weigh([OFFER], {}, {"vast:h": failed})
    assert (risky.interruptions_per_hour, risky.boot_s) == (pytest.approx(2 / 24), 100)
    assert weigh([OFFER], {}, {"vast:other": failed}) == [OFFER]


def test_a_fleet_moves_to_the_provider_that_loses_fewer_machines() -> None:
    cheap, firm = VirtualProvider(name="vast", price=0.2, hides_hosts=True), VirtualProvider(name="ssh", price=0.202)
    night = Night(spec(providers=["vast", "ssh"], image="me/trainer:1"), {"vast": cheap, "ssh": firm})
    for _ in range(12):
        night.submit(hours=0.5)
        night.step(10)
        for one in cheap.alive():
            cheap.vanish(one)
        night.step(50)
    providers = [one.provider for one in sorted(night.machines(), key=lambda one: one.requested_at or 0)]
    assert (providers[0], providers[-1]) == ("vast", "ssh")
    night.step(90)
    assert night.billing() == []


def test_the_history_is_written_once_for_each_end() -> None:
    night = make_night()
    night.submit(hours=0.2)
    night.step(60)
    (known,) = night.store.reputations().values()
    assert (known.starts, known.losses, known.registered) == (1, 0, 1)
    require_clean_end(night)
