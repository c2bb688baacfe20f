"""Saved and taken back: the same decisions, other revisions, damaged states."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.rules.document.loader import load_values
from baton.contract.rules.document.rule import RuleSet
from baton.contract.rules.engine.rule_evaluator import Evaluator, RestoredRule, StateError
from tests.properties.profiles import machine_settings

NAN, INF = math.nan, math.inf
CONDITIONS = (
    "mean(x, 3) > 0", "std(x, 3) > 0.5", "slope(x, 4) < 0", "zscore(x, 3) > 1", "median(x, 3) < 1", "min(x, 15s) < 0",
    "max(x, 2) > 1", "ema(x, 3) > 0.5", "ema(x, 20s) > 0.5", "rising(x, 2)", "falling(x, 15s)", "not changed(x, 2)",
    "changed(x, 25s)", "since_best(x, min) > 2", "best(x, max) > 1", "delta(x, 2) > 0", "delta(x, 15s) > 0",
    "count(x, 20s) > 2", "age(x) > 15s", "missing(y)", "x > 0 and y > 0", "x > 0", "isnan(x)", "count(x) > 5",
    "zscore(x, 25s) > 1", "step % 3 == 0", "lag(x, 2) > 0", "at(y, x) > 0",
)  # fmt: skip
RULES = st.fixed_dictionaries(
    {"when": st.sampled_from(CONDITIONS)},
    optional={
        "clear": st.sampled_from(["x < 0", "mean(y, 2) > 0"]),
        "for": st.sampled_from(["3 checks", "2 of 3", "3 of all", "2 steps", "15s"]),
        "warmup": st.sampled_from(["3 steps", "2 checks", "25s"]),
        "cooldown": st.sampled_from(["3 steps", "2 checks", "25s"]),
        "max_fires": st.integers(1, 3),
        "every": st.sampled_from(["3 steps", "25s"]),
    },
)
NUMBER = st.one_of(st.sampled_from([None, 1.0, 2.0, 0.0, -1.0, NAN, INF, -INF, "bad"]), st.floats(-2, 2))
STREAM = st.lists(
    st.tuples(st.fixed_dictionaries({}, optional={"x": NUMBER, "y": NUMBER}), st.sampled_from([10.0, 1.0, 0.0, -20.0])),
    max_size=20,
)


def rules_of(*rules: dict[str, Any]) -> RuleSet:
    loaded = load_values({"rules": [{"name": f"rule-{n}", "do": "save", **rule} for n, rule in enumerate(rules)]})
    assert loaded.rules is not None, loaded.faults
    return loaded.rules


def saved(evaluator: Evaluator) -> Any:
    """Through strict JSON, as it is stored."""
    return json.loads(json.dumps(evaluator.state_dict(), allow_nan=False))


@machine_settings(runs=40, steps=1)
@given(rules=st.lists(RULES, min_size=1, max_size=6), stream=STREAM)
def test_killed_at_every_step_it_decides_the_same(rules: list[dict[str, Any]], stream: list[tuple[Any, float]]) -> None:
    revision = rules_of(*rules)
    unbroken, broken = Evaluator(revision), Evaluator(revision)
    now = 0.0
    for step, (metrics, later) in enumerate(stream):
        now += later
        expected = unbroken.observe(metrics, step=step, now=now)
        again = Evaluator(revision)
        assert all(carried.kept for carried in again.load_state_dict(saved(broken)))
        assert repr(again.observe(metrics, step=step, now=now)) == repr(expected)
        assert repr(again.statuses()) == repr(unbroken.statuses())
        assert saved(again) == saved(unbroken)
        broken = again


def test_what_is_told_does_not_show_that_it_was_saved() -> None:
    revision = rules_of({"when": "x > 0", "for": "5 steps", "cooldown": "2 steps"})
    unbroken, again = Evaluator(revision), Evaluator(revision)
    for step in range(3):
        unbroken.observe({"x": 1.0}, step=step, now=float(step))
    again.load_state_dict(saved(unbroken))
    assert repr(again.statuses()) == repr(unbroken.statuses())
    assert again.statuses()[0].done == 2


def test_patience_is_not_forgotten() -> None:
    """The original stopped at 8 uninterrupted, and at 13 when it was killed at 5."""
    revision = rules_of({"when": "loss > 0", "for": "8 checks"})
    evaluator = Evaluator(revision)
    fired = []
    for step in range(1, 14):
        if step == 6:
            state = saved(evaluator)
            evaluator = Evaluator(revision)
            evaluator.load_state_dict(state)
        fired += [step for _ in evaluator.observe({"loss": 1.0}, step=step, now=0.0)]
    assert fired == [8]


def test_a_revision_keeps_what_means_the_same() -> None:
    same = {"when": "mean(loss, 3) > 1", "for": "5 checks"}
    first = Evaluator(
        rules_of(same, {"when": "loss > 1", "for": "5 checks"}, {"when": "loss > 0"}, {"when": "loss > 9"})
    )
    for step in range(6):
        first.observe({"loss": 2.0}, step=step, now=float(step))
    second = Evaluator(
        rules_of(
            {
                **same,
                "when": "mean( loss,3 )>1.0",
                "severity": "error",
                "cooldown": "10m",
                "max_fires": 3,
            },
            {"when": "loss > 1.5", "for": "5 checks"},
            {"when": "loss > 0", "for": "2 checks"},
            {"name": "new", "when": "std(loss, 3) > 1 or mean(loss, 4) > 1"},
        )
    )
    assert second.load_state_dict(saved(first)) == [
        RestoredRule("rule-0", True),
        RestoredRule("rule-1", False, "its condition, 'for', 'on' or 'every' has changed"),
        RestoredRule("rule-2", False, "its condition, 'for', 'on' or 'every' has changed"),
        RestoredRule("new", False, "the rule is new"),
        RestoredRule("rule-3", False, "the rule is gone"),
    ]
    # the mean goes on in the middle of its window: four checks of five were made
    found = [[one.rule for one in second.observe({"loss": 2.0}, step=step, now=float(step))] for step in range(6, 12)]
    assert found == [["rule-0"], ["rule-2"], [], ["new"], ["rule-1"], []]


HIGH = {"when": "loss > 5"}


def revised(
    before: dict[str, Any], after: dict[str, Any], *, at: int, steps: int = 30, losses: dict[int, float] | None = None
) -> tuple[list[RestoredRule], list[tuple[int, str]]]:
    """Replace a rule by another before step `at`; return the carried counters, and the verdicts of both rules."""
    evaluator, carried = Evaluator(rules_of(before)), []
    told = []
    for step in range(1, steps):
        if step == at:
            state = saved(evaluator)
            evaluator = Evaluator(rules_of(after))
            carried = evaluator.load_state_dict(state)
        loss = (losses or {}).get(step, 9.0)
        found = evaluator.observe({"loss": loss}, step=step, now=step * 10.0)
        told += [(step, f"{one.mode} {one.state}") for one in found]
    return carried, told


@pytest.mark.parametrize("hold", ["1 check", "3 checks", "2 of 3", "2 of all", "2 steps", "20s"])
@pytest.mark.parametrize(
    "more",
    [{}, {"once": True}, {"cooldown": "10h"}, {"clear": "loss < 2"}, {"cooldown": "500 steps", "clear": "loss < 2"}],
    ids=str,
)
def test_a_rule_that_was_tried_acts_as_soon_as_it_may(hold: str, more: dict[str, Any]) -> None:
    rule = {**HIGH, **more, "for": hold}
    carried, told = revised({**rule, "mode": "dry_run"}, rule, at=12)
    assert carried == [RestoredRule("rule-0", False, "its 'do' or 'mode' has changed: it is armed anew")]
    assert [one for one in told if one[0] >= 12] == [(12, "enforce fired")]
    assert len(told) == 2


def test_so_does_one_that_alerted() -> None:
    rule = {**HIGH, "for": "3 checks"}
    _, told = revised({**rule, "do": {"alert": "loss is {loss}"}}, {**rule, "do": {"stop": "failed"}}, at=12)
    assert told == [(3, "enforce fired"), (12, "enforce fired")]
    _, told = revised({**rule, "do": {"stop": "complete"}}, {**rule, "do": {"stop": "failed"}}, at=12)
    assert told == [(3, "enforce fired"), (12, "enforce fired")]


def test_what_counts_towards_for_is_kept_when_a_rule_is_armed_anew() -> None:
    rule = {**HIGH, "for": "5 checks"}
    assert revised({**rule, "mode": "dry_run"}, rule, at=4)[1] == [(5, "enforce fired")]
    # its condition does not hold any more, or was false in between: that is not made up
    tried = {**rule, "mode": "dry_run", "clear": "loss < 2"}
    assert revised(tried, {**rule, "clear": "loss < 2"}, at=12, losses={10: 4.0})[1] == [
        (5, "dry_run fired"),
        (16, "enforce fired"),
    ]
    assert revised({**rule, "mode": "dry_run"}, rule, at=12, losses={12: 1.0, 13: 1.0})[1] == [
        (5, "dry_run fired"),
        (18, "enforce fired"),
    ]


def test_one_that_is_spent_goes_on_counting() -> None:
    rule = {**HIGH, "for": "5 checks", "once": True}
    _, told = revised({**rule, "mode": "dry_run"}, rule, at=20, losses={8: 1.0})
    assert told == [(5, "dry_run fired"), (8, "dry_run cleared"), (20, "enforce fired")]


def test_a_rule_that_does_the_same_stays_as_it_was() -> None:
    rule = {**HIGH, "do": {"stop": {"outcome": "complete", "save": True}}}
    carried, told = revised(rule, {**rule, "do": "stop", "severity": "error", "description": "as before"}, at=12)
    assert carried == [RestoredRule("rule-0", True)]
    assert told == [(1, "enforce fired")]


def test_the_stored_digest_of_actions_is_as_it_was() -> None:
    """A renamed class once changed the digest of actions with a placeholder: each such rule would have fired anew."""
    actions = [{"alert": "loss {loss:.2f} at {grad.norm}"}, {"log": "x {loss}"}, {"set": {"knob": "lr", "factor": 0.5}}]
    (rule,) = rules_of({"when": "loss > 2", "do": actions}).rules
    assert rule.action_identity == "c8d976362ceb1b96"


def test_a_state_of_an_earlier_version_arms_nothing() -> None:
    first = Evaluator(rules_of({**HIGH, "mode": "dry_run"}))
    for step in range(5):
        first.observe({"loss": 9.0}, step=step, now=0.0)
    state = saved(first)
    del state["document"], state["rules"]["rule-0"]["deeds"], state["rules"]["rule-0"]["lasts"]
    again = Evaluator(rules_of(HIGH))
    assert again.load_state_dict(state) == [RestoredRule("rule-0", True)]
    assert again.observe({"loss": 9.0}, step=5, now=0.0) == ()
    # and it is known that the condition has held: another revision acts at once
    later = Evaluator(rules_of({**HIGH, "do": "stop"}))
    later.load_state_dict(saved(again))
    assert [one.rule for one in later.observe({"loss": 9.0}, step=6, now=0.0)] == ["rule-0"]


def test_another_revision_arms_a_rule_that_errors_disabled() -> None:
    first = Evaluator(rules_of(HIGH))
    for step in range(4):
        first.observe({"loss": [9.0]}, step=step, now=0.0)
    state = saved(first)
    same = Evaluator(rules_of(HIGH))
    assert same.load_state_dict(state) == [RestoredRule("rule-0", True)]
    assert str(same.statuses()[0].state) == "disabled"
    assert same.observe({"loss": 9.0}, step=4, now=0.0) == ()
    other = Evaluator(rules_of({**HIGH, "description": "looked at"}))
    assert other.load_state_dict(state) == [
        RestoredRule("rule-0", False, "it was disabled by errors: it is armed anew"),
    ]
    assert [str(one.state) for one in other.observe({"loss": 9.0}, step=4, now=0.0)] == ["fired"]


def test_another_revision_forgets_errors() -> None:
    first = Evaluator(rules_of(HIGH))
    for step in range(2):
        first.observe({"loss": [9.0]}, step=step, now=0.0)
    other = Evaluator(rules_of({**HIGH, "severity": "error"}))
    assert other.load_state_dict(saved(first)) == [RestoredRule("rule-0", True)]
    other.observe({"loss": [9.0]}, step=2, now=0.0)
    assert [str(one.state) for one in other.observe({"loss": 9.0}, step=3, now=0.0)] == ["fired"]


def test_a_metric_that_is_to_rise_instead_of_to_fall_is_another_condition() -> None:
    def declared(goal: str) -> RuleSet:
        rule = {"name": "stuck", "when": "since_best(eval.f1) >= 3", "do": "save"}
        loaded = load_values({"metrics": {"eval.f1": {"goal": goal}}, "rules": [rule]})
        assert loaded.rules is not None, loaded.faults
        return loaded.rules

    first = Evaluator(declared("min"))
    fired = [step for step in range(5) for _ in first.observe({"eval.f1": 1.0 + step}, step=step, now=0.0)]
    assert fired == [3]
    second = Evaluator(declared("max"))
    (carried,) = second.load_state_dict(saved(first))
    assert not carried.kept
    assert str(second.statuses()[0].state) != "fired"
    values = [5.0, 4.0, 3.0, 2.0]
    fired = [step for step in range(4) for _ in second.observe({"eval.f1": values[step]}, step=5 + step, now=0.0)]
    assert fired == [3]


@pytest.mark.parametrize("known", [True, False], ids=["other rules before", "no rules before"])
def test_every_so_many_steps_is_at_their_multiples_whenever_a_rule_comes(known: bool) -> None:
    second = Evaluator(rules_of({**HIGH, "every": "1000 steps"}))
    if known:
        first = Evaluator(rules_of({"name": "other", "when": "loss > 100"}))
        for step in range(1045, 1050):
            first.observe({"loss": 9.0}, step=step, now=0.0)
        second.load_state_dict(saved(first))
    found = [step for step in range(1050, 2100) for _ in second.observe({"loss": 9.0}, step=step, now=0.0)]
    assert found == [2000]


def test_a_multiple_that_falls_between_two_steps_is_not_missed() -> None:
    first = Evaluator(rules_of({"name": "other", "when": "loss > 100"}))
    first.observe({"loss": 9.0}, step=995, now=0.0)
    second = Evaluator(rules_of({**HIGH, "every": "1000 steps"}))
    second.load_state_dict(saved(first))
    assert [one.step for one in second.observe({"loss": 9.0}, step=1005, now=0.0)] == [1005]
    third = Evaluator(rules_of({**HIGH, "every": "1000 steps", "cooldown": "1 check"}))
    assert [one.step for step in (1000, 1500, 2010) for one in third.observe({"loss": 9.0}, step=step, now=0.0)] == [
        1000,
        2010,
    ]


def test_a_rule_under_another_order_or_with_more_windows_is_kept() -> None:
    first = Evaluator(rules_of({"when": "mean(x, 2) > 0", "for": "3 checks"}))
    for step in range(3):
        first.observe({"x": 1.0}, step=step, now=float(step))
    more = [
        {"name": "other", "when": "mean(x, 5s) > 0 or max(x, 9) > 0"},
        {"name": "rule-0", "when": "mean(x, 2) > 0", "for": "3 checks"},
    ]
    second = Evaluator(rules_of(*more))
    assert [carried.kept for carried in second.load_state_dict(saved(first))] == [False, True]
    assert [one.rule for one in second.observe({"x": 1.0}, step=3, now=3.0)] == ["rule-0"]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *[found for key, one in inner for found in paths_of(one, (*path, key))]]


def replaced(state: str, path: tuple[Any, ...], value: Any) -> Any:
    """Read the state from JSON, with another value at the path."""
    found = inner = json.loads(state)
    if not path:
        return value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


def refusals(rules: list[dict[str, Any]], value: Any, *, own: bool) -> int:
    """Put the value at every place of the state, the rules' own or the common ones; return how often it is refused."""
    revision, refused = rules_of(*rules), 0
    empty, evaluator = saved(Evaluator(revision)), Evaluator(revision)
    for step in range(6):
        evaluator.observe({"x": step / 3, "y": NAN}, step=step, now=step * 10.0)
    state = saved(evaluator)
    text = json.dumps(state)
    for path in paths_of(state):
        if own != (path[:1] == ("rules",)):
            continue
        other = Evaluator(revision)
        try:
            other.load_state_dict(replaced(text, path, value))
        except StateError:
            refused += 1
            assert saved(other) == empty
        for step in range(6, 12):
            verdicts = other.observe({"x": step / 3}, step=step, now=step * 10.0)
            assert not [one for one in verdicts if one.reason], path
    return refused


@pytest.mark.parametrize("value", [None, -1, 10**30, "x", [], {}, [None], True], ids=repr)
def test_a_damaged_state_is_refused_or_harmless(value: Any) -> None:
    """Damage common fields once for all rules, and fields of a single rule for a few rules at a time."""
    rules = [{"when": when, "for": "2 of 3", "warmup": "1 check"} for when in CONDITIONS]
    rules.append({"when": "x > 0", "every": "3 steps"})
    refused = refusals(rules, value, own=False)
    refused += sum(refusals(rules[first : first + 4], value, own=True) for first in range(0, len(rules), 4))
    assert refused > 100


def test_another_version_is_refused() -> None:
    evaluator = Evaluator(rules_of({"when": "x > 0"}))
    with pytest.raises(StateError, match="version"):
        evaluator.load_state_dict({**saved(evaluator), "version": 2})
