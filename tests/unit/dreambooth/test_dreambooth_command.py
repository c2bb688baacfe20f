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
PLAIN = [sys.executable, "-m", SCRIPT]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "-m", SCRIPT]
"""`accelerate launch`, whose defaults are one process, and the GPU if there is one."""
WARNED_BY_THE_HUB = """\
import atexit, logging, sys

def warn():
    if "gpu_client.training.dreambooth.model" in sys.modules:
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")

atexit.register(warn)
"""
"""A `sitecustomize.py`, which Python imports at its start, for a line of another library at the end of the training."""
TAKES_A_WHILE = {"max_train_steps": 20, "checkpointing_steps": 5, "train_text_encoder": False}


class Place:
    """A directory in which nothing lies but a configuration, and what the command makes there."""

    def __init__(self, directory: Path, parameters: dict[str, Any]) -> None:
        directory.mkdir()
        self.directory = directory
        self.output = directory / "output"
        self.log = directory.with_suffix(".log")
        self.customized = directory.with_suffix(".site")
        self.customized.mkdir()
        (self.customized / "sitecustomize.py").write_text(WARNED_BY_THE_HUB, encoding="utf-8")
        (directory / "job.json").write_text(json.dumps(parameters), encoding="utf-8")

    def start(self, program: list[str]) -> subprocess.Popen[bytes]:
        """Start `PROGRAM --config FILE` as the leader of a process group."""
        command = [*program, "--config", "job.json"]
        path = os.pathsep.join(map(str, (self.customized, ROOT)))
        environment = {**os.environ, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command, cwd=self.directory, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill_at(self, checkpoint: int) -> None:
        """Start the script, for which a launcher would only wait, and kill it when a checkpoint becomes visible."""
        process, goal = self.start(PLAIN), self.output / f"checkpoint-{checkpoint}"
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
    assert place.start(LAUNCH).wait(START_LIMIT_S) == 0, place.log.read_text()
    said = place.log.read_text()
    assert said.count("Retrying in 1s") == 1, "the hub's lines once, not by its own handler too"
    assert "torchvision" not in said, "the first import of transformers warns of torchvision twice"
    assert {path.name for path in place.directory.iterdir()} == {"job.json", "output"}

    undisturbed = run("undisturbed", **parameters)
    assert outputs(place.output) == outputs(undisturbed)
    files = [
        json.loads((at / "checkpoint-20" / "baton.json").read_text())["files"] for at in (place.output, undisturbed)
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
