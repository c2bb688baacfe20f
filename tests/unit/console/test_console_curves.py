"""Curves of several attempts as columns of a plot: what is valid, repeated, marked and smoothed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baton.contract.rules.metrics import ALIASES, name_in_rules
from cdk import NODE

SOURCES = Path(__file__).parents[3] / "console" / "src"
ATTEMPTS = [
    {"epoch": 1, "resumed_step": None, "end": "interrupted", "progress": {"step": 60}, "machine_id": "m-1"},
    {"epoch": 2, "resumed_step": 40, "end": None, "progress": {"step": 50}, "machine_id": "m-2"},
]
CURVES = [
    {"epoch": 1, "steps": [20, 40, 60], "means": [3, 2, 1], "lows": [2, 1, 0], "highs": [4, 3, 2]},
    {"epoch": 2, "steps": [50], "means": [5], "lows": None, "highs": None},
]
TWO = [{"epoch": 1, "step": 1, "mean": 1}, {"epoch": 2, "step": 2, "mean": 1}]
TRIED = [
    {"rule": "never", "fires": 0, "steps": [], "actions": ["stop"], "operands": {"lr": 1}},
    {
        "rule": "late", "fires": 1, "steps": [7], "actions": ["save", "stop"],
        "operands": {"step": 7, "mean(eval.loss, 20)": 1},
    },
]  # fmt: skip
REPORTED = [*ALIASES, "train/loss", "f1-macro", "a//b.c"]
CASES: list[tuple[str, Any]] = [
    ("c.splitCurves(CURVES, ATTEMPTS).valid.map((p) => [p.epoch, p.step])", [[1, 20], [1, 40], [2, 50]]),
    ("c.splitCurves(CURVES, ATTEMPTS).repeated.map((p) => [p.step, p.mean, p.low, p.high])", [[60, 1, 0, 2]]),
    # An attempt from the start repeats everything before it, also what an attempt between them has resumed.
    ("[...c.lastValidSteps([...ATTEMPTS, {epoch: 3, resumed_step: null}])]", [[3, None], [2, 0], [1, 0]]),
    ("c.repeatedRanges(ATTEMPTS)", [{"from": 40, "to": 60}]),
    ("c.marksOf(ATTEMPTS, []).map((m) => [m.step, m.kind])", [[60, "kill"], [40, "resume"]]),
    ("c.firingsOf(TRIED)", [{"step": 7, "kind": "rule", "text": "late would have fired at step 7: save, stop"}]),
    ("c.judgedMetricOf({rules: TRIED, goal: null})", "eval.loss"),
    ("c.judgedMetricOf({rules: [TRIED[0]], goal: {metric: 'loss'}})", "loss"),
    ("c.judgedMetricOf({rules: [], goal: null}) ?? null", None),
    ("REPORTED.map((one) => c.reportedName(['step_s', ...REPORTED], IN_RULES[one]))", REPORTED),
    ("c.reportedName(['eval.loss', 'eval_loss'], 'eval.loss')", "eval.loss"),
    ("c.reportedName(['loss', 'lr'], 'unknown')", "loss"),
    ("c.reportedName([], 'eval.loss')", "eval.loss"),
    # A constant stays constant: the average has no bias at the start. A gap stays a gap.
    (
        "c.smooth([{mean: 2}, {mean: null}, {mean: 2}], 0.9).map((p) => p.mean?.toFixed(6))",
        ["2.000000", None, "2.000000"],
    ),
    ("c.smooth([{mean: 0}, {mean: 1}], 0.5).map((p) => Math.round(p.mean * 1000))", [0, 667]),
    # Each line leads on to the next attempt and ends there; a repeated part leads nowhere.
    ("c.byColor(TWO, 2)[0].map((p) => [p.step, p.mean])", [[1, 1], [2, 1], [2.5, None]]),
    ("c.byColor(TWO, 2, {linked: false})[0].map((p) => p.step)", [1, 1.5]),
    (
        "c.toColumns([{points: TWO, value: (p) => p.mean}, {points: [{step: 3, mean: 7}], value: (p) => p.mean}])",
        [[1, 2, 3], [1, 1, None], [None, None, 7]],
    ),
]


@pytest.fixture(scope="module")
def results() -> list[Any]:
    values = ",".join(f"({expression})" for expression, _ in CASES)
    program = (
        f"const ATTEMPTS = {json.dumps(ATTEMPTS)}, CURVES = {json.dumps(CURVES)}, TWO = {json.dumps(TWO)};"
        f"const TRIED = {json.dumps(TRIED)}, REPORTED = {json.dumps(REPORTED)};"
        f"const IN_RULES = {json.dumps({one: name_in_rules(one) for one in REPORTED})};"
        f"import(process.argv[1]).then((c) => console.log(JSON.stringify([{values}])))"
    )
    line = [str(NODE), "-e", program, (SOURCES / "curves" / "curve-data.js").as_uri()]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("place", range(len(CASES)), ids=[expression for expression, _ in CASES])
def test_columns(results: list[Any], place: int) -> None:
    assert results[place] == CASES[place][1]
