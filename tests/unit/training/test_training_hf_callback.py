"""The Hugging Face callback, alone and in a Trainer of one weight; larger ones are in tests/e2e/training."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import Session
from gpu_client.controller.measurements import Measurements
from gpu_client.controller.rollback import RollbackTracker
from gpu_client.controller.steering import Steering
from gpu_client.training.session import session as session_module
from tests.unit.controller.controller_kit import Clock

transformers = pytest.importorskip("transformers")
from trainer_kit import Losses, Trained  # noqa: E402  # it needs transformers


def test_what_a_trainer_logs_never_clashes_with_the_report_itself(start: Callable[..., Session]) -> None:
    """A metric called `total` was a second value for the argument, and ended the training."""
    from baton import BatonCallback

    session = start()
    state = transformers.TrainerState(global_step=3, max_steps=10, is_world_process_zero=True)
    callback = BatonCallback(session)
    callback.on_log(None, state, transformers.TrainerControl(), logs={"total": 4.0, "step": 3, "loss": 0.5})
    assert session._last_report == (3, 10, {"loss": 0.5})


NAN = "rules: [{name: nan, when: not isfinite(loss), do: {stop: failed}}]"


def test_a_nan_is_seen_at_its_step_though_the_trainer_would_filter_it(tmp_path: Path) -> None:
    """The Trainer logs 0.0 for it: `loss < 1` would have called the training good."""
    trained = Trained(tmp_path, NAN, [1.0, 1.0, float("nan"), 1.0, 1.0])
    assert trained.fired() == [("nan", 3)] and trained.step == 3 and not trained.finishing
    assert trained.filtered == {False}
    assert (tmp_path / "output" / "checkpoint-3" / "baton.json").is_file()


def test_without_a_job_and_a_rule_on_the_loss_the_filter_stays(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "rules: [{name: r, when: step >= 2, do: stop}]", [1.0] * 5)
    assert trained.filtered == {True} and trained.finishing and trained.step == 2


@pytest.mark.parametrize(
    "rules", ["", "rules: [{name: r, when: step >= 9, do: stop}]", "{presets: {preset-stuck: off}, rules: []}"]
)
def test_in_a_job_the_filter_is_off_for_the_sake_of_the_preset(tmp_path: Path, rules: str) -> None:
    """The Trainer's filter of NaN losses is off in a job: with the filter, `preset-nonfinite` saw 0.0 for each NaN."""
    trained = Trained(tmp_path, rules, [1.0, float("nan"), 1.0], job=True)
    assert trained.filtered == {False}
    losses = [one["loss"] for one in trained.logged if "loss" in one]
    assert [math.isnan(loss) for loss in losses] == [False, True, True]


@pytest.mark.parametrize("off", ["off", "{preset-nonfinite: off}"])
def test_where_that_preset_is_off_the_filter_stays(tmp_path: Path, off: str) -> None:
    trained = Trained(tmp_path, f"{{presets: {off}, rules: []}}", [1.0, float("nan"), 1.0], job=True)
    assert trained.filtered == {True}


def test_how_long_the_trainers_own_loader_was_waited_for_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`data.wait` never was, and a preset that reads it was silent. What else takes time is none of it."""
    clock = Clock()
    monkeypatch.setattr(session_module, "Steering", partial(Steering, clock=clock))

    class Slow(Losses):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            clock.now += 2
            return super().__getitem__(index)

    class Busy(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            clock.now += 8

    waits: list[float] = []
    step_metrics = Measurements.step_metrics

    def looked(self: Measurements, *given: Any, **more: Any) -> dict[str, object]:
        found = step_metrics(self, *given, **more)
        waits.extend(value for name, value in found.items() if name == "data.wait" and isinstance(value, float))
        return found

    monkeypatch.setattr(Measurements, "step_metrics", looked)
    rules = "rules: [{name: r, when: data.wait > 5 * step.time, do: stop}]"
    between = {
        "eval_dataset": Slow([5.0] * 3),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "callbacks": lambda _: [Busy()],
    }
    saved = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    trained = Trained(tmp_path, rules, [3.0] * 4, dataset=lambda losses: Slow(losses * 2), **between, **saved)
    assert trained.step == 4
    assert waits == [6.0, 4.0, 4.0, 2.0], "two batches for each step, and accelerate takes one ahead"


def test_a_logged_value_counts_once(tmp_path: Path) -> None:
    """A logged value counts once; repeats at each step let a patience of three checks end after two."""
    rules = "rules: [{name: r, when: loss > 2, for: 3 checks, do: stop}]"
    trained = Trained(tmp_path, rules, [3.0] * 8)
    assert trained.fired() == [("r", 3)] and trained.step == 3


def test_the_log_of_an_evaluation_is_none_of_the_training(tmp_path: Path) -> None:
    """The loss that had been logged before it counted once more."""
    rules = "rules: [{name: r, when: loss > 2, on: log, for: 4 checks, do: stop}]"
    often = {"eval_dataset": Losses([5.0]), "eval_strategy": "steps", "eval_steps": 1}
    trained = Trained(tmp_path, rules, [3.0] * 8, **often)
    assert trained.fired() == [("r", 4)] and trained.step == 4


def test_rules_evaluate_and_hear_of_two_evaluation_sets(tmp_path: Path) -> None:
    rules = """
rules:
- {name: ask, when: loss > 2, do: evaluate}
- {name: val, when: eval.val_loss > 4, do: {log: "{eval.val_loss}"}}
- {name: test, when: eval.test_loss > 8, do: stop}
"""
    sets = {"val": Losses([5.0]), "test": Losses([9.0])}
    trained = Trained(tmp_path, rules, [1.0, 3.0, 1.0], eval_dataset=sets, do_eval=True)
    assert trained.fired() == [("ask", 2), ("val", 2), ("test", 2)]
    assert trained.step == 2


def test_where_there_is_nothing_to_evaluate_on_nothing_is_asked(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "rules: [{name: ask, when: loss > 2, do: evaluate}]", [1.0, 3.0, 1.0])
    assert trained.fired() == [("ask", 2)] and trained.step == 3, "the Trainer would have raised"


def test_a_rule_turns_the_learning_rate_and_the_schedule_goes_on(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    plain = Trained(tmp_path / "a", "rules: []", [1.0] * 6)
    rules = "rules: [{name: r, when: loss > 2, do: {set: {knob: lr, factor: 0.5}}}]"
    halved = Trained(tmp_path / "b", rules, [1.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    rates = [[one["learning_rate"] for one in run.logged if "learning_rate" in one] for run in (plain, halved)]
    assert rates[1][:3] == pytest.approx(rates[0][:3])
    assert rates[1][3:] == pytest.approx([rate / 2 for rate in rates[0][3:]])


@pytest.mark.parametrize("killed_at", [2, 3, 4, 5])
def test_counters_outlive_an_interruption(tmp_path: Path, killed_at: int) -> None:
    """Killed at 5, patience of 7 stopped at 13 instead of 8 in the framework that this replaces."""
    rules = "rules: [{name: r, when: loss > 2, for: 6 checks, do: stop}]"
    losses = [1.0] + [3.0] * 9
    first = Trained(tmp_path, rules, losses, save_strategy="steps", save_steps=1, kill_at=killed_at)
    assert first.step == killed_at and first.fired() == []
    assert (tmp_path / "output" / f"checkpoint-{killed_at}" / "steering.json").is_file()
    second = Trained(tmp_path, rules, losses, resume=True, save_strategy="steps", save_steps=1)
    assert second.fired() == [("r", 7)] and second.step == 7 and second.finishing


def test_an_evaluation_says_how_far_it_is(start: Callable[..., Session]) -> None:
    """An evaluation reports its progress, so that it does not count as a stalled training."""
    from baton import BatonCallback

    said: list[tuple[str, int, int]] = []
    session = start()
    session.phase = lambda *told: said.append(told)  # type: ignore[method-assign]
    callback, state, control = BatonCallback(session), transformers.TrainerState(), transformers.TrainerControl()
    for batches in ([0, 1], [0, 1], iter([0, 1])):
        for _ in range(2):
            assert callback.on_prediction_step(None, state, control, eval_dataloader=batches) is control
    assert said[:4] == [("evaluation", 1, 2), ("evaluation", 2, 2)] * 2
    assert [(name, total) for name, _, total in said[4:]] == [("evaluation", 0)] * 2, "its length is not known"
    assert said[4][1] < said[5][1]


def test_behind_a_rollback_the_rate_is_lower_and_batches_that_cannot_be_skipped_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rules = "rules: [{name: r, when: loss > 99, do: stop}]"
    how: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    Trained(tmp_path, rules, [1.0] * 4, kill_at=2, **how)
    begin = RollbackTracker.begin
    back = [{"number": 1, "rule": "r", "skip": 2, "lr_factor": 0.5}]
    monkeypatch.setattr(RollbackTracker, "begin", lambda self, known: begin(self, back))
    second = Trained(tmp_path, rules, [1.0] * 4, resume=True, **how)
    rates = [one["learning_rate"] for one in second.logged if "learning_rate" in one]
    assert rates == pytest.approx([0.05, 0.05])
    assert "action.failed r: learning rate times 0.5; 2 batches are not skipped: no state has skip" in caplog.text
