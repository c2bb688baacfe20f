"""What the presets tell of a training, and what they leave untold. No time passes but on a clock of the test."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.rules.document import load
from contract.rules.presets import NAMES
from gpu_client.agent import presets as module
from gpu_client.agent.channel_messages import CheckpointNotice, Progress
from gpu_client.agent.presets import MAX_TOLD, QUIET_AFTER_ATTEMPTS, PresetWatch
from tests.unit.agent.agent_kit import Clock
from tests.unit.agent.preset_streams import DIVERGING, HEALTHY

HOUR_S = 3600.0
REAL = json.loads((Path(__file__).parent / "preset_losses.json").read_text())


class Probe:
    """GPUs that are as busy as a test says; None: the driver says nothing."""

    def __init__(self) -> None:
        self.util: float | None = None
        self.started = self.stopped = 0
        self.full = False

    def start(self) -> None:
        if self.full:
            raise RuntimeError("can't start new thread")
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1

    def take(self) -> dict[str, float]:
        return {} if self.util is None else {"gpu.util": self.util}


class Training:
    """A training process, its channel, the watch over it, and what that told."""

    def __init__(self, attempt: int = 1, base: int = 0) -> None:
        self.clock = Clock()
        self.reports: list[tuple[float, Any]] = []
        self.decided: list[dict[str, Any]] = []
        self.log: list[str] = []
        self.probe = Probe()
        self.storing = False
        self.step = 0
        self.total: int | None = 10**9
        self.watch = PresetWatch(
            self.decided.append,
            attempt=attempt,
            clock=self.clock,
            make_probe=lambda: self.probe,  # type: ignore[arg-type,return-value]
        )
        self.begin(base)

    def begin(self, base: int = 0) -> None:
        self.watch.attach(self, base=base, storing=lambda: self.storing, say=self.log.append)

    def take_reports(self) -> list[tuple[float, Any]]:
        taken, self.reports = self.reports, []
        return taken

    def say(self, report: Any) -> None:
        self.reports.append((self.clock.now, report))
        self.watch.look()

    def report(self, step: int, metrics: Mapping[str, float] | None = None, **more: Any) -> None:
        self.step = step
        odd = {name: str(value) for name, value in (metrics or {}).items() if not math.isfinite(value)}
        fine = {name: value for name, value in (metrics or {}).items() if name not in odd}
        self.say(Progress(step, self.total, fine, nonfinite=odd, **more))

    def train(self, steps: int, *, step_s: float = 0.4, **metrics: Any) -> None:
        """Each metric may be a function of the step; `wait` is how long each waits for data."""
        wait = metrics.pop("wait", None)
        for step in range(self.step + 1, self.step + 1 + steps):
            self.clock.now += step_s
            found = {name: value(step) if callable(value) else value for name, value in metrics.items()}
            signals = {"step.time": step_s} if wait is None else {"step.time": step_s, "data.wait": wait}
            self.report(step, found, signals=signals)

    def stand_still(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(self.clock.now + 5, until)
            self.watch.look()

    def told(self, what: str = "rule.fired") -> list[str]:
        return [one["rule"] for one in self.decided if one["decision"] == what]


@pytest.fixture
def training() -> Training:
    return Training()


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
    assert len(training.told()) == MAX_TOLD and len(training.told("rule.cleared")) == MAX_TOLD


@pytest.mark.parametrize("metrics", [{"grad_norm": math.inf}, {"grad_norm": math.nan}, {"accuracy": math.nan}])
def test_what_mixed_precision_makes_infinite_now_and_then_is_no_loss(
    training: Training, metrics: dict[str, float]
) -> None:
    training.train(5, loss=lambda step: 1 / step, **metrics)
    assert training.decided == []


def test_what_comes_in_one_go_is_told_by_the_values_that_it_was_decided_by(training: Training) -> None:
    """It was rendered when all of it had been looked at: the loss is 0.5."""
    for step, value in enumerate([1.0, math.nan, 0.5], 1):
        odd, fine = ({"loss": "nan"}, {}) if math.isnan(value) else ({}, {"loss": value})
        training.reports.append((training.clock.now, Progress(step, 10, fine, nonfinite=odd)))
    training.watch.look()
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
    """As Hugging Face's Trainer tells it: the same number again and again, which is no level without noise."""
    chance = random.Random(1)
    for _ in range(40):
        training.train(100, loss=0.12 + chance.gauss(0, 0.02))
    assert training.decided == []


# Stuck


def test_a_loop_that_stands_still_is_told_with_what_is_usual(training: Training) -> None:
    training.train(100)
    training.stand_still(590)
    assert training.decided == []
    training.stand_still(250)
    [fired] = training.decided
    assert fired["rule"] == "preset-stuck" and fired["step"] == 100
    assert fired["message"] == "no step for 10 min, usual 0.4 s"
    assert fired["operands"]["step.usual"] == pytest.approx(0.4)
    training.stand_still(40 * HOUR_S)
    assert training.told() == ["preset-stuck"], "once, however long it lasts"
    training.train(20)
    training.stand_still(20)
    assert training.told("rule.cleared") == ["preset-stuck"]


def test_slow_steps_have_more_time(training: Training) -> None:
    training.train(30, step_s=120)
    training.stand_still(39 * 60)
    assert training.decided == []
    training.stand_still(2 * 60)
    assert training.told() == ["preset-stuck"]
    assert training.decided[0]["message"] == "no step for 40 min, usual 2 min"


def test_first_steps_have_an_hour(training: Training) -> None:
    training.report(0)
    training.stand_still(3590)
    assert training.decided == []
    training.stand_still(30)
    assert training.decided[0]["message"] == "no step for 60 min, usual unknown"


def test_a_pause_that_was_seen_before_is_expected_again(training: Training) -> None:
    training.train(50)
    training.train(1, step_s=590.0)
    training.train(50)
    training.stand_still(19 * 60)
    assert training.decided == []
    training.stand_still(2 * 60)
    assert training.told() == ["preset-stuck"]


def test_before_the_first_report_and_behind_the_last_step_nothing_stands_still(training: Training) -> None:
    training.stand_still(10 * HOUR_S)
    training.total = 100
    training.train(100)
    training.stand_still(10 * HOUR_S)
    assert training.decided == []


def test_a_script_that_reports_nothing_is_left_alone_whatever_it_does() -> None:
    training = Training()
    training.probe.util = 0.0
    training.stand_still(50 * HOUR_S)
    for step in range(10):
        training.say(CheckpointNotice(step, None, {}))  # type: ignore[arg-type]
        training.stand_still(HOUR_S)
    assert training.decided == []


def test_what_goes_on_between_steps_explains_it(training: Training) -> None:
    training.train(50)
    for done in range(10):
        metrics = {"images": float(done), "images_total": 10.0}
        training.report(50, metrics, phase=("images", done))
        training.stand_still(50 * 60)
    assert training.decided == []
    training.stand_still(HOUR_S + 30 * 60)
    assert training.told() == ["preset-stuck"], "nothing of it for two hours"
    training.report(50, {"images": 10.0, "images_total": 10.0}, phase=("images", 10))
    training.stand_still(9 * 60)
    assert training.told("rule.cleared") == ["preset-stuck"]
    training.stand_still(HOUR_S)
    assert training.told() == ["preset-stuck"] * 2, "it is over, and no step has come"


def test_a_checkpoint_that_is_being_stored_explains_it(training: Training) -> None:
    training.train(50)
    training.stand_still(300)
    training.storing = True
    training.stand_still(1.9 * HOUR_S)
    training.storing = False
    training.stand_still(300)
    assert training.decided == [], "from its end the ten minutes are counted anew"
    training.stand_still(400)
    assert training.told() == ["preset-stuck"]


def test_checkpoints_are_signs_of_life(training: Training) -> None:
    training.train(50)
    for step in range(10):
        training.stand_still(590)
        training.say(CheckpointNotice(step, None, {}))  # type: ignore[arg-type]
    assert training.decided == []


def test_times_are_measured_here_where_the_script_has_no_session(training: Training) -> None:
    for step in range(60, 3000, 30):
        training.clock.now += 60
        training.report(step)
    training.stand_still(1190)
    assert training.decided == [], "reports are a minute apart, though steps take two seconds"
    training.stand_still(20)
    assert training.decided[0]["message"] == "no step for 20 min, usual 60 s"


# Data and GPUs


def test_waiting_for_data_is_told_when_it_lasts(training: Training) -> None:
    training.train(1000, step_s=0.5, wait=0.1)
    training.train(600, step_s=0.5, wait=0.4)
    assert training.decided == [], "five minutes are none"
    training.train(1200, step_s=0.5, wait=0.4)
    assert training.told() == ["preset-starved"]
    assert "0.4 s of a step's 0.5 s" in training.decided[0]["message"]
    training.train(3000, step_s=0.5, wait=0.1)
    assert training.told("rule.cleared") == ["preset-starved"]


@pytest.mark.parametrize("wait", [None, 0.0, 0.2])
def test_a_training_that_waits_less_than_half_of_the_time_is_fed(training: Training, wait: float | None) -> None:
    training.train(10000, step_s=0.5, wait=wait)
    assert training.decided == []


def work(training: Training, seconds: float, util: Callable[[float], float | None]) -> None:
    for second in range(int(seconds)):
        training.probe.util = util(second)
        training.train(1, step_s=1.0)


def test_an_idle_gpu_is_told_after_a_quarter_of_an_hour(training: Training) -> None:
    work(training, 1200, lambda second: 90.0)
    work(training, 880, lambda second: 0.0)
    assert training.decided == []
    work(training, 60, lambda second: 2.0)
    assert training.told() == ["preset-gpu-idle"]
    work(training, 60, lambda second: 50.0)
    assert training.told("rule.cleared") == ["preset-gpu-idle"]


def test_a_training_that_never_uses_the_gpu_is_told_of_it(training: Training) -> None:
    work(training, 1000, lambda second: 0.0)
    assert training.told() == ["preset-gpu-idle"]


@pytest.mark.parametrize(
    "util", [lambda second: 95.0, lambda second: 60.0 if second % 600 < 20 else 0.0, lambda second: None]
)
def test_a_gpu_that_works_now_and_then_or_that_nobody_knows_of_is_not_idle(
    training: Training, util: Callable[[float], float | None]
) -> None:
    work(training, 5000, util)
    assert training.decided == []


def test_a_script_that_reports_nothing_is_told_only_of_a_gpu_that_it_used(training: Training) -> None:
    training.probe.util = 0.0
    training.stand_still(HOUR_S)
    assert training.decided == []
    training.probe.util = 80.0
    training.stand_still(60)
    training.probe.util = 0.0
    training.stand_still(HOUR_S)
    assert training.told() == ["preset-gpu-idle"]


def test_gpus_are_looked_at_while_a_process_runs(training: Training) -> None:
    training.stand_still(9)
    assert training.probe.started == 0, "a short one costs nothing"
    training.stand_still(60)
    assert (training.probe.started, training.probe.stopped) == (1, 0)
    training.watch.detach()
    assert training.probe.stopped == 1
    training.stand_still(60)
    assert training.probe.started == 1


def test_a_machine_without_room_for_a_thread_knows_no_gpu(training: Training) -> None:
    training.probe.full = True
    training.train(100, loss=lambda step: 1 / step)
    training.train(1, loss=math.nan)
    assert training.told() == ["preset-nonfinite"]
    training.watch.detach()


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
    assert len(training.decided) == MAX_TOLD


def test_late_attempts_tell_once() -> None:
    training = Training(attempt=QUIET_AFTER_ATTEMPTS + 1)
    for _ in range(5):
        training.train(1, loss=math.nan)
        training.train(1, loss=lambda step: 1 / step)
        training.stand_still(700)
    assert [one["decision"] for one in training.decided] == ["rule.fired"]


# Switched off, and broken


def test_what_is_switched_off_is_not_told(training: Training) -> None:
    training.watch.follow("presets: {preset-nonfinite: off}\nrules: []")
    training.train(5, loss=math.nan)
    training.train(50)
    training.stand_still(1200)
    assert training.told() == ["preset-stuck"]
    training.watch.follow("presets: off\nrules: []")
    training.train(50)
    training.stand_still(HOUR_S)
    assert len(training.decided) == 1
    training.watch.follow("rules: [{name: 'no' when")
    assert training.watch._off == set(NAMES), "what cannot be read changes nothing"
    training.watch.follow("")
    training.train(20, loss=lambda step: 1 / step)
    training.report(training.step + 1, {"loss": math.inf})
    assert training.told()[-1] == "preset-nonfinite"


@pytest.mark.parametrize(("text", "any_rule"), [
    ("", False), ("presets: off\nrules: []", False),
    ("rules: [{name: a, when: loss > 1, do: stop}]", True), ("[", True),
])  # fmt: skip
def test_whether_a_document_has_rules_of_its_own(training: Training, text: str, any_rule: bool) -> None:
    assert training.watch.follow(text) is any_rule


def test_a_bug_in_here_costs_nothing_but_the_presets(
    training: Training, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(module.LossTrend, "push", broken)
    with caplog.at_level(logging.ERROR, "baton.job"):
        training.train(3, loss=lambda step: 1 / step)
    assert len(caplog.records) == 1 and "not looked at any more" in caplog.text
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
    assert len(training.decided) <= 2 * MAX_TOLD * len(NAMES)


def test_the_document_of_presets_is_read_once() -> None:
    assert module.preset_rules() is module.preset_rules()
    assert load("presets: off\nrules: []").rules is not None
