"""Generate pictures from seeds; equal seeds give equal pictures on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler
from diffusers.utils import logging as diffusers_logging
from PIL import Image

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.model.base_model import PIPELINES, Conditioning, Models


def sample(
    models: Models, config: DreamboothConfig, prompt: Conditioning, negative: Conditioning, seeds: Sequence[int]
) -> list[Image.Image]:
    """Generate one picture of `config.resolution` pixels square per seed. The models must be in evaluation mode."""
    pipeline = _pipeline(models)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    embeddings = {
        "prompt_embeds": _repeated(models, prompt.tokens, len(seeds)),
        "negative_prompt_embeds": _repeated(models, negative.tokens, len(seeds)),
    }
    if prompt.pooled is not None and negative.pooled is not None:
        embeddings["pooled_prompt_embeds"] = _repeated(models, prompt.pooled, len(seeds))
        embeddings["negative_pooled_prompt_embeds"] = _repeated(models, negative.pooled, len(seeds))
    with torch.no_grad(), models.autocast():
        latents = pipeline(
            **embeddings,
            height=config.resolution,
            width=config.resolution,
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale,
            generator=generators,
            output_type="latent",
        ).images
    # At full size the decoder takes most of the memory, therefore latents are decoded one by one. The pipeline would
    # decode in the UNet's precision.
    return [_image(models.decode_latents(latent[None])[0]) for latent in latents]


def _pipeline(models: Models) -> Any:
    """Make a pipeline from the models' parts, for embedded prompts."""
    steps = DPMSolverMultistepScheduler.from_config(models.sampling_config)
    absent = {"safety_checker", "feature_extractor"} if models.kind == "sd" else set()
    extra = {"requires_safety_checker": False} if models.kind == "sd" else {"add_watermarker": False}
    names = {*models.text_encoders, *(name.replace("text_encoder", "tokenizer") for name in models.text_encoders)}
    before = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()  # Suppresses "Pipelines without text encoders ...".
    try:
        pipeline = PIPELINES[models.kind](
            vae=models.vae, unet=models.unet, scheduler=steps, **dict.fromkeys(absent | names), **extra
        )
    finally:
        diffusers_logging.set_verbosity(before)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _repeated(models: Models, embedding: torch.Tensor, times: int) -> torch.Tensor:
    return embedding.to(models.device, models.dtype).expand(times, *embedding.shape[1:])


def _image(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray((pixels.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
