"""Images, captions and masks; their crops; the order of batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.data import pictures as pictures_module
from gpu_client.training.dreambooth.data.batches import PictureBatches, find_nearest_shape, list_bucket_shapes
from gpu_client.training.dreambooth.data.pictures import (
    Picture,
    Placement,
    _ResizedImages,
    read_class_pictures,
    read_instance_pictures,
)
from gpu_client.training.dreambooth.errors import DataError
from gpu_client.training.errors import CheckpointMismatchError
from tests.kits.dreambooth.photographs import ODD_EXIF, save_crops, subject


def config_with(**changed: Any) -> DreamboothConfig:
    return DreamboothConfig.of({"instance_prompt": "a sks cat", "resolution": 64, **changed})


def names(pictures: list[Picture]) -> list[str]:
    return [picture.name for picture in pictures]


@pytest.fixture
def folder(data_dir: Path) -> Path:
    return data_dir / "instance"


def test_images_come_in_the_order_of_their_names_with_folders_apart(data_dir: Path, folder: Path) -> None:
    save_crops(folder / "more", "cat", 1)
    (folder / "notes.md").write_text("not an image")
    (folder / ".hidden.png").write_bytes(b"")
    pictures = read_instance_pictures(config_with(), data_dir)
    assert names(pictures) == [*(f"cat-0{n}.png" for n in range(5)), "more/cat-00.png"]
    assert {picture.prompt for picture in pictures} == {"a sks cat"}
    assert {picture.size for picture in pictures} == {(96, 96)}
    assert pictures[0].digest == pictures[5].digest != pictures[1].digest


def test_without_a_folder_of_their_own_they_lie_in_the_data_directory(tmp_path: Path) -> None:
    save_crops(tmp_path, "cat", 2)
    save_crops(tmp_path / "class", "coffee", 3)
    config = config_with(class_prompt="a cat", with_prior_preservation=True, num_class_images=2)
    assert names(read_instance_pictures(config, tmp_path)) == ["cat-00.png", "cat-01.png"]
    assert names(read_class_pictures(config, tmp_path)) == ["coffee-00.png", "coffee-01.png"]


def test_photographs_are_turned_upright_and_made_rgb(tmp_path: Path) -> None:
    image = subject("rocket").resize((60, 90)).convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    image.save(tmp_path / "a.jpg", exif=exif)
    (picture,) = read_instance_pictures(config_with(), tmp_path)
    assert picture.size == (60, 90)
    assert picture.open().mode == "RGB"


def test_notes_of_a_camera_that_cannot_be_written_anew_cost_no_photograph(tmp_path: Path) -> None:
    subject("rocket").resize((60, 90)).save(tmp_path / "a.jpg", exif=ODD_EXIF)
    (picture,) = read_instance_pictures(config_with(), tmp_path)
    assert picture.size == (60, 90)


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (lambda f: None, "holds no image"),
        (lambda f: (f / "a.png").write_bytes(b"\x89PNG nonsense"), "none of the 1 images in .* can be decoded: a.png"),
        (
            lambda f: Image.fromarray(np.full((64, 64), 3000, dtype=np.uint16)).save(f / "a.png"),
            "a.png .has more than 8 bits a pixel and channel: save it with 8",
        ),
        (
            lambda f: (save_crops(f, "cat", 2), (f / "b.jpg").write_bytes(b"")),
            "1 of 3 images in .* cannot be used: b.jpg",
        ),
    ],
)
def test_images_that_are_none(write: Any, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "instance").mkdir()
    write(tmp_path / "instance")
    with pytest.raises(DataError, match=complaint):
        read_instance_pictures(config_with(), tmp_path)


def test_a_cut_off_image_is_refused(data_dir: Path, folder: Path) -> None:
    whole = (folder / "cat-02.png").read_bytes()
    (folder / "cat-02.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cat-02.png"):
        read_instance_pictures(config_with(), data_dir)


def test_captions_beside_images_win_over_lists(data_dir: Path, folder: Path) -> None:
    (folder / "metadata.jsonl").write_text(
        "\n".join(f'{{"file_name": "cat-0{n}.png", "text": "listed {n}"}}' for n in range(3)) + "\n"
    )
    (folder / "captions.jsonl").write_text('{"file_name": "cat-03.png", "caption": "  also\\n listed "}\n')
    (folder / "cat-00.txt").write_text("beside\n")
    (folder / "cat-04.txt").write_text("beside too")
    pictures = read_instance_pictures(config_with(use_captions=True), data_dir)
    assert [picture.prompt for picture in pictures] == [
        "beside", "listed 1", "listed 2", "also listed", "beside too",
    ]  # fmt: skip


def test_captions_as_other_programs_write_them(data_dir: Path, folder: Path) -> None:
    """A mark before them, Windows' line ends, and within a text what is a line's end for Unicode and not for JSON."""
    for number in range(1, 5):
        (folder / f"cat-0{number}.txt").write_bytes("\ufeffbeside\r\n".encode())
    line = '\ufeff{"file_name": "cat-00.png", "text": "a\u2028cat\x85here"}\r\n\r\n'
    (folder / "metadata.jsonl").write_bytes(line.encode())
    (folder / ".editor").mkdir()
    (folder / ".editor" / "metadata.jsonl").write_text("a copy of half a file")
    pictures = read_instance_pictures(config_with(use_captions=True), data_dir)
    assert [picture.prompt for picture in pictures] == ["a cat here", *["beside"] * 4]


def test_images_of_the_class_are_looked_at_where_they_are_wanted(data_dir: Path) -> None:
    (data_dir / "class").mkdir()
    (data_dir / "class" / "a.png").write_bytes(b"no image")
    assert read_class_pictures(config_with(class_prompt="a cat"), data_dir) == []
    with pytest.raises(DataError, match=r"a\.png"):
        read_class_pictures(config_with(class_prompt="a cat", with_prior_preservation=True), data_dir)


def test_what_is_null_in_a_list_is_as_if_it_were_absent(data_dir: Path, folder: Path) -> None:
    """Programs that export tables write every column."""
    for path in folder.glob("*.txt"):
        path.unlink()
    lines = [{"file_name": f"cat-0{n}.png", "text": None, "caption": f"view {n}"} for n in range(4)]
    lines.append({"file_name": "cat-04.png", "text": "view 4", "caption": None})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pictures = read_instance_pictures(config_with(use_captions=True), data_dir)
    assert [picture.prompt for picture in pictures] == [f"view {n}" for n in range(5)]


def test_images_without_captions_are_named(data_dir: Path, folder: Path) -> None:
    for number in range(4):
        (folder / f"cat-0{number}.txt").write_text("a cat")
    (folder / "cat-01.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"2 of 5 images have no caption: cat-01.png, cat-04.png"):
        read_instance_pictures(config_with(use_captions=True), data_dir)


@pytest.mark.parametrize("name", ["cat-02.txt", "metadata.jsonl"])
def test_captions_that_are_no_text(name: str, data_dir: Path, folder: Path) -> None:
    (folder / name).write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        read_instance_pictures(config_with(use_captions=True), data_dir)


@pytest.mark.parametrize("line", ["nonsense", '{"text": "a"}', '{"file_name": "cat-00.png"}', "[1]"])
def test_a_list_of_captions_that_cannot_be_read(line: str, data_dir: Path, folder: Path) -> None:
    (folder / "metadata.jsonl").write_text(f'{{"file_name": "cat-01.png", "text": "a"}}\n\n{line}\n')
    with pytest.raises(DataError, match=r"metadata.jsonl, line 3"):
        read_instance_pictures(config_with(use_captions=True), data_dir)


def test_masks_that_are_missing_or_do_not_fit(data_dir: Path, folder: Path) -> None:
    with pytest.raises(DataError, match=r"5 of 5 images have no mask: cat-00.png"):
        read_instance_pictures(config_with(use_masks=True), data_dir)
    for number in range(5):
        Image.new("L", (96, 96), 255).save(folder / f"cat-0{number}.mask.png")
    assert len(read_instance_pictures(config_with(use_masks=True), data_dir)) == 5
    Image.new("L", (96, 64), 255).save(folder / "cat-01.mask.png")
    Image.new("L", (96, 96), 0).save(folder / "cat-02.mask.png")
    with pytest.raises(
        DataError, match=r"its mask has 96 x 64 pixels, its image 96 x 96.*its mask is black everywhere"
    ):
        read_instance_pictures(config_with(use_masks=True), data_dir)


def test_pixels_are_the_window_that_was_asked_for(tmp_path: Path) -> None:
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 64:] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (picture,) = read_instance_pictures(config_with(), tmp_path)

    def cut(right: float, flip: bool = False) -> torch.Tensor:
        return Placement.of(picture.size, (64, 64), down=0.5, right=right, flip=flip).pixels(picture)

    assert cut(0.0).shape == (3, 64, 64)
    assert (cut(0.0) == -1).all()
    assert (cut(1.0) == 1).all()
    assert (cut(0.0, flip=True) == 1).all()
    middle = cut(0.5)
    assert (middle[:, :, :32] == -1).all()
    assert (middle[:, :, 32:] == 1).all()
    assert Placement.of((64, 128), (64, 64), down=0.5, right=0.25, flip=False).left == 16


def test_a_photograph_is_decoded_once_as_long_as_there_is_room(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = read_instance_pictures(config_with(), data_dir)
    opened: list[str] = []
    opening = Picture.open

    def recorded(picture: Picture) -> Image.Image:
        opened.append(picture.name)
        return opening(picture)

    monkeypatch.setattr(Picture, "open", recorded)
    room = _ResizedImages(limit_bytes=2 * 64 * 64 * 3)
    monkeypatch.setattr(pictures_module, "_resized_images", room)
    for number in (0, 1, 0, 1, 0, 2, 0, 1):
        place = Placement.of(pictures[number].size, (64, 64), down=0.5, right=0.5, flip=False)
        assert place.pixels(pictures[number]).shape == (3, 64, 64)
    assert opened == ["cat-00.png", "cat-01.png", "cat-02.png", "cat-01.png"]


def test_weights_follow_the_mask_through_crop_and_mirror(tmp_path: Path) -> None:
    save_crops(tmp_path, "cat", 1, (128, 64))
    mask = Image.new("L", (128, 64), 0)
    mask.paste(255, (0, 0, 64, 64))
    mask.save(tmp_path / "cat-00.mask.png")
    (picture,) = read_instance_pictures(config_with(use_masks=True), tmp_path)

    def weights(right: float, flip: bool, outside: float) -> torch.Tensor:
        return Placement.of(picture.size, (64, 64), down=0.5, right=right, flip=flip).weights(picture, outside)

    assert weights(0.0, False, 0.0).shape == (1, 8, 8)
    assert (weights(0.0, False, 0.0) == 1).all()
    assert (weights(0.0, True, 0.0) == 0).all()
    assert (weights(1.0, False, 0.25) == 0.25).all()
    half = weights(0.5, False, 0.25)
    assert (half[..., :4] == 1).all()
    assert (half[..., 4:] == 0.25).all()
    Image.new("L", (128, 64), 51).save(tmp_path / "cat-00.mask.png")
    assert weights(0.0, False, 0.25).tolist() == [[[pytest.approx(0.25 + 0.75 * 0.2)] * 8] * 8]


def test_buckets_have_about_the_pixels_of_the_square_and_its_multiples() -> None:
    shapes = list_bucket_shapes(1024, 64)
    assert (1024, 1024) in shapes
    assert (832, 1216) in shapes  # SDXL's 3:2
    for height, width in shapes:
        assert height % 64 == width % 64 == 0
        assert 0.8 * 1024**2 < height * width <= 1024**2
        assert 0.5 <= height / width <= 2
    assert find_nearest_shape((4000, 6000), shapes) == (832, 1216)
    assert find_nearest_shape((500, 500), shapes) == (1024, 1024)
    assert find_nearest_shape((100, 1000), shapes) == min(shapes)


def pictures_of(sizes: list[tuple[int, int]]) -> list[Picture]:
    return [Picture(str(number), b"", "a", size, f"digest {number}") for number, size in enumerate(sizes)]


def test_every_epoch_takes_every_picture_once_and_batches_have_one_shape() -> None:
    pictures = pictures_of([(64, 64)] * 5 + [(64, 128)] * 3)
    config = config_with(aspect_ratio_buckets=True, bucket_step=8, train_batch_size=2)
    batches = PictureBatches(pictures, config, purpose="instance")
    assert batches.batches_per_epoch == 5
    orders = []
    for epoch in range(3):
        taken = [next(batches).items for _ in range(5)]
        assert sorted(int(picture.name) for items in taken for picture, _ in items) == list(range(8)), epoch
        assert all(len({placement.shape for _, placement in items}) == 1 for items in taken)
        orders.append([picture.name for items in taken for picture, _ in items])
    assert orders[0] != orders[1] != orders[2]


def test_a_position_is_continued_exactly() -> None:
    pictures = pictures_of([(64, 96)] * 7)
    config = config_with(train_batch_size=2, random_flip=True)

    def facts(batches: PictureBatches) -> list[Any]:
        taken = [next(batches) for _ in range(6)]
        return [
            ([(p.name, place) for p, place in c.items], torch.rand(2, generator=c.generator).tolist()) for c in taken
        ]

    batches = PictureBatches(pictures, config, purpose="instance")
    for _ in range(6):
        next(batches)
    state = batches.state_dict()
    expected = facts(batches)
    again = PictureBatches(pictures, config, purpose="instance")
    again.load_state_dict(state)
    assert facts(again) == expected
    assert len({place.left for items, _ in expected for _, place in items}) > 3
    assert {place.flip for items, _ in expected for _, place in items} == {False, True}
    assert facts(PictureBatches(pictures, config, purpose="class")) != facts(
        PictureBatches(pictures, config, purpose="instance")
    )


def test_every_batch_of_every_epoch_draws_anew() -> None:
    def draws(purpose: str, **changed: Any) -> list[float]:
        batches = PictureBatches(pictures_of([(64, 64)] * 4), config_with(**changed), purpose=purpose)
        return [torch.rand(1, generator=next(batches).generator).item() for _ in range(12)]

    plain = draws("instance")
    assert len({*plain, *draws("class"), *draws("instance", seed=1)}) == 3 * 12
    # The crop of a picture does not change the noise that is drawn for the picture.
    assert draws("instance", random_flip=True) == draws("instance", center_crop=True) == plain


@pytest.mark.parametrize("option", ["center_crop", "aspect_ratio_buckets"])
def test_crops_that_are_not_left_to_chance(option: str) -> None:
    config = config_with(bucket_step=64, **{option: True})
    batches = PictureBatches(pictures_of([(64, 96)] * 2), config, purpose="instance")
    assert {place.left for _ in range(10) for _, place in next(batches).items} == {16}


def test_another_seed_batch_size_or_picture_is_another_order() -> None:
    pictures = pictures_of([(64, 64)] * 9)
    state = PictureBatches(pictures, config_with(), purpose="instance").state_dict()
    for others, changed in [
        (pictures, {"seed": 1}),
        (pictures, {"train_batch_size": 2}),
        (pictures[:-1], {}),
        ([*pictures_of([(64, 64)] * 8), Picture("8", b"", "a", (64, 64), "another")], {}),
    ]:
        with pytest.raises(CheckpointMismatchError, match="not those of the checkpoint"):
            PictureBatches(others, config_with(**changed), purpose="instance").load_state_dict(state)
