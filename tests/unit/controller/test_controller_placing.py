"""A training ignores the control plane's rules without complaint."""

from __future__ import annotations

import json
from typing import Any

from gpu_client.controller.rule_engine import MISSING_AFTER, RuleEngine

THEIRS = [
    {"name": "dear", "when": "cost > 40 or loss > 0", "do": "stop"},
    {"name": "silent", "when": "heartbeat.age > 2m", "do": {"requeue": {}}},
    {"name": "worst", "when": "group_rank(loss, 500) >= 0.5", "do": "stop"},
    {"name": "broken", "when": "log.ecc > 0", "do": "stop"},
    {"name": "slow", "when": "loss > 0", "on": "timer", "do": "stop"},
]
MINE = {"name": "mine", "when": "loss > 5", "for": "3 checks", "do": "stop"}


def document(*rules: dict[str, Any]) -> str:
    return json.dumps({"signals": {"ecc": "uncorrectable ECC error"}, "rules": list(rules)})


def engine_of(text: str) -> tuple[RuleEngine, list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    engine = RuleEngine(told.append)
    assert engine.install(1, text, step=0) == ""
    return engine, told


def run(engine: RuleEngine, losses: list[float], first: int = 1, event: str = "step") -> list[tuple[int, str]]:
    return [
        (step, order.rule)
        for step, loss in enumerate(losses, first)
        for order in engine.observe({"loss": loss}, step=step, now=float(step), event=event)
    ]


def test_they_are_left_out_in_silence() -> None:
    """A training ignores the control plane's rules; each was told as `rule.unevaluable` after 200 steps."""
    engine, told = engine_of(document(THEIRS[0], MINE, *THEIRS[1:]))
    assert [one["rule"] for one in engine.statuses()] == ["mine"]
    assert engine.reads == {"loss"}
    assert run(engine, [1.0] * (3 * MISSING_AFTER)) == []
    assert run(engine, [9.0] * 3, first=700) == [(702, "mine")]
    assert [one["type"] for one in told] == ["rule.updated", "rule.fired"]


def test_with_nothing_but_theirs_a_step_costs_nothing_and_the_revision_is_in_force() -> None:
    engine, told = engine_of(document(*THEIRS))
    assert (engine.active, engine.revision, engine.reads) == (False, 1, frozenset())
    assert [(one["type"], one["message"]) for one in told] == [("rule.updated", "revision 1 is in force")]
    assert run(engine, [9.0] * 3, event="timer") == [] and engine.statuses() == []


def test_a_rule_of_theirs_in_the_next_revision_leaves_the_counters_of_the_others() -> None:
    engine, _ = engine_of(document(MINE))
    assert run(engine, [9.0, 9.0]) == []
    assert engine.install(2, document(*THEIRS, MINE), step=2) == ""
    saved = json.loads(json.dumps(engine.state_dict()))
    assert run(engine, [9.0], first=3) == [(3, "mine")]
    resumed, told = engine_of(document(*THEIRS, MINE))
    resumed.load_state_dict(saved, step=2)
    assert run(resumed, [9.0], first=3) == [(3, "mine")]
    assert [one["type"] for one in told] == ["rule.updated", "rule.fired"]


def test_what_they_cannot_have_there_is_a_reason_to_reject_the_revision() -> None:
    engine, _ = engine_of(document(MINE))
    reason = engine.install(2, document({**THEIRS[0], "do": {"rollback": {}}}), step=0)
    assert "rollback" in reason and (engine.revision, engine.active) == (1, True)
