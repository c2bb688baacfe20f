"""Validation pictures: made every few epochs from the same seeds, kept in the checkpoints, collected into one grid."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from gpu_client.training.dreambooth.batches import derived_seed
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.encoding import Encoder
from gpu_client.training.dreambooth.lora import Lora
from gpu_client.training.dreambooth.models import Models
from gpu_client.training.dreambooth.optimization import Optimization
from gpu_client.training.dreambooth.sampling import sample

OUTPUT_DIR = "validation"
GRID_FILE = "validation_grid.png"
_LABEL_PIXELS = 16
_MAX_TILE_PIXELS = 512


class ValidationPictures:
    """What the model made of the validation prompt, by step. One of the session's states."""

    def __init__(
        self, config: DreamboothConfig, models: Models, encoder: Encoder, lora: Lora, optimization: Optimization
    ) -> None:
        self._config = config
        self._models = models
        self._encoder = encoder
        self._lora = lora
        self._optimization = optimization
        self._encoded: dict[int, list[bytes]] = {}
        self._milestone = 0

    @property
    def steps(self) -> list[int]:
        """The steps of which there are pictures."""
        return sorted(self._encoded)

    def due(self, epoch: int) -> bool:
        """Whether `validation_epochs` more epochs are complete. Asked at the start of a step, so that an attempt which
        was stopped right after one makes the pictures that the stopped attempt has not made."""
        return self._config.validation_prompt is not None and epoch // self._config.validation_epochs > self._milestone

    def make(self, step: int, epoch: int) -> None:
        """Pictures of the weights after `step`; of their average, if there is one."""
        self._milestone = epoch // self._config.validation_epochs
        if self._config.validation_prompt is None or step in self._encoded:
            return
        seeds = [derived_seed("validation", self._config.seed, n) for n in range(self._config.num_validation_images)]
        self._optimization.use_average()
        self._lora.training(False)
        with torch.no_grad():
            prompt = self._encoder.conditioning([self._config.validation_prompt])
        negative = self._encoder.negative()
        images = [sample(self._models, self._config, prompt, negative, [seed])[0] for seed in seeds]
        self._lora.training(True)
        self._optimization.use_weights()
        self._encoded[step] = [_png(image) for image in images]

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

    def write(self, output_dir: Path) -> None:
        """Write each as `validation/step-<step>-<number>.png`, and all as one grid."""
        if not self._encoded:
            return
        folder = output_dir / OUTPUT_DIR
        folder.mkdir(exist_ok=True)
        for step in self.steps:
            for number, encoded in enumerate(self._encoded[step]):
                (folder / f"step-{step:06}-{number}.png").write_bytes(encoded)
        (output_dir / GRID_FILE).write_bytes(_png(self._grid()))

    def _grid(self) -> Image.Image:
        """A row for each step with its number above, a column for each seed."""
        tile = min(self._config.resolution, _MAX_TILE_PIXELS)
        height = tile + _LABEL_PIXELS
        grid = Image.new("RGB", (tile * self._config.num_validation_images, height * len(self._encoded)), "white")
        draw = ImageDraw.Draw(grid)
        for row, step in enumerate(self.steps):
            draw.text((2, row * height + 2), f"step {step}", fill="black")
            for column, encoded in enumerate(self._encoded[step]):
                with Image.open(io.BytesIO(encoded)) as image:
                    grid.paste(image.resize((tile, tile)), (column * tile, row * height + _LABEL_PIXELS))
        return grid


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()
