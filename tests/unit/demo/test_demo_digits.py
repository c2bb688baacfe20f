"""The digits, and what the demos measure on them: accuracy, equal weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from demo import digits
from demo.digits import Digits
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
        list(model.parameters())[-1][7] = 1.0  # reads a 7, whatever the picture
    save_torch_file(model.state_dict(), tmp_path / "model.safetensors")
    shown = Digits(np.zeros((4, 8, 8), np.uint8), np.array([7, 1, 7, 7], np.int64))
    readings = digits.read_digits(tmp_path / "model.safetensors", 4, shown)
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
    assert digits.different_tensors(tmp_path / "one", tmp_path / "other") == expected
