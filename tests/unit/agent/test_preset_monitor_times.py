"""Test the presets' decisions on a training that does not move, waits for data or leaves its GPUs idle."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from gpu_client.agent.control.channel_messages import CheckpointNotice
from tests.unit.agent.preset_kit import HOUR_S, Training

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
    training.train(2)
    training.stand_still(3590)
    assert training.decided == []
    training.stand_still(30)
    assert training.decided[0]["message"] == "no step for 60 min, usual unknown"


def test_before_it_has_reported_twice_it_has_two_hours(training: Training) -> None:
    training.report(0)
    training.stand_still(2 * HOUR_S - 10)
    assert training.decided == []
    training.stand_still(30)
    assert training.decided[0]["message"] == "no step for 2.0 h, usual unknown"


def test_a_script_may_report_once_an_hour(training: Training) -> None:
    """A script that reports only once an epoch, every hour, is never told as stuck; the first epoch was."""
    for epoch in range(40):
        training.report(epoch, {"loss": 1.0 / (epoch + 1)})
        training.stand_still(HOUR_S * (1.05 + 0.1 * (epoch % 3)))
    assert training.decided == []


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


# Rotation


def test_checkpoints_that_a_script_deletes_too_soon_are_told_once_from_the_second_on(training: Training) -> None:
    training.missed = 1
    training.stand_still(60)
    assert training.decided == []
    training.missed = 2
    training.stand_still(15)
    [fired] = training.decided
    assert (fired["rule"], fired["severity"]) == ("preset-rotation", "error")
    assert fired["message"] == "the script has deleted 2 checkpoints before they could be stored"
    training.missed = 40
    training.stand_still(5 * HOUR_S)
    assert training.told() == ["preset-rotation"]
