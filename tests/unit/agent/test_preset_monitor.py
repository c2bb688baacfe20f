"""Test the presets' decisions on reported values: which, how often, and which are not made."""

from __future__ import annotations

import json
import logging
import math
import random
from pathlib import Path

import pytest

from baton.contract.rules.document.loader import load
from baton.contract.rules.document.presets import NAMES
from gpu_client.agent.control import preset_monitor as module
from gpu_client.agent.control.channel_messages import Point, TrainingProgress, parse
from gpu_client.agent.control.preset_monitor import MAX_FIRINGS, QUIET_AFTER_ATTEMPTS
from tests.unit.agent.preset_kit import HOUR_S, Training
from tests.unit.agent.preset_streams import DIVERGING, HEALTHY

REAL = json.loads((Path(__file__).parent / "preset_losses.json").read_text())


# Not a number


@pytest.mark.parametrize("name", ["loss", "train_loss", "train/loss", "eval_loss", "val/loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_told_at_its_report(training: Training, name: str, value: float) -> None:
    training.train(5, **{name: lambda step: 1 / step})
    assert training.decided == []
    training.report(6, {name: value})
    [fired] = training.decided
    assert (fired["decision"], fired["rule"], fired["step"]) == ("rule.fired", "preset-nonfinite", 6)
    assert fired["severity"] == "error" and fired["actions"] == ["alert"]
    assert str(value) in [str(one).lower() for one in fired["operands"].values()] or fired["operands"]
    assert training.log == [f"[baton] preset-nonfinite: {fired['message']}"]
    training.train(50, **{name: value})
    assert len(training.decided) == 1, "once, however long it lasts"


def test_it_is_over_with_the_next_number_and_told_three_times_at_most(training: Training) -> None:
    for _ in range(20):
        training.train(2, loss=math.nan)
        training.train(2, loss=lambda step: 1 / step)
        training.stand_still(599)
    assert len(training.told()) == MAX_FIRINGS and len(training.told("rule.cleared")) == MAX_FIRINGS


@pytest.mark.parametrize(("epoch", "said"), [(0.25, 0.25), (2, 2.0), (math.nan, None), (None, None)])
def test_it_says_in_which_pass_over_the_data_that_was(
    training: Training, epoch: float | None, said: float | None
) -> None:
    training.report(6, {"loss": math.nan, **({} if epoch is None else {"epoch": epoch})})
    assert [one.get("training_epoch") for one in training.decided] == [said]


@pytest.mark.parametrize("metrics", [{"grad_norm": math.inf}, {"grad_norm": math.nan}, {"accuracy": math.nan}])
def test_what_mixed_precision_makes_infinite_now_and_then_is_no_loss(
    training: Training, metrics: dict[str, float]
) -> None:
    training.train(5, loss=lambda step: 1 / step, **metrics)
    assert training.decided == []


def test_what_comes_in_one_go_is_told_by_the_values_that_it_was_decided_by(training: Training) -> None:
    """A message contains the loss of its own step, not the 0.5 of the batch's last step."""
    for step, value in enumerate([1.0, math.nan, 0.5], 1):
        odd, fine = ({"loss": "nan"}, {}) if math.isnan(value) else ({}, {"loss": value})
        points = (Point(step, {**fine, **odd}),)
        training.reports.append((training.clock.now, TrainingProgress(step, 10, fine, nonfinite=odd, points=points)))
    training.watch.poll()
    assert [(one["decision"], one["step"]) for one in training.decided] == [("rule.fired", 2), ("rule.cleared", 3)]
    assert training.decided[0]["message"].startswith("the loss is NaN")


# Divergence


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_does_not_diverge(name: str) -> None:
    for seed in range(4):
        training = Training()
        for value in HEALTHY[name](random.Random(f"{name} {seed}")):
            training.train(1, step_s=1.0, loss=value)
        assert training.decided == [], f"seed {seed}"


@pytest.mark.parametrize("name", DIVERGING)
def test_a_diverging_training_is_told_soon(name: str) -> None:
    stream, begins = DIVERGING[name]
    for seed in range(4):
        training = Training()
        for value in stream(random.Random(f"{name} {seed}")):
            training.train(1, step_s=1.0, loss=value)
        told = [one for one in training.decided if one["rule"] == "preset-divergence"]
        assert [one["decision"] for one in told] == ["rule.fired"], f"seed {seed}"
        assert begins + 60 < told[0]["step"] <= begins + 200
        assert "stays there" in told[0]["message"]


@pytest.mark.parametrize("name", REAL)
def test_real_trainings(name: str) -> None:
    """Recorded from the digits example (a batch of 32) and from Dreambooth on a tiny Stable Diffusion."""
    real, training = REAL[name], Training()
    for value in real["losses"]:
        training.train(1, step_s=1.0, loss=float(value))
    fired = [(one["rule"], one["step"]) for one in training.decided if one["decision"] == "rule.fired"]
    if real["diverges_at"] is None:
        assert fired == []
    else:
        (rule, step), *more = fired
        assert rule == real["preset"] and 0 < step - real["diverges_at"] <= 100
        assert {one for one, _ in more} <= {"preset-nonfinite"}


def test_a_loss_that_is_logged_now_and_then_is_one_point_each_time(training: Training) -> None:
    """The repeats of a logged loss between two logs of Hugging Face's Trainer are no level without noise."""
    chance = random.Random(1)
    for _ in range(40):
        training.train(100, loss=0.12 + chance.gauss(0, 0.02))
    assert training.decided == []


def test_what_is_shown_again_is_nothing_new(training: Training) -> None:
    """Two losses that each message of a long evaluation repeats neither fire a preset nor count as new values."""
    chance = random.Random(1)
    training.train(600, loss=lambda step: 3.0 * 0.99**step + chance.gauss(0.1, 0.001), step_s=1.0)
    shown = {"loss": 0.1, "train_loss": 2.9}
    for step in range(600, 640):
        training.clock.now += 1.0
        training.report(step, {"loss": 0.1 + chance.gauss(0, 0.001)})
        for done in range(1, 11):
            told = {"type": "progress", "step": step, "total": None, "metrics": {**shown, "evaluation": done}}
            training.clock.now += 1.0
            training.say(parse(json.dumps({**told, "phase": {"name": "evaluation", "done": done}}).encode(), []))
    assert training.decided == []


def test_a_loss_by_two_names_is_told_of_by_one_and_watched_by_both(training: Training) -> None:
    """Raw, and smoothed over an epoch: neither is a jump of the other."""
    chance = random.Random(1)

    def raw(step: int) -> float:
        return 3.0 * 0.99**step + chance.gauss(0.1, 0.001)

    training.train(400, loss=raw)
    training.train(400, loss=raw, train_loss=2.9)
    assert training.decided == []
    training.train(1, loss=0.1, train_loss=math.nan)
    assert training.told() == ["preset-nonfinite"]


# One attempt and many


def test_each_process_of_a_job_is_looked_at_from_nothing() -> None:
    training = Training()
    for value in [0.1 + step % 7 * 0.01 for step in range(600)]:
        training.train(1, step_s=1.0, loss=value)
    training.begin(base=1000)
    training.step = 0
    training.stand_still(2 * HOUR_S)
    for value in [9.0 + step % 5 * 0.1 for step in range(600)]:
        training.train(1, step_s=1.0, loss=value)
    assert training.decided == [], "another step's loss is another loss"
    training.train(1, loss=math.nan)
    assert training.decided[0]["step"] == 1601, "counted within the job"


def test_an_attempt_is_told_of_no_more_than_three_times_by_all_its_processes_together() -> None:
    training = Training()
    for _ in range(10):
        training.step = 0
        training.train(1, loss=math.nan)
        training.begin()
    assert len(training.decided) == MAX_FIRINGS


def test_late_attempts_tell_once() -> None:
    training = Training(attempt=QUIET_AFTER_ATTEMPTS + 1)
    for _ in range(5):
        training.train(1, loss=math.nan)
        training.train(1, loss=lambda step: 1 / step)
        training.stand_still(700)
    assert [one["decision"] for one in training.decided] == ["rule.fired"]


# Switched off, and broken


def test_what_is_switched_off_is_not_told(training: Training) -> None:
    training.watch.set_rules("presets: {preset-nonfinite: off}\nrules: []")
    training.train(5, loss=math.nan)
    training.train(50)
    training.stand_still(1200)
    assert training.told() == ["preset-stuck"]
    training.watch.set_rules("presets: off\nrules: []")
    training.train(50)
    training.stand_still(HOUR_S)
    assert len(training.decided) == 1
    training.watch.set_rules("rules: [{name: 'no' when")
    assert training.watch._off == set(NAMES), "what cannot be read changes nothing"
    training.watch.set_rules("")
    training.train(20, loss=lambda step: 1 / step)
    training.report(training.step + 1, {"loss": math.inf})
    assert training.told()[-1] == "preset-nonfinite"


@pytest.mark.parametrize(("text", "any_rule"), [
    ("", False), ("presets: off\nrules: []", False),
    ("rules: [{name: a, when: loss > 1, do: stop}]", True), ("[", True),
])  # fmt: skip
def test_whether_a_document_has_rules_of_its_own(training: Training, text: str, any_rule: bool) -> None:
    assert training.watch.set_rules(text) is any_rule


def test_a_bug_in_here_costs_nothing_but_the_presets(
    training: Training, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(module.LossTrend, "push", broken)
    with caplog.at_level(logging.ERROR, "baton.job"):
        training.train(3, loss=lambda step: 1 / step)
    assert len(caplog.records) == 1 and "not evaluated any more" in caplog.text
    training.train(3, loss=math.nan)
    assert training.decided == []


def test_hostile_numbers_are_no_reason_to_fall() -> None:
    chance = random.Random(7)
    odd = [0.0, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, 1e30]
    training = Training()
    for _ in range(5000):
        training.clock.now += chance.choice([0.0, 0.2, 100.0])
        training.total = chance.choice([None, 0, 5, 10**15])
        metrics = {chance.choice(["loss", "eval_loss", "x"]): chance.choice(odd)}
        phase = chance.choice([None, ("a", chance.randint(0, 3)), ("b", 0)])
        signals = {chance.choice(["step.time", "data.wait"]): chance.choice([0.0, -1.0, 1e308])}
        training.report(chance.choice([0, 1, 7, 10**15]), metrics, phase=phase, signals=signals)
        training.storing = chance.random() < 0.5
    assert not training.watch._broken
    assert len(training.decided) <= 2 * MAX_FIRINGS * len(NAMES)


def test_the_document_of_presets_is_read_once() -> None:
    assert module.load_preset_rules() is module.load_preset_rules()
    assert load("presets: off\nrules: []").rules is not None
