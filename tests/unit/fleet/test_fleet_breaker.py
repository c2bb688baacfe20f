"""Nights in which no machine ever begins a job: the fleet pauses, tries one machine, and says why it waits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from functions.fleet import lifecycle
from functions.fleet.records import Machine
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import spec


class Everyone(set[str]):
    """The set of all machines."""

    def __contains__(self, machine: object) -> bool:
        return True


def make_night(**changes: Any) -> Night:
    """Make a night at a provider that hides its hosts, therefore no quarantine ends a loop."""
    return Night(spec(**changes), {"loopback": VirtualProvider(hides_hosts=True)})


def creates(night: Night) -> int:
    return len(night.providers["loopback"].creates)


def waits(night: Night) -> str:
    """Return why the fleet waits, without the random part of machines' names."""
    return re.sub(r"(dep10000-nights-)\w+", r"\1…", night.store.ledger(TENANT, "nights").waits)


def test_machines_that_never_start_their_workers_do_not_spend_the_budget() -> None:
    night = make_night()
    night.silent = Everyone()
    night.submit(hours=1)
    night.step(60 * 24)
    # Three machines, then one after each pause: 15 min, 30 min, 1 h, 2 h and 4 h.
    assert creates(night) <= 12
    assert night.spent_usd() < 1
    assert "machines in a row ended before they began a job" in waits(night)


def test_a_fleet_says_why_it_pauses_and_tries_one_machine_then() -> None:
    night = make_night(max=10)
    night.silent = Everyone()
    for _ in range(5):
        night.submit(hours=1)
    night.step(17)
    # 22:13:20 and 15 minutes; the pause begins with the ends of the machines, whose number does not double it.
    told = (
        "loopback: machines_do_not_start: 5 machines in a row ended before they began a job, the last: the machine did "
        "not start its worker in time; its output: baton fleet logs dep10000-nights-…"
    )
    assert waits(night) == f"{told}; next try at 22:43 UTC"
    assert creates(night) == 5
    night.step(13)
    assert (creates(night), waits(night)) == (5, f"{told}; next try at 22:43 UTC")
    night.step(2)
    assert (creates(night), waits(night)) == (6, f"{told}; one machine tries again")
    night.step(20)
    assert "machines_do_not_start: 6 machines" in waits(night) and waits(night).endswith("next try at 23:28 UTC")
    night.silent = set()
    night.step(60)
    assert (creates(night), waits(night)) == (11, "")
    assert sum(one.state is State.BUSY for one in night.machines()) == 5


def test_a_new_document_tries_at_once() -> None:
    night = make_night()
    night.silent = Everyone()
    night.submit(hours=1)
    night.step(60)
    before = creates(night)
    assert "next try" in waits(night)
    fleet = night.store.fleets()[0]
    night.store.put_fleet(fleet.model_copy(update={"updated_at": night.now, "version": fleet.version + 1}))
    night.step(1)
    assert (creates(night), waits(night)) == (before + 1, "")


@pytest.mark.parametrize("fault", ["preflight", "vanish"])
def test_machines_that_fail_their_check_or_vanish_pause_the_fleet(fault: str) -> None:
    night = make_night()
    provider = night.providers["loopback"]
    night.submit(hours=1)
    check = night._worker

    def work(machine: Machine, *given: Any, **named: Any) -> Machine:
        if machine.state is not State.REGISTERED:
            return check(machine, *given, **named)
        if fault == "preflight":
            return lifecycle.checked(machine, "the offer names 24 GiB VRAM, the machine has 8", night.now)
        provider.vanish(next(one for one in provider.alive() if one.token == machine.id))
        return machine

    night._worker = work  # type: ignore[method-assign]
    night.step(22)
    assert creates(night) == 3
    assert "next try at" in waits(night)


@pytest.mark.parametrize(
    "changes",
    [
        {"idle_timeout_s": 60},
        {"max_hours": 0.5, "min": 1},
        {"budget": {"total_usd": 0.205}, "max_usd_per_hour": 0.204, "min": 1},
    ],
)
def test_machines_that_end_for_the_lack_of_jobs_pause_nothing(changes: dict[str, Any]) -> None:
    night = make_night(**changes)
    for _ in range(4):
        if night.spec.min == 0:
            night.submit(hours=0.1)
        night.step(1)
        night.trainings.clear()
        night.step(60)
    ended = [one for one in night.machines() if one.state is State.GONE]
    assert ended and all(one.claimed_at is None for one in ended)
    assert all(one.failures == 0 for one in night.store.ledger(TENANT, "nights").breakers.values())


def test_a_pause_of_one_provider_leaves_the_others_to_the_fleet() -> None:
    """The cheaper provider's machines never start; the other's do. Each provider counts for itself."""
    bad, good = VirtualProvider(name="ssh", price=0.1, hides_hosts=True), VirtualProvider(name="vast", price=0.3)
    night = Night(spec(providers=["ssh", "vast"], image="me/trainer:1", max=1), {"ssh": bad, "vast": good})
    check = night._worker
    night._worker = lambda machine, *more, **named: (  # type: ignore[method-assign]
        machine if machine.provider == "ssh" else check(machine, *more, **named)
    )
    training = night.submit(hours=1)
    night.step(3 * 18 + 10)
    assert (len(bad.creates), len(good.creates), training.on is not None) == (3, 1, True)
    assert {one.state for one in night.machines() if one.provider == "ssh"} == {State.GONE}
    night.step(80)
    assert training.left_s <= 0
    again = night.submit(hours=0.1)
    night.step(30)
    assert again.left_s <= 0 and len(bad.creates) <= 5, "a job at the other provider ends no pause of the first"
    assert night.store.ledger(TENANT, "nights").breakers["ssh"].failures >= 3
