"""A nudge lets a tick follow at once: the tick begins after the nudge, and no tick of its own nudges the next one."""

from __future__ import annotations

import pytest

from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.ticks import controller
from functions.fleet.ticks.controller import LEASE_S
from functions.storage.dynamodb.items.fleet_items import put_events
from tests.kits.api.fleets import make_machine
from tests.twins.provider import Faults
from tests.unit.fleet.night import Night
from tests.unit.fleet.test_fleet_nights import make_night, require_clean_end


def test_a_nudge_rents_at_once_and_a_second_one_changes_nothing() -> None:
    night = make_night()
    night.submit(hours=1)
    for _ in range(3):
        assert night.controller().nudge().finished
    assert (len(night.billing()), night.paused_s) == (1, 0)
    night.step(100)
    require_clean_end(night)


def test_a_nudge_waits_for_the_tick_that_may_not_have_seen_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    night = make_night()
    fence = night.store.acquire("another", night.now, LEASE_S)
    assert fence is not None

    def pause(self: Night, seconds: float) -> None:
        night.paused_s += seconds
        if night.paused_s == 3:
            night.submit(hours=1)
            night.store.release(fence, finished_at=night.now)

    monkeypatch.setattr(Night, "_pause", pause)
    assert night.controller().nudge().created == 1
    assert night.paused_s == 3


def test_a_nudge_leaves_a_longer_tick_to_the_schedule() -> None:
    night = make_night()
    night.submit(hours=1)
    night.store.acquire("another", night.now, LEASE_S)
    report = night.controller().nudge()
    assert (report.skipped, night.billing()) == (True, [])
    assert night.paused_s == controller.NUDGE_PATIENCE_S < 30, "the local stack ends within 30 s"
    night.now += LEASE_S
    night.step(100)
    require_clean_end(night)


def test_nudges_every_few_seconds_neither_repeat_a_create_nor_end_a_machine_early() -> None:
    """Ticks by nudges, with lost answers and hidden machines, neither repeat a create nor end a machine early."""
    night = make_night(Faults(lost_answers=1, hidden=1))
    training = night.submit(hours=1)
    for _ in range(100):
        for _ in range(3):
            night.controller().nudge()
            night.now += 5
            night.providers["loopback"].now = night.now
        night.step()
    assert training.left_s <= 0
    assert len(night.providers["loopback"].creates) == 1
    (machine,) = night.machines()
    assert machine.state is State.GONE
    assert machine.absences[-1] - machine.absences[0] >= 60


@pytest.mark.parametrize("by_worker", [True, False])
def test_only_what_a_worker_brings_about_is_marked(by_worker: bool) -> None:
    events = [make_machine("m1", state).event for state in State]
    marked = {
        event.type
        for event, put in zip(events, put_events("t", "acme", "nights", events, 1, by_worker=by_worker), strict=True)
        if "nudge" in put["Put"]["Item"]
    }
    assert marked == ({"machine.ready", "machine.terminating"} if by_worker else set())
