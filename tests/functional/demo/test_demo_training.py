"""The training script of the rules demo, in a process of its own, obeys rules and rollbacks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.contract.worker.output import LogLine
from demo import digits
from demo.jobs import TrainedStep, printed_steps
from demo.rules import scenario
from tests.kits.stack.stack import clean_environment

pytestmark = pytest.mark.processes

PARAMETERS = {"steps": 24, "batch_size": 16, "hidden": 4, "checkpoint_every": 8, "evaluate_every": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    every = digits.load()
    digits.write_pngs(replace(every, images=every.images[:100], labels=every.labels[:100]), folder)
    return folder


def trained(
    data: Path, folder: Path, *, resume_from: str = "", control: Any = None, **parameters: Any
) -> list[TrainedStep]:
    """Run the script as an agent would, but without one; returns the steps that it printed."""
    (folder / "params.json").write_text(json.dumps({**PARAMETERS, **parameters}))
    (folder / "control.json").write_text(json.dumps(control or {}))
    variables = {
        **clean_environment(),
        "BATON_DATA_DIR": str(data),
        "BATON_OUTPUT_DIR": str(folder / "out"),
        "BATON_PARAMS": str(folder / "params.json"),
        "BATON_CONTROL": str(folder / "control.json"),
    }
    if resume_from:
        variables["BATON_RESUME_FROM"] = str(folder / "out" / resume_from)
    command = [sys.executable, str(scenario.HERE / "training.py")]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    texts = ran.stdout.splitlines()
    lines = [LogLine(epoch=1, line=number, text=text, at=1) for number, text in enumerate(texts)]
    return [TrainedStep(*one) for one in printed_steps(lines)]


def test_a_rate_that_is_too_high_is_stopped_by_the_rule_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    control = {"rules": {"revision": 1, "text": scenario.document("diverging")}}
    steps = trained(data, tmp_path, control=control, learning_rate=1.0)
    assert [one.step for one in steps] == list(range(1, 11)), "as soon as the mean of ten is known"
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-8"], "save: false"


def test_damaged_batches_spike_and_a_rollback_passes_over_them_at_a_lower_rate(data: Path, tmp_path: Path) -> None:
    damaged: dict[str, Any] = {"damaged_from": 15, "damaged_to": 18, "checkpoint_every": 12}
    before = trained(data, tmp_path, **damaged)
    assert [one.metrics["batch"] for one in before] == list(range(1, 25))
    assert max(one.loss for one in before[:14]) < 5 < before[14].loss
    assert (tmp_path / "out" / "model.safetensors").exists()

    (tmp_path / "out" / "checkpoint-24").rename(tmp_path / "of-the-first")
    rollback = {"number": 1, "rule": "spike", "step": 15, "to_step": 12, "skip": 6, "lr_factor": 0.5}
    control = {"rules": {"revision": 1, "text": scenario.document("spiking")}, "rollbacks": [rollback]}
    after = trained(data, tmp_path, resume_from="checkpoint-12", control=control, **damaged)
    assert [one.step for one in after] == list(range(13, 25))
    assert [one.metrics["batch"] for one in after] == list(range(19, 31))
    assert [one.metrics["lr"] for one in after] == pytest.approx([one.metrics["lr"] / 2 for one in before[12:]])
    assert max(one.loss for one in after) < 5
