"""What the demo checks for itself rather than believing the job: accuracy, and equality of weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.digits import Digits


@dataclass(frozen=True)
class Readings:
    """What a model reads on digits it has never seen."""

    digits: Digits
    predicted: NDArray[np.int64]

    @property
    def wrong(self) -> NDArray[np.int64]:
        """Indices of the misread ones."""
        return np.flatnonzero(self.predicted != self.digits.labels)

    @property
    def accuracy(self) -> float:
        """Share read correctly, 0 to 1."""
        return 1 - len(self.wrong) / len(self.digits.labels)


def read_digits(weights: Path, hidden: int, held_out: Digits) -> Readings:
    """Run the network with the weights of a fetched `model.safetensors` on the held-out digits."""
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
    """Names of tensors that are not the same bits in both files, missing ones included; [] if all are."""
    from safetensors.numpy import load_file

    left, right = load_file(one), load_file(other)
    return sorted(
        name
        for name in left.keys() | right.keys()
        if name not in left or name not in right or not _same_bits(left[name], right[name])
    )


def _same_bits(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    # Compared as bytes: 0.0 and -0.0 are equal numbers, and NaN is not equal to itself.
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
