"""Rules that exceed the time budget are checked less often; a NaN is always checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from controller_kit import rule

from baton.contract.rules.document.rule import REPORT
from gpu_client.controller.rule_engine import BUDGET_S, MAX_EVERY, MEASURE_EVERY, SAMPLES, EvaluationBudget, RuleEngine

JUDGED = MEASURE_EVERY * SAMPLES
"""Observations until it is judged."""


class Scene:
    """An engine whose observations take as long as a test says."""

    def __init__(self, when: str = "loss > 5") -> None:
        self.cost_s = 10e-6
        self._now = 0.0
        self._calls = 0
        self.told: list[tuple[str, int, str]] = []
        self.engine = RuleEngine(self._tell, EvaluationBudget(self._clock))
        assert self.engine.install(1, rule("r", when, cooldown="1 steps"), step=0) == ""
        self.told.clear()
        self.step = 0

    def _clock(self) -> float:
        self._calls += 1
        self._now += self.cost_s if self._calls % 2 == 0 else 0.0
        return self._now

    def _tell(self, decision: dict[str, Any]) -> None:
        self.told.append((decision["type"], decision["step"], decision.get("message", "")))

    def run(self, steps: int, value: Any = 1.0, event: str = "step") -> int:
        """Count the checked observations."""
        evaluator = self.engine._evaluator
        assert evaluator is not None
        seen = 0
        for _ in range(steps):
            self.step += 1
            before = evaluator._step
            self.engine.observe({"loss": value}, step=self.step, now=float(self.step), event=event)
            seen += evaluator._step != before
        return seen


def test_within_its_budget_nothing_is_left_out_and_nothing_said() -> None:
    scene = Scene()
    scene.cost_s = BUDGET_S * 0.95
    assert scene.run(3 * JUDGED) == 3 * JUDGED and scene.told == []


@pytest.mark.parametrize("event", ["step", REPORT])
def test_what_takes_three_times_as_long_is_checked_at_each_third_step_and_that_is_said(event: str) -> None:
    """Rules above their budget are checked at every third step, whether steps or reports drive the loop."""
    scene = Scene()
    scene.cost_s = BUDGET_S * 2.6
    assert scene.run(JUDGED, event=event) == JUDGED
    assert scene.told == [
        ("rule.updated", JUDGED, "rules take 520 us (budget 200): checked at every 3 steps from now on")
    ]
    assert scene.run(300, event=event) == 100 and len(scene.told) == 1


@pytest.mark.parametrize("reported_at", [4, 7])
def test_what_a_loop_reports_seldom_is_looked_at_however_its_steps_fall(reported_at: int) -> None:
    """The engine evaluates each rare report, although few or none of their steps are multiples of 4."""
    scene = Scene()
    scene.cost_s = BUDGET_S * 3.5
    scene.run(JUDGED)
    before, seen = JUDGED, []
    evaluator = scene.engine._evaluator
    assert evaluator is not None
    for step in range(before + 1, before + 251):
        loss = {"loss": 1.0} if step % 10 == reported_at else {}
        scene.engine.observe(loss, step=step, now=float(step), event=REPORT if loss else "step")
        if loss and evaluator._step == step:
            seen.append(step)
    assert scene.engine._budget.every == 4 and len(seen) >= 24


def test_a_resumed_training_leaves_out_the_same_steps() -> None:
    def fired(killed_after: int | None) -> list[int]:
        scene = Scene("loss > 5")
        scene.cost_s = BUDGET_S * 2.6
        scene.run(JUDGED)
        for step in range(1, 40):
            scene.run(1, float(step), REPORT)
            if step == killed_after:
                again = Scene("loss > 5")
                again.cost_s, again.step, again.told = scene.cost_s, scene.step, scene.told
                again.engine.load_state_dict(json.loads(json.dumps(scene.engine.state_dict())), step=scene.step)
                scene = again
        return [step for kind, step, _ in scene.told if kind == "rule.fired"]

    expected = fired(None)
    assert len(expected) > 5 and all(fired(step) == expected for step in range(1, 40))


def test_one_long_step_changes_nothing() -> None:
    scene = Scene()
    scene.run(JUDGED - 1)
    scene.cost_s = 0.004
    scene.run(1)
    assert scene.told == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_seen_at_its_step(value: float) -> None:
    scene = Scene("not isfinite(loss)")
    scene.cost_s = 1.0
    scene.run(JUDGED)
    assert scene.engine._budget.every == MAX_EVERY
    scene.run(3)
    scene.told.clear()
    assert scene.run(1, value) == 1 and scene.told == [("rule.fired", scene.step, "")]


def test_a_step_with_nothing_that_rules_read_is_left_out_too() -> None:
    scene = Scene()
    scene.cost_s = BUDGET_S * 2.6
    scene.run(JUDGED)
    scene.engine.observe({"other": 1.0}, step=scene.step + 1, now=0.0)
    assert scene.engine._evaluator is not None and scene.engine._evaluator._step == scene.step


def test_events_are_never_left_out() -> None:
    scene = Scene()
    scene.cost_s = 1.0
    scene.run(JUDGED)
    assert scene.run(10, event="evaluate") == 10


def test_a_tensor_is_read_before_the_time_is_taken() -> None:
    """Reading waits for the GPU, which is no fault of the rules."""

    class Slow:
        def __init__(self, scene: Scene) -> None:
            self.scene = scene

        def __float__(self) -> float:
            self.scene._now += 1.0
            return 2.0

    scene = Scene()
    scene.run(2 * JUDGED, Slow(scene))
    assert scene.told == []


def test_with_room_again_they_are_checked_as_before_and_there_is_no_to_and_fro() -> None:
    scene = Scene()
    scene.cost_s = BUDGET_S * 3.5
    scene.run(JUDGED)
    scene.cost_s = BUDGET_S * 1.5
    scene.run(4 * JUDGED * 2)
    assert len(scene.told) == 1, "half the time is no room"
    scene.cost_s = BUDGET_S * 0.5
    scene.run(4 * JUDGED)
    assert [said.partition(": ")[2] for _, _, said in scene.told] == [
        "checked at every 4 steps from now on",
        "checked at every step from now on",
    ]


@pytest.mark.parametrize("events", range(8))
@pytest.mark.parametrize("every", [2, 8, MAX_EVERY])
def test_it_is_judged_again_whatever_came_between_its_steps(events: int, every: int) -> None:
    """The event of the start was enough: every measurement fell on a step that was left out, for ever."""
    scene = Scene()
    scene.run(events, event="evaluate")
    scene.step = 0
    scene.cost_s = BUDGET_S * (every - 0.5)
    scene.run(JUDGED)
    assert scene.engine._budget.every == every
    scene.cost_s = BUDGET_S * 0.1
    scene.run(SAMPLES * (every + 1))
    assert scene.engine._budget.every == 1


def test_a_resumed_training_goes_on_as_slowly() -> None:
    scene = Scene()
    scene.cost_s = 1.0
    scene.run(JUDGED)
    again = Scene()
    again.engine.load_state_dict(scene.engine.state_dict(), step=JUDGED)
    assert again.engine._budget.every == MAX_EVERY
