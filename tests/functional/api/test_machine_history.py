"""Count the machines of a fleet over time, from the events of the fleet."""

from __future__ import annotations

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineState
from functions.api.fleet import machine_history
from functions.fleet.records import FleetEvent
from tests.kits.api.fleets import DOCUMENT, make_machine, put_machine, write
from tests.kits.api.harness import NOW, Api

HOUR_S = 3600
LIFE = ("planned", "requested", "booting", "registered", "ready", "busy", "ready", "terminating", "gone")
GROUPS = ("starting", "idle", "busy", "ending")


def tell(api: Api, machine: str, *states: tuple[int, str]) -> None:
    """Write events, each as the minute after NOW and the state."""
    events = [FleetEvent(at=NOW + 60 * minute, type=f"machine.{state}", machine=machine) for minute, state in states]
    for one in events:
        write(api, events=[one])


@pytest.fixture
def fleet(api: Api) -> Api:
    api.call("PUT", "/fleets/nights", DOCUMENT).ok()
    return api


def test_each_span_has_the_average_of_its_machines(fleet: Api) -> None:
    tell(fleet, "m1", *zip((0, 0, 1, 6, 6, 10, 40, 45, 50), LIFE, strict=True))
    put_machine(fleet, make_machine("m1", MachineState.GONE))
    write(fleet, events=[FleetEvent(at=NOW, type="budget.warning"), FleetEvent(at=NOW, type="machine.overdue")])
    fleet.clock.advance(HOUR_S)
    found = fleet.get("/fleets/nights/history?hours=1&points=6").ok()
    assert (found["since"], found["until"]) == (NOW, NOW + HOUR_S)
    assert {group: found[group] for group in GROUPS} == {
        "starting": [0.6, 0, 0, 0, 0, 0],
        "idle": [0.4, 0, 0, 0, 0.5, 0],
        "busy": [0, 1, 1, 1, 0, 0],
        "ending": [0, 0, 0, 0, 0.5, 0],
    }
    whole = fleet.get("/fleets/nights/history?hours=1&points=1").ok()
    assert whole["busy"] == [0.5], "the average of a machine that was busy for half the hour"


def test_a_machine_without_an_event_in_the_time_counts_by_its_state(fleet: Api) -> None:
    put_machine(fleet, make_machine("quiet", MachineState.BUSY))
    put_machine(fleet, make_machine("leaves", MachineState.TERMINATING))
    put_machine(fleet, make_machine("created-late", MachineState.FAILED, requested_at=NOW))
    tell(fleet, "leaves", (90, "draining"), (105, "terminating"))
    fleet.clock.advance(2 * HOUR_S)
    found = fleet.get("/fleets/nights/history?hours=1&points=4").ok()
    assert found["busy"] == [2, 2, 1, 1], "before its first event the machine that drains had a job"
    assert (found["ending"], found["idle"], found["starting"]) == ([0, 0, 1, 1], [0] * 4, [0] * 4)


def test_more_events_than_one_answer_reads_shorten_the_time(fleet: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_history, "MAX_EVENTS", 2)
    tell(fleet, "m1", (0, "busy"), (30, "ready"), (45, "busy"))
    put_machine(fleet, make_machine("m1", MachineState.BUSY))
    fleet.clock.advance(HOUR_S)
    found = fleet.get("/fleets/nights/history?hours=1&points=2").ok()
    assert found["since"] == NOW + 30 * 60
    assert (found["idle"], found["busy"]) == ([1, 0], [0, 1])


def test_a_fleet_without_machines_has_a_history_of_zeros(fleet: Api) -> None:
    found = fleet.get("/fleets/nights/history").ok()
    assert {group: {*found[group]} for group in GROUPS} == {group: {0} for group in GROUPS}
    assert [len(found[group]) for group in GROUPS] == [120] * 4


@pytest.mark.parametrize(
    ("query", "field"), [("hours=0", "hours"), ("hours=2161", "hours"), ("points=501", "points"), ("days=1", "days")]
)
def test_bounds_are_refused_at_their_field(fleet: Api, query: str, field: str) -> None:
    assert fleet.get(f"/fleets/nights/history?{query}").error["field"] == field


def test_another_tenant_has_no_such_fleet(fleet: Api) -> None:
    fleet.get("/fleets/nights/history", key="rival_submit").refused(ErrorCode.FLEET_NOT_FOUND, "fleet")


def test_fleets_are_sent_again_only_if_they_changed(fleet: Api) -> None:
    put_machine(fleet, make_machine("m1", MachineState.READY))
    for target in ("/fleets", "/fleets/nights"):
        first = fleet.get(target)
        fleet.clock.advance(60)
        unchanged = fleet.get(target, headers={"if-none-match": first.headers["etag"]})
        assert (unchanged.status, unchanged.body) == (304, b""), "the time of the answer is no news"
    known = {target: fleet.get(target).headers["etag"] for target in ("/fleets", "/fleets/nights")}
    put_machine(fleet, make_machine("m1", MachineState.BUSY, version=2))
    for target, etag in known.items():
        changed = fleet.get(target, headers={"if-none-match": etag})
        assert changed.status == 200 and '"busy"' in changed.text
