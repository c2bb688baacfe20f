"""Prior preservation: provided images are used, the rest is generated once, and later jobs share them."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dreambooth_runs import Run, power_cut
from PIL import Image
from safetensors.torch import load_file

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.model.base_model import _fingerprint
from gpu_client.training.dreambooth.model.lora import WEIGHTS_FILE
from gpu_client.training.dreambooth.sampling import class_images
from gpu_client.training.dreambooth.sampling.class_images import MAX_SETS, compute_key
from tests.kits.dreambooth.photographs import save_crops

PRIOR = {
    "with_prior_preservation": True,
    "class_prompt": "a photo of a cat",
    "num_class_images": 3,
    "sample_batch_size": 2,
    "max_train_steps": 2,
}
Made = Callable[[], list[int]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The sizes of the batches that were generated since it was asked last."""
    calls: list[int] = []
    sample = class_images.sample

    def counted(*arguments: Any) -> list[Image.Image]:
        images = sample(*arguments)
        calls.append(len(images))
        return images

    monkeypatch.setattr(class_images, "sample", counted)

    def since() -> list[int]:
        found = list(calls)
        calls.clear()
        return found

    return since


def test_missing_images_are_generated_in_batches_and_written(run: Run, made: Made) -> None:
    output = run(**PRIOR)
    assert made() == [2, 1]
    files = sorted((output / "class_images").iterdir())
    assert [file.name for file in files] == ["00000.jpg", "00001.jpg", "00002.jpg"]
    pictures = [np.asarray(Image.open(file)) for file in files]
    assert {picture.shape for picture in pictures} == {(64, 64, 3)}
    assert (pictures[0] != pictures[1]).any()
    assert (pictures[1] != pictures[2]).any()


def test_the_batch_size_of_sampling_changes_no_image(run: Run) -> None:
    first, second = run("first", **PRIOR), run("second", **{**PRIOR, "sample_batch_size": 3})
    for number in range(3):
        pictures = [np.asarray(Image.open(o / "class_images" / f"0000{number}.jpg"), float) for o in (first, second)]
        assert np.abs(pictures[0] - pictures[1]).mean() < 2


def test_the_prior_counts_with_its_weight(run: Run) -> None:
    def weights(name: str, **changed: Any) -> dict[str, torch.Tensor]:
        return load_file(run(name, **{"max_train_steps": 2, **changed}) / WEIGHTS_FILE)

    plain, none = weights("plain"), weights("none", **PRIOR, prior_loss_weight=0.0)
    full = weights("full", **PRIOR)
    for name, tensor in plain.items():
        torch.testing.assert_close(none[name], tensor, rtol=1e-5, atol=1e-7)
    assert any(not torch.allclose(full[name], plain[name], atol=1e-4) for name in plain)


def test_images_that_came_with_the_job_are_used_first(run: Run, made: Made, data_dir: Path) -> None:
    save_crops(data_dir / "class", "coffee", 2)
    output = run(**PRIOR)
    assert made() == [1]
    assert len(list((output / "class_images").iterdir())) == 1
    save_crops(data_dir / "class", "coffee", 4)
    output = run("enough", **PRIOR)
    assert made() == []
    assert not (output / "class_images").exists()
    assert not (output / "checkpoint-0").exists()


def test_a_later_job_on_the_machine_finds_them(run: Run, made: Made, tmp_path: Path) -> None:
    shared = {**PRIOR, "cache_dir": str(tmp_path / "cache")}
    first = run("first", **shared)
    assert made() == [2, 1]
    other_job = {"max_train_steps": 1, "lora_rank": 2, "instance_prompt": "a photo of zwx cat"}
    second = run("second", **{**shared, **other_job})
    assert made() == []
    for number in range(3):
        name = f"class_images/0000{number}.jpg"
        assert (first / name).read_bytes() == (second / name).read_bytes()
    more = run("more", **{**shared, **other_job, "num_class_images": 4})
    assert made() == [1]
    assert len(list((more / "class_images").iterdir())) == 4


def test_making_them_changes_no_bit_of_the_training(run: Run, made: Made, tmp_path: Path) -> None:
    shared = {**PRIOR, "cache_dir": str(tmp_path / "cache"), "lora_dropout": 0.5}
    first = run("first", **shared)
    assert made() == [2, 1]
    second = run("second", **shared)
    assert made() == []
    assert (second / WEIGHTS_FILE).read_bytes() == (first / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize(
    "changed",
    [
        {"class_prompt": "a cat"},
        {"resolution": 72},
        {"seed": 5},
        {"guidance_scale": 3.0},
        {"num_inference_steps": 1},
        {"mixed_precision": "bf16"},
        {"variant": "fp16"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_images_made_otherwise_have_another_name(changed: dict[str, Any], parameters: dict[str, Any]) -> None:
    model: Any = SimpleNamespace(fingerprint="a")
    first = DreamboothConfig.of({**parameters, **PRIOR})
    assert compute_key(DreamboothConfig.of({**parameters, **PRIOR, **changed}), model) != compute_key(first, model)
    same = DreamboothConfig.of({**parameters, **PRIOR, "instance_prompt": "another", "num_class_images": 9})
    assert compute_key(same, model) == compute_key(first, model)


def test_images_of_another_model_are_not_shared(run: Run, made: Made, tmp_path: Path, tiny_sd2: Path) -> None:
    shared = {**PRIOR, "num_class_images": 1, "max_train_steps": 1, "cache_dir": str(tmp_path / "cache")}
    run("first", **shared)
    run("second", **shared, pretrained_model_name_or_path=str(tiny_sd2))
    assert made() == [1, 1]


def test_a_model_is_another_when_any_byte_of_it_is(tmp_path: Path) -> None:
    """A LoRA that is fused into the attention layers changes neither the beginning nor the end of a UNet's file."""
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    weights.parent.mkdir()
    content = bytearray(5 * 2**20)
    weights.write_bytes(content)
    first = _fingerprint(tmp_path, None)
    assert _fingerprint(tmp_path, None) == first
    content[len(content) // 2] = 1
    weights.write_bytes(content)
    second = _fingerprint(tmp_path, None)
    assert second != first
    weights.rename(weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert _fingerprint(tmp_path, None) not in (first, second)


def test_a_model_saved_over_another_ones_place_makes_images_of_its_own(
    run: Run, made: Made, tmp_path: Path, tiny_sd: Path
) -> None:
    place = shutil.copytree(tiny_sd, tmp_path / "model")
    shared = {**PRIOR, "cache_dir": str(tmp_path / "cache"), "pretrained_model_name_or_path": str(place)}
    with power_cut(2, "loss"):
        run("first", **shared)
    assert made() == [2, 1]
    (key,) = (path.name for path in (tmp_path / "cache" / "class-images").iterdir())
    weights = place / "unet" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4] ^= 1
    weights.write_bytes(content)
    first = run("first", **shared)
    assert made() == []
    with zipfile.ZipFile(first / "class_images.zip") as archive:
        assert archive.comment.decode() == key, "of the model that made them, not of the one that is there in the end"
    run("second", **shared)
    assert made() == [2, 1]


def test_a_model_on_the_hub_is_another_when_its_branch_has_moved_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache: names of branches in refs/, files below their commit."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--nobody--cats"
    (repository / "refs").mkdir(parents=True)

    def at(commit: str, file: str) -> str:
        (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (repository / "snapshots" / commit / file).write_text("{}")
        (repository / "refs" / "main").write_text(commit)
        return _fingerprint("nobody/cats", None)

    first = at("a" * 40, "model_index.json")
    assert at("b" * 40, "config.json") != first
    assert at("a" * 40, "config.json") == first == _fingerprint("nobody/cats", "a" * 40)
    assert _fingerprint("nobody/dogs", None) not in (first, _fingerprint("nobody/dogs", "b" * 40))


def test_a_damaged_image_is_made_again(run: Run, made: Made, tmp_path: Path) -> None:
    shared = {**PRIOR, "cache_dir": str(tmp_path / "cache")}
    first = run("first", **shared)
    made()
    (stored,) = (tmp_path / "cache" / "class-images").iterdir()
    whole = (stored / "00001.jpg").read_bytes()
    (stored / "00001.jpg").write_bytes(whole[:100])
    second = run("second", **shared)
    assert made() == [1]
    assert (first / "class_images/00000.jpg").read_bytes() == (second / "class_images/00000.jpg").read_bytes()
    assert len((stored / "00001.jpg").read_bytes()) > 100
    assert sorted(path.name for path in stored.iterdir()) == ["00000.jpg", "00001.jpg", "00002.jpg"]


def test_a_cache_that_cannot_be_written_costs_nothing_but_itself(run: Run, made: Made, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    output = run(**PRIOR, cache_dir=str(tmp_path / "cache"))
    assert made() == [2, 1]
    assert (output / WEIGHTS_FILE).is_file()


@pytest.mark.parametrize("cache_dir", ["~no-such-user/cache", None])
def test_without_a_home_nothing_is_kept(
    cache_dir: str | None, run: Run, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers can run as a user without an entry in the list of users."""

    def unknown(_: int) -> Any:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    output = run(**PRIOR, cache_dir=cache_dir)
    assert made() == [2, 1]
    assert (output / WEIGHTS_FILE).is_file()


def test_only_the_newest_sets_stay(run: Run, tmp_path: Path) -> None:
    sets = tmp_path / "cache" / "class-images"
    for number in range(MAX_SETS + 3):
        (sets / f"{number:02}").mkdir(parents=True)
    run(**PRIOR, cache_dir=str(tmp_path / "cache"))
    assert len(list(sets.iterdir())) == MAX_SETS
