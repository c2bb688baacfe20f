"""The simulated nights of `make bench-fleet`: the naive controller is naive as described, and in nothing else."""

from __future__ import annotations

from baton.contract.fleets.fleet import FleetSpec
from bench.fleet.nights import NaiveNight, measure, run_night
from tests.twins.provider import Faults, VirtualProvider
from tests.unit.fleet.night import Killed, Night

DOCUMENT = {
    "name": "nights",
    "providers": ["loopback"],
    "max_usd_per_hour": 1,
    "budget": {"total_usd": 6},
}


def naive_night(faults: Faults | None = None) -> NaiveNight:
    return NaiveNight(FleetSpec.model_validate(DOCUMENT), {"loopback": VirtualProvider(faults=faults or Faults())})


def test_the_naive_controller_does_its_work_without_faults() -> None:
    night = naive_night()
    training = night.submit(hours=1)
    night.step(90)
    assert training.left_s <= 0
    assert night.billing() == []
    assert len(night.providers["loopback"].creates) == 1


def test_the_naive_controller_creates_again_after_a_lost_answer() -> None:
    night = naive_night(Faults(lost_answers=1))
    night.submit(hours=0.2)
    night.step(120)
    assert len(night.providers["loopback"].creates) == 2
    assert len(night.billing()) == 1, "the machine of the lost answer is billed for ever"


def test_the_naive_controller_believes_a_destroy_that_was_ignored() -> None:
    night = naive_night(Faults(ignored_destroys=1))
    night.submit(hours=0.2)
    night.step(120)
    assert len(night.billing()) == 1


def test_the_naive_controller_forgets_a_machine_whose_answer_it_did_not_live_to_store() -> None:
    night, calls = naive_night(), 0

    def die_at_the_first_write(call: str) -> None:
        nonlocal calls
        calls += call == "write"
        if call == "write" and calls == 1:
            raise Killed

    night.interrupt = die_at_the_first_write
    night.submit(hours=0.2)
    night.step(120)
    assert len(night.providers["loopback"].creates) == 2 and len(night.billing()) == 1


def test_a_night_is_the_same_for_both_controllers_and_repeatable() -> None:
    calm = [run_night(seed, kind, 0.0) for kind in (Night, NaiveNight) for seed in range(2)]
    assert [one.worked_usd for one in calm[:2]] == [one.worked_usd for one in calm[2:]]
    assert all(one.stray_usd_per_hour == 0 and 0 < one.lost_usd < 1 for one in calm)
    assert run_night(7, Night, 0.1) == run_night(7, Night, 0.1)


def test_the_figures_count_all_nights() -> None:
    figures = {one.name.rpartition(": ")[2]: one for one in measure(3, 0.1)}
    assert figures["with a stray at the end"].met and figures["price of all strays"].met
    assert figures["lost eight hours later"].met
    assert figures["with a stray at the end"].rounds == [0]
