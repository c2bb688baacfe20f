"""The replay of a history: every decision is the one of the evaluator that observes the same reports in a training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.rules.backtest import replay as replaying
from baton.contract.rules.backtest.history import Builder, History
from baton.contract.rules.backtest.replay import Trial, replay
from baton.contract.rules.document.loader import load_values
from baton.contract.rules.document.rule import Rule, RuleSet
from baton.contract.rules.engine.rule_evaluator import Evaluator
from baton.contract.rules.engine.verdicts import Verdict
from tests.properties.profiles import machine_settings

Row = tuple[dict[str, float | None], int, float]

CONDITION = st.sampled_from(
    [
        "loss > 0",
        "x < 1 and loss >= 0",
        "mean(loss, 3) > 0.5",
        "max(x, 5s) > 1 or isnan(loss)",
        "changed(flag, 2)",
        "missing(eval.loss)",
        "eval.loss > at(loss, eval.loss)",
        "age(x) > 1s",
        "count(loss, 5s) < 3",
        "wall > 20s",
        "step > 3 and not flag",
        "true",
    ]
)
PERIOD = st.sampled_from(["1 check", "3 checks", "7 steps", "5s", "0 steps"])
RULE = st.fixed_dictionaries(
    {"when": CONDITION},
    optional={
        "for": PERIOD | st.sampled_from(["2 of 3", "2 of all"]),
        "warmup": PERIOD,
        "cooldown": PERIOD,
        "clear": CONDITION,
        "max_fires": st.integers(1, 3),
    },
)
WITH_EVENTS = st.builds(
    lambda rule, on: {**rule, "on": on},
    RULE,
    st.sampled_from(["step", "evaluate", "log", "start", ["evaluate", "step"], ["evaluate", "start"]]),
)
WITH_PERIOD = st.builds(
    lambda rule, every: {**rule, "every": every}, RULE, st.sampled_from(["1 step", "3 steps", "1s", "1m"])
)
VALUE = st.integers(-2, 2).map(float) | st.sampled_from([0.1, math.nan, math.inf, -0.0]) | st.none()
ROW = st.tuples(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("loss", "x", "eval.loss", "flag", "wall"), VALUE)),
    st.sampled_from([0, 1, 1, 1, 2, 40]),
    st.sampled_from([0.0, 1.0, 1.0, 2.5, 30.0, -5.0]),
)
"""Metrics of a row, and how far its step and its time lie after those of the row before."""


def rule_set(*rules: dict[str, Any]) -> RuleSet:
    """Return the rules that the language accepts, as a rule set."""
    metrics = {"flag": {"kind": "bool"}}
    named = [{"name": f"rule-{number}", "do": "save", **rule} for number, rule in enumerate(rules)]
    sound = [one for one in named if load_values({"rules": [one], "metrics": metrics}).rules is not None]
    loaded = load_values({"rules": sound, "metrics": metrics})
    assert loaded.rules is not None
    return loaded.rules


def placed(stream: list[Row]) -> Iterator[Row]:
    """The rows with steps and times counted from the beginning of the run."""
    step, now = 0, 1000.0
    for metrics, steps, seconds in stream:
        step, now = step + steps, now + seconds
        yield metrics, step, now


def history_of(stream: list[Row], *, timed: bool = True) -> History:
    builder = Builder("run")
    for metrics, step, now in placed(stream):
        builder.add(step, now if timed else None, metrics)
    return builder.history()


STEP_AND_EVALUATION = "epoch"
"""Stands for a row that is both, because an evaluator takes one event. No rule here is checked at epochs."""


def with_both(rule: Rule) -> Rule:
    """The rule, checked at rows that are a step and an evaluation too; a step is also a log."""
    events = {"step" if event == "log" else event for event in rule.on}
    return replace(rule, on=frozenset(events | {STEP_AND_EVALUATION} if events & {"step", "evaluate"} else events))


def verdicts_of_one_evaluator(rules: RuleSet, stream: list[Row], *, timed: bool) -> list[tuple[int, Verdict]]:
    """Rows and verdicts where one evaluator has all rules and observes every row."""
    evaluator = Evaluator(rules._replace(rules=tuple(map(with_both, rules.rules))))
    rows = list(placed(stream))
    walls = accumulate((now - rows[0][2] for _, _, now in rows), max)
    has_wall = any("wall" in metrics for metrics, _, _ in rows)
    found: list[tuple[int, Verdict]] = []
    before: int | None = None
    for row, ((metrics, step, now), wall) in enumerate(zip(rows, walls, strict=True)):
        event = "step"
        if metrics.get("eval.loss") is not None:
            event = "evaluate" if step == before else STEP_AND_EVALUATION
        before = step
        given_metrics = {**metrics, "wall": wall} if timed and not has_wall else metrics
        verdicts = evaluator.observe(given_metrics, step=step, now=now if timed else 0.0, event=event)
        found += [(row, verdict) for verdict in verdicts]
    return found


def same_operands(left: Any, right: Any) -> bool:
    """Return whether two operands are equal; NaN equals NaN, and True is not 1."""
    return repr(left) == repr(right)


def trials_of(rules: RuleSet, history: History) -> list[Trial]:
    return replay(rules, history, lambda rows: None)


@pytest.mark.parametrize("block_rows", [4, 8192])
@machine_settings(runs=200, steps=1)
@given(
    rules=st.lists(RULE | WITH_EVENTS | WITH_PERIOD, min_size=1, max_size=6),
    stream=st.lists(ROW, min_size=1, max_size=30),
    timed=st.booleans(),
)
def test_all_decisions_are_those_of_one_evaluator(
    block_rows: int, rules: list[dict[str, Any]], stream: list[Row], timed: bool
) -> None:
    sound = rule_set(*rules)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replaying, "BLOCK_ROWS", block_rows)
        trials = trials_of(sound, history_of(stream, timed=timed))
    verdicts = verdicts_of_one_evaluator(sound, stream, timed=timed)
    assert [trial.rule for trial in trials] == list(sound.rules)
    for trial in trials:
        told = [(row, verdict) for row, verdict in verdicts if verdict.rule == trial.rule.name]
        fired = [(row, verdict.operands) for row, verdict in told if verdict.state == "fired"]
        assert trial.fired.tolist() == [row for row, _ in fired]
        assert trial.cleared.tolist() == [row for row, verdict in told if verdict.state == "cleared"]
        assert same_operands(trial.operands, fired[0][1] if fired else ())


def test_rules_of_different_events_are_each_checked_at_their_own() -> None:
    stream: list[Row] = [
        ({"loss": 1.0}, 1, 1.0),
        ({"loss": 2.0, "eval.loss": 5.0}, 1, 1.0),
        ({"eval.loss": 6.0}, 0, 1.0),
        ({"loss": 3.0}, 1, 1.0),
    ]
    rules = rule_set(
        *({"when": "loss > 0", "cooldown": "0 steps", "on": on} for on in ("evaluate", "step")),
        {"when": "loss > 0", "cooldown": "0 steps"},
        {"when": "loss > 0", "cooldown": "0 steps", "every": "2 steps"},
    )
    assert [trial.fired.tolist() for trial in trials_of(rules, history_of(stream))] == [
        [1, 2], [0, 1, 3], [0, 1, 3], [1],
    ]  # fmt: skip


def test_operands_are_those_of_the_first_firing() -> None:
    rules = rule_set({"when": "mean(loss, 2) > x", "clear": "loss < 0"}, {"when": "loss > 9"})
    stream: list[Row] = [({"loss": loss, "x": 1.0}, 1, 1.0) for loss in (1.0, 2.0, -4.0, 7.0)]
    first, never = trials_of(rules, history_of(stream))
    assert (first.fired.tolist(), first.cleared.tolist()) == ([1, 3], [2])
    assert first.operands == (("mean(loss, 2)", 1.5), ("x", 1.0))
    assert (never.fired.tolist(), never.operands) == ([], ())


def test_the_rows_of_each_block_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "BLOCK_ROWS", 4)
    told: list[int] = []
    replay(rule_set({"when": "loss > 0"}), history_of([({"loss": 1.0}, 1, 1.0)] * 10), told.append)
    assert told == [4, 4, 2]
