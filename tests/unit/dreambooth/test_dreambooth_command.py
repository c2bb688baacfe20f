"""The script as a process: without any control plane, killed and started again; and on a GPU where there is one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dreambooth_runs import Run
from safetensors.torch import load_file

from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.lora import WEIGHTS_FILE

ROOT = Path(__file__).resolve().parents[3]
START_LIMIT_S = 120
SCRIPT = "gpu_client.training.dreambooth_lora"
LAUNCHERS = {
    "python": [sys.executable, "-m", SCRIPT],
    "accelerate": [
        sys.executable, "-m", "accelerate.commands.launch",
        "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "-m", SCRIPT,
    ],
}  # fmt: skip


@pytest.mark.processes
def test_killed_and_launched_again_it_ends_as_if_nothing_had_happened(
    run: Run, parameters: dict[str, Any], tmp_path: Path, data_dir: Path
) -> None:
    parameters |= {"max_train_steps": 40, "checkpointing_steps": 5, "train_text_encoder": False}
    uninterrupted = run("uninterrupted", **parameters)
    config = tmp_path / "job.json"
    config.write_text(json.dumps(parameters), encoding="utf-8")
    arguments = ["--config", str(config), "--data-dir", str(data_dir), "--output-dir", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    first = subprocess.Popen([*LAUNCHERS["accelerate"], *arguments], env=environment, start_new_session=True)
    deadline = time.monotonic() + START_LIMIT_S
    while not (tmp_path / "out" / "checkpoint-5").is_dir():
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert not (tmp_path / "out" / WEIGHTS_FILE).exists()

    subprocess.run([*LAUNCHERS["python"], *arguments], env=environment, check=True, timeout=START_LIMIT_S)
    assert (tmp_path / "out" / WEIGHTS_FILE).read_bytes() == (uninterrupted / WEIGHTS_FILE).read_bytes()


@pytest.mark.processes
def test_the_rest_of_the_house_starts_without_diffusers() -> None:
    """An agent's image has none of it."""
    probe = (
        "import sys, gpu_client.training, gpu_client.training.session, gpu_client.agent.loop, gpu_client.cli.main; "
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sdxl"])
def test_on_a_gpu_in_bf16_it_trains_and_resumes(
    model: str, run: Run, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "pretrained_model_name_or_path": str(request.getfixturevalue(model)),
        "mixed_precision": "bf16",
        "max_train_steps": 50,
        "checkpointing_steps": 10,
        "with_prior_preservation": True,
        "class_prompt": "a photo of a cat",
        "num_class_images": 4,
        "validation_prompt": "a photo of sks cat",
        "validation_epochs": 10,
        "deterministic": True,
    }
    uninterrupted = load_file(run("uninterrupted", **options) / WEIGHTS_FILE)
    loss, calls = dreambooth_lora.denoising_loss, 0

    def cut(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 100:
            raise KeyboardInterrupt
        return loss(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dreambooth_lora, "denoising_loss", cut)
        run("cut", **options)
    resumed = load_file(run("cut", **options) / WEIGHTS_FILE)
    assert all(tensor.isfinite().all() for tensor in resumed.values())
    for name, tensor in uninterrupted.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=2e-2, atol=2e-3)
