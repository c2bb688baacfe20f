"""The money of fleets is counted on, and their waiting said, as the control plane means them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.events import FleetEventType
from baton.contract.fleets.fleet import MachineState
from cdk import NODE

FLEET = Path(__file__).parents[3] / "console" / "src" / "fleet"
NOON = 1_795_867_200  # 2026-11-28 12:00 UTC
DAY = "{scope: 'fleet', name: 'per_day_usd', period: '2026-11-28', cap_usd: 15, spent_usd: 9, reserved_usd: 1}"
TOTAL = "{scope: 'fleet', name: 'total_usd', period: '', cap_usd: 20, spent_usd: 19.5, reserved_usd: 0.4}"
WHOLE = "{scope: 'deployment', name: 'per_day_usd', period: '', cap_usd: 1, spent_usd: 1, reserved_usd: 0}"
BUSY, READY = {"state": "busy"}, {"state": "ready"}
ENDS = "1 machine is given back. A machine with a job saves a checkpoint first."
NO_JOB = "No machine is rented: the last tick found no waiting job in queue default that this fleet can run."
NO_FURTHER = "No further machine is needed: the last tick found no job without a machine that this fleet can run."
GONE = "The machine is gone: two complete lists of its provider lack the machine: no job."


def said(function: str, *machines: dict[str, str], **more: Any) -> str:
    """Return the call of a function with a fleet."""
    fleet = {"spec": {"queues": ["default"], "max": 2}, "stopped": False, "waits": "", "job_id": None}
    return f"words.{function}({json.dumps({**fleet, 'machines': machines, **more})})"


CASES: list[tuple[str, Any]] = [
    ("budget.usdPerHour([{state: 'busy', usd_per_hour: 0.4}, {state: 'planned', usd_per_hour: 0.4}])", 0.4),
    (f"budget.leftOf({DAY})", 5),
    ("budget.leftOf({cap_usd: 5, spent_usd: 5, reserved_usd: 0.2})", 0),
    (f"budget.tightest([{DAY}, {TOTAL}, {WHOLE}]).name", "total_usd"),
    ("budget.endOf('2026-12-31')", NOON + (33 * 24 + 12) * 3600),
    ("budget.endOf('2026-11')", NOON + (2 * 24 + 12) * 3600),
    ("budget.endOf('')", None),
    # Twelve hours are left of the day: 0.4 USD/h add 4.8 USD, 1 USD/h reaches the bound after 6 h.
    (f"budget.forecast({DAY}, 0.4, {NOON})", {"expected_usd": 13.8, "lasts_s": None}),
    (f"budget.forecast({DAY}, 1, {NOON})", {"expected_usd": 15, "lasts_s": 21_600}),
    (f"budget.forecast({DAY}, 0, {NOON})", {"expected_usd": None, "lasts_s": None}),
    (f"budget.forecast({TOTAL}, 0.5, {NOON})", {"expected_usd": None, "lasts_s": 3600}),
    (f"budget.lastsFor([{DAY}, {TOTAL}, {WHOLE}], 0.5, {NOON})", 3600),
    (f"budget.lastsFor([{DAY}, {WHOLE}], 0.4, {NOON})", None),
    (f"words.boundName({WHOLE})", "A day, all fleets of the deployment"),
    (f"words.countsOf({json.dumps([BUSY, READY])})", {"busy": 1, "idle": 1, "starting": 0, "ending": 0}),
    (said("stateOf", BUSY, stopped=True), "stopping"),
    (said("why", waits="vast: HTTP 502"), "No machine is rented: vast: HTTP 502."),
    (said("why", BUSY, waits="no offer fits"), "No further machine is rented: no offer fits."),
    (said("why", BUSY), NO_FURTHER),
    (said("why", BUSY, READY), "2 machines are rented, as many as the document permits."),
    (said("why", BUSY, stopped=True, waits="no offer fits"), ENDS),
    (said("why", stopped=True), "The fleet is stopped and rents nothing."),
    (said("why", stopped=True, job_id="146683a1"), "The fleet has ended with its job."),
    (said("why"), NO_JOB),
    ("words.sentenceOf({type: 'machine.gone', reason: 'no job'})", GONE),
    ("words.sentenceOf({type: 'comet.seen', reason: ''})", "comet.seen."),
]
STATES = ("words.groupOf", [state.value for state in MachineState])
EVENTS = ("(type) => words.sentenceOf({type, reason: ''})", [one.value for one in FleetEventType])


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """Evaluate all cases in one process."""
    lists = (f"{json.dumps(values)}.map({function})" for function, values in (STATES, EVENTS))
    program = (
        "Promise.all(process.argv.slice(1).map((path) => import(path))).then(([budget, words]) => "
        f"console.log(JSON.stringify([{','.join([*(call for call, _ in CASES), *lists])}])))"
    )
    paths = [(FLEET / name).as_uri() for name in ("budget.js", "words.js")]
    done = subprocess.run([str(NODE), "-e", program, *paths], capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=[call[:60] for call, _ in CASES])
def test_fleets_are_counted_and_said(results: list[Any], index: int) -> None:
    expected = CASES[index][1]
    assert results[index] == (pytest.approx(expected) if isinstance(expected, float | int) else expected)


def test_each_state_of_a_machine_belongs_to_one_group(results: list[Any]) -> None:
    groups = dict(zip(STATES[1], results[-2], strict=True))
    assert {state for state, group in groups.items() if group == "ended"} == {"gone", "failed"}
    assert groups["lost"] == "ending" and groups["ambiguous"] == "starting" and groups["ready"] == "idle"


def test_each_event_has_a_sentence(results: list[Any]) -> None:
    sentences = dict(zip(EVENTS[1], results[-1], strict=True))
    assert [kind for kind, sentence in sentences.items() if " " not in sentence.removeprefix("The machine ")] == [
        "machine.booting"
    ]
