"""The step after which a rule ends a Hugging Face training, by its event: the original's table.

The original's trainer forgot a stop at the beginning, and wrote the checkpoint of the next step on a save.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_training_hf_callback import Losses, Trained

SAVES = {"save_strategy": "steps", "save_steps": 3}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 4, "eval_dataset": Losses([1.0])}


def rules(*said: dict[str, Any]) -> str:
    return json.dumps({"rules": [{"name": f"r{number}", "do": "stop", **one} for number, one in enumerate(said)]})


@pytest.mark.parametrize(
    ("event", "more", "stopped_after"),
    [
        ("start", {}, 1),
        ("step", {}, 1),
        ("log", {}, 1),
        ("log", {"logging_steps": 2}, 2),
        ("save", SAVES, 4),  # with a checkpoint of its own: that of step 3 is being committed
        ("save", {}, 8),
        ("evaluate", EVALUATES, 4),
        ("evaluate", {}, 8),
        ("epoch", {}, 8),
        ("end", {}, 8),
    ],
)
def test_a_stop_comes_with_its_event(tmp_path: Path, event: str, more: dict[str, Any], stopped_after: int) -> None:
    trained = Trained(tmp_path, rules({"when": "true", "on": event}), [1.0] * 8, **more)
    assert trained.step == stopped_after


def test_a_rule_that_saves_and_stops_leaves_the_checkpoint_of_that_step(tmp_path: Path) -> None:
    trained = Trained(tmp_path, rules({"when": "step >= 3", "do": ["save", "stop"]}), [1.0] * 8)
    assert trained.step == 3
    assert [path.name for path in (tmp_path / "output").glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_save_at_a_step_saves_that_step(tmp_path: Path) -> None:
    """The original's state was one step behind at a step's begin: it wrote the next one."""
    Trained(tmp_path, rules({"when": "step == 7", "do": "save"}), [1.0] * 8)
    assert (tmp_path / "output" / "checkpoint-7" / "baton.json").is_file()
    assert not (tmp_path / "output" / "checkpoint-8").exists()


def test_a_trainers_own_metrics_are_left_as_they_are(tmp_path: Path) -> None:
    """The original wrote `steps` and `epoch` into them, for every other callback and for the files of results."""
    watched = Trained(tmp_path, rules({"when": "mean(eval.loss, 2) > 9 or eval.loss > 9"}), [1.0] * 8, **EVALUATES)
    evaluations = [one for one in watched.logged if "eval_loss" in one]
    assert len(evaluations) == 2 and all("steps" not in one for one in evaluations)
    (tmp_path / "plain").mkdir()
    plain = Trained(tmp_path / "plain", "rules: []", [1.0] * 8, **EVALUATES)
    assert [sorted(one) for one in watched.logged] == [sorted(one) for one in plain.logged]


@pytest.mark.parametrize("event", ["step", "log"])
def test_a_step_and_its_log_are_one_check_each(tmp_path: Path, event: str) -> None:
    trained = Trained(tmp_path, rules({"when": "step > 0", "on": event, "for": "4 checks"}), [1.0] * 8)
    assert trained.step == 4


@pytest.mark.parametrize(
    ("when", "stopped_after"),
    [("step > 0", 4), ("wall >= 0s", 4), ("missing(nothing)", 3)],  # the last is checked at the start, too
)
def test_a_rule_that_waits_for_no_event_is_checked_once_a_step(tmp_path: Path, when: str, stopped_after: int) -> None:
    """The Trainer announces a step and its log one after the other: both together are one check."""
    assert Trained(tmp_path, rules({"when": when, "for": "4 checks"}), [1.0] * 8).step == stopped_after
