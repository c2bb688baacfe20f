"""Settings that may change between two attempts, and settings that may not."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from dreambooth_runs import EVERYTHING, Run, power_cut, refusal, short_training, train_in
from safetensors import safe_open
from safetensors.torch import load_file

from baton import CheckpointMismatchError
from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.model.lora import WEIGHTS_FILE
from gpu_client.training.dreambooth.settings import FREE, LearningSettings
from tests.kits.dreambooth.photographs import save_crops

EVERYTHING_STEPS = 6
OTHERS = {
    "instance_prompt": "a photo of zwx dog",
    "class_prompt": "a photo of a dog",
    "pretrained_model_name_or_path": "nobody/cats",
    "train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-5,
    "text_encoder_lr": 1e-5,
    "train_text_encoder": False,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 1,
    "adam_beta1": 0.5,
    "max_grad_norm": 0.5,
    "mixed_precision": "bf16",
    "lora_rank": 8,
    "lora_alpha": 1.0,
    "lora_dropout": 0.0,
    "center_crop": True,
    "random_flip": False,
    "with_prior_preservation": False,
    "prior_loss_weight": 0.5,
    "num_class_images": 4,
    "snr_gamma": None,
    "use_ema": False,
    "ema_decay": 0.5,
    "seed": 1,
}
FREELY = {
    "checkpointing_steps": 1,
    "validation_prompt": None,
    "validation_epochs": 2,
    "num_validation_images": 1,
    "num_inference_steps": 2,
    "guidance_scale": 1.0,
    "gradient_checkpointing": True,
    "model_type": "sd",
    "sample_batch_size": 1,
}


@pytest.fixture(scope="module")
def cut_off(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Leftovers of EVERYTHING after a power cut in its third step."""
    place = tmp_path_factory.mktemp("cut")
    save_crops(place / "data" / "instance", "cat", 5)
    with power_cut(10, "loss"):
        train_in(place / "out", place / "data", {**short_training(tiny_sd), **EVERYTHING})
    return place / "out"


@pytest.fixture
def out(cut_off: Path, tmp_path: Path) -> Path:
    shutil.copytree(cut_off, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record each computed loss."""
    losses: list[int] = []
    loss = dreambooth_lora.compute_denoising_loss

    def counted(*arguments: Any) -> Any:
        losses.append(1)
        return loss(*arguments)

    monkeypatch.setattr(dreambooth_lora, "compute_denoising_loss", counted)
    return losses


def changed_settings(error: CheckpointMismatchError) -> list[str]:
    told = error.problem.partition(" was written with other settings: ")[2]
    return [one.partition(" was ")[0] for one in told.split("; ")]


def settings_with(base: Path, **changed: Any) -> LearningSettings:
    return LearningSettings(DreamboothConfig.of({**short_training(base), **EVERYTHING, **changed}), EVERYTHING_STEPS)


@pytest.mark.parametrize("field", OTHERS)
def test_what_decides_what_is_learned_cannot_be_changed(field: str, cut_off: Path, tiny_sd: Path) -> None:
    newest = cut_off / "checkpoint-2"
    settings_with(tiny_sd).require_same(newest)
    with pytest.raises(CheckpointMismatchError, match=f"{field} was .*, is ") as refused:
        settings_with(tiny_sd, **{field: OTHERS[field]}).require_same(newest)
    assert changed_settings(refused.value) == [field]


@pytest.mark.parametrize("field", ["lora_rank", "use_ema", "learning_rate"])
def test_nothing_is_trained_or_changed_where_a_setting_is_another(
    field: str, run: Run, out: Path, steps: list[int]
) -> None:
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(CheckpointMismatchError, match=f"other settings: {field} was .*, is "):
        run("out", **{**EVERYTHING, field: OTHERS[field]})
    assert steps == []
    assert sorted(path.name for path in out.iterdir()) == before


def test_every_field_is_free_or_is_compared() -> None:
    assert DreamboothConfig.model_fields.keys() > FREE
    assert not FREE & OTHERS.keys()
    assert FREELY.keys() < FREE


def test_the_rest_may_be_changed(run: Run, out: Path, steps: list[int], data_dir: Path, tmp_path: Path) -> None:
    (data_dir / "instance").rename(data_dir / "cats")
    options = {**EVERYTHING, **FREELY, "instance_data_dir": "cats", "cache_dir": str(tmp_path / "cache")}
    run("out", **options)
    assert len(steps) == 4 * 4, "4 steps were left"
    assert (out / "checkpoint-6").is_dir()


def test_what_is_switched_off_may_be_changed(run: Run, steps: list[int]) -> None:
    with power_cut(2, "loss"):
        run("out", checkpointing_steps=1)
    changed = {"prior_loss_weight": 0.5, "ema_decay": 0.5, "bucket_step": 8, "class_prompt": "a cat", "lora_alpha": 4.0}
    run("out", **changed)
    assert len(steps) == 2 + 4


def test_every_change_is_told_with_both_values_and_what_to_do(
    run: Run, data_dir: Path, parameters: dict[str, Any], capsys: pytest.CaptureFixture[str], steps: list[int]
) -> None:
    """A finished run, and a file that was edited: nothing was trained, and it said that it had."""
    output = run("out")
    before = (output / WEIGHTS_FILE).read_bytes()
    steps.clear()
    edited = {"instance_prompt": "a photo of zwx dog", "learning_rate": 1e-5, "lr_scheduler": "cosine"}
    reason = refusal(output, data_dir, parameters | edited, capsys)
    assert steps == []
    assert (output / WEIGHTS_FILE).read_bytes() == before
    for told in (
        "instance_prompt was 'a photo of sks cat', is 'a photo of zwx dog'",
        "learning_rate was 0.001, is 1e-05",
        "lr_scheduler was 'constant', is 'cosine'",
        "Restore the old values",
        "--output-dir",
    ):
        assert told in reason


def test_a_complete_run_says_that_it_is(run: Run, steps: list[int], caplog: pytest.LogCaptureFixture) -> None:
    before = (run("out") / WEIGHTS_FILE).read_bytes()
    assert "complete" not in caplog.text
    steps.clear()
    with caplog.at_level(logging.INFO, "baton.training"):
        assert (run("out") / WEIGHTS_FILE).read_bytes() == before
    assert steps == []
    assert "all 3 steps are trained already: the training is complete" in caplog.text


@pytest.mark.parametrize("longer", [{"max_train_steps": 5}, {"num_train_epochs": 2, "train_batch_size": 1}])
def test_more_steps_train_on(run: Run, longer: dict[str, Any]) -> None:
    """5 steps of 2 batches: 5 images twice."""
    uninterrupted = load_file(run("uninterrupted", **longer) / WEIGHTS_FILE)
    output = run("out")
    longest = load_file(run("out", **longer) / WEIGHTS_FILE)
    assert all((longest[name] == tensor).all() for name, tensor in uninterrupted.items())
    with safe_open(output / WEIGHTS_FILE, "pt") as file:
        assert file.metadata()["baton.step"] == "5"


def test_more_steps_are_refused_where_the_learning_rate_follows_from_them(run: Run) -> None:
    run("out", lr_scheduler="cosine")
    with pytest.raises(CheckpointMismatchError, match=r"max_train_steps was 3, is 5 \(the learning rate of .* cosine"):
        run("out", lr_scheduler="cosine", max_train_steps=5)


def test_fewer_steps_than_are_trained_are_refused(run: Run) -> None:
    run("out")
    with pytest.raises(CheckpointMismatchError, match=r"max_train_steps was 3, is 2 \(3 steps are trained already\)"):
        run("out", max_train_steps=2)
