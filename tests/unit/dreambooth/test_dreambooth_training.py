"""The outputs of a training, with each option at least once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, StableDiffusionXLPipeline
from dreambooth_runs import RESOLUTION, Run, short_training, train_in
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from baton import Session
from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.model.lora import WEIGHTS_FILE
from gpu_client.training.dreambooth.sampling.validation import GRID_FILE
from tests.kits.dreambooth.photographs import save_crops, subject
from tests.kits.dreambooth.tiny_pipelines import tiny_vae


@pytest.fixture(scope="module")
def plain(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a training without options."""
    place = tmp_path_factory.mktemp("plain")
    save_crops(place / "data" / "instance", "cat", 5)
    return weights_of(train_in(place / "out", place / "data", short_training(tiny_sd)))


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / WEIGHTS_FILE)


def picture_from(pipeline: Any) -> np.ndarray[Any, Any]:
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        "a photo of sks cat",
        num_inference_steps=2,
        height=RESOLUTION,
        width=RESOLUTION,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images[0]
    return np.asarray(image)


@pytest.mark.parametrize(
    ("model", "pipeline_class", "parts"),
    [
        ("tiny_sd", StableDiffusionPipeline, {"unet", "text_encoder"}),
        ("tiny_sd2", StableDiffusionPipeline, {"unet", "text_encoder"}),
        ("tiny_sdxl", StableDiffusionXLPipeline, {"unet", "text_encoder", "text_encoder_2"}),
    ],
)
def test_the_artifact_loads_into_a_pipeline_and_changes_its_output(
    model: str, pipeline_class: Any, parts: set[str], run: Run, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(model)
    output = run(pretrained_model_name_or_path=str(base), lora_alpha=8.0, learning_rate=1e-2)
    assert {name.partition(".")[0] for name in weights_of(output)} == parts

    plain = picture_from(pipeline_class.from_pretrained(base))
    pipeline = pipeline_class.from_pretrained(base)
    pipeline.load_lora_weights(output)
    taught = picture_from(pipeline)
    assert np.abs(taught - plain).max() > 1e-3
    assert {name: set(active) for name, active in pipeline.get_list_adapters().items()} == {
        name: {"default_0"} for name in parts
    }
    # alpha / rank is 8 / 4: a loader that forgot alpha would halve the LoRA.
    assert {layer.scaling["default_0"] for layer in _lora_layers(pipeline.unet)} == {2.0}


def _lora_layers(module: torch.nn.Module) -> list[Any]:
    return [layer for layer in module.modules() if hasattr(layer, "lora_A")]


def test_the_artifact_says_where_it_comes_from(run: Run, tiny_sd: Path) -> None:
    variables = {"BATON_JOB_ID": "job-7"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_RECIPE", "dreambooth-lora-sd@2")
        output = run(variables=variables, max_train_steps=1, validation_prompt="sks cat on a chair")
    with safe_open(output / WEIGHTS_FILE, "pt") as stream:
        said = stream.metadata()
    assert json.loads(said.pop("lora_adapter_metadata"))["unet.r"] == 4
    assert said == {
        "format": "pt",
        "baton.job": "job-7",
        "baton.recipe": "dreambooth-lora-sd@2",
        "baton.step": "1",
        "baton.base_model": str(tiny_sd),
        "baton.base_model_type": "sd",
        "baton.instance_prompt": "a photo of sks cat",
        "baton.validation_prompt": "sks cat on a chair",
        "baton.resolution": "64",
        "baton.rank": "4",
        "baton.seed": "0",
    }


def test_equal_jobs_make_equal_files_and_another_seed_makes_another(run: Run) -> None:
    first, second, other = run("first"), run("second"), run("other", seed=1)
    assert (first / WEIGHTS_FILE).read_bytes() == (second / WEIGHTS_FILE).read_bytes()
    assert (first / WEIGHTS_FILE).read_bytes() != (other / WEIGHTS_FILE).read_bytes()


def test_without_text_encoders_only_the_unet_is_trained(run: Run) -> None:
    output = run(train_text_encoder=False)
    assert all(name.startswith("unet.") for name in weights_of(output))


@pytest.mark.parametrize(
    "scheduler", ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant_with_warmup"]
)
def test_schedulers_change_the_training_and_warm_up(scheduler: str, run: Run, plain: dict[str, torch.Tensor]) -> None:
    warmed = weights_of(run(lr_scheduler=scheduler, lr_warmup_steps=1))
    assert any(not torch.equal(plain[name], warmed[name]) for name in plain)


def test_constant_honours_the_warm_up(run: Run) -> None:
    plain = run("plain", lr_scheduler="constant_with_warmup", lr_warmup_steps=2)
    also = run("also", lr_scheduler="constant", lr_warmup_steps=2)
    assert (plain / WEIGHTS_FILE).read_bytes() == (also / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3},
        {"train_batch_size": 2},
        {"random_flip": True},
        {"center_crop": True, "resolution": 72},
        {"snr_gamma": 5.0},
        {"use_ema": True, "ema_decay": 0.5},
        {"lora_rank": 2},
        {"lora_dropout": 0.5},
        {"max_grad_norm": 1e-3},
        {"text_encoder_lr": 1e-5},
        {"adam_weight_decay": 1.0},
    ],
    ids="-".join,
)
def test_options_change_what_is_learned(options: dict[str, Any], run: Run, plain: dict[str, torch.Tensor]) -> None:
    changed = weights_of(run(**options))
    assert plain.keys() == changed.keys()
    different = [n for n in plain if plain[n].shape != changed[n].shape or not torch.equal(plain[n], changed[n])]
    assert different
    assert all(tensor.isfinite().all() for tensor in changed.values())


@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sdxl"])
def test_gradient_checkpointing_saves_memory_and_changes_nothing(
    model: str, run: Run, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(request.getfixturevalue(model))
    kept_bytes: list[int] = []
    loss_of = dreambooth_lora.compute_denoising_loss

    def weighed(*arguments: Any) -> torch.Tensor:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_of(*arguments)
        kept_bytes.append(sum(kept.values()))
        return loss

    monkeypatch.setattr(dreambooth_lora, "compute_denoising_loss", weighed)
    plain = weights_of(run("plain", pretrained_model_name_or_path=base))
    without, _ = max(kept_bytes), kept_bytes.clear()
    saving = weights_of(run("saving", pretrained_model_name_or_path=base, gradient_checkpointing=True))
    assert max(kept_bytes) < 0.6 * without, "of what the backward pass remembers"
    for name, tensor in plain.items():
        torch.testing.assert_close(saving[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module", params=["tiny_sd", "tiny_sdxl"])
def full(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Options of a training, and its weights after full precision."""
    options = {
        "pretrained_model_name_or_path": str(request.getfixturevalue(request.param)),
        "learning_rate": 1e-4,
        "text_encoder_lr": 1e-4,
        "max_train_steps": 2,
    }
    place = tmp_path_factory.mktemp("full")
    save_crops(place / "data" / "instance", "cat", 5)
    return options, weights_of(train_in(place / "out", place / "data", {**short_training(Path()), **options}))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_trains_float32_weights_near_those_of_full_precision(
    precision: str, run: Run, full: tuple[dict[str, Any], dict[str, torch.Tensor]]
) -> None:
    options, expected = full
    mixed = weights_of(run(precision, mixed_precision=precision, validation_prompt="sks cat", **options))
    assert {tensor.dtype for tensor in mixed.values()} == {torch.float32}
    for name, tensor in expected.items():
        # The first values are random numbers of the lower precision.
        torch.testing.assert_close(mixed[name], tensor, rtol=2**-8, atol=1e-3)
    assert any(mixed[name].abs().max() > 0 for name in mixed if ".up." in name)


def test_each_step_reports_its_mean_loss_its_rate_and_its_epoch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    told: list[tuple[int, int, dict[str, float]]] = []
    loss_of = dreambooth_lora.compute_denoising_loss

    def noted(*arguments: Any) -> torch.Tensor:
        loss = loss_of(*arguments)
        losses.append(loss.item())
        return loss

    def report(_: Session, step: int, total: int, **metrics: Any) -> None:
        told.append((step, total, {name: float(value) for name, value in metrics.items()}))

    monkeypatch.setattr(dreambooth_lora, "compute_denoising_loss", noted)
    monkeypatch.setattr(Session, "report", report)
    run(lr_warmup_steps=2)
    assert told.pop(0) == (0, 3, {}), "before the first step it is known how many there will be"
    assert [(step, total) for step, total, _ in told] == [(1, 3), (2, 3), (3, 3)]
    means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    assert [metrics["loss"] for *_, metrics in told] == pytest.approx(means)
    # The reported rate is that of the step's own update: the first update of a warm-up has the rate 0.
    assert [metrics["learning_rate"] for *_, metrics in told] == pytest.approx([0.0, 5e-4, 1e-3])
    assert [metrics["epoch"] for *_, metrics in told] == [0, 0, 1]  # 5 pictures, 2 to a step


def test_the_default_rate_moves_the_weights(run: Run, parameters: dict[str, Any]) -> None:
    """The default learning rate moves the weights; the original's default, 2e-6, moves them a hundredth of that."""
    del parameters["learning_rate"]
    steps = 10
    learned = weights_of(run(max_train_steps=steps, train_text_encoder=False))
    moved = max(tensor.abs().max().item() for name, tensor in learned.items() if ".up." in name)
    assert 0.5e-4 * steps < moved < 2e-4 * steps, "Adam makes steps of about the rate"


def test_epochs_replace_steps(run: Run) -> None:
    output = run(num_train_epochs=2, max_train_steps=500, gradient_accumulation_steps=2)
    assert (output / "checkpoint-5").is_dir()  # 2 epochs of 5 batches, 2 to a step


def test_a_separate_vae_is_used(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(99)
    tiny_vae(force_upcast=False).save_pretrained(tmp_path / "vae")
    own, other = run("own"), run("other", pretrained_vae_model_name_or_path=str(tmp_path / "vae"))
    assert (own / WEIGHTS_FILE).read_bytes() != (other / WEIGHTS_FILE).read_bytes()
    again = run("again", pretrained_vae_model_name_or_path=str(Path(tmp_path / "vae")), model_type="sd")
    assert (other / WEIGHTS_FILE).read_bytes() == (again / WEIGHTS_FILE).read_bytes()


def test_a_pipeline_stands_for_its_vae(run: Run, tiny_sd: Path, tiny_sdxl: Path, tmp_path: Path) -> None:
    AutoencoderKL.from_pretrained(tiny_sdxl, subfolder="vae").save_pretrained(tmp_path / "vae")
    inside = run("inside", pretrained_vae_model_name_or_path=str(tiny_sdxl))
    alone = run("alone", pretrained_vae_model_name_or_path=str(tmp_path / "vae"))
    assert (inside / WEIGHTS_FILE).read_bytes() == (alone / WEIGHTS_FILE).read_bytes()


def test_the_base_model_may_be_an_input(run: Run, tiny_sd: Path, data_dir: Path) -> None:
    (data_dir / "model").symlink_to(tiny_sd)
    assert (run(pretrained_model_name_or_path="model", max_train_steps=1) / WEIGHTS_FILE).is_file()


@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sdxl"])
def test_caches_change_nothing_but_time(model: str, run: Run, request: pytest.FixtureRequest) -> None:
    options = {
        "pretrained_model_name_or_path": str(request.getfixturevalue(model)),
        "train_text_encoder": False,
        "center_crop": True,
        "random_flip": True,
        "validation_prompt": "sks cat",
    }
    plain = run("plain", **options)
    cached = run("cached", cache_latents=True, cache_text_embeddings=True, **options)
    assert (plain / WEIGHTS_FILE).read_bytes() == (cached / WEIGHTS_FILE).read_bytes()
    assert (plain / GRID_FILE).read_bytes() == (cached / GRID_FILE).read_bytes()


def test_captions_take_the_place_of_the_prompt(run: Run, data_dir: Path) -> None:
    plain = run("plain")
    for path in (data_dir / "instance").glob("*.png"):
        path.with_suffix(".txt").write_text("a photo of sks cat\n", encoding="utf-8")
    same = run("same", use_captions=True)
    assert (plain / WEIGHTS_FILE).read_bytes() == (same / WEIGHTS_FILE).read_bytes()
    (data_dir / "instance" / "cat-03.txt").write_text("sks cat looks left", encoding="utf-8")
    other = run("other", use_captions=True)
    assert (plain / WEIGHTS_FILE).read_bytes() != (other / WEIGHTS_FILE).read_bytes()


def test_masks_say_what_counts(run: Run, data_dir: Path, plain: dict[str, torch.Tensor]) -> None:
    def draw(white: tuple[int, int, int, int]) -> None:
        for path in sorted((data_dir / "instance").glob("cat-0?.png")):
            mask = Image.new("L", (96, 96), 0)
            mask.paste(255, white)
            mask.save(path.with_name(f"{path.stem}.mask.png"))

    draw((0, 0, 96, 96))
    everything = weights_of(run("everything", use_masks=True))
    for name, tensor in plain.items():
        torch.testing.assert_close(everything[name], tensor, rtol=1e-4, atol=1e-6)
    draw((0, 0, 48, 96))
    half = weights_of(run("half", use_masks=True))
    assert any(not torch.allclose(half[name], plain[name], atol=1e-5) for name in plain)
    all_alike = weights_of(run("alike", use_masks=True, unmasked_weight=1.0))
    for name, tensor in plain.items():
        torch.testing.assert_close(all_alike[name], tensor, rtol=1e-4, atol=1e-6)


def test_buckets_train_pictures_of_several_shapes(run: Run, data_dir: Path, tiny_sdxl: Path) -> None:
    save_crops(data_dir / "instance", "coffee", 2, (128, 64))
    save_crops(data_dir / "instance", "rocket", 2, (64, 128))
    output = run(
        pretrained_model_name_or_path=str(tiny_sdxl),
        aspect_ratio_buckets=True,
        bucket_step=8,
        train_batch_size=2,
        num_train_epochs=2,
        with_prior_preservation=True,
        class_prompt="a photo",
        num_class_images=2,
        cache_latents=True,
    )
    assert all(tensor.isfinite().all() for tensor in weights_of(output).values())
    shapes = {name.split(".")[2] for name in load_file(output / "checkpoint-5" / "cache.safetensors")}
    assert shapes == {"64x64", "80x48", "48x80"}


def test_validation_pictures_are_kept_by_step_and_put_into_one_grid(run: Run) -> None:
    output = run(
        max_train_steps=5,
        gradient_accumulation_steps=5,
        validation_prompt="a photo of sks cat",
        validation_epochs=2,
        learning_rate=1e-2,
        use_ema=True,
        ema_decay=0.5,
    )
    names = sorted(path.name for path in (output / "validation").iterdir())
    assert names == [f"step-{step:06}-{number}.png" for step in (2, 4, 5) for number in (0, 1)]
    pictures = {name: np.asarray(Image.open(output / "validation" / name)) for name in names}
    assert pictures["step-000002-0.png"].shape == (RESOLUTION, RESOLUTION, 3)
    assert (pictures["step-000002-0.png"] != pictures["step-000002-1.png"]).any()
    assert (pictures["step-000002-0.png"] != pictures["step-000005-0.png"]).any()
    assert (output / GRID_FILE).is_file()


def test_without_a_validation_prompt_there_are_no_pictures(run: Run) -> None:
    output = run(max_train_steps=1)
    assert not (output / "validation").exists()
    assert not (output / GRID_FILE).exists()


def test_the_photographs_are_real() -> None:
    """The photographs of the tests have content: without them, all tests here would train on blank images."""
    assert np.asarray(subject("cat")).std() > 20
