"""Validation pictures: their steps, their publication, and their grid."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.sampling.validation import (
    GRID_FILE,
    MAX_PICTURES,
    MAX_PIXELS,
    MAX_SIDE_PIXELS,
    ValidationPictures,
    choose_interval,
    draw_grid,
)


def picture(side: int, colour: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(stream, format="PNG")
    return stream.getvalue()


def rows_of(pixels: np.ndarray, colour: tuple[int, int, int]) -> list[int]:
    """Return the rows at which pictures of this color begin."""
    found = (pixels == colour).all(axis=2).any(axis=1)
    return [int(row) for row in np.flatnonzero(found & ~np.roll(found, 1))]


def test_a_row_for_each_step_in_order_with_room_for_its_number_and_the_prompt() -> None:
    red, green = picture(64, "red"), picture(64, "#00ff00")
    pixels = np.asarray(draw_grid({20: [red, green], 3: [green, red]}, "sks cat", 64))
    height, width, _ = pixels.shape
    assert (width, height) == (256, 3 * 16 + 2 * 64)
    assert rows_of(pixels, (255, 0, 0)) == [32, 112]
    assert tuple(pixels[32, 0]) == (0, 255, 0) and tuple(pixels[112, 0]) == (255, 0, 0), "step 3 comes first"
    assert tuple(pixels[40, 66]) == (255, 255, 255), "a gap between pictures"
    for top in (0, 16, 96):
        assert (pixels[top : top + 16, :80] < 64).all(axis=2).sum() > 20, "black letters"


@pytest.mark.parametrize("title", ["", "cat " * 400, "c" * 1000, "猫 🐱 chat très élégant"])
def test_any_prompt_has_room(title: str) -> None:
    grid = draw_grid({1: [picture(64, "red")]}, title, 64)
    assert grid.width == 256 and grid.height <= 64 + 5 * 16


@pytest.mark.parametrize(("rows", "columns"), [(256, 1), (4, 64), (64, 4), (128, 2)])
def test_many_pictures_make_no_monster(rows: int, columns: int) -> None:
    one = picture(8, "red")
    grid = draw_grid(dict.fromkeys(range(rows), [one] * columns), "a", 8192)
    assert grid.width * grid.height < 1.5 * MAX_PIXELS
    assert max(grid.size) <= MAX_SIDE_PIXELS


@pytest.mark.parametrize("broken", [b"", b"no picture", picture(64, "red")[:60]])
def test_a_picture_that_cannot_be_read_costs_no_training(broken: bytes, caplog: pytest.LogCaptureFixture) -> None:
    pixels = np.asarray(draw_grid({1: [broken, picture(64, "blue")]}, "a", 64))
    assert rows_of(pixels, (0, 0, 255)) == [32]
    assert "picture 0 of step 1 cannot be read" in caplog.text


def config(**more: object) -> DreamboothConfig:
    return DreamboothConfig.of({"instance_prompt": "a", "validation_prompt": "a", **more})


@pytest.mark.parametrize(
    ("images", "wanted", "epochs", "every"),
    [
        (4, 50, 400, 50),
        (4, 1, 63, 1),
        (4, 1, 64, 2),
        (4, 1, 10_000, 159),
        (64, 1, 9, 3),
        (1, 1, 0, 1),
        (1, 7, 10**9, 3921569),
    ],
)
def test_thousands_of_pictures_are_spread_over_the_training(
    images: int, wanted: int, epochs: int, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    found = choose_interval(config(num_validation_images=images, validation_epochs=wanted), epochs)
    assert found == every
    assert (epochs // found + 1) * images <= MAX_PICTURES
    assert (f"every {every} epochs, not every {wanted}" in caplog.text) is (every > wanted)


def test_nobody_is_warned_of_pictures_that_are_not_made(caplog: pytest.LogCaptureFixture) -> None:
    choose_interval(DreamboothConfig.of({"instance_prompt": "a", "validation_epochs": 1}), 10_000)
    assert caplog.text == ""


def test_a_picture_that_is_being_shown_is_not_written_again(tmp_path: Path) -> None:
    """A picture that the agent may be uploading is not written a second time."""
    session: Any = SimpleNamespace(output_dir=tmp_path, artifact=lambda path: shown.append(path.name))
    shown: list[str] = []
    unused: Any = None
    pictures = ValidationPictures(config(resolution=64), unused, unused, unused, unused, epochs=9)
    image = torch.frombuffer(bytearray(picture(64, "red")), dtype=torch.uint8)
    pictures.load_state_dict({"milestone": 1, "images": {3: [image], 5: [image]}})
    pictures.show_again(session)
    assert shown == ["step-000005-0.png"]
    files = sorted((tmp_path / "validation").iterdir())
    assert [file.name for file in files] == ["step-000003-0.png", "step-000005-0.png"]
    for file in files:
        os.utime(file, (7, 7))
    pictures.write_grid(tmp_path)
    assert (tmp_path / GRID_FILE).is_file()
    assert [file.stat().st_mtime for file in files] == [7, 7]
    assert [file.read_bytes() for file in files] == [picture(64, "red")] * 2
