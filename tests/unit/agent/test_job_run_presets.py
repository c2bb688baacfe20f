"""Test presets in a whole attempt: over the real channel, beside rules, in each step, never delaying the training."""

from __future__ import annotations

import math
import os
import shutil
from typing import Any

import pytest

from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.control import preset_monitor
from gpu_client.agent.control.control_relay import UNSTEERED_AFTER_S, ControlRelay
from gpu_client.agent.io import checkpoint_collector
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import make_answer
from tests.unit.agent.job_kit import CLEAN, Stage, Trainer
from tests.unit.agent.test_control_relay import Channel as Quiet
from tests.unit.agent.test_control_relay import Plane, decision, say

NOTHING: dict[str, Any] = {"commands": []}


def reports(*losses: float, decides: int = 0) -> Any:
    """Make a trainer that reports each value, makes a decision of its own, and ends."""

    def act(trainer: Trainer, looks: int) -> None:
        channel = trainer.connect()
        for step, loss in enumerate(losses, 1):
            channel._reported_at = -math.inf  # no waiting between reports
            channel.report(step, 10, {"loss": loss})
            with channel._lock:  # a newer report would take its place
                if channel._progress is not None:
                    channel._queue.append(channel._progress)
                    channel._progress = None
        for number in range(decides):
            channel.send_steering(decision(number))
        trainer.ends(CLEAN)

    return act


def told(stage: Stage) -> list[tuple[int, str, str | None, int]]:
    every = [*stage.client.heart.requests, stage.last_report()]
    found = {one.number: one for request in every if request.control for one in request.control.decisions}
    return [(number, one.type, one.rule, one.step) for number, one in sorted(found.items())]


def test_a_loss_that_is_no_number_is_told_with_the_attempts_numbers(stage: Stage) -> None:
    stage.act = reports(1.0, math.nan, 0.5, decides=2)
    assert stage.run(control=NOTHING) is AttemptOutcome.COMPLETE, "nothing else happens"
    found = told(stage)
    assert [one[0] for one in found] == [1, 2, 3, 4]
    by_preset = [(kind, step) for _, kind, rule, step in found if rule == "preset-nonfinite"]
    assert by_preset == [("rule.fired", 2), ("rule.cleared", 3)]
    lines = [line for kind, chunk in stage.client.said if kind == "logs" for line in chunk.lines]
    assert any(line.startswith("[baton] preset-nonfinite: the loss is NaN") for line in lines)
    assert stage.last_report().ended_by is None


@pytest.mark.parametrize(
    "control",
    [
        {"rules": {"revision": 1, "text": "presets: off\nrules: []"}, "commands": []},
        {"rules": {"revision": 1, "text": "presets: {preset-nonfinite: off}\nrules: []"}, "commands": []},
    ],
)
def test_what_is_switched_off_is_not_told(stage: Stage, control: dict[str, Any]) -> None:
    stage.act = reports(1.0, math.nan)
    assert stage.run(control=control) is AttemptOutcome.COMPLETE
    assert told(stage) == []


def test_each_step_of_a_plan_is_a_training_of_its_own(stage: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        losses = (1.0, math.nan) if len(stage.trainers) == 2 else (1.0,)
        reports(*losses)(trainer, looks)

    stage.act = act
    plan = {"steps": [{"name": name, "command": [name]} for name in ("warm", "train", "after")], "outputs": []}
    assert stage.run(control=NOTHING, plan=plan) is AttemptOutcome.COMPLETE
    [(_, kind, rule, step)] = told(stage)
    assert (kind, rule) == ("rule.fired", "preset-nonfinite")
    assert step > 2, "counted within the job"


def test_a_script_that_says_nothing_is_told_nothing_of(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset_monitor, "TICK_S", 0.0)
    stage.act = lambda trainer, looks: trainer.ends(CLEAN) if looks > 50 else None
    assert stage.run(control=NOTHING) is AttemptOutcome.COMPLETE
    assert told(stage) == []


def test_checkpoints_that_a_script_deletes_too_soon_are_told_of(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset_monitor, "TICK_S", 0.0)
    for name in ("POLL_S", "HURRY_S"):
        monkeypatch.setattr(checkpoint_collector, name, 0.0)

    def act(trainer: Trainer, looks: int) -> None:
        checkpoint, moment = trainer.directory / f"checkpoint-{looks // 10}", looks % 10
        if looks < 30 and moment == 0:
            checkpoint.mkdir()
            (checkpoint / "model.bin").write_bytes(b"x")
            os.mkfifo(checkpoint / "pipe")  # which no link can hold
        elif looks < 30 and moment == 5 and checkpoint.exists():
            shutil.rmtree(checkpoint)
        elif looks > 50:
            trainer.ends(CLEAN)

    stage.act = act
    assert stage.run(control=NOTHING) is AttemptOutcome.COMPLETE
    assert stage.committed == []
    assert [(kind, rule) for _, kind, rule, _ in told(stage)] == [("rule.fired", "preset-rotation")]


def test_a_broken_preset_costs_an_attempt_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(preset_monitor._TrainingState, "poll", broken)
    stage.act = reports(1.0, math.nan, decides=1)
    assert stage.run(control=NOTHING) is AttemptOutcome.COMPLETE
    assert [one[2] for one in told(stage)] == ["r"]


def test_two_sources_are_numbered_without_a_gap_whatever_becomes_of_heartbeats() -> None:
    from gpu_client.agent.control.channel_messages import Point, TrainingProgress

    clock = Clock()
    relay, channel = ControlRelay(None, now=lambda: 1_790_000_000, clock=clock), Quiet()
    relay.attach(channel)  # type: ignore[arg-type]
    plane = Plane()
    for step in range(1, 40):
        odd = {"loss": "nan"} if step % 2 else {}
        fine = {} if step % 2 else {"loss": 1.0 / step}
        clock.now += 700
        points = (Point(step, {**fine, **odd}),)
        channel.reports.append((clock.now, TrainingProgress(step, 100, fine, nonfinite=odd, points=points)))
        say(relay, channel, decision(1000 + step))
        report = relay.report()
        if step % 3:
            plane.take(report)
        if step % 3 == 1:
            relay.acknowledge(report, make_answer())
    for _ in range(10):
        report = relay.report()
        plane.take(report)
        relay.acknowledge(report, make_answer())
    own = [step for step in plane.steps if step < 1000]
    assert own == [1, 2, 3, 4, 5, 6], "fired and over three times"
    assert [step for step in plane.steps if step > 1000] == list(range(1001, 1040))
    assert plane.decided == len(plane.steps) == 45


@pytest.mark.parametrize(("text", "deaf"), [("presets: off\nrules: []", False), ("# not read here", True)])
def test_a_document_without_rules_needs_nobody_who_goes_by_them(text: str, deaf: bool) -> None:
    from baton.contract.worker.control import Control

    clock = Clock()
    relay, channel = ControlRelay(Control(rules={"revision": 1, "text": text}), clock=clock), Quiet()
    relay.attach(channel)  # type: ignore[arg-type]
    relay.poll()
    clock.now += UNSTEERED_AFTER_S + 1
    assert (relay.report().rejected is not None) is deaf
