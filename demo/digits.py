"""The real data, and what the demos measure on it themselves instead of believing the job: accuracy, equal weights.

The data are the 1,797 handwritten digits that ship with scikit-learn (8 x 8 pixels, from UCI).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

HELD_OUT_EVERY = 5
"""The recipe `digits@1` never trains on an image whose index is a multiple of this."""

GREY_LEVELS = 16


@dataclass(frozen=True)
class Digits:
    """Images (n, 8, 8) as bytes, and their labels."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    @property
    def held_out(self) -> Digits:
        """Select the held-out part by index, independently of the job."""
        return Digits(self.images[::HELD_OUT_EVERY], self.labels[::HELD_OUT_EVERY])


def load() -> Digits:
    """Load all digits, in scikit-learn's order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return Digits(
        np.round(found.images * (255 / GREY_LEVELS)).astype(np.uint8), np.asarray(found.target, dtype=np.int64)
    )


def write_pngs(digits: Digits, directory: Path) -> dict[str, Path]:
    """Write `<label>/<index>.png` for each digit; returns the paths by that name."""
    for label in set(digits.labels.tolist()):
        (directory / str(label)).mkdir(parents=True, exist_ok=True)
    files = {}
    for index, (image, label) in enumerate(zip(digits.images, digits.labels.tolist(), strict=True)):
        name = f"{label}/{index:04d}.png"
        Image.fromarray(image).save(directory / name)
        files[name] = directory / name
    return files


@dataclass(frozen=True)
class Readings:
    """The labels that a model reads on the held-out digits."""

    digits: Digits
    predicted: NDArray[np.int64]

    @property
    def wrong(self) -> NDArray[np.int64]:
        """Return the indices of the misread digits."""
        return np.flatnonzero(self.predicted != self.digits.labels)

    @property
    def accuracy(self) -> float:
        """Return the share that is read correctly, 0 to 1."""
        return 1 - len(self.wrong) / len(self.digits.labels)


def read_digits(weights: Path, hidden: int, held_out: Digits) -> Readings:
    """Run the network on the held-out digits with the weights of a fetched `model.safetensors`."""
    import torch
    from safetensors.torch import load_file

    from gpu_client.training.digits import make_model

    model = make_model(hidden)
    model.load_state_dict(load_file(weights))
    model.eval()
    images = torch.from_numpy(held_out.images.astype(np.float32) / 255)[:, None]
    with torch.no_grad():
        predicted = model(images).argmax(dim=1).numpy()
    return Readings(held_out, np.asarray(predicted, dtype=np.int64))


def different_tensors(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors whose bits differ between two files, or that one file lacks."""
    from safetensors.numpy import load_file

    left, right = load_file(one), load_file(other)
    return sorted(
        name
        for name in left.keys() | right.keys()
        if name not in left or name not in right or not _same_bits(left[name], right[name])
    )


def _same_bits(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    # 0.0 equals -0.0, and NaN does not equal NaN, therefore bytes are compared.
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
