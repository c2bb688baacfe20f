"""Test the end of a training that stands still: stacks, a last checkpoint, one restart, then a failure."""

from __future__ import annotations

import time
from typing import Any

import pytest

from baton.contract.jobs.job import FailureClass
from gpu_client.agent.attempt import steps
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.control import preset_monitor
from gpu_client.agent.control.channel_messages import Point, TrainingProgress
from gpu_client.agent.control.preset_monitor import TICK_S, PresetMonitor
from tests.kits.clock import Clock
from tests.unit.agent.job_kit import CLEAN, Stage, Trainer, checkpoint
from tests.unit.agent.test_control_relay import Channel

ONE = {"steps": [{"name": "train", "command": ["train"], "retry_wait_s": 0}]}


class Watched:
    """Presets beside a training that reports a step each second."""

    def __init__(self, rules: str = "") -> None:
        self.clock, self.channel = Clock(), Channel()
        self.monitor = PresetMonitor(lambda _decision: None, clock=self.clock)
        self.monitor.set_rules(rules)
        self.step = 0
        self.attach()

    def attach(self) -> None:
        self.monitor.attach(self.channel, base=0, storing=lambda: False, log_line=lambda _line: None)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.clock.now += 1
            point = Point(self.step, {"loss": 1.0 / self.step})
            self.channel.reports.append((self.clock.now, TrainingProgress(self.step, 1000, {}, points=(point,))))
            self.monitor.poll()

    def wait(self, seconds: float) -> float:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += TICK_S
            self.monitor.poll()
        return self.monitor.stuck_s()


def test_ten_minutes_without_a_step_of_a_second_are_a_stall() -> None:
    watched = Watched()
    assert watched.wait(3600) == 0.0, "before the first step nothing is known"
    watched.train(30)
    assert watched.wait(590) == 0.0
    assert watched.wait(20) == pytest.approx(610, abs=TICK_S)
    watched.train(1)
    assert watched.monitor.stuck_s() == 0.0
    watched.wait(20)
    assert watched.wait(600) == 0.0, "a pause that ended may recur"
    assert watched.wait(3600) > 1220, "after the cooldown of the preset"
    watched.attach()
    assert watched.monitor.stuck_s() == 0.0, "another process, another training"


def test_a_preset_that_is_switched_off_stops_nothing() -> None:
    watched = Watched("presets: {preset-stuck: off}\nrules: []")
    watched.train(30)
    assert watched.wait(7200) == 0.0


def hang(stage: Stage, *, healthy: int = 99, prints: bool = False) -> None:
    """Let the trainers stop at step 7 with a checkpoint; the one after `healthy` others trains to its end."""

    def act(trainer: Trainer, looks: int) -> None:
        if len(stage.trainers) > healthy:
            return trainer.ends(CLEAN)
        if looks == 1:
            trainer.connect().report(7, 10, {"loss": 0.5})
            if len(stage.trainers) == 1:
                checkpoint(trainer, 7)
        if prints:
            trainer.print(f"evaluating {looks}")
            return trainer.ends(CLEAN) if looks > 100 else None
        return None

    stage.act = act


@pytest.fixture
def stuck(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Count a training without a step as stuck at once, and a silence of 100 ms as silent."""
    monkeypatch.setattr(preset_monitor.PresetMonitor, "stuck_s", lambda _monitor: 3600.0)
    monkeypatch.setattr(steps, "SILENCE_S", 0.1)
    return stage


def kinds(trainer: Trainer) -> list[tuple[str, bool]]:
    return [(one.kind, one.checkpoint) for one in trainer.directives]


def test_a_stalled_training_saves_and_starts_again_on_its_machine(stuck: Stage, capfd: Any) -> None:
    hang(stuck, healthy=1)
    assert stuck.run(plan=ONE, restart_on_stall=True, stop_grace_s=1) is AttemptOutcome.COMPLETE
    first, second = stuck.trainers
    assert kinds(first) == [("stop", True)]
    assert "Thread 0x" in capfd.readouterr().err, "the stacks of its threads"
    assert stuck.committed == [7]
    assert second.env["BATON_RESUME_FROM"].endswith("checkpoint-7")


def test_a_training_that_stalls_again_leaves_the_machine(stuck: Stage) -> None:
    hang(stuck)
    began = time.monotonic()
    assert stuck.run(plan=ONE, restart_on_stall=True, stop_grace_s=0) is AttemptOutcome.FAILED
    assert len(stuck.trainers) == 2
    assert stuck.last_report().failure_class is FailureClass.NO_PROGRESS
    assert stuck.last_report().message.startswith("stopped: no progress for ")
    assert time.monotonic() - began > 0.3, "the second stall has to last twice as long"


def test_output_is_a_sign_of_life_and_without_permission_nothing_is_stopped(stuck: Stage) -> None:
    hang(stuck, prints=True)
    assert stuck.run(restart_on_stall=True) is AttemptOutcome.COMPLETE
    stuck.client.said.clear()
    stuck.trainers.clear()
    hang(stuck)
    act = stuck.act
    stuck.act = lambda trainer, looks: trainer.ends(CLEAN) if looks > 50 else act(trainer, looks)
    assert stuck.run(restart_on_stall=False) is AttemptOutcome.COMPLETE


@pytest.mark.parametrize(
    ("connects", "last_step", "ended"), [(True, None, True), (False, 40, True), (False, None, False)]
)
def test_a_start_that_hangs_is_ended_if_the_training_reports_steps(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, connects: bool, last_step: int | None, ended: bool
) -> None:
    """A script that neither connects nor has ever reported a step may run for hours without a word."""
    monkeypatch.setattr(steps, "SILENCE_S", 0.0)
    monkeypatch.setattr(steps, "START_SILENCE_S", 0.02)

    def act(trainer: Trainer, looks: int) -> None:
        if connects:
            trainer.connect()
        if looks > 50 and not ended:
            trainer.ends(CLEAN)

    stage.act = act
    outcome = stage.run(plan=ONE, restart_on_stall=True, last_step=last_step, stop_grace_s=0)
    assert (outcome is AttemptOutcome.FAILED, len(stage.trainers)) == ((True, 2) if ended else (False, 1))
