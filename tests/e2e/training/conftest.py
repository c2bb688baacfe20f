"""The data that the digits example learns from."""

from __future__ import annotations

import pytest
from PIL import Image
from sklearn.datasets import load_digits


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the real handwritten digits as digits/<label>/<index>.png."""
    folder = tmp_path_factory.mktemp("data")
    bunch = load_digits()
    for index, (image, label) in enumerate(zip(bunch.images, bunch.target, strict=True)):
        path = folder / "digits" / str(label) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype("uint8")).save(path)
    return str(folder)
