"""Short trainings and their interruptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton import Session
from baton.contract.jobs.job import FailureClass
from gpu_client.agent.process.failures import AttemptFailure, ExitStatus, classify_exit
from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.sampling import class_images, validation

RESOLUTION = 64
Run = Callable[..., Path]

EVERYTHING = {
    "max_train_steps": 6,
    "checkpointing_steps": 2,
    "gradient_accumulation_steps": 2,
    "train_batch_size": 2,
    "with_prior_preservation": True,
    "class_prompt": "a photo of a cat",
    "num_class_images": 3,
    "sample_batch_size": 2,
    "num_inference_steps": 1,
    "validation_prompt": "sks cat",
    "validation_epochs": 1,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 2,
    "lora_dropout": 0.2,
    "random_flip": True,
    "use_ema": True,
    "snr_gamma": 5.0,
}
"""6 steps of 2 batches; 5 images make 3 batches, so epochs end within steps. Each batch takes 2 losses."""
CACHED = {**EVERYTHING, "train_text_encoder": False, "cache_latents": True, "cache_text_embeddings": True}


def short_training(base: Path) -> dict[str, Any]:
    """Return the parameters of a training of half a second, in float32."""
    return {
        "instance_prompt": "a photo of sks cat",
        "pretrained_model_name_or_path": str(base),
        "resolution": RESOLUTION,
        "max_train_steps": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "text_encoder_lr": 1e-3,
        "mixed_precision": "no",
        "num_inference_steps": 2,
        "num_validation_images": 2,
        "cache_dir": "",
    }


def train_in(
    output: Path, data_dir: Path, parameters: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> Path:
    """Train from the newest checkpoint in `output` to the end or to a stop; return `output`."""
    config = DreamboothConfig.of(parameters)
    with Session.start(output_dir=output, data_dir=data_dir, resume=True, variables=variables or {}) as session:
        dreambooth_lora.train(session, config)
    return output


def refusal(output: Path, data_dir: Path, parameters: Mapping[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the failure reason of a job whose trainer refuses it; the failure must be `bad_input`."""
    failure = failure_of(output, data_dir, parameters, capsys)
    assert failure.failure_class is FailureClass.BAD_INPUT
    return failure.reason


def failure_of(
    output: Path, data_dir: Path, parameters: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> AttemptFailure:
    """Classify, as the agent does, a trainer that ends before training with one line of explanation."""
    job = output.with_suffix(".json")
    job.write_text(json.dumps(parameters))
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        dreambooth_lora.main(["--config", str(job), "--data-dir", str(data_dir), "--output-dir", str(output)])
    printed = capsys.readouterr().err.splitlines()
    assert [line for line in printed if line.startswith("error: ")] == printed[-1:]
    assert isinstance(left.value.code, int)
    return classify_exit(ExitStatus(left.value.code, None, oom_suspected=False, stopped_by_us=False), printed)


class PowerCutError(Exception):
    pass


@contextmanager
def power_cut(after: int, where: str) -> Iterator[None]:
    """Simulate a power cut after a number of calls of the loss, or of the sampler."""
    module, name = {
        "loss": (dreambooth_lora, "compute_denoising_loss"),
        "class images": (class_images, "sample"),
        "validation": (validation, "sample"),
    }[where]
    made, calls = getattr(module, name), 0

    def until_the_cut(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise PowerCutError
        return made(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, until_the_cut)
        with pytest.raises(PowerCutError):
            yield


def outputs(directory: Path) -> dict[str, bytes]:
    """Read all outputs except the checkpoints."""
    files = (path for path in directory.rglob("*") if path.is_file() and "checkpoint-" not in str(path))
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
