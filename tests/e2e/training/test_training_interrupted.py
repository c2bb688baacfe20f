"""Real processes, really killed: interrupted equals uninterrupted, bit for bit, and nothing half-written stays."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import Run, flat, only_complete, run_ranks, same_bytes

from gpu_client.training.checkpoint import checkpoint_directory

pytestmark = pytest.mark.processes

LAST = 399
SETTINGS = {"steps": LAST + 1, "hidden": 16, "checkpoint_every": 7}


def test_the_example_learns_the_digits(tmp_path: Path, data: str) -> None:
    output = tmp_path / "out"
    # A quarter of the default channels, since the time of a step grows with their square.
    Run("digits", output, {"steps": 200, "hidden": 14, "learning_rate": 1e-2}, BATON_DATA_DIR=data).finish()
    report = json.loads((output / "predictions.json").read_text())
    assert report["accuracy"] >= 0.97
    assert report["held_out"] == len(report["predictions"]) == 360
    right = [row["label"] == row["predicted"] for row in report["predictions"]]
    assert sum(right) / 360 == report["accuracy"]
    assert re.fullmatch(r"digits/\d/\d+\.png", report["predictions"][0]["file"])
    assert only_complete(output) == [150, 200]


def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path, data: str) -> None:
    through, killed = tmp_path / "through", tmp_path / "killed"
    Run("digits", through, SETTINGS, BATON_DATA_DIR=data).finish()
    moments = random.Random(20)
    reached = 0
    for _ in range(5):
        run = Run("digits", killed, SETTINGS, BATON_DATA_DIR=data)
        goal = reached + 7 * moments.randint(1, 2)
        run.wait_for((killed / f"checkpoint-{goal}").exists)
        time.sleep(moments.random() * 0.05)  # anywhere: in a step, or while the next checkpoint is written
        run.signal(signal.SIGKILL)
        run.finish(-signal.SIGKILL)
        reached = only_complete(killed)[-1]
        assert goal <= reached < LAST
        assert not (killed / "model.safetensors").exists()
    Run("digits", killed, SETTINGS, BATON_DATA_DIR=data).finish()
    assert same_bytes(through, killed, "model.safetensors")
    assert same_bytes(through, killed, "predictions.json")
    # Optimizer, scheduler, position and torch's random state too. (Python's and numpy's are not used, nor seeded.)
    one, other = (folder / f"checkpoint-{LAST}" for folder in (through, killed))
    assert same_bytes(one, other, "model.safetensors")
    assert same_bytes(one, other, "optimizer.safetensors")
    bundles = [torch.load(path / "state.pt", weights_only=True) for path in (one, other)]
    assert bundles[0]["states"].keys() == {"model", "optimizer", "scheduler", "batches"}
    assert flat(bundles[0]["states"]) == flat(bundles[1]["states"])
    assert flat(bundles[0]["random"][0]["torch"]) == flat(bundles[1]["random"][0]["torch"])
    assert not list(killed.glob(".*"))


def test_a_typing_error_in_the_parameters_is_refused(tmp_path: Path, data: str) -> None:
    printed = Run("digits", tmp_path / "out", {"step": 3}, BATON_DATA_DIR=data).finish(1)
    assert "unexpected keyword argument 'step'" in printed


def test_no_digits_are_a_clear_error(tmp_path: Path) -> None:
    printed = Run("digits", tmp_path / "out", BATON_DATA_DIR=str(tmp_path)).finish(1)
    assert "holds 0 digits: expected many files <label>/<index>.png" in printed


def test_sigterm_to_every_process_ends_in_a_checkpoint_despite_workers(tmp_path: Path) -> None:
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    Run("workers", through).finish()
    run = Run("workers", stopped, {"hold_at": 13})
    run.wait_for(lambda: "step 13" in run.log.read_text())
    run.signal(signal.SIGTERM)
    (stopped / "go-on").touch()
    assert "stopped: signal" in run.finish()
    assert only_complete(stopped) == [10, 13]
    Run("workers", stopped).finish()
    assert same_bytes(through, stopped, "model.safetensors")


def test_a_disk_that_takes_no_more_is_reported_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    printed = Run("full_disk", tmp_path / "out").finish()
    assert printed.count("refused: the checkpoint of step 2 could not be written") == 2
    assert "['checkpoint-1']" in printed
    assert only_complete(tmp_path / "out") == [1]


def test_accelerate_on_two_processes_stops_together_and_resumes_exactly(tmp_path: Path) -> None:
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    run_ranks("accelerated", through)
    printed = run_ranks(
        "accelerated", stopped, stop_at=13
    )  # the signal reaches the last rank only; all know one step later
    assert ["left after step 14: signal" in text for text in printed] == [True, True]
    assert only_complete(stopped) == [10, 14]
    run_ranks("accelerated", stopped)
    assert same_bytes(through, stopped, "model.safetensors")


def test_when_one_process_cannot_write_none_commits_and_none_waits(tmp_path: Path) -> None:
    printed = run_ranks("one_fails", tmp_path / "out")
    assert "refused: another process could not write its part of step 2" in printed[0]
    assert "refused: 'model' (object) has no state_dict()" in printed[1]
    assert only_complete(tmp_path / "out") == [1, 3]
    assert not list((tmp_path / "out").glob(".*"))


def test_lightning_stopped_and_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Noise is drawn from all generators."""
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    Run("lightning_trainer", through).finish()
    assert "left after step 3: signal" in Run("lightning_trainer", stopped, {"stop_at": 3}).finish()
    assert only_complete(stopped) == [3]
    Run("lightning_trainer", stopped, {"kill_at": 7}).finish(-signal.SIGKILL)
    assert only_complete(stopped) == [3, 5]
    assert "left after step 12: None" in Run("lightning_trainer", stopped).finish()
    assert same_bytes(through, stopped, "model.safetensors")


def test_the_trainer_stopped_and_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    Run("trainer", through).finish()
    assert "left after step 3: signal" in Run("trainer", stopped, {"stop_at": 3}).finish()
    assert only_complete(stopped) == [3]
    Run("trainer", stopped, {"kill_at": 8}).finish(-signal.SIGKILL)
    assert only_complete(stopped) == [3, 5]
    assert "left after step 12: None" in Run("trainer", stopped).finish()
    assert checkpoint_directory.verify(stopped / "checkpoint-12").created_by == "script"
    assert load_file(through / "final" / "model.safetensors")
    assert same_bytes(through / "final", stopped / "final", "model.safetensors")
