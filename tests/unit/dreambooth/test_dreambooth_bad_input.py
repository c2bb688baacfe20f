"""Faulty jobs are refused before training, with the reason and the remedy."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EDMEulerScheduler
from dreambooth_runs import Run, refusal

from baton import SessionError
from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.errors import ConfigError, DataError, ModelError
from gpu_client.training.dreambooth.model.device import check_machine
from gpu_client.training.protocol import BAD_INPUT_EXIT_CODE


@pytest.fixture(autouse=True)
def nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*arguments: Any) -> Any:
        raise AssertionError("training has begun")

    monkeypatch.setattr(dreambooth_lora, "compute_denoising_loss", trained)


def test_a_base_model_path_that_does_not_exist(run: Run, tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "models/of/mine"):
        with pytest.raises(ModelError, match=r"pretrained_model_name_or_path: .* is no directory"):
            run(pretrained_model_name_or_path=name)
    with pytest.raises(ModelError, match=r"pretrained_vae_model_name_or_path: .* is no directory"):
        run(pretrained_vae_model_name_or_path="/none")


@pytest.mark.parametrize("field", ["pretrained_model_name_or_path", "pretrained_vae_model_name_or_path"])
def test_a_home_that_nobody_has(
    field: str, parameters: dict[str, Any], data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = refusal(tmp_path / "out", data_dir, parameters | {field: "~no-such-user/model"}, capsys)
    assert f"{field}: ~no-such-user/model cannot be resolved" in reason


def test_a_directory_that_is_no_pipeline(run: Run, tmp_path: Path, tiny_sd: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"the base model .*empty cannot be loaded"):
        run(pretrained_model_name_or_path=str(tmp_path / "empty"))
    with pytest.raises(ModelError, match=r"the VAE .*empty cannot be loaded"):
        run(pretrained_vae_model_name_or_path=str(tmp_path / "empty"))
    shutil.copytree(tiny_sd, tmp_path / "half")
    for weights in (tmp_path / "half" / "unet").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ModelError, match=r"the base model .*half cannot be loaded"):
        run(pretrained_model_name_or_path=str(tmp_path / "half"))


def test_pipelines_of_other_kinds(run: Run, tmp_path: Path, tiny_sdxl: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ModelError, match=r"is a FluxPipeline. This script trains StableDiffusionPipeline and"):
        run(pretrained_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(ModelError, match=r"model_type is sd, but .* is a StableDiffusionXLPipeline"):
        run(pretrained_model_name_or_path=str(tiny_sdxl), model_type="sd")


def test_models_that_predict_something_else(run: Run, tmp_path: Path, tiny_sd: Path) -> None:
    shutil.copytree(tiny_sd, tmp_path / "sample")
    path = tmp_path / "sample" / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prediction_type": "sample"}))
    with pytest.raises(ModelError, match="predicts 'sample'"):
        run(pretrained_model_name_or_path=str(tmp_path / "sample"))


def test_models_of_another_noise_schedule(run: Run, tmp_path: Path, tiny_sdxl: Path) -> None:
    """Playground 2.5 is SDXL in all but its schedule: noise as SDXL's would teach it nothing of use."""
    shutil.copytree(tiny_sdxl, tmp_path / "playground")
    EDMEulerScheduler().save_pretrained(tmp_path / "playground" / "scheduler")
    index = tmp_path / "playground" / "model_index.json"
    scheduler = {"scheduler": ["diffusers", "EDMEulerScheduler"]}
    index.write_text(json.dumps(json.loads(index.read_text()) | scheduler))
    with pytest.raises(ModelError, match=r"the noise of .*playground is that of an EDMEulerScheduler"):
        run(pretrained_model_name_or_path=str(tmp_path / "playground"))


def test_data_without_an_image(run: Run, data_dir: Path) -> None:
    for path in (data_dir / "instance").iterdir():
        path.write_bytes(b"not an image")
    with pytest.raises(DataError, match="none of the 5 images"):
        run()
    shutil.rmtree(data_dir / "instance")
    with pytest.raises(DataError, match="holds no image"):
        run()


def test_a_warm_up_longer_than_the_epochs(run: Run) -> None:
    with pytest.raises(ConfigError, match="the warm-up of 9 steps does not end within 5"):
        run(num_train_epochs=2, lr_warmup_steps=9)


def test_8bit_adam_without_bitsandbytes(run: Run) -> None:
    assert importlib.util.find_spec("bitsandbytes") is None
    with pytest.raises(ConfigError, match="use_8bit_adam: bitsandbytes is not installed here"):
        run(use_8bit_adam=True)


def test_8bit_adam_without_a_gpu(parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    config = DreamboothConfig.of({**parameters, "use_8bit_adam": True})
    with pytest.raises(ConfigError, match="it needs a CUDA device"):
        check_machine(config, torch.device("cpu"))
    check_machine(config, torch.device("cuda"))


def test_bf16_on_hardware_without_it(parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = DreamboothConfig.of({**parameters, "mixed_precision": "bf16"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    with pytest.raises(ConfigError, match="mixed_precision: Tesla T4 has no bf16: use fp16"):
        check_machine(config, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    check_machine(config, torch.device("cuda"))


def test_several_processes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="this run has 2 processes"):
        run()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"resolution": 100},
            "the configuration is wrong: resolution: 100 is not divisible by 8. Correct it and submit",
        ),
        (
            {"with_prior_preservation": True},
            "the configuration is wrong: class_prompt: with_prior_preservation needs a",
        ),
        ({"pretrained_model_name_or_path": "/none"}, "pretrained_model_name_or_path: /none is no directory"),
        ({"use_8bit_adam": True}, "the configuration is wrong: use_8bit_adam: bitsandbytes is not installed"),
        ({"use_captions": True}, "use_captions: 5 of 5 images have no caption"),
        (
            {"num_train_epochs": 2, "lr_warmup_steps": 9},
            "the configuration is wrong: lr_warmup_steps: the warm-up of 9",
        ),
    ],
)
def test_the_job_fails_as_bad_input_with_one_line(
    changed: dict[str, Any],
    reason: str,
    parameters: dict[str, Any],
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refusal(tmp_path / "out", data_dir, parameters | changed, capsys).startswith(reason)


def test_a_job_without_a_decodable_image_fails_as_bad_input(
    parameters: dict[str, Any], data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (data_dir / "instance").iterdir():
        path.write_bytes(b"not an image")
    assert refusal(tmp_path / "out", data_dir, parameters, capsys).startswith("none of the 5 images")


def test_a_job_in_bf16_on_a_machine_without_it_fails_as_bad_input(
    parameters: dict[str, Any],
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dreambooth_lora, "select_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    reason = refusal(tmp_path / "out", data_dir, parameters | {"mixed_precision": "bf16"}, capsys)
    assert reason.startswith("the configuration is wrong: mixed_precision: Tesla T4 has no bf16")


def test_what_is_no_fault_of_the_job_has_another_exit_code(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_EPOCH", "first")
    (tmp_path / "job.yaml").write_text("instance_prompt: a dog\n")
    with pytest.raises(SystemExit) as left:
        dreambooth_lora.main(["--config", str(tmp_path / "job.yaml"), "--data-dir", str(data_dir)])
    assert left.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: BATON_EPOCH is 'first'")


def test_images_that_nobody_named_are_not_guessed(
    tmp_path: Path,
    data_dir: Path,
    parameters: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program guesses no images: without --data-dir and the folder, all images below would train."""
    config = tmp_path / "job.json"
    config.write_text(json.dumps(parameters))
    monkeypatch.chdir(data_dir / "instance")
    with pytest.raises(SystemExit) as left:
        dreambooth_lora.main(["--config", str(config)])
    assert left.value.code == BAD_INPUT_EXIT_CODE
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: instance_data_dir: instance is no directory here. Name the folder")


def test_the_errors_are_the_sessions() -> None:
    assert issubclass(ConfigError, SessionError)
    assert issubclass(DataError, SessionError)
    assert issubclass(ModelError, SessionError)
