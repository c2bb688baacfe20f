"""What the demo measures for itself: data, accuracy, equality."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from baton.contract.goodput import Goodput
from demo import digits, measure, pictures
from demo.digits import Digits
from demo.follow import Point
from demo.measure import Readings
from demo.saving import Saving
from demo.summary import Interruption
from gpu_client.training.digits import make_model, read_digits


def test_the_digits_are_the_1797_real_ones() -> None:
    data = digits.load()
    assert data.images.shape == (1797, 8, 8)
    assert (data.images.min(), data.images.max()) == (0, 255)
    assert set(data.labels.tolist()) == set(range(10))
    assert len(data.held_out.labels) == 360


def test_the_recipe_holds_out_the_very_digits_that_the_demo_measures_on(tmp_path: Path) -> None:
    data = digits.load()
    part = Digits(data.images[:40], data.labels[:40])
    files = digits.write_pngs(part, tmp_path)
    assert len(files) == 40
    assert all(
        np.array_equal(np.asarray(Image.open(files[f"{part.labels[i]}/{i:04d}.png"])), part.images[i])
        for i in range(40)
    )

    images, labels, held_out, _ = read_digits(tmp_path)
    theirs = sorted(
        (label, image.numpy().tobytes())
        for label, image in zip(labels[held_out].tolist(), images[held_out], strict=True)
    )
    expected = (torch.from_numpy(part.held_out.images.astype(np.float32)) / 255)[:, None]
    assert theirs == sorted(
        (label, image.numpy().tobytes()) for label, image in zip(part.held_out.labels.tolist(), expected, strict=True)
    )


def test_the_accuracy_is_that_of_the_weights_in_the_file(tmp_path: Path) -> None:
    model = make_model(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        list(model.parameters())[-1][7] = 1.0  # whatever it is shown, it reads a 7
    save_torch_file(model.state_dict(), tmp_path / "model.safetensors")
    shown = Digits(np.zeros((4, 8, 8), np.uint8), np.array([7, 1, 7, 7], np.int64))
    readings = measure.read_digits(tmp_path / "model.safetensors", 4, shown)
    assert readings.predicted.tolist() == [7, 7, 7, 7]
    assert readings.wrong.tolist() == [1]
    assert readings.accuracy == 0.75


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"a": np.array([1.0, 0.0], np.float32), "b": np.arange(3)}, []),
        ({"a": np.array([1.0, -0.0], np.float32), "b": np.arange(3)}, ["a"]),
        ({"a": np.array([1.0, np.float32(1e-45)], np.float32), "b": np.arange(3)}, ["a"]),
        ({"a": np.array([1.0, 0.0], np.float64), "b": np.arange(3)}, ["a"]),
        ({"a": np.array([[1.0, 0.0]], np.float32), "b": np.arange(3)}, ["a"]),
        ({"a": np.array([1.0, 0.0], np.float32), "c": np.arange(3)}, ["b", "c"]),
    ],
)
def test_weights_are_equal_only_bit_for_bit(tmp_path: Path, other: dict[str, np.ndarray], expected: list[str]) -> None:
    save_file({"a": np.array([1.0, 0.0], np.float32), "b": np.arange(3)}, tmp_path / "one")
    save_file(other, tmp_path / "other")
    assert measure.different_tensors(tmp_path / "one", tmp_path / "other") == expected


def readings(wrong: set[int], whole: int = 100) -> Readings:
    labels = np.arange(whole) % 10
    predicted = np.array([(label + (index in wrong)) % 10 for index, label in enumerate(labels)])
    return Readings(Digits(np.zeros((whole, 8, 8), np.uint8), labels.astype(np.int64)), predicted.astype(np.int64))


def test_the_grid_shows_every_misread_digit_first() -> None:
    shown = pictures.choose(readings({3, 50, 99}), 20)
    assert shown[:3] == [3, 50, 99]
    assert len(shown) == len(set(shown)) == 20
    assert shown[3:] == sorted(shown[3:])
    assert shown[3] == 0
    assert shown[-1] == 98


def test_misread_digits_never_take_the_whole_grid() -> None:
    shown = pictures.choose(readings(set(range(60))), 20)
    assert shown[:10] == list(range(10))
    assert all(index >= 60 for index in shown[10:])


@pytest.mark.parametrize(("wrong", "whole", "count"), [(set(), 5, 5), (set(range(5)), 5, 5), ({1}, 5, 5)])
def test_a_grid_larger_than_the_data_shows_what_there_is(wrong: set[int], whole: int, count: int) -> None:
    shown = pictures.choose(readings(wrong, whole), 20)
    assert len(shown) == len(set(shown)) == count


@pytest.mark.parametrize("resumed_from", [16, 0])
def test_the_pictures_are_drawn(tmp_path: Path, resumed_from: int) -> None:
    cut = Interruption(20, resumed_from, 3, 5.0, 6.0)
    points = [Point(1, step, 1 / step) for step in (1, 8, 16, 20)] + [Point(2, step, 1 / step) for step in (17, 40)]
    pictures.draw_loss(points, [Point(1, step, 1 / step) for step in (1, 8, 40)], cut, 40, tmp_path / "loss.png")
    pictures.draw_predictions(readings({1}), tmp_path / "predictions.png", columns=4, rows=2)
    time = Goodput(productive_s=9, repeated_s=2, stalled_s=1, transferring_s=3, idle_s=1, checkpoints_committed=2)
    pictures.draw_time(Saving({"attempt 1": time, "attempt 2": Goodput()}), tmp_path / "time.png")
    for name in ("loss.png", "predictions.png", "time.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 400
            assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10
