"""Class images that a job leaves for later jobs on other machines."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dreambooth_runs import EVERYTHING, Run, outputs, power_cut, short_training, train_in

from baton.contract.names import SHARED_DIR
from functions.recipes import built_in_recipe
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.model.lora import WEIGHTS_FILE
from gpu_client.training.dreambooth.sampling.class_images import compute_key
from gpu_client.training.dreambooth.sampling.shared_images import SHARED_FILE, open_shared_images, write_shared
from tests.kits.dreambooth.photographs import save_crops

PRIOR = {
    "with_prior_preservation": True,
    "class_prompt": "a photo of a cat",
    "num_class_images": 3,
    "sample_batch_size": 2,
    "max_train_steps": 1,
}
Hand = Callable[[Path], Path]


@pytest.fixture
def hand(data_dir: Path) -> Hand:
    """Gives what one job has left to the next ones, as the agent does; returns where it lies."""

    def give(output: Path) -> Path:
        (data_dir / SHARED_DIR).mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(output / SHARED_FILE, data_dir / SHARED_DIR / SHARED_FILE))

    return give


@pytest.fixture(scope="module")
def first(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a first job, which made its class images one by one.

    On some processors an image comes out otherwise by a bit with another one beside it.
    """
    place = tmp_path_factory.mktemp("first")
    save_crops(place / "data" / "instance", "cat", 5)
    return train_in(place / "out", place / "data", {**short_training(tiny_sd), **PRIOR, "sample_batch_size": 1})


def test_a_later_job_takes_them_and_trains_as_if_it_had_made_them(run: Run, made: list[int], hand: Hand) -> None:
    whole = outputs(run("first", **PRIOR))
    assert made == [2, 1]
    with zipfile.ZipFile(hand(run("first", **PRIOR))) as archive:
        assert archive.testzip() is None
        images = {f"class_images/{name}": archive.read(name) for name in archive.namelist()}
    assert images == {name: content for name, content in whole.items() if name.startswith("class_images/")}
    made.clear()
    second = outputs(run("second", **PRIOR))
    assert made == []
    assert SHARED_FILE not in second, "it has nothing to add"
    assert {**second, SHARED_FILE: whole[SHARED_FILE]} == whole


def test_what_is_lacking_is_added(run: Run, made: list[int], hand: Hand) -> None:
    hand(run("first", **PRIOR))
    fewer = run("fewer", **{**PRIOR, "num_class_images": 2})
    assert made == [2, 1] and not (fewer / SHARED_FILE).exists()
    more = run("more", **{**PRIOR, "num_class_images": 5})
    assert made == [2, 1, 1, 1]
    with zipfile.ZipFile(more / SHARED_FILE) as archive:
        assert archive.namelist() == [f"0000{number}.jpg" for number in range(5)]


def test_own_images_of_the_class_come_first_and_are_not_shared(
    run: Run, made: list[int], hand: Hand, data_dir: Path
) -> None:
    hand(run("first", **PRIOR))
    save_crops(data_dir / "class", "coffee", 2)
    output = run("second", **PRIOR)
    assert made == [2, 1]
    assert len(list((output / "class_images").iterdir())) == 1
    assert not (output / SHARED_FILE).exists()


@pytest.mark.parametrize(
    "changed", [{"class_prompt": "a cat"}, {"guidance_scale": 3.0}, {"mixed_precision": "bf16"}, {"model": "other"}]
)
def test_those_of_another_key_are_not_taken(
    run: Run, made: list[int], first: Path, hand: Hand, changed: dict[str, Any], tiny_sd2: Path
) -> None:
    if "model" in changed:
        changed = {"pretrained_model_name_or_path": str(tiny_sd2)}
    hand(first)
    made.clear()
    output = run("second", **{**PRIOR, **changed})
    assert made == [2, 1]
    assert (output / SHARED_FILE).is_file()


def test_a_base_model_that_changed_under_its_name_takes_none(
    run: Run, made: list[int], hand: Hand, tiny_sd: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_sd, tmp_path / "base"))
    hand(run("first", **PRIOR, pretrained_model_name_or_path=str(base)))
    weights = next((base / "unet").glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    run("second", **PRIOR, pretrained_model_name_or_path=str(base))
    assert made == [2, 1, 2, 1]


@pytest.mark.parametrize("damage", ["cut off", "no archive", "an image", "no image", "a directory"])
def test_a_damaged_archive_costs_nothing_but_itself(
    run: Run, made: list[int], first: Path, hand: Hand, damage: str
) -> None:
    whole, place = outputs(first), hand(first)
    made.clear()
    content = place.read_bytes()
    if damage == "cut off":
        place.write_bytes(content[: len(content) // 2])
    elif damage == "no archive":
        place.write_bytes(b"")
    elif damage == "an image":
        middle = content.index(b"\xff\xd8", content.index(b"00001.jpg")) + 300
        place.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    elif damage == "no image":
        with zipfile.ZipFile(place) as archive:
            comment = archive.comment
        with zipfile.ZipFile(place, "w") as archive:
            archive.comment = comment
            archive.writestr("00000.jpg", b"no image")
    else:
        place.unlink()
        place.mkdir()
    second = outputs(run("second", **{**PRIOR, "sample_batch_size": 1}))
    assert sum(made) == (1 if damage == "an image" else 3)
    assert second[WEIGHTS_FILE] == whole[WEIGHTS_FILE]
    assert second[SHARED_FILE] == whole[SHARED_FILE], "the next job is given a sound one"


def test_no_bit_of_an_archive_is_one_too_many(tmp_path: Path) -> None:
    place = tmp_path / SHARED_DIR / SHARED_FILE
    place.parent.mkdir(parents=True)
    write_shared(place.parent, "key", [("00000.jpg", b"first"), ("00001.jpg", b"second")])
    whole = place.read_bytes()
    assert open_shared_images(tmp_path, "key").read("00000.jpg") == b"first"
    for number in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[number // 8] ^= 1 << number % 8
        place.write_bytes(damaged)
        assert open_shared_images(tmp_path, "key").read("00000.jpg") in (b"first", None)


def test_attempts_know_what_was_shared_with_the_first(run: Run, made: list[int], hand: Hand, data_dir: Path) -> None:
    whole = outputs(run("whole", **EVERYTHING))
    place = hand(run("whole", **EVERYTHING))
    made.clear()
    with power_cut(13, "loss"):
        run("cut", **EVERYTHING)
    place.unlink()
    cut = outputs(run("cut", **EVERYTHING))
    assert made == []
    assert {**cut, SHARED_FILE: whole[SHARED_FILE]} == whole
    assert SHARED_FILE not in cut


@pytest.mark.parametrize("recipe_id", ["dreambooth-lora-sd@2", "dreambooth-lora-sdxl@2"])
def test_the_recipes_key_is_of_all_that_images_depend_on(recipe_id: str) -> None:
    recipe = built_in_recipe(recipe_id)
    assert recipe is not None
    (shared,) = recipe.shared
    model: Any = SimpleNamespace(fingerprint="of both models")
    usual = DreamboothConfig(instance_prompt="a dog", class_prompt="dog")
    decisive = {"pretrained_model_name_or_path", "pretrained_vae_model_name_or_path"}
    for name in recipe.parameters.keys() - decisive:
        # whatever it is: only whether the key depends on it counts
        changed = usual.model_copy(update={name: "another"})
        if compute_key(changed, model) != compute_key(usual, model):
            decisive.add(name)
    assert set(shared.key) == decisive | ({"revision", "variant"} & recipe.parameters.keys())
