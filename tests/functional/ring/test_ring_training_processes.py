"""Test a training with loader workers as processes: preempted and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpu_client.ring.core.ring import make_ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from tests.kits.waiting import until

pytestmark = pytest.mark.processes

TRAINER = Path(__file__).resolve().parents[2] / "e2e" / "trainers" / "ringed.py"


def begun(folder: Path, steps: int, **environment: str) -> subprocess.Popen[bytes]:
    """Run the trainer as a script without an agent."""
    parameters = {"steps": steps, "step_s": 0.05, "ring": str(folder / "ring"), "trace": str(folder / "trace")}
    (folder / "parameters.json").write_text(json.dumps({**parameters, "workers": 2}))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    own = {"BATON_OUTPUT_DIR": str(folder / "output"), "BATON_PARAMS": str(folder / "parameters.json"), **environment}
    return subprocess.Popen([sys.executable, str(TRAINER)], env={**kept, **own}, start_new_session=True)


def traced(folder: Path) -> list[tuple[int, list[str]]]:
    if not (folder / "trace").exists():
        return []
    lines = map(json.loads, (folder / "trace").read_text().splitlines())
    return [(line["step"], line["ids"]) for line in lines]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_all_its_processes_costs_a_training_no_sample_and_gives_it_none_twice(
    tmp_path: Path, number: signal.Signals
) -> None:
    with RingWriter(make_ring(str(tmp_path / "ring"), RingSettings(cap=60))) as writer:
        for seed in range(60):
            writer.put({"x": np.full(4, float(seed)), "seed": np.array(float(seed))}, seed=seed)
    process = begun(tmp_path, 1000)
    until(lambda: len(traced(tmp_path)) >= 8, what="steps")
    os.killpg(process.pid, number)
    code = process.wait(60)
    last = max(int(path.name.partition("-")[2]) for path in (tmp_path / "output").glob("checkpoint-*"))
    if number is signal.SIGTERM:
        assert code == 0 and last == traced(tmp_path)[-1][0], "its last step is saved"
    assert begun(tmp_path, 30, BATON_RESUME_FROM=str(tmp_path / "output" / f"checkpoint-{last}")).wait(60) == 0
    read: dict[int, list[str]] = {}
    for step, ids in traced(tmp_path):
        assert read.setdefault(step, ids) == ids, f"step {step} reads the same again"
    assert sorted(read) == list(range(1, 31))
    assert len({one for ids in read.values() for one in ids}) == 60, "a pass has each sample once"
