"""Generate validation pictures every few epochs from equal seeds, publish them, and keep them in checkpoints.

At the end of the training, one grid collects all pictures.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.model.base_model import Models
from gpu_client.training.dreambooth.model.encoding import Encoder
from gpu_client.training.dreambooth.model.lora import Lora
from gpu_client.training.dreambooth.model.optimization import Optimization
from gpu_client.training.dreambooth.sampling.sampler import sample
from gpu_client.training.resumable_loader import derive_seed
from gpu_client.training.session.session import Session

OUTPUT_DIR = "validation"
GRID_FILE = "validation_grid.png"
MAX_PICTURES = 256
"""Limit of a job's pictures, because a job has at most 500 output files and every checkpoint contains all pictures."""

log = logging.getLogger("baton.training")


class ValidationPictures:
    """Pictures of the validation prompt by step. A state of the session.

    epochs: number of complete epochs at the end of the training.
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
        self._every_epochs = choose_interval(config, epochs)

    @property
    def steps(self) -> list[int]:
        """Return the steps with pictures."""
        return sorted(self._encoded)

    def due(self, epoch: int) -> bool:
        """Return True if the interval has passed.

        Call at the start of a step, so that an attempt that resumes just after an interval makes the pictures that the
        stopped attempt did not make.
        """
        return self._config.validation_prompt is not None and epoch // self._every_epochs > self._milestone

    def make(self, step: int, epoch: int, session: Session) -> None:
        """Generate and publish pictures of the weights after `step`, or of their average."""
        self._milestone = epoch // self._every_epochs
        if self._config.validation_prompt is None or step in self._encoded:
            return
        seeds = [derive_seed("validation", self._config.seed, n) for n in range(self._config.num_validation_images)]
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
        """Write the pictures of an earlier attempt, and publish the newest pictures again.

        The earlier attempt may have ended before publishing its newest pictures.
        """
        for step in self.steps:
            self._write(step, session.output_dir)
        if self._encoded:
            self._show(self.steps[-1], session)

    def state_dict(self) -> dict[str, Any]:
        """Return all pictures as files."""
        images = {
            step: [torch.frombuffer(bytearray(encoded), dtype=torch.uint8) for encoded in row]
            for step, row in self._encoded.items()
        }
        return {"milestone": self._milestone, "images": images}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the pictures of an earlier attempt."""
        self._milestone = int(state["milestone"])
        self._encoded = {int(step): [image.numpy().tobytes() for image in row] for step, row in state["images"].items()}

    def write_grid(self, output_dir: Path) -> None:
        """Write one grid of all pictures; each picture already has a file of its own."""
        if not self._encoded:
            return
        grid = draw_grid(self._encoded, self._config.validation_prompt or "", self._config.resolution)
        (output_dir / GRID_FILE).write_bytes(_png(grid))

    def _show(self, step: int, session: Session) -> None:
        for path in self._write(step, session.output_dir):
            session.artifact(path)

    def _write(self, step: int, output_dir: Path) -> list[Path]:
        """Write each picture as `validation/step-<step>-<number>.png`."""
        folder = output_dir / OUTPUT_DIR
        folder.mkdir(exist_ok=True)
        paths = [folder / f"step-{step:06}-{number}.png" for number in range(len(self._encoded[step]))]
        for path, encoded in zip(paths, self._encoded[step], strict=True):
            path.write_bytes(encoded)
        return paths


def choose_interval(config: DreamboothConfig, epochs: int) -> int:
    """Return `validation_epochs`, or a longer interval that gives at most MAX_PICTURES pictures."""
    most_steps = MAX_PICTURES // config.num_validation_images
    # The end of the training adds another set.
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


MAX_TILE_PIXELS = 512
MAX_SIDE_PIXELS = 16_384
"""Limit of a side in pixels, half the limit of many programs."""
MAX_PIXELS = 40_000_000
_LEAST_WIDTH_PIXELS = 256
"""Minimum width of a grid, for a readable title above small pictures."""
_GAP_PIXELS = 4
_FONT_PIXELS = (12, 24)
_MAX_TITLE_LINES = 4


def draw_grid(rows: Mapping[int, Sequence[bytes]], title: str, resolution: int) -> Image.Image:
    """Draw a grid of all pictures by step, with a title; reduce the size of many pictures.

    `rows`: encoded square pictures of `resolution` pixels a side, by step.
    """
    columns = max(len(row) for row in rows.values())
    tile = _tile(len(rows), columns, resolution)
    width = max(columns * (tile + _GAP_PIXELS) - _GAP_PIXELS, _LEAST_WIDTH_PIXELS)
    font = ImageFont.load_default(_font_pixels(tile))
    line = _line_pixels(tile)
    lines = _wrapped(title, font, width - line)
    height = line + tile
    grid = Image.new("RGB", (width, len(lines) * line + len(rows) * height), "white")
    draw = ImageDraw.Draw(grid)
    for number, text in enumerate(lines):
        draw.text((line // 4, number * line), text, fill="black", font=font)
    for number, step in enumerate(sorted(rows)):
        top = len(lines) * line + number * height
        draw.text((line // 4, top), f"step {step}", fill="black", font=font)
        for column, encoded in enumerate(rows[step]):
            place = column * (tile + _GAP_PIXELS), top + line
            try:
                with Image.open(io.BytesIO(encoded)) as picture:
                    grid.paste(picture.convert("RGB").resize((tile, tile)), place)
            except (OSError, SyntaxError, ValueError) as error:
                # The training is complete, and an unreadable picture must not lose the result.
                log.warning("picture %d of step %d cannot be read: %s", column, step, error)
                draw.text(place, "unreadable", fill="red", font=font)
    return grid


def _tile(rows: int, columns: int, resolution: int) -> int:
    """Compute the side of each picture in pixels."""
    fits = int((MAX_PIXELS / (rows * columns)) ** 0.5)
    tile = max(min(resolution, MAX_TILE_PIXELS, fits, MAX_SIDE_PIXELS // max(rows, columns)), 1)
    # A smaller tile also has a smaller font, therefore the text still fits.
    line = _line_pixels(tile)
    high = (MAX_SIDE_PIXELS - _MAX_TITLE_LINES * line) // rows - line
    return max(min(tile, MAX_SIDE_PIXELS // columns - _GAP_PIXELS, high), 1)


def _font_pixels(tile: int) -> int:
    least, most = _FONT_PIXELS
    return min(max(tile // 16, least), most)


def _line_pixels(tile: int) -> int:
    return _font_pixels(tile) * 4 // 3


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Wrap a text into lines of at most `width` pixels; a too long text ends with three dots."""
    lines: list[str] = []
    # Pillow's own font has only European letters.
    for word in text.encode("latin-1", "replace").decode("latin-1").split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word)
    lines = [_cut(line, font, width) for line in lines]
    if len(lines) > _MAX_TITLE_LINES:
        lines = [*lines[: _MAX_TITLE_LINES - 1], _cut(f"{lines[_MAX_TITLE_LINES - 1]} ...", font, width)]
    return lines


def _cut(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(f"{line}...") > width:
        line = line[:-1]
    return f"{line}..."
