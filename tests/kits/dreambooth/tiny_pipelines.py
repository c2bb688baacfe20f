"""Stable Diffusion and SDXL pipelines with a few hundred thousand random weights, tokenizers included.

They have the real ones' parts, shapes of interfaces and files on disk, so that a training script cannot tell them from
a base model; nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

SEED = 20
TEXT_WIDTH = 32
TOKENS = 77


def save_tiny_sd(directory: Path, *, prediction_type: str = "epsilon") -> Path:
    """Write a Stable Diffusion 1.x ("epsilon") or 2.x ("v_prediction") pipeline; returns `directory`."""
    torch.manual_seed(SEED)
    pipeline = StableDiffusionPipeline(
        vae=tiny_vae(force_upcast=False),
        text_encoder=CLIPTextModel(_text_config(TEXT_WIDTH)),
        tokenizer=tiny_tokenizer(),
        unet=_unet(cross_attention_dim=TEXT_WIDTH),
        scheduler=_scheduler(prediction_type),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(directory)
    return directory


def save_tiny_sdxl(directory: Path) -> Path:
    """Write an SDXL pipeline: two text encoders, and a UNet that is told sizes and crops; returns `directory`."""
    torch.manual_seed(SEED + 1)
    pooled = 24
    pipeline = StableDiffusionXLPipeline(
        vae=tiny_vae(force_upcast=True),
        text_encoder=CLIPTextModel(_text_config(TEXT_WIDTH)),
        text_encoder_2=CLIPTextModelWithProjection(_text_config(2 * TEXT_WIDTH, projection_dim=pooled)),
        tokenizer=tiny_tokenizer(),
        tokenizer_2=tiny_tokenizer(pad_token="!"),
        unet=_unet(
            cross_attention_dim=3 * TEXT_WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + pooled,
            use_linear_projection=True,
        ),
        scheduler=_scheduler("epsilon"),
        add_watermarker=False,
    )
    pipeline.save_pretrained(directory)
    return directory


def tiny_vae(*, force_upcast: bool) -> AutoencoderKL:
    """Make a VAE with latents 8 times smaller in 4 channels, as the real ones have."""
    return AutoencoderKL(
        block_out_channels=(8, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
        force_upcast=force_upcast,
    )


def tiny_tokenizer(pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """Make CLIP's byte-level tokenizer with single bytes as its only words."""
    characters = [chr(code) for code in range(33, 127)]
    words = [*characters, *(f"{character}</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        pad_token=pad_token,
        model_max_length=TOKENS,
    )


def _text_config(width: int, *, projection_dim: int = TEXT_WIDTH) -> CLIPTextConfig:
    tokenizer = tiny_tokenizer()
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        projection_dim=projection_dim,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _unet(*, cross_attention_dim: int, **more: object) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        # Each attention costs a training as much as two other blocks; the down block and the middle have one each.
        up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
        cross_attention_dim=cross_attention_dim,
        **more,
    )


def _scheduler(prediction_type: str) -> DDIMScheduler:
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        prediction_type=prediction_type,
        steps_offset=1,
    )
