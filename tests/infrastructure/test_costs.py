"""Test that docs/costs.md equals the output of its script, from current request counts, and that the bounds hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.costs import call_costs, prices
from bench.costs.cost_model import (
    ALARMS,
    BOUND_CONTROL,
    BOUND_KELPIE,
    BOUND_ORIGINAL,
    CONSOLE_POLL_BYTES,
    DURATION_MS,
    FLEET,
    FLEET_POLL_S,
    FUNCTIONS,
    LISTED_JOBS,
    MOST_LISTED_JOBS,
    PART_POLL_S,
    RING_POLL_S,
    VIEWS,
    WAITING,
    Costs,
    K,
    kelpie_usd,
    most_packs,
    original_usd,
    smallest_fleet,
)
from bench.costs.cost_page import PAGE, page, recorded
from bench.costs.units import index_units, item_bytes, write_units
from bench.harness.plane import Plane
from functions.local.emulator import Emulator
from functions.storage.tables import HEARTBEATS, JOBS
from tests.infrastructure.conftest import of_type
from tests.kits.clouds.emulator import unique

CONSOLE = Path(__file__).parents[2] / "console" / "src"


def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(recorded()), "make costs"


@pytest.mark.emulator
def test_the_calls_are_billed_as_recorded(emulator: Emulator) -> None:
    assert call_costs.record(Plane(emulator.endpoint_url, f"{unique('costs')}-")) == recorded(), "make costs"


def test_a_thousand_gpu_hours_stay_within_the_bounds() -> None:
    costs = Costs(recorded())
    assert costs.control * K <= BOUND_CONTROL, "1 GB every ten minutes, all of it new"
    assert costs.with_s3 <= BOUND_KELPIE * kelpie_usd(), "1 GB every ten minutes, all of it new"
    assert costs.with_s3 <= BOUND_ORIGINAL * original_usd()
    assert f"they allow {most_packs(recorded())} packs" in PAGE.read_text(encoding="utf-8")


def test_a_working_day_of_a_console_costs_at_most_a_cent() -> None:
    assert Costs(recorded()).console_day <= 0.01
    assert recorded()["list of jobs"]["read"] <= LISTED_JOBS + 1, "half a unit for a job, half for its lease"


def test_a_working_day_of_a_job_s_page_costs_at_most_a_cent() -> None:
    assert Costs(recorded()).job_page_day <= 0.01
    assert recorded()["curves"]["s3_get"] == 1 + 8, "of 24 chunks a summary replaces 16"


@pytest.mark.parametrize("view", VIEWS)
def test_a_working_day_of_a_view_of_the_console_costs_at_most_a_cent(view: str) -> None:
    assert Costs(recorded()).view_day(view) <= 0.01


def test_a_working_day_of_the_page_of_a_waiting_job_costs_at_most_a_cent_with_the_longest_lists() -> None:
    # Half a unit for each job, half for each running job's lease; half of the lists have running jobs.
    longest = {
        **recorded()["list of jobs"],
        "read": 0.75 * MOST_LISTED_JOBS + 1,
        "answer_kb": CONSOLE_POLL_BYTES / 1000,
    }
    assert Costs({**recorded(), "list of jobs": longest}).view_day(WAITING) <= 0.01
    source = (CONSOLE / "jobs" / "queue-feed.js").read_text(encoding="utf-8")
    assert f"const LISTED = {MOST_LISTED_JOBS};" in source and "this.pause_s = PART_INTERVAL_S;" in source


def test_the_console_asks_as_rarely_as_its_costs_say() -> None:
    source = (CONSOLE / "core" / "polling.js").read_text(encoding="utf-8")
    for name, poll_s in (("LAST", FLEET_POLL_S), ("RING", RING_POLL_S), ("PART", PART_POLL_S)):
        assert f"export const {name}_INTERVAL_S = {poll_s};" in source


def test_checkpoints_do_not_become_dearer_unseen() -> None:
    """The margin is small: the cost was 0.3210 before the sweeper's probe passed the authorizer, and 0.3212 before each
    sweep looked for elastic jobs to settle."""
    assert Costs(recorded(), new_packs=1).control * K <= 0.3213
    assert ", above" not in PAGE.read_text(encoding="utf-8")
    assert recorded()["checkpoint"]["write"] == 10
    assert recorded()["pack"] == {"read": 2.5, "s3_get": 2, "s3_put": 1, "write": 2}


def test_the_page_says_for_how_many_gpus_the_bound_holds() -> None:
    fleet = smallest_fleet(recorded())
    bound = BOUND_CONTROL / K
    assert Costs(recorded(), fleet=fleet).control_besides_checkpoints <= bound
    assert fleet == 1 or Costs(recorded(), fleet=fleet - 1).control_besides_checkpoints > bound
    assert fleet <= FLEET
    assert f"from {fleet} GPUs on.**" in PAGE.read_text(encoding="utf-8")


def test_a_webhook_costs_what_its_queue_its_function_and_its_log_do() -> None:
    row = Costs(recorded()).webhook
    assert row.events == pytest.approx(row.per_hour * 3 * prices.QUEUE.usd)
    assert row.api == 0 and row.functions > 0 and row.dynamodb >= row.per_hour * prices.WRITE.usd


def test_rules_of_the_control_plane_cost_who_has_them() -> None:
    usual = recorded()
    costs = Costs(usual)
    assert 0 < costs.watching * K < BOUND_CONTROL
    for call in ("watched heartbeat", "watched look"):
        dearer = Costs({**usual, call: {**usual[call], "write": usual[call]["write"] + 1}})
        assert dearer.watching > costs.watching and dearer.control == costs.control


def test_the_peers_cost_what_was_found_before() -> None:
    assert kelpie_usd() == pytest.approx(0.0031, rel=0.05)
    assert original_usd() == pytest.approx(0.004, rel=0.05)


def test_a_resume_from_s3_costs_more_than_a_hundred_hours_of_control_plane() -> None:
    assert prices.EGRESS_GB.usd > 100 * Costs(recorded()).control


def test_what_is_idle_costs_little_besides_what_stands_there(template: dict[str, Any]) -> None:
    assert abs(len(of_type(template, "AWS::CloudWatch::Alarm")) - ALARMS) <= 5
    month = Costs(recorded()).idle_month
    assert month["the sweeper, once a minute"] < 0.15
    assert month["the fleets' controller, once a minute, without a fleet"] < 0.05
    assert month["the same with a fleet that rents nothing, instead"] < 0.10
    assert month["its reads by the controller, with an active fleet"] < 0.05


def test_a_rented_machine_costs_little_besides_its_rent() -> None:
    """A thousand machine-hours, whose rent is 100 USD at the least."""
    assert sum(row.total for row in Costs(recorded()).machine_rows) * K < 0.3


def test_a_world_of_8_nodes_costs_less_a_day_than_two_hours_of_a_machine() -> None:
    costs = Costs(recorded())
    assert recorded()["node heartbeat"] == recorded()["heartbeat"], "a seat's heartbeat writes its lease alone"
    assert sum(row.total for row in costs.world_rows) * 24 < 0.3
    assert sum(row.total for row in costs.relay_rows) * 24 < 0.65


def test_more_of_anything_costs_more() -> None:
    usual = recorded()
    for call, billed in usual.items():
        if call in ("asked in vain", "delivery", "idle tick", "fleet tick", "watched heartbeat", "watched look"):
            continue
        if call in ("list of jobs", "counts of jobs", "session token", "authorizer of a token", "curves"):
            continue
        if any(call in calls for calls in VIEWS.values()):
            continue
        for unit, count in billed.items():
            dearer = Costs({**usual, call: {**billed, unit: count + 10}})
            assert _hour(dearer) > _hour(Costs(usual)), (call, unit)
    parts = {"pack", "rent", "elastic job in a sweep", "counts of jobs"}
    assert set(DURATION_MS) >= set(usual) - set(FUNCTIONS) - parts


def _hour(costs: Costs) -> float:
    """Compute USD of an hour of a rented machine that trains, of a world and of a relayed pair."""
    rows = (*costs.machine_rows, costs.node_heartbeats, *costs.world_rows, *costs.relay_rows)
    return costs.with_s3 + sum(row.total for row in rows)


def test_sizes_are_those_that_dynamodb_counts() -> None:
    assert item_bytes({"pk": {"S": "abc"}, "n": {"N": "-1790000000"}, "\u00fc": {"BOOL": True}}) == 5 + 7 + 3
    assert item_bytes({"S": {"S": "x"}}) == 2, "an attribute may be called as a type is"
    assert [write_units(size) for size in (0, 1, 1024, 1025)] == [1, 1, 1, 2]


def test_an_index_is_written_when_what_it_shows_changes() -> None:
    row = {"pk": {"S": "j"}, "due_pk": {"S": "DUE"}, "due_at": {"N": "100"}, "expires_at": {"N": "190"}}
    assert index_units(HEARTBEATS, row, {**row, "expires_at": {"N": "220"}}) == 0
    assert index_units(HEARTBEATS, row, {**row, "due_at": {"N": "400"}}) == 2
    assert index_units(HEARTBEATS, None, row) == index_units(HEARTBEATS, row, None) == 1
    assert index_units(HEARTBEATS, row, {name: row[name] for name in ("pk", "expires_at")}) == 1
    ready = {"pk": {"S": "p"}, "sk": {"S": "META"}, "ready_pk": {"S": "q"}, "ready_sk": {"S": "1"}, "doc": {"S": "a"}}
    assert index_units(JOBS, ready, {**ready, "doc": {"S": "b" * 1500}}) == 2, "all of the item is in it"
