"""Compute or read from a cache the inputs of the UNet: latents of pictures and embeddings of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.data.batches import PictureBatches
from gpu_client.training.dreambooth.data.pictures import Picture, Placement
from gpu_client.training.dreambooth.model.base_model import Conditioning, Models


class TensorCache:
    """Cache of tensors by key, on the CPU. A state of the session, which later attempts restore."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.made = 0
        """Number of tensors that this attempt has computed."""

    def get(self, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of a key; compute a missing tensor by `make`."""
        if key not in self._tensors:
            self._tensors[key] = make().detach().cpu().contiguous()
            self.made += 1
        return self._tensors[key]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all tensors, sorted by key."""
        return dict(sorted(self._tensors.items()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tensors of an earlier attempt."""
        self._tensors = dict(state)


class Encoder:
    """Frozen encoders of the model, with a cache."""

    def __init__(self, models: Models, config: DreamboothConfig) -> None:
        self.cache = TensorCache()
        self._models = models
        self._config = config

    def fill(
        self, batches: Iterable[PictureBatches], prompts: Sequence[str], report_phase: Callable[[str, int, int], object]
    ) -> None:
        """Fill the configured caches, and move text encoders without further use to the CPU.

        `report_phase` receives the name of the phase, the finished and the total number.
        """
        if self._config.cache_latents:
            items = [
                (picture, placement)
                for source in batches
                for number, picture in enumerate(source.pictures)
                for placement in source.placements(number)
            ]
            for number, item in enumerate(items, 1):
                self.moments([item])
                report_phase("cached_latents", number, len(items))
        if self._config.cache_text_embeddings:
            for number, prompt in enumerate(prompts, 1):
                self.conditioning([prompt])
                report_phase("cached_prompts", number, len(prompts))
            self.negative()
            for encoder in self._models.text_encoders.values():
                encoder.to("cpu")

    def moments(self, items: Sequence[tuple[Picture, Placement]]) -> torch.Tensor:
        """Return the latent distributions of pictures; see `Models.encode_pixels`."""
        if not self._config.cache_latents:
            return self._encode(items)
        return torch.cat([self.cache.get(_latent_key(*item), partial(self._encode, [item])) for item in items])

    def conditioning(self, prompts: Sequence[str]) -> Conditioning:
        """Return the embeddings of prompts, with gradients if text encoders are trained and gradients are on."""
        if not self._config.cache_text_embeddings:
            with self._models.autocast(), torch.set_grad_enabled(torch.is_grad_enabled() and self._trains_text):
                return self._models.encode_prompts(prompts)
        parts = [self._cached(_prompt_key(prompt), prompt) for prompt in prompts]
        pooled = [part.pooled for part in parts if part.pooled is not None]
        return Conditioning(torch.cat([part.tokens for part in parts]), torch.cat(pooled) if pooled else None)

    def negative(self) -> Conditioning:
        """Return the negative embedding of guidance."""
        if self._config.cache_text_embeddings:
            return self._cached("negative", None)
        with torch.no_grad(), self._models.autocast():
            return self._models.negative_conditioning()

    @property
    def _trains_text(self) -> bool:
        return self._config.train_text_encoder

    def _encode(self, items: Sequence[tuple[Picture, Placement]]) -> torch.Tensor:
        return self._models.encode_pixels(torch.stack([placement.pixels(picture) for picture, placement in items]))

    def _cached(self, key: str, prompt: str | None) -> Conditioning:
        made: list[Conditioning] = []

        def make() -> Conditioning:
            if not made:
                with torch.no_grad(), self._models.autocast():
                    if prompt is None:
                        made.append(self._models.negative_conditioning())
                    else:
                        made.append(self._models.encode_prompts([prompt]))
            return made[0]

        tokens = self.cache.get(f"{key}.tokens", lambda: make().tokens)
        if self._models.kind == "sd":
            return Conditioning(tokens, None)

        def make_pooled() -> torch.Tensor:
            pooled = make().pooled
            assert pooled is not None  # SDXL's second encoder has a projection.
            return pooled

        return Conditioning(tokens, self.cache.get(f"{key}.pooled", make_pooled))


def _latent_key(picture: Picture, placement: Placement) -> str:
    height, width = placement.shape
    return f"latents.{picture.digest}.{width}x{height}{'.mirrored' if placement.flip else ''}"


def _prompt_key(prompt: str) -> str:
    return f"prompt.{hashlib.blake2b(prompt.encode(), digest_size=16).hexdigest()}"
