"""The calls of users about fleets."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineState
from functions.api.fleet import fleet_calls
from functions.fleet.ledger import DeploymentLedger, Ledger
from functions.fleet.records import FleetEvent
from functions.settings import ControlPlaneSettings
from tests.kits.api.fleets import DOCUMENT, make_machine, put_machine, write
from tests.kits.api.harness import NOW, TENANT, Api
from tests.twins.fleet import MemoryFleetStore


def put(api: Api, **changes: Any) -> dict[str, Any]:
    document = {**DOCUMENT, **changes}
    view: dict[str, Any] = api.call("PUT", f"/fleets/{document['name']}", document).ok()
    return view


def test_a_fleet_is_stored_with_its_defaults(api: Api) -> None:
    made = put(api)
    assert made["spec"] == {
        **DOCUMENT,
        "budget": {"total_usd": 20, "per_day_usd": None, "per_month_usd": None},
        "choose": "price",
        "disk_gib": 40,
        "gpu_models": [],
        "idle_timeout_s": 300,
        "image": None,
        "market": "either",
        "max": 1,
        "max_hours": 24,
        "min": 0,
        "min_vram_gib": 0,
        "min_driver": None,
        "min_disk_write_mb_s": 20,
        "min_download_mbit_s": 20,
        "queues": ["default"],
        "tags": {},
        "regions": [],
    }
    assert (made["stopped"], made["machines"], made["waits"]) == (False, [], "")
    assert (made["created_at"], made["updated_at"], made["at"]) == (NOW, NOW, NOW)
    (bound,) = made["bounds"]
    assert (bound["name"], bound["scope"], bound["cap_usd"], bound["reserved_usd"]) == ("total_usd", "fleet", 20, 0)
    assert made["replaced"] is None
    assert made["warnings"] == ["loopback: this deployment has no driver for the provider"]
    assert api.get("/fleets/nights").ok() == {**made, "warnings": []}
    put(api, name="days")
    assert [one["spec"]["name"] for one in api.get("/fleets").ok()["fleets"]] == ["days", "nights"]


def test_a_second_document_replaces_the_first_and_starts_a_stopped_fleet(api: Api) -> None:
    put(api)
    api.clock.advance(5)
    stopped = api.post("/fleets/nights/stop").ok()
    assert (stopped["stopped"], stopped["updated_at"]) == (True, NOW + 5)
    with api.unchanged():
        assert api.post("/fleets/nights/stop").ok() == stopped
    api.clock.advance(5)
    again = put(api, max=3)
    assert (again["stopped"], again["spec"]["max"]) == (False, 3)
    assert (again["created_at"], again["updated_at"]) == (NOW, NOW + 10)
    assert api.context.fleet and [one.version for one in api.context.fleet.fleets()] == [3]


def test_the_answer_to_a_document_tells_what_the_document_replaces(api: Api) -> None:
    first = put(api)["spec"]
    put_machine(api, make_machine("m1", MachineState.BUSY))
    put_machine(api, make_machine("m2", MachineState.TERMINATING))
    write(api, ledger=Ledger(version=1).spend(0.58, NOW))
    again = put(api)["replaced"]
    assert again == {"spec": first, "stopped": False, "spent_usd": 0.58, "given_back": []}
    assert put(api, providers=["ssh"])["replaced"] == {**again, "given_back": ["m1"]}
    assert api.get("/fleets/nights").ok()["replaced"] is None
    api.post("/fleets/nights/stop").ok()
    stopped = put(api)["replaced"]
    assert (stopped["stopped"], stopped["spec"]["providers"], stopped["given_back"]) == (True, ["ssh"], [])


def test_names_belong_to_a_tenant(api: Api) -> None:
    put(api)
    with api.unchanged():
        for method, path in (
            ("GET", "/fleets/nights"),
            ("POST", "/fleets/nights/stop"),
            ("GET", "/fleets/nights/machines"),
            ("GET", "/fleets/nights/events"),
        ):
            api.call(method, path, key="rival_submit").refused(ErrorCode.FLEET_NOT_FOUND, "fleet")
        assert api.get("/fleets", key="rival_submit").ok() == {"fleets": [], "damaged": []}
    api.call("PUT", "/fleets/nights", {**DOCUMENT, "max": 9}, key="rival_submit").ok()
    assert api.get("/fleets/nights").ok()["spec"]["max"] == 1
    for name in ("Nights", "n" * 33, "9", "a%25b", "%C3%BC"):
        api.get(f"/fleets/{name}").refused(ErrorCode.FLEET_NOT_FOUND, "fleet")


@pytest.mark.parametrize("part", ["fleet", "machine"])
def test_a_damaged_record_is_named_and_hides_no_other_fleet(api: Api, part: str) -> None:
    store = api.context.fleet
    assert isinstance(store, MemoryFleetStore)
    put(api)
    put(api, name="days")
    etag = api.get("/fleets").headers["etag"]
    (store.damaged_machines if part == "machine" else store.damaged_fleets).add((TENANT, "nights"))
    answer = api.get("/fleets")
    page = answer.ok()
    assert [one["spec"]["name"] for one in page["fleets"]] == ["days"]
    (line,) = page["damaged"]
    assert line.startswith(f"A record of fleet nights of tenant {TENANT} cannot be read") and "fleet doctor" in line
    assert answer.headers["etag"] != etag
    with api.unchanged():
        for method, path, body in (
            ("GET", "/fleets/nights", None),
            ("POST", "/fleets/nights/plan", {"fleet": DOCUMENT}),
            ("PUT", "/fleets/nights", DOCUMENT),
        ):
            refused = api.call(method, path, body)
            refused.refused(ErrorCode.CONFLICT, remedy="`baton fleet doctor` lists")
            assert refused.error["message"] == line
    assert api.get("/fleets", key="rival_submit").ok() == {"fleets": [], "damaged": []}


def test_a_stop_is_stored_also_if_the_machines_cannot_be_read(api: Api) -> None:
    store = api.context.fleet
    assert isinstance(store, MemoryFleetStore)
    put(api)
    store.damaged_machines.add((TENANT, "nights"))
    refused = api.post("/fleets/nights/stop")
    refused.refused(ErrorCode.CONFLICT, remedy="`baton fleet doctor` lists")
    assert refused.error["message"].startswith("The change of fleet nights is stored. A record of fleet nights")
    store.damaged_machines.clear()
    assert api.get("/fleets/nights").ok()["stopped"]


def test_a_tenant_has_so_many_fleets_that_a_tick_looks_after_all(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_calls, "MAX_FLEETS", 2)
    put(api)
    put(api, name="days")
    refused = api.call("PUT", "/fleets/weeks", {**DOCUMENT, "name": "weeks"})
    refused.refused(ErrorCode.CONFLICT, "name")
    put(api, max=2)


@pytest.mark.parametrize(
    ("changes", "field", "part"),
    [
        ({"name": "days"}, "name", "The path names the fleet nights"),
        ({"providers": ["aws"]}, "providers.0", "loopback"),
        ({"providers": ["loopback", "vast"]}, "image", "machines of vast start a container"),
        ({"providers": ["loopback", "loopback"]}, "providers", "twice"),
        ({"providers": []}, "providers", "at least 1"),
        ({"min": 3, "max": 2}, "max", "less than min (3)"),
        ({"min": 41, "max": 41}, "budget", "does not pay for an hour of min (41)"),
        ({"budget": {}}, "budget", "needs total_usd, per_day_usd or per_month_usd"),
        ({"budget": {"total_usd": 0}}, "budget.total_usd", "greater than 0"),
        ({"budget": {"weekly_usd": 5}}, "budget.weekly_usd", "No such field"),
        ({"max_usd_per_hour": -1}, "max_usd_per_hour", "greater than 0"),
        ({"market": "black"}, "market", "'spot', 'on-demand' or 'either'"),
        ({"image": "two words"}, "image", "pattern"),
        ({"gpus": 4}, "gpus", "No such field"),
    ],
)
def test_a_contradictory_document_is_refused_at_its_field(
    api: Api, changes: dict[str, Any], field: str, part: str
) -> None:
    with api.unchanged():
        answer = api.call("PUT", "/fleets/nights", {**DOCUMENT, **changes})
    assert answer.status == 422
    assert answer.error["field"] == field and part in answer.error["message"], answer.text


def test_another_call_at_the_same_moment_is_a_conflict(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    put(api)
    store = api.context.fleet
    assert store is not None
    older = store.fleet(TENANT, "nights")
    put(api, max=2)
    monkeypatch.setattr(store, "fleet", lambda tenant, name: older)
    with api.unchanged():
        api.call("PUT", "/fleets/nights", DOCUMENT).refused(ErrorCode.CONFLICT)
        api.post("/fleets/nights/stop").refused(ErrorCode.CONFLICT)


def test_a_fleet_shows_its_money_its_machines_and_why_it_waits(api: Api) -> None:
    put(api, budget={"total_usd": 20, "per_day_usd": 5})
    put_machine(api, make_machine("m1", MachineState.BUSY, job_id="146683a1-cb76-4702-9fef-fcccd32594f1"))
    put_machine(api, make_machine("m2", MachineState.GONE))
    spent = Ledger(version=1, waits="no offer fits").spend(1.25, NOW)
    write(api, ledger=spent)
    view = api.get("/fleets/nights").ok()
    (machine,) = view["machines"]
    assert (machine["id"], machine["state"], machine["provider"]) == ("m1", "busy", "loopback")
    assert (machine["provider_id"], machine["gpu_model"], machine["receipt"]) == ("h-m1", "RTX 4090", None)
    assert machine["job_id"] and machine["usd_per_hour"] == 0.4
    assert (view["waits"], view["spent_usd"]) == ("no offer fits", 1.25)
    total, day = view["bounds"]
    assert (total["name"], total["cap_usd"], total["spent_usd"], total["reserved_usd"]) == ("total_usd", 20, 1.25, 0.4)
    assert (day["name"], day["period"], day["spent_usd"]) == ("per_day_usd", "2026-09-21", 1.25)


def test_the_budget_of_the_deployment_is_a_bound_of_each_fleet(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ControlPlaneSettings.from_environment({"BATON_FLEET_BUDGET": '{"per_day_usd": 3}'})
    monkeypatch.setitem(api.context.settings.__dict__, "fleet_budget", settings.fleet_budget)
    put(api)
    write(api, spending=DeploymentLedger(version=1, reserved_usd=0.7).spend(1.5, NOW))
    (listed,) = api.get("/fleets").ok()["fleets"]
    _, whole = listed["bounds"]
    values = {"name": "per_day_usd", "period": "2026-09-21", "cap_usd": 3, "spent_usd": 1.5, "reserved_usd": 0.7}
    assert whole == {**values, "scope": "deployment"}
    for bad in ("5", "{}", "per_day_usd: 3", '{"per_day_usd": -1}', '{"per_week_usd": 1}'):
        with pytest.raises(ValidationError):
            ControlPlaneSettings.from_environment({"BATON_FLEET_BUDGET": bad})


def test_ended_machines_have_receipts(api: Api) -> None:
    put(api)
    put_machine(api, make_machine("alive", MachineState.READY))
    put_machine(api, make_machine("m1", MachineState.GONE, since=NOW + 1))
    # A create without an answer: still watched for a late arrival, and ended for the user.
    put_machine(api, make_machine("m2", MachineState.FAILED, since=NOW + 2, reason="no capacity", requested_at=NOW))
    put_machine(api, make_machine("m3", MachineState.GONE, since=NOW + 3))
    found = api.get("/fleets/nights/machines").ok()["machines"]
    assert [(one["id"], one["state"]) for one in found] == [("m3", "gone"), ("m2", "failed"), ("m1", "gone")]
    assert found[0]["receipt"] == {
        "requested_at": NOW,
        "created_at": NOW,
        "quoted_usd_per_hour": 0.4,
        "observed_usd": 0.31,
        "charged_usd": None,
        "absent_at": [NOW + 3600, NOW + 3660],
    }
    newest = api.get("/fleets/nights/machines", query={"limit": 2}).ok()["machines"]
    assert [one["id"] for one in newest] == ["m3", "m2"]
    api.get("/fleets/nights/machines?limit=0").refused(ErrorCode.INVALID_VALUE, "limit")


def test_events_are_listed_newest_first(api: Api) -> None:
    put(api)
    for second in range(3):
        write(api, events=[FleetEvent(at=NOW + second, type="machine.ready", machine="m1", usd=0.1)])
    found = api.get("/fleets/nights/events", query={"limit": 2}).ok()["events"]
    assert [one["at"] for one in found] == [NOW + 2, NOW + 1]
    assert found[0] == {"at": NOW + 2, "type": "machine.ready", "machine": "m1", "reason": "", "usd": 0.1}
