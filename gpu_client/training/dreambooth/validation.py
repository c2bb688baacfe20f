"""Validation pictures: made every few epochs from the same seeds, shown at once, kept in the checkpoints.

In the end they are collected into one grid.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from gpu_client.training.dreambooth.batches import derived_seed
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.encoding import Encoder
from gpu_client.training.dreambooth.grid import picture_grid
from gpu_client.training.dreambooth.lora import Lora
from gpu_client.training.dreambooth.models import Models
from gpu_client.training.dreambooth.optimization import Optimization
from gpu_client.training.dreambooth.sampling import sample
from gpu_client.training.session import Session

OUTPUT_DIR = "validation"
GRID_FILE = "validation_grid.png"
MAX_PICTURES = 256
"""Of a job: each is a file among its outputs, of which there may be 500, and lies in every checkpoint."""

log = logging.getLogger("baton.training")


class ValidationPictures:
    """What the model made of the validation prompt, by step. One of the session's states.

    epochs: how many will be complete at the end of the training.
    """

    def __init__(
        self,
        config: DreamboothConfig,
        models: Models,
        encoder: Encoder,
        lora: Lora,
        optimization: Optimization,
        *,
        epochs: int,
    ) -> None:
        self._config = config
        self._models = models
        self._encoder = encoder
        self._lora = lora
        self._optimization = optimization
        self._encoded: dict[int, list[bytes]] = {}
        self._milestone = 0
        self._every_epochs = epochs_between(config, epochs)

    @property
    def steps(self) -> list[int]:
        """The steps of which there are pictures."""
        return sorted(self._encoded)

    def due(self, epoch: int) -> bool:
        """Whether so many more epochs are complete. Asked at the start of a step, so that an attempt which
        was stopped right after one makes the pictures that the stopped attempt has not made."""
        return self._config.validation_prompt is not None and epoch // self._every_epochs > self._milestone

    def make(self, step: int, epoch: int, session: Session) -> None:
        """Pictures of the weights after `step`; of their average, if there is one. They are shown at once."""
        self._milestone = epoch // self._every_epochs
        if self._config.validation_prompt is None or step in self._encoded:
            return
        seeds = [derived_seed("validation", self._config.seed, n) for n in range(self._config.num_validation_images)]
        self._optimization.use_average()
        self._lora.training(False)
        with torch.no_grad():
            prompt = self._encoder.conditioning([self._config.validation_prompt])
        negative = self._encoder.negative()
        images = []
        for number, seed in enumerate(seeds, 1):
            images += sample(self._models, self._config, prompt, negative, [seed])
            session.phase("validation_pictures", number, len(seeds))
        self._lora.training(True)
        self._optimization.use_weights()
        self._encoded[step] = [_png(image) for image in images]
        self._show(step, session)

    def show_again(self, session: Session) -> None:
        """Write out what an earlier attempt made. It may not have come to showing its newest ones: they are shown."""
        for step in self.steps:
            self._write(step, session.output_dir)
        if self._encoded:
            self._show(self.steps[-1], session)

    def state_dict(self) -> dict[str, Any]:
        """All pictures as files."""
        images = {
            step: [torch.frombuffer(bytearray(encoded), dtype=torch.uint8) for encoded in row]
            for step, row in self._encoded.items()
        }
        return {"milestone": self._milestone, "images": images}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the pictures of an earlier attempt."""
        self._milestone = int(state["milestone"])
        self._encoded = {int(step): [image.numpy().tobytes() for image in row] for step, row in state["images"].items()}

    def write_grid(self, output_dir: Path) -> None:
        """Write all as one grid. Each lies in a file of its own since it was made, or shown again."""
        if not self._encoded:
            return
        grid = picture_grid(self._encoded, self._config.validation_prompt or "", self._config.resolution)
        (output_dir / GRID_FILE).write_bytes(_png(grid))

    def _show(self, step: int, session: Session) -> None:
        for path in self._write(step, session.output_dir):
            session.artifact(path)

    def _write(self, step: int, output_dir: Path) -> list[Path]:
        """`validation/step-<step>-<number>.png` of each."""
        folder = output_dir / OUTPUT_DIR
        folder.mkdir(exist_ok=True)
        paths = [folder / f"step-{step:06}-{number}.png" for number in range(len(self._encoded[step]))]
        for path, encoded in zip(paths, self._encoded[step], strict=True):
            path.write_bytes(encoded)
        return paths


def epochs_between(config: DreamboothConfig, epochs: int) -> int:
    """`validation_epochs`, or more where a training of so many epochs would make more than MAX_PICTURES."""
    most_steps = MAX_PICTURES // config.num_validation_images
    # Besides those in between there are pictures of the end.
    least = -(-epochs // (most_steps - 1))
    if config.validation_prompt is not None and least > config.validation_epochs:
        log.warning(
            "pictures are made every %d epochs, not every %d: a job can keep %d of them",
            least,
            config.validation_epochs,
            MAX_PICTURES,
        )
    return max(config.validation_epochs, least)


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()
