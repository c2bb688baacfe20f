"""Order the batches: pictures of one shape together, exactly resumable, every random choice a pure function.

The order and the seed of each batch are functions of (pictures, batch size, seed, epoch, position). Therefore the state
is a few numbers, and the draws for a batch do not depend on earlier draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.data.pictures import Picture, Placement, Size
from gpu_client.training.errors import CheckpointMismatchError
from gpu_client.training.resumable_loader import derive_seed

_WIDEST_RATIO = 2.0


def list_bucket_shapes(resolution: int, step: int) -> list[Size]:
    """List the shapes of at most resolution x resolution pixels with sides divisible by `step` and ratios up to 2."""
    shapes = set()
    for width in range(step, 2 * resolution + 1, step):
        height = resolution * resolution // width // step * step
        if height and 1 / _WIDEST_RATIO <= width / height <= _WIDEST_RATIO:
            shapes.add((height, width))
    return sorted(shapes)


def find_nearest_shape(size: Size, shapes: Sequence[Size]) -> Size:
    """Return the shape that crops least of an image of `size`; among equal shapes the larger."""
    ratio = math.log(size[0] / size[1])
    return min(shapes, key=lambda shape: (abs(ratio - math.log(shape[0] / shape[1])), -shape[0] * shape[1], shape))


@dataclass(frozen=True)
class PictureBatch:
    """Batch of pictures, with their crops and the generator for all further draws."""

    items: list[tuple[Picture, Placement]]
    generator: torch.Generator


class PictureBatches:
    """Endless iterator over batches; each epoch takes every picture once, in a new order.

    The last batch of a shape may be smaller. The state is the position after the last returned batch; store the state
    after the step that used the batch.
    """

    def __init__(self, pictures: Sequence[Picture], config: DreamboothConfig, *, purpose: str) -> None:
        """`purpose` separates the random choices of several iterators."""
        square = (config.resolution, config.resolution)
        shapes = list_bucket_shapes(config.resolution, config.bucket_step) if config.aspect_ratio_buckets else [square]
        self.pictures = list(pictures)
        self.shapes = [find_nearest_shape(picture.size, shapes) for picture in self.pictures]
        self._config = config
        self._purpose = purpose
        self._buckets: dict[Size, list[int]] = {}
        for number, shape in enumerate(self.shapes):
            self._buckets.setdefault(shape, []).append(number)
        size = config.train_batch_size
        self.batches_per_epoch = sum(-(-len(bucket) // size) for bucket in self._buckets.values())
        self.epoch = 0
        self.position = 0
        self._order: tuple[int, list[list[int]]] | None = None  # Epoch, and the epoch's batches.

    def placements(self, number: int) -> list[Placement]:
        """List every possible crop of picture `number`, for settings without random crops."""
        flips = (False, True) if self._config.random_flip else (False,)
        return [self._placed(number, 0.5, 0.5, flip) for flip in flips]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PictureBatch:
        numbers = self._batches(self.epoch)[self.position]
        seed = derive_seed("batch", self._purpose, self._config.seed, self.epoch, self.position)
        generator = torch.Generator().manual_seed(seed)
        items = [(self.pictures[number], self._draw_placement(number, generator)) for number in numbers]
        self._advance()
        return PictureBatch(items, generator)

    def skip(self, batches: int) -> None:
        """Skip `batches` batches."""
        for _ in range(batches):
            self._advance()

    def _advance(self) -> None:
        self.position += 1
        if self.position == self.batches_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the facts that identify the order."""
        return {"epoch": self.epoch, "position": self.position, "order": self._order_facts(self.epoch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises CheckpointMismatchError if pictures or settings differ."""
        epoch, stored = int(state["epoch"]), dict(state["order"])
        here = self._order_facts(epoch)
        different = [
            f"{name} was {stored.get(name)}, is {here[name]}" for name in here if stored.get(name) != here[name]
        ]
        if different:
            raise CheckpointMismatchError(
                f"the {self._purpose} images are not those of the checkpoint: {'; '.join(different)}",
                "Resume with the images and settings that wrote it, or start a new job",
            )
        self.epoch, self.position = epoch, int(state["position"])

    def _draw_placement(self, number: int, generator: torch.Generator) -> Placement:
        # The number of draws is constant, so that the following noise does not depend on the options.
        down, right, coin = torch.rand(3, generator=generator).tolist()
        if self._config.center_crop or self._config.aspect_ratio_buckets:
            down = right = 0.5
        return self._placed(number, down, right, self._config.random_flip and coin < 0.5)

    def _placed(self, number: int, down: float, right: float, flip: bool) -> Placement:
        return Placement.of(self.pictures[number].size, self.shapes[number], down=down, right=right, flip=flip)

    def _batches(self, epoch: int) -> list[list[int]]:
        if self._order is None or self._order[0] != epoch:
            seed = derive_seed("order", self._purpose, self._config.seed, epoch)
            generator = torch.Generator().manual_seed(seed)
            batches = []
            for shape in sorted(self._buckets):
                bucket = self._buckets[shape]
                mixed = [bucket[place] for place in torch.randperm(len(bucket), generator=generator).tolist()]
                size = self._config.train_batch_size
                batches += [mixed[start : start + size] for start in range(0, len(mixed), size)]
            order = torch.randperm(len(batches), generator=generator).tolist()
            self._order = (epoch, [batches[place] for place in order])
        return self._order[1]

    def _order_facts(self, epoch: int) -> dict[str, Any]:
        content = ":".join(picture.digest for picture in self.pictures)
        captions = "\n".join(picture.prompt for picture in self.pictures)
        return {
            "count": len(self.pictures),
            "content": f"{derive_seed(content):016x}",
            **({"captions": f"{derive_seed(captions):016x}"} if self._config.use_captions else {}),
            "batch_size": self._config.train_batch_size,
            # A torch with other permutations would silently repeat and skip pictures; the value detects such a torch.
            "order": f"{derive_seed(self._batches(epoch)):016x}",
        }
