"""The script as a process without a control plane, killed and restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dreambooth_runs import Run, outputs

from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.model.lora import WEIGHTS_FILE
from tests.kits.waiting import until

ROOT = Path(__file__).resolve().parents[3]
START_LIMIT_S = 120
SCRIPT = "gpu_client.training.dreambooth_lora"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
"""`accelerate launch`, whose defaults are one process, and the GPU if there is one."""
TAKES_A_WHILE = {"max_train_steps": 40, "checkpointing_steps": 5, "train_text_encoder": False}


class Place:
    """A directory in which nothing lies but a configuration, and what the command makes there."""

    def __init__(self, directory: Path, parameters: dict[str, Any]) -> None:
        directory.mkdir()
        self.directory = directory
        self.output = directory / "output"
        (directory / "job.json").write_text(json.dumps(parameters), encoding="utf-8")

    def start(self) -> subprocess.Popen[bytes]:
        """The documented command, `accelerate launch -m ... --config FILE`, as the leader of a process group."""
        command = [*LAUNCH, "-m", SCRIPT, "--config", "job.json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
        return subprocess.Popen(command, cwd=self.directory, env=environment, start_new_session=True)

    def kill_at(self, checkpoint: int) -> None:
        """Start it, and kill -9 every process of it when a checkpoint has become visible."""
        process, goal = self.start(), self.output / f"checkpoint-{checkpoint}"
        try:
            # Polled fast: the next one comes in less than a second.
            until(lambda: goal.is_dir() or process.poll() is not None, START_LIMIT_S, every_s=0.005)
            assert process.poll() is None, "it ended by itself"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


@pytest.mark.processes
def test_killed_and_launched_again_it_ends_as_if_nothing_had_happened(
    run: Run, parameters: dict[str, Any], tmp_path: Path, data_dir: Path
) -> None:
    parameters |= {**TAKES_A_WHILE, "instance_data_dir": str(data_dir / "instance")}
    place = Place(tmp_path / "place", parameters)
    place.kill_at(5)
    assert not (place.output / WEIGHTS_FILE).exists()
    assert place.start().wait(START_LIMIT_S) == 0
    assert {path.name for path in place.directory.iterdir()} == {"job.json", "output"}

    undisturbed = run("undisturbed", **parameters)
    assert outputs(place.output) == outputs(undisturbed)
    files = [
        json.loads((at / "checkpoint-40" / "baton.json").read_text())["files"] for at in (place.output, undisturbed)
    ]
    assert {"lora.safetensors", "optimizer.safetensors", "state.pt"} <= files[0].keys()
    assert files[0] == files[1], "optimizer, scheduler, order and random states too"


def test_folders_may_be_named_and_lie_elsewhere(
    run: Run, parameters: dict[str, Any], tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters |= {"max_train_steps": 1}
    here = Place(tmp_path / "here", parameters).directory
    monkeypatch.chdir(here)
    dreambooth_lora.main(["--config", "job.json", "--data-dir", str(data_dir), "--output-dir", str(tmp_path / "out")])
    assert outputs(tmp_path / "out") == outputs(run("as-a-function", **parameters))
    # And where the folder of the images lies here, nothing has to be named.
    (here / "instance").symlink_to(data_dir / "instance")
    dreambooth_lora.main(["--config", "job.json"])
    assert outputs(here / "output") == outputs(tmp_path / "out")


@pytest.mark.processes
def test_the_rest_of_the_house_starts_without_diffusers() -> None:
    """An agent's image has none of it."""
    probe = (
        "import sys, gpu_client.training.session.session, gpu_client.agent.app.worker_loop, gpu_client.cli.main; "
        "print(sorted({'diffusers', 'peft', 'transformers', 'accelerate'} & sys.modules.keys()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
    )
    assert found.stdout.strip() == "[]"


def test_other_libraries_lines_stand_in_the_log_once_or_not_at_all() -> None:
    """The hub's retries stood there twice, and each start began with two lines about torchvision."""
    probe = (
        "import logging; from gpu_client.training import dreambooth_lora; "
        "logging.basicConfig(format='%(asctime)s %(message)s'); "
        "logging.getLogger('huggingface_hub.utils').warning('Retrying in 1s')"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
    )
    assert found.stderr.count("Retrying in 1s") == 1
    assert "torchvision" not in found.stderr
