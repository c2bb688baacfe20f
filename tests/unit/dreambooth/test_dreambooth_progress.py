"""A training without Baton logs its progress."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from dreambooth_runs import train_in

from gpu_client.training.dreambooth_lora import EVERY_S, ProgressLines


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]


def test_the_first_step_the_last_and_one_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    lines = ProgressLines(10, 100, clock=lambda: now)
    for step in range(11, 101):
        now += EVERY_S / 10
        lines.after(step, torch.tensor(0.25))
    assert _said(caplog) == [
        "step 11 of 100, loss 0.2500, about 4 min left",
        "step 21 of 100, loss 0.2500, about 4 min left",
        "step 31 of 100, loss 0.2500, about 3 min left",
        "step 41 of 100, loss 0.2500, about 3 min left",
        "step 51 of 100, loss 0.2500, about 2 min left",
        "step 61 of 100, loss 0.2500, about 2 min left",
        "step 71 of 100, loss 0.2500, about 1 min left",
        "step 81 of 100, loss 0.2500",
        "step 91 of 100, loss 0.2500",
        "step 100 of 100, loss 0.2500",
    ]


@pytest.mark.parametrize(("variables", "lines"), [({}, 2), ({"BATON_JOB_ID": "a-job"}, 0)])
def test_under_baton_they_are_not_needed(
    variables: dict[str, str],
    lines: int,
    parameters: dict[str, Any],
    tmp_path: Path,
    data_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    train_in(tmp_path / "output", data_dir, parameters | {"max_train_steps": 2}, variables)
    assert len(_said(caplog)) == lines
