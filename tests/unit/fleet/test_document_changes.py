"""A changed document: machines that no longer match go back, idle ones first, and all others stay."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineMeasurements
from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.records import Machine, Terms
from functions.fleet.ticks.document_changes import given_back, outdated, surplus
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import make_night, require_clean_end, spec
from tests.unit.fleet.test_machine_states import NOW, make_machine

MEASURED = MachineMeasurements(driver="570.86.15", disk_write_mb_s=900, download_mbit_s=400)
TERMS = Terms(image="me/trainer:1", disk_gib=40, queues=["default", "slow"], tags={"team": "vision"})


def change(night: Night, **changes: Any) -> None:
    """Apply a changed document."""
    before = night.store.fleets()[0]
    document = spec(**{**night.spec.model_dump(exclude_unset=True), **changes})
    update = {"spec": document, "version": before.version + 1, "updated_at": night.now}
    night.store.put_fleet(before.model_copy(update=update))


def drained(night: Night) -> list[int]:
    """Return the times at which machines began to drain."""
    events = night.store.events(TENANT, "nights", limit=1000)
    return [one.at for one in events if one.type == "machine.draining"]


def states(night: Night) -> list[str]:
    return [str(one.state) for one in night.machines()]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"providers": ["ssh"]}, "the document no longer names the provider loopback"),
        ({"gpu_models": ["A100"]}, "the document has changed: the machine RTX 4090 is not among gpu_models"),
        ({"min_vram_gib": 48}, "the document has changed: the machine 24 GiB VRAM, min_vram_gib is 48"),
        ({"disk_gib": 80}, "the document has changed: the machine has 40 GiB disk, disk_gib is 80"),
        ({"disk_gib": 20}, ""),
        (
            {"min_driver": 575},
            "the document has changed: the machine has the NVIDIA driver 570.86.15, min",
        ),
        ({"min_download_mbit_s": 500}, "the document has changed: the machine downloads 400 Mbit/s"),
        ({"regions": ["DE"]}, "the document has changed: the machine stands in an unknown place"),
        ({"market": "spot"}, "the document has changed: the machine is on-demand, market is spot"),
        ({"image": "me/trainer:2"}, "the document has changed: the machine runs the image me/trainer:1"),
        ({"queues": ["default"]}, "the document has changed: the machine serves the queue slow"),
        ({"queues": ["slow", "default"]}, ""),
        ({"queues": ["default", "slow", "new"]}, "the document has changed: the machine does not serve the queue new"),
        ({"tags": {}}, "the document has changed: the machine serves only jobs with the tag team=vision"),
        (
            {"tags": {"team": "audio"}},
            "the document has changed: the machine serves jobs without the tag team=audio",
        ),
    ],
)
def test_a_machine_that_no_longer_matches_is_named_with_the_difference(changes: dict[str, Any], reason: str) -> None:
    document = spec(**{**TERMS.model_dump(exclude={"port"}), **changes})
    ready = rented(State.READY)
    assert outdated(ready, document).startswith(reason) and bool(outdated(ready, document)) == bool(reason)


def rented(state: State, **fields: Any) -> Machine:
    offer = make_machine(state).offer.model_copy(update={"gpu_model": "RTX 4090", "vram_gib": 24, "disk_gib": 200})
    return make_machine(state, **{"offer": offer, "terms": TERMS, "enrolled_at": NOW, "measured": MEASURED, **fields})


def test_queues_count_from_the_enrolment_and_a_job_of_a_named_queue_is_finished() -> None:
    removed, added, tagged = (
        spec(image="me/trainer:1", queues=queues, tags=tags)
        for queues, tags in ((["slow"], {}), (["default", "slow", "new"], {}), (["default", "slow"], {"team": "audio"}))
    )
    assert outdated(rented(State.BOOTING, enrolled_at=None), removed) == ""
    assert outdated(rented(State.BUSY), added) == ""
    assert "serves the queue default" in outdated(rented(State.BUSY), removed)
    assert "without the tag team=audio" in outdated(rented(State.BUSY), tagged)
    assert outdated(rented(State.BUSY, terms=None), removed) == "", "rented before terms were stored"


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, []),
        ({"max": 1}, ["idle"]),
        ({"max_usd_per_hour": 0.3}, ["dear"]),
        ({"max": 1, "max_usd_per_hour": 0.3}, ["dear", "idle"]),
        ({"providers": ["ssh"]}, ["dear", "idle"]),
    ],
)
def test_machines_that_a_new_document_ends_are_known_before(changes: dict[str, Any], ids: list[str]) -> None:
    machines = [
        rented(State.BUSY, id="dear", usd_per_hour=0.4),
        rented(State.READY, id="idle", usd_per_hour=0.2),
        rented(State.TERMINATING, id="leaves", usd_per_hour=0.4),
    ]
    terms = {**TERMS.model_dump(exclude={"port", "disk_gib"}), "max": 2, "max_usd_per_hour": 0.5}
    assert given_back(machines, spec(**{**terms, **changes})) == ids


def test_idle_machines_go_first_and_the_newest_jobs_last() -> None:
    machines = [
        rented(State.BUSY, id="old", claimed_at=NOW - 900),
        rented(State.BUSY, id="new", claimed_at=NOW - 9),
        rented(State.BOOTING, id="boots", enrolled_at=None),
        rented(State.READY, id="idle"),
        rented(State.DRAINING, id="leaves"),
    ]
    assert [surplus(machines, most) for most in (4, 3)] == [frozenset(), {"idle"}]
    assert surplus(machines, 1) == {"idle", "boots", "new"}


def test_a_lower_max_gives_back_the_idle_machines_and_keeps_the_jobs() -> None:
    night = make_night(max=3, min=3, idle_timeout_s=1800)
    training = night.submit(hours=2)
    night.step(10)
    assert sorted(states(night)) == ["busy", "ready", "ready"]
    change(night, max=1, min=0)
    night.step(5)
    assert sorted(states(night)) == ["busy", "gone", "gone"]
    assert {one.reason for one in night.machines() if one.state is State.GONE} == {
        "the document permits fewer machines"
    }
    night.step(150)
    assert training.left_s <= 0 and len(night.providers["loopback"].machines) == 3
    require_clean_end(night)


@pytest.mark.parametrize("changes", [{"image": "me/trainer:2"}, {"queues": ["elsewhere"]}, {"min_vram_gib": 25}])
def test_a_changed_document_replaces_machines_after_a_checkpoint(changes: dict[str, Any]) -> None:
    night = make_night(image="me/trainer:1")
    training = night.submit(hours=2)
    night.step(20)
    for one in night.store.machines(TENANT, "nights"):
        seen = one.model_copy(update={"enrolled_at": night.now, "version": one.version + 1})
        night.store.update_machine(seen)
    change(night, **changes)
    night.step()
    assert drained(night) == [night.now - 60]
    assert (training.on, training.since_checkpoint_s) == (None, 0)
    night.step(5)
    assert [one.id for one in night.machines() if one.reason.startswith("the document has changed")]
    assert night.store.quarantined(night.now) == {}


def test_machines_that_a_document_ends_while_they_boot_do_not_pause_the_fleet() -> None:
    night = make_night(image="me/trainer:1")
    for _ in range(3):
        night.submit(hours=0.5)
    night.step()
    change(night, image="me/trainer:2")
    night.step(4)
    assert all(one.failures == 0 for one in night.store.ledger(TENANT, "nights").breakers.values())
    assert states(night).count("gone") == 3 and len(night.billing()) == 3
    night.step(90)
    require_clean_end(night)


def test_a_lower_cap_and_a_shorter_life_hold_for_running_machines() -> None:
    night = make_night()
    night.submit(hours=20)
    night.step(30)
    (machine,) = night.machines()
    change(night, max_hours=1)
    night.step()
    (shorter,) = night.machines()
    assert (shorter.requested_at or 0) + 3600 == shorter.ends_by < machine.ends_by
    change(night, max_hours=24, max_usd_per_hour=0.1)
    night.step(4)
    (ended,) = [one for one in night.machines() if one.id == machine.id]
    assert ended.reason == "the price 0.2 USD/h exceeds the cap 0.1 USD/h"
    assert ended.ends_by == shorter.ends_by, "a worker's key ends with the end as of the enrolment"
    assert night.billing() == []


def test_a_machine_is_given_back_before_its_provider_ends_it() -> None:
    provider = VirtualProvider(ends_at=1_700_000_000 + 3 * 3600)
    night = Night(spec(), {"loopback": provider})
    training = night.submit(hours=5)
    night.step(180)
    assert provider.ends_at is not None
    (at,) = drained(night)
    assert provider.ends_at - 480 <= at < provider.ends_at - 300
    night.step(6)
    (machine,) = night.machines()
    assert (machine.state, machine.reason) == (State.GONE, "the provider ends the machine soon")
    assert (training.on, training.since_checkpoint_s) == (None, 0)
    night.step()
    waits = night.store.ledger(TENANT, "nights").waits
    assert waits.startswith("no offer fits, the nearest: ends in ") and "before its boot" in waits
    require_clean_end(night)


def test_an_announced_price_below_the_cap_is_accepted_and_one_above_drains() -> None:
    night = make_night(max_usd_per_hour=0.5)
    night.providers["loopback"].min_interval_s = {"accept": 5.5}
    night.submit(hours=3)
    night.step(20)
    provider = night.providers["loopback"]
    (body,) = provider.alive()
    body.announced_usd_per_hour = 0.4
    night.step(2)
    assert (body.usd_per_hour, body.announced_usd_per_hour) == (0.4, None)
    assert night.machines()[0].usd_per_hour == 0.4
    body.announced_usd_per_hour = 0.6
    night.step(5)
    assert body.usd_per_hour == 0.4 and body.ended_at is not None, "nobody accepted the price above the cap"
    first = next(one for one in night.machines() if one.handle == body.handle)
    assert first.reason == "the provider raises the price to 0.6 USD/h, above the cap 0.5 USD/h"


def test_nobody_accepts_a_price_for_a_machine_that_leaves() -> None:
    night = make_night(max_usd_per_hour=0.5, idle_timeout_s=0)
    night.submit(hours=0.1)
    night.step(6)
    provider = night.providers["loopback"]
    (body,) = provider.alive()
    provider.faults.ignored_destroys = 20
    night.step(8)
    assert night.machines()[0].state is State.TERMINATING
    body.announced_usd_per_hour = 0.4
    night.step(1)
    assert body.usd_per_hour == 0.2
