"""Texts of alerts, also with metrics that no condition reads."""

from __future__ import annotations

from typing import Any

from gpu_client.controller.rule_engine import MISSING_AFTER, RuleEngine

RULES = """
rules:
  - name: high
    when: loss > 2
    do: {alert: "loss {loss:.1f} at step {step:d}, learning rate {lr:g}, accuracy {eval.accuracy:.0%}"}
"""


def engine_with(told: list[dict[str, Any]]) -> RuleEngine:
    engine = RuleEngine(told.append)
    assert engine.install(1, RULES, step=0) == ""
    return engine


def test_a_text_tells_metrics_that_no_condition_reads() -> None:
    engine = engine_with([])
    assert engine.reads == {"loss", "step", "lr", "eval.accuracy"}, "so that they are measured, and gathered"
    engine.observe({"eval.accuracy": 0.5}, step=1, now=1.0, event="evaluate")
    engine.observe({"loss": 1.0, "learning_rate": 0.1}, step=2, now=2.0)
    [order] = engine.observe({"loss": 3.0, "learning_rate": 0.01}, step=3, now=3.0)
    assert order.arguments["text"] == "loss 3.0 at step 3, learning rate 0.01, accuracy 50%"


def test_they_make_no_rule_due_and_are_not_missed_when_they_never_come() -> None:
    told: list[dict[str, Any]] = []
    engine = engine_with(told)
    [order] = engine.observe({"loss": 3.0}, step=1, now=1.0)
    assert order.arguments["text"] == "loss 3.0 at step 1, learning rate unknown, accuracy unknown"
    for step in range(2, MISSING_AFTER + 2):
        assert not engine.observe({"lr": 0.1}, step=step, now=float(step))
    assert [one["type"] for one in told] == ["rule.updated", "rule.fired"]


def test_a_resumed_training_knows_them() -> None:
    before, after = engine_with([]), engine_with([])
    before.observe({"loss": 1.0, "lr": 0.1, "eval.accuracy": 0.25}, step=1, now=1.0)
    after.load_state_dict(before.state_dict(), step=1)
    [order] = after.observe({"loss": 3.0}, step=2, now=2.0)
    assert order.arguments["text"] == "loss 3.0 at step 2, learning rate 0.1, accuracy 25%"
