"""Rules in force: installing, renaming, reporting, missing metrics, saving and restoring."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from controller_kit import rule

from gpu_client.controller import rule_engine as module
from gpu_client.controller.rule_engine import MISSING_AFTER, RuleEngine
from gpu_client.training.protocol import encode


class Told(list[dict[str, Any]]):
    def __call__(self, decision: dict[str, Any]) -> None:
        encode({"decision": decision})  # what cannot be said as JSON would end the training here
        self.append(decision)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self if one["type"] == kind]


def engine_of(*texts: str) -> tuple[RuleEngine, Told]:
    told = Told()
    engine = RuleEngine(told)
    for revision, text in enumerate(texts, 1):
        assert engine.install(revision, text, step=0) == ""
    return engine, told


def feed(engine: RuleEngine, values: list[Any], *, first: int = 1, name: str = "loss") -> list[int]:
    """The steps after which there was something to do."""
    return [
        step for step, value in enumerate(values, first) if engine.observe({name: value}, step=step, now=float(step))
    ]


@pytest.mark.parametrize("text", ["", "   \n", "rules: []", "{}"])
def test_a_document_without_rules_asks_nothing_of_a_step(text: str) -> None:
    """`rules: []` was active: several processes would have gathered nothing at each step."""
    engine = RuleEngine(Told())
    reason = engine.install(1, text, step=0)
    assert not engine.active and engine.reads == frozenset()
    assert (engine.revision == 1) == (reason == "")


@pytest.mark.parametrize(
    "text",
    [
        "rules: [{name: a, when: mena(loss, 5) > 1, do: stop}]",
        "rules: [{name: a, when: loss >, do: stop}]",
        "[" * 20_000,
        "\x00",
        "just words",
        rule("a", "zscore(loss, 1000000) > 1"),
    ],
)
def test_a_rejected_revision_leaves_the_one_before_in_force(text: str) -> None:
    engine, told = engine_of(rule("high", "loss > 1", **{"for": "3 checks"}))
    assert feed(engine, [2, 2]) == []
    assert engine.install(2, text, step=2)
    assert engine.revision == 1 and engine.reads == {"loss"}
    assert feed(engine, [2], first=3) == [3], "its counters were kept too"
    assert [one["revision"] for one in told.of("rule.updated")] == [1]


def test_whatever_goes_wrong_in_reading_rules_does_not_reach_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of(rule("high", "loss > 1"))

    def load(text: str) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(module, "load", load)
    assert "no such luck" in engine.install(2, "rules: []", step=0)
    assert engine.revision == 1 and engine.active


def test_the_reason_names_the_place_and_the_remedy() -> None:
    engine = RuleEngine(Told())
    reason = engine.install(1, "rules:\n- name: a\n  when: mena(loss, 5) > 1\n  do: stop", step=0)
    assert "line 3" in reason and "mean" in reason


def test_an_unchanged_rule_keeps_its_counters_and_a_changed_one_says_that_it_begins_anew() -> None:
    three = {"for": "3 checks"}
    kept, changed = json.loads(rule("kept", "loss > 1", **three)), json.loads(rule("changed", "loss > 1", **three))
    before = {"rules": kept["rules"] + changed["rules"]}
    engine, told = engine_of(json.dumps(before))
    feed(engine, [2, 2])
    changed["rules"][0]["when"] = "loss > 1.5"
    assert engine.install(2, json.dumps({"rules": kept["rules"] + changed["rules"]}), step=2) == ""
    message = told.of("rule.updated")[-1]["message"]
    assert "changed (" in message and "kept (" not in message
    feed(engine, [2, 2, 2], first=3)
    assert [(one["rule"], one["step"]) for one in told.of("rule.fired")] == [("kept", 3), ("changed", 5)]


def test_removed_rules_are_gone_and_come_back_as_new() -> None:
    text = rule("high", "loss > 1", **{"for": "2 checks"})
    engine, _ = engine_of(text)
    feed(engine, [2])
    assert engine.install(2, "", step=1) == "" and not engine.active
    assert engine.install(3, text, step=1) == ""
    assert feed(engine, [2, 2], first=2) == [3]


def test_a_rule_whose_metric_never_comes_is_told_once() -> None:
    """The engine reports a rule whose metric never comes as unevaluable, once, and not as `armed`."""
    engine, told = engine_of(rule("quiet", "eval.f1 > 0.9", "stop"))
    feed(engine, [1.0] * (3 * MISSING_AFTER))
    ((rule_, step, message),) = [(one["rule"], one["step"], one["message"]) for one in told.of("rule.unevaluable")]
    assert (rule_, step) == ("quiet", MISSING_AFTER) and "eval.f1" in message and "loss" in message


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("eval.f1 > 0.9 and loss < 5", ["r"]),  # checked at each step, and never known
        ("eval.f1 > 0.9 and step > 300", ["r"]),  # known to be false, for some time
        ("loss > 5", []),
        ("mean(loss, 1000) > 5", []),  # a window that is not full yet is on its way
        ("step > 10000", []),
        ("coalesce(eval.f1, 0) > 0.9 and loss > 5", []),  # known without it
        ("loss > 5 or eval.f1 > 0.9", ["r"]),
    ],
)
def test_only_rules_that_could_never_be_known_are_told(when: str, expected: list[str]) -> None:
    engine, told = engine_of(rule("r", when))
    feed(engine, [1.0] * (2 * MISSING_AFTER + 1))
    assert [one["rule"] for one in told.of("rule.unevaluable")] == expected


def test_a_metric_that_comes_late_is_not_told_and_works() -> None:
    engine, told = engine_of(rule("late", "eval.loss > 2"))
    feed(engine, [1.0] * (MISSING_AFTER - 2))
    assert engine.observe({"eval_loss": 3.0}, step=199, now=199.0, event="evaluate")
    feed(engine, [1.0] * 10, first=200)
    assert told.of("rule.unevaluable") == []
    assert [one["step"] for one in told.of("rule.fired")] == [199]


def test_what_was_told_before_a_checkpoint_is_not_told_again() -> None:
    text = rule("quiet", "eval.f1 > 0.9")
    engine, _ = engine_of(text)
    feed(engine, [1.0] * (MISSING_AFTER - 5))
    early = engine.state_dict()
    feed(engine, [1.0] * 10, first=196)
    late = engine.state_dict()
    for state, expected in ((early, [200]), (late, [])):
        resumed, told = engine_of(text)
        resumed.load_state_dict(json.loads(json.dumps(state)), step=195)
        feed(resumed, [1.0] * 300, first=196)
        assert [one["step"] for one in told.of("rule.unevaluable")] == expected


def test_two_evaluation_sets_do_not_disturb_each_other() -> None:
    """The framework that this replaces crashed at the second one."""
    engine, told = engine_of(
        json.dumps(
            {
                "rules": [
                    {"name": "one", "when": "rising(eval.val_loss, 2)", "do": "save"},
                    {"name": "two", "when": "eval.test_loss < 1", "do": "save"},
                ]
            }
        )
    )
    for step, (val, test) in enumerate([(1, 3), (2, 2), (3, 0.5)], 1):
        engine.observe({"eval.val_loss": val, "step": step}, step=step, now=step, event="evaluate")
        engine.observe({"eval.test_loss": test, "step": step}, step=step, now=step, event="evaluate")
    assert [(one["rule"], one["step"]) for one in told.of("rule.fired")] == [("one", 3), ("two", 3)]


@pytest.mark.parametrize(("value", "said"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_what_is_no_number_is_seen_at_its_step_and_can_be_told(value: float, said: str) -> None:
    engine, told = engine_of(rule("nan", "not isfinite(loss)", "stop"))
    assert feed(engine, [1.0, value]) == [2]
    assert told.of("rule.fired")[0]["operands"]["loss"] == said


@pytest.mark.parametrize("value", ["text", object(), [1, 2], {}, b"1", 10**400, 1 + 2j])
def test_a_metric_that_is_no_number_is_an_error_of_the_rule(value: Any) -> None:
    engine, told = engine_of(rule("high", "loss > 1"))
    for step in range(1, 9):
        engine.observe({"loss": value}, step=step, now=step)
    errors = told.of("rule.error")
    assert len(errors) == (0 if value == 10**400 else 3), "after the third it is disabled"


def test_names_are_those_of_rules_and_their_number_has_an_end() -> None:
    engine, told = engine_of(rule("lr", "lr > 1"))
    assert engine.renamed({"learning_rate": 1, "eval_loss": 2, "train/f1-macro": 3}) == {
        "lr": 1, "eval.loss": 2, "train.f1_macro": 3,
    }  # fmt: skip
    for step in range(module.MAX_NAMES * 2):
        engine.observe({f"loss_of_step_{step}": 1.0}, step=step, now=0.0)
    assert len(engine._names) <= module.MAX_NAMES
    assert len(told.of("rule.unevaluable")[0]["message"]) < 4_000


def test_a_dry_run_tells_and_does_nothing() -> None:
    engine, told = engine_of(rule("dry", "loss > 1", "stop", mode="dry_run"))
    assert feed(engine, [2.0]) == []
    (fired,) = told.of("rule.fired")
    assert fired["dry_run"] and fired["actions"] == ["stop"]


@pytest.mark.parametrize(
    ("hold", "values", "fires_at", "onset"),
    [
        ("1 checks", [0, 2], 2, 2),
        ("3 checks", [2, 0, 2, 2, 2], 5, 3),
        ("3 of 5", [2, 0, 2, 0, 2], 5, 1),
        ("3 of 5", [2, 0, 0, 0, 0, 2, 2, 2], 8, 6),
        ("2 steps", [0, 2, 2, 2], 4, 2),
        ("2s", [0, 2, 2, 2], 4, 2),
    ],
)
@pytest.mark.parametrize("saved", [False, True])
def test_the_onset_is_the_first_step_of_what_has_held(
    hold: str, values: list[int], fires_at: int, onset: int, saved: bool
) -> None:
    """A rollback goes to a checkpoint before it: one in between has the trouble in it."""
    text = rule("r", "loss > 1", '{"rollback": {}}', **{"for": hold})
    engine, _ = engine_of(text)
    found = []
    for step, value in enumerate(values, 1):
        found += [(order.step, order.onset) for order in engine.observe({"loss": value}, step=step, now=step)]
        if saved:
            state = json.loads(json.dumps(engine.state_dict()))
            engine, _ = engine_of(text)
            engine.load_state_dict(state, step=step)
    assert found == [(fires_at, onset)]


def test_a_state_of_another_version_or_damaged_begins_anew_and_says_so() -> None:
    text = rule("r", "loss > 1", **{"for": "2 checks"})
    engine, _ = engine_of(text)
    feed(engine, [2])
    good = engine.state_dict()
    for state in ({**good, "version": 99}, {**good, "rules": {"version": 1}}, {**good, "rules": [1]}):
        resumed, told = engine_of(text)
        resumed.load_state_dict(state, step=1)
        assert "all counters begin anew" in told.of("rule.updated")[-1]["message"]
        assert feed(resumed, [2, 2], first=2) == [3]
    for state in ({}, {"version": 1, "rules": None}):
        resumed, told = engine_of(text)
        resumed.load_state_dict(state, step=1)
        assert len(told) == 1


def test_a_large_window_is_a_small_state() -> None:
    """A list of a hundred thousand numbers delayed the checkpoint by a second."""
    text = rule("r", "mean(loss, 100000) > 1e9")
    engine, _ = engine_of(text)
    for step in range(1, 100_001):
        engine.observe({"loss": step * 0.37}, step=step, now=step)
    state = engine.state_dict()

    def size(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(map(size, value.values()))
        return 1 + sum(map(size, value)) if isinstance(value, list) else 1

    assert size(state) < 200
    resumed, _ = engine_of(text)
    resumed.load_state_dict(json.loads(json.dumps(state)), step=100_000)
    assert resumed.statuses() == engine.statuses()
    assert resumed.state_dict() == state
    values = state["rules"]["metrics"]["loss"]
    for damaged in ("AAAA", "not base64!", values["values"][:-16], 7, None):
        values["values"] = damaged
        other, told = engine_of(text)
        other.load_state_dict(state, step=100_000)
        assert "all counters begin anew" in told[-1]["message"]


@pytest.mark.parametrize(("count", "metrics", "alerts", "chars"), [(200, 1, 8, 1), (1, 15, 16, 1000)])
def test_every_decision_of_the_most_a_document_may_have_can_be_said(
    count: int, metrics: int, alerts: int, chars: int
) -> None:
    rules = [
        {
            "name": f"rule-{number}-{'x' * 50}",
            "when": " + ".join(f"coalesce(metric_{part}_{'y' * 40}, inf)" for part in range(metrics)) + " > 1",
            "on": ["step"],
            "do": [{"alert": "é" * chars}] * alerts,
        }
        for number in range(count)
    ]
    engine, _ = engine_of(json.dumps({"rules": rules}, ensure_ascii=False))
    orders = engine.observe({"loss": 1.0}, step=1, now=1.0)
    assert len(orders) == count * alerts
    assert len(engine.statuses()) == count
    assert all(len(one["said"]) <= 200 for one in engine.statuses())
