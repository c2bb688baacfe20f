"""An interrupted run equals an uninterrupted one, bit for bit, at any point of interruption."""

from __future__ import annotations

import os
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dreambooth_runs import CACHED, EVERYTHING, Run, outputs, power_cut, refusal, short_training, train_in
from PIL import Image

from baton import CheckpointMismatchError
from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.model.lora import WEIGHTS_FILE
from gpu_client.training.dreambooth.model.optimization import Optimization
from gpu_client.training.dreambooth.sampling import class_images
from tests.kits.dreambooth.photographs import save_crops


@pytest.fixture(scope="module")
def whole(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Outputs of EVERYTHING without an interruption."""
    place = tmp_path_factory.mktemp("whole")
    save_crops(place / "data" / "instance", "cat", 5)
    return outputs(train_in(place / "out", place / "data", {**short_training(tiny_sd), **EVERYTHING}))


@pytest.fixture(scope="module")
def cut_off(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Leftovers of EVERYTHING after a power cut in its third step, without stored settings."""
    place = tmp_path_factory.mktemp("cut")
    save_crops(place / "data" / "instance", "cat", 5)
    with pytest.MonkeyPatch.context() as patch, power_cut(10, "loss"):
        patch.setattr("gpu_client.training.dreambooth.settings.LearningSettings.as_values", lambda _: None)
        train_in(place / "out", place / "data", {**short_training(tiny_sd), **EVERYTHING})
    return place / "out"


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of class images of each sampler call."""
    calls: list[int] = []
    sample = class_images.sample

    def counted(*arguments: Any) -> list[Image.Image]:
        images = sample(*arguments)
        calls.append(len(images))
        return images

    monkeypatch.setattr(class_images, "sample", counted)
    return calls


@pytest.mark.parametrize(
    ("model", "options", "cuts"),
    [
        (
            "tiny_sd",
            EVERYTHING,
            [
                ("loss", 2),  # between two batches of the first step
                ("loss", 9),  # in the step after a checkpoint, between the instance's loss and the class's
                ("validation", 1),  # between two pictures of one step
                ("loss", 7),  # between two batches, before the next checkpoint
                ("loss", 10),  # within the step that ends an epoch
            ],
        ),
        (
            "tiny_sdxl",
            {**CACHED, "aspect_ratio_buckets": True, "bucket_step": 8},
            [("loss", 11), ("validation", 1)],
        ),
    ],
    ids=["sd", "sdxl-cached-buckets"],
)
def test_interrupted_equals_uninterrupted(
    model: str,
    options: dict[str, Any],
    cuts: list[tuple[str, int]],
    run: Run,
    data_dir: Path,
    generated: list[int],
    request: pytest.FixtureRequest,
) -> None:
    options = {**options, "pretrained_model_name_or_path": str(request.getfixturevalue(model))}
    if options.get("aspect_ratio_buckets"):
        save_crops(data_dir / "instance", "rocket", 2, (64, 96))
    uninterrupted = outputs(run("uninterrupted", **options))
    assert len(uninterrupted) > 8
    assert sum(generated) == 3

    generated.clear()
    for where, after in cuts:
        with power_cut(after, where):
            run("cut", **options)
    assert outputs(run("cut", **options)) == uninterrupted
    assert sum(generated) == 3


def test_the_scale_of_the_loss_goes_on_where_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed fp16 training keeps its loss scale, which falls at overflows and rises after two sound steps."""
    scaler, update, scales = torch.amp.GradScaler, Optimization.update, list[float]()

    def noted(self: Optimization) -> torch.Tensor:
        norm = update(self)
        scales.append(self.scaler.get_scale())
        return norm

    def quickly_changing(*arguments: Any, **keywords: Any) -> torch.amp.GradScaler:
        return scaler(*arguments, **keywords, init_scale=2.0**24, growth_interval=2)

    monkeypatch.setattr(torch.amp, "GradScaler", quickly_changing)
    monkeypatch.setattr(Optimization, "update", noted)
    options = {"mixed_precision": "fp16", "max_train_steps": 7, "checkpointing_steps": 3, "train_batch_size": 2}
    uninterrupted = outputs(run("uninterrupted", **options))
    whole = list(scales)
    assert {one < other for one, other in pairwise(whole) if one != other} == {True, False}, "it rises and falls"

    with power_cut(7, "loss"):
        run("cut", **options)
    scales.clear()
    assert outputs(run("cut", **options)) == uninterrupted
    assert scales == whole[3:]


def test_class_images_that_were_cut_off_come_out_the_same(run: Run, whole: dict[str, bytes]) -> None:
    with power_cut(1, "class images"):
        run("cut", **EVERYTHING)
    assert outputs(run("cut", **EVERYTHING)) == whole


def test_an_attempt_on_another_machine_needs_only_the_checkpoint(
    run: Run, generated: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**CACHED, "center_crop": True, "cache_dir": str(tmp_path / "cache")}
    uninterrupted = outputs(run("uninterrupted", **options))
    shutil.rmtree(tmp_path / "cache")
    with power_cut(12, "loss"):
        run("first", **options)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "second").mkdir()
    shutil.copytree(tmp_path / "first" / "checkpoint-2", tmp_path / "second" / "checkpoint-2")
    assert len(generated) == 4

    def no_work(*arguments: Any) -> Any:
        raise AssertionError("what is cached is not made again")

    monkeypatch.setattr("gpu_client.training.dreambooth.model.base_model.Models.encode_pixels", no_work)
    monkeypatch.setattr("gpu_client.training.dreambooth.model.base_model.Models.encode_prompts", no_work)
    assert outputs(run("second", **options)) == uninterrupted
    assert len(generated) == 4


@pytest.mark.parametrize("prior", [True, False])
def test_caches_are_kept_as_soon_as_there_is_a_step(
    prior: bool, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {**CACHED, "with_prior_preservation": prior, "center_crop": True, "checkpointing_steps": 100}
    losses_of_a_step = 4 if prior else 2
    with power_cut(losses_of_a_step + 1, "loss"):
        run("out", **options)
    kept = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert kept == ({"checkpoint-0", "checkpoint-1"} if prior else {"checkpoint-1"})

    def no_work(*arguments: Any) -> Any:
        raise AssertionError("what is cached is not made again")

    monkeypatch.setattr("gpu_client.training.dreambooth.model.base_model.Models.encode_pixels", no_work)
    monkeypatch.setattr("gpu_client.training.dreambooth.model.base_model.Models.encode_prompts", no_work)
    with power_cut(2 * losses_of_a_step, "loss"):
        run("out", **options)
    kept_later = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert kept_later == kept, "what was found is not committed anew"


def test_a_stop_leaves_a_checkpoint_of_that_step(
    run: Run, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, calls = dreambooth_lora.compute_denoising_loss, 0

    def terminated_in_the_third_step(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(dreambooth_lora, "compute_denoising_loss", terminated_in_the_third_step)
        stopped = run("stopped", **EVERYTHING)
    assert calls == 12
    assert (stopped / "checkpoint-3").is_dir()
    assert not (stopped / WEIGHTS_FILE).exists()
    assert outputs(run("stopped", **EVERYTHING)) == whole


def test_a_stop_while_class_images_are_made_ends_the_attempt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = class_images.sample

    def terminated(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return sample(*arguments)

    monkeypatch.setattr(class_images, "sample", terminated)
    assert list(run("stopped", **EVERYTHING).iterdir()) == []


def test_killed_after_the_last_step_only_the_outputs_are_made(
    run: Run, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = run("out", **EVERYTHING)
    assert outputs(output) == whole  # and in another directory
    for name in whole:
        (output / name).unlink()
    assert (output / "checkpoint-6").is_dir()
    with monkeypatch.context() as patch:
        patch.setattr(dreambooth_lora, "compute_denoising_loss", lambda *_: pytest.fail("trained again"))
        assert outputs(run("out", **EVERYTHING)) == whole


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"lora_rank": 8}, r"'lora' does not accept the state .* is \[4, \d+\] in the checkpoint, \[8, \d+\] here"),
        ({"train_text_encoder": False}, "the LoRA of the checkpoint has other places"),
        ({"train_batch_size": 1}, "the instance images are not those of the checkpoint: batch_size was 2, is 1"),
        ({"num_class_images": 5}, "fewer class images"),
        ({"use_ema": False}, "holds cache, ema"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_that_notes_no_settings_is_refused_where_it_does_not_fit(
    changed: dict[str, Any], complaint: str, run: Run, cut_off: Path, tmp_path: Path
) -> None:
    shutil.copytree(cut_off, tmp_path / "out")
    with pytest.raises(CheckpointMismatchError, match=complaint):
        run("out", **{**EVERYTHING, **changed})


def test_a_checkpoint_that_notes_no_settings_is_resumed(
    run: Run, cut_off: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    shutil.copytree(cut_off, tmp_path / "out")
    assert outputs(run("out", **EVERYTHING)) == whole


def test_a_job_whose_lora_does_not_fit_at_resume_fails_as_bad_input(
    cut_off: Path, parameters: dict[str, Any], data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(cut_off, tmp_path / "out")
    reason = refusal(tmp_path / "out", data_dir, parameters | EVERYTHING | {"lora_rank": 8}, capsys)
    assert "lora_rank or the base model is another" in reason


def test_a_checkpoint_of_other_images_is_refused(run: Run, cut_off: Path, tmp_path: Path, data_dir: Path) -> None:
    shutil.copytree(cut_off, tmp_path / "out")
    save_crops(data_dir / "instance", "rocket", 1)
    with pytest.raises(CheckpointMismatchError, match="count was 5, is 6"):
        run("out", **EVERYTHING)


def test_a_checkpoint_of_other_captions_is_refused(run: Run, data_dir: Path) -> None:
    """A caption that was changed between two attempts would be learned in one half of the training."""
    captions = {path.with_suffix(".txt") for path in (data_dir / "instance").glob("*.png")}
    for number, path in enumerate(sorted(captions)):
        path.write_text(f"sks cat, view {number}", encoding="utf-8")
    with power_cut(10, "loss"):
        run("out", **EVERYTHING, use_captions=True)
    first = min(captions)
    first.write_text("sks cat, seen from above", encoding="utf-8")
    with pytest.raises(CheckpointMismatchError, match="the instance images are not those of the checkpoint: captions"):
        run("out", **EVERYTHING, use_captions=True)
    first.write_text("sks  cat, view 0\n", encoding="utf-8")  # the same words
    assert (run("out", **EVERYTHING, use_captions=True) / WEIGHTS_FILE).is_file()


def test_a_lora_of_another_base_model_is_refused(run: Run, cut_off: Path, tmp_path: Path, tiny_sdxl: Path) -> None:
    shutil.copytree(cut_off, tmp_path / "out")
    with pytest.raises(CheckpointMismatchError, match="the LoRA of the checkpoint has other places"):
        run("out", **{**EVERYTHING, "pretrained_model_name_or_path": str(tiny_sdxl)})
