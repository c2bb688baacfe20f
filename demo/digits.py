"""The real data: the 1,797 handwritten digits that ship with scikit-learn (8 x 8 pixels, from UCI)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

HELD_OUT_EVERY = 5
"""As the recipe `digits@1` splits: an image whose index is a multiple of this is never trained on."""

GREY_LEVELS = 16


@dataclass(frozen=True)
class Digits:
    """Images (n, 8, 8) as bytes, and what they show."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    @property
    def held_out(self) -> Digits:
        """The part that the recipe holds out, chosen here by index rather than taken from the job's word."""
        return Digits(self.images[::HELD_OUT_EVERY], self.labels[::HELD_OUT_EVERY])


def load() -> Digits:
    """All digits, in scikit-learn's order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return Digits(
        np.round(found.images * (255 / GREY_LEVELS)).astype(np.uint8), np.asarray(found.target, dtype=np.int64)
    )


def write_pngs(digits: Digits, directory: Path) -> dict[str, Path]:
    """Write `<label>/<index>.png` for each; returns path by that name."""
    for label in set(digits.labels.tolist()):
        (directory / str(label)).mkdir(parents=True, exist_ok=True)
    files = {}
    for index, (image, label) in enumerate(zip(digits.images, digits.labels.tolist(), strict=True)):
        name = f"{label}/{index:04d}.png"
        Image.fromarray(image).save(directory / name)
        files[name] = directory / name
    return files
