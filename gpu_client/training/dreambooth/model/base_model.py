"""Load Stable Diffusion 1.x, 2.x and SDXL from a directory or the hub, under one interface."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined,unused-ignore]  # whichever the hub's library uses
from torch import nn
from transformers.utils import logging as transformers_logging

from gpu_client.training.checkpoint.checkpoint_directory import hash_file
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.data.pictures import Picture, Placement
from gpu_client.training.dreambooth.errors import HubError, ModelError
from gpu_client.training.dreambooth.model.device import WEIGHT_DTYPES

PIPELINES = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}
_KINDS = {"StableDiffusionPipeline": "sd", "StableDiffusionXLPipeline": "sdxl"}
_LATENT_CHANNELS = 4
_NAME_A_MODEL = "Name a directory in the format of diffusers, or a model on the hub as owner/name"
_LOGVAR_RANGE = (-30.0, 20.0)


@dataclass(frozen=True)
class Conditioning:
    """Embeddings of prompts for the UNet, on the CPU or the model's device."""

    tokens: torch.Tensor
    """Embeddings of tokens, of shape (prompts, tokens, width)."""
    pooled: torch.Tensor | None
    """Pooled embeddings of shape (prompts, width), for SDXL only."""


class Models:
    """Parts of one base model on one device. The training changes only the matrices of `Lora`."""

    def __init__(
        self, kind: str, pipeline: Any, device: torch.device, dtype: torch.dtype, fingerprint: Callable[[], str]
    ) -> None:
        """Prefer `load_models`."""
        self.kind = kind
        self.device = device
        self.dtype = dtype
        self._fingerprint = fingerprint
        self.unet: Any = pipeline.unet
        self.vae: Any = pipeline.vae
        names = ["", "_2"] if kind == "sdxl" else [""]
        self.text_encoders: dict[str, Any] = {f"text_encoder{n}": getattr(pipeline, f"text_encoder{n}") for n in names}
        self.tokenizers: list[Any] = [getattr(pipeline, f"tokenizer{n}") for n in names]
        self.sampling_config: dict[str, Any] = dict(pipeline.scheduler.config)
        self.noise_schedule: Any = DDPMScheduler.from_config(pipeline.scheduler.config)
        self.zero_negative = kind == "sdxl" and bool(pipeline.config.get("force_zeros_for_empty_prompt", True))
        for module in self.modules().values():
            module.requires_grad_(False)
            module.eval()
            module.to(device)

    @cached_property
    def fingerprint(self) -> str:
        """Compute the digest of the base model with its VAE, which reads every byte of both."""
        return self._fingerprint()

    def modules(self) -> dict[str, nn.Module]:
        """Return all parts by their names in pipelines."""
        return {"unet": self.unet, "vae": self.vae, **self.text_encoders}

    def autocast(self) -> torch.autocast:
        """Return a context for mixed precision, if configured."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    # --- pictures ----------------------------------------------------------------------------------------------------

    def encode_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode images from -1 to 1 into latent distributions: means and log variances in float32, along dim 1."""
        with torch.no_grad():
            moments = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.parameters
        return torch.as_tensor(moments).float()

    def draw_latents(self, moments: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw latents from latent distributions, scaled for the UNet."""
        mean, log_variance = moments.to(self.device).chunk(2, dim=1)
        deviation = torch.exp(0.5 * log_variance.clamp(*_LOGVAR_RANGE))
        noise = torch.randn(mean.shape, generator=generator).to(self.device)
        latents: torch.Tensor = (mean + deviation * noise) * self.vae.config.scaling_factor
        return latents

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents into images from 0 to 1 on the CPU, in float32."""
        scaled = latents.to(self.device, self.vae.dtype) / self.vae.config.scaling_factor
        with torch.no_grad():
            images = self.vae.decode(scaled).sample
        return (torch.as_tensor(images).float() / 2 + 0.5).clamp(0, 1).cpu()

    # --- prompts -----------------------------------------------------------------------------------------------------

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Embed prompts, with gradients if text encoders are trained."""
        parts: list[torch.Tensor] = []
        pooled: torch.Tensor | None = None
        for tokenizer, encoder in zip(self.tokenizers, self.text_encoders.values(), strict=True):
            tokens = tokenizer(
                list(prompts),
                padding="max_length",
                max_length=tokenizer.model_max_length,
                truncation=True,
                return_tensors="pt",
            )
            ids = tokens.input_ids.to(self.device)
            if self.kind == "sd":
                mask = tokens.attention_mask.to(self.device) if _uses_mask(encoder) else None
                return Conditioning(encoder(ids, attention_mask=mask)[0], None)
            output = encoder(ids, output_hidden_states=True)
            parts.append(output.hidden_states[-2])
            pooled = output[0]  # The projection of the last encoder.
        return Conditioning(torch.cat(parts, dim=-1), pooled)

    def negative_conditioning(self) -> Conditioning:
        """Return the negative embedding of guidance: the empty prompt, or zeros."""
        empty = self.encode_prompts([""])
        if not self.zero_negative or empty.pooled is None:
            return empty
        return Conditioning(torch.zeros_like(empty.tokens), torch.zeros_like(empty.pooled))

    # --- the UNet ----------------------------------------------------------------------------------------------------

    def predict(
        self,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Conditioning,
        items: Sequence[tuple[Picture, Placement]],
    ) -> torch.Tensor:
        """Predict with the UNet from noisy latents. SDXL also receives each image's size and crop."""
        added = None
        if conditioning.pooled is not None:
            sizes = [[*picture.size, place.top, place.left, *place.shape] for picture, place in items]
            times = torch.tensor(sizes, dtype=torch.float32, device=self.device)
            added = {"text_embeds": conditioning.pooled.to(self.device, self.dtype), "time_ids": times}
        tokens = conditioning.tokens.to(self.device, self.dtype)
        prediction = self.unet(noisy.to(self.dtype), timesteps, tokens, added_cond_kwargs=added).sample
        return torch.as_tensor(prediction)


def load_models(config: DreamboothConfig, device: torch.device, data_dir: Path) -> Models:
    """Load the base model onto `device` in the configured precision. Raises ModelError, HubError."""
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    dtype = WEIGHT_DTYPES[config.mixed_precision]
    base = _place("pretrained_model_name_or_path", config.pretrained_model_name_or_path, data_dir)
    kind = _kind_of(base, config)
    options: dict[str, Any] = {"dtype": dtype, "revision": config.revision}
    places: list[tuple[Path | str, str | None]] = [(base, config.revision)]
    parts: dict[str, Any] = {}
    if config.pretrained_vae_model_name_or_path is not None:
        vae = _place("pretrained_vae_model_name_or_path", config.pretrained_vae_model_name_or_path, data_dir)
        inside = isinstance(vae, Path) and not (vae / "config.json").exists()
        parts["vae"] = _load_vae(vae, dtype, subfolder="vae" if inside else None)
        places.append((vae, None))
    else:
        parts["vae"] = _load_vae(base, dtype, subfolder="vae", revision=config.revision, variant=config.variant)
    if kind == "sd":
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    else:
        parts |= {"add_watermarker": False}
    try:
        pipeline = PIPELINES[kind].from_pretrained(str(base), variant=config.variant, **options, **parts)
    except LOADING_ERRORS as error:
        raise _unloadable("base model", base, error) from error
    models = Models(kind, pipeline, device, dtype, lambda: "".join(_fingerprint(*place) for place in places))
    _check_trainable(models, base)
    return models


def check_base_model(config: DreamboothConfig, data_dir: Path) -> None:
    """Check that the base model exists and has the right kind, without loading it. Raises ModelError, HubError."""
    _kind_of(_place("pretrained_model_name_or_path", config.pretrained_model_name_or_path, data_dir), config)
    if config.pretrained_vae_model_name_or_path is not None:
        _place("pretrained_vae_model_name_or_path", config.pretrained_vae_model_name_or_path, data_dir)


def _place(field: str, name: str, data_dir: Path) -> Path | str:
    """Resolve a directory or a name on the hub. Raises ModelError for a missing directory."""
    try:
        here = Path(name).expanduser()
    except RuntimeError as error:  # An unknown user, or a user without a home directory.
        raise ModelError(f"{field}: {name} cannot be resolved ({error})", _NAME_A_MODEL) from error
    for path in (here, data_dir / name):
        if path.is_dir():
            return path.absolute()
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"{field}: {name} is no directory, neither here nor in {data_dir}", _NAME_A_MODEL)
    return name


def _kind_of(base: Path | str, config: DreamboothConfig) -> str:
    try:
        index = DiffusionPipeline.load_config(str(base), revision=config.revision)
    except LOADING_ERRORS as error:
        raise _unloadable("base model", base, error) from error
    found = str(index.get("_class_name"))
    kind = _KINDS.get(found)
    if kind is None:
        raise ModelError(f"{base} is a {found}", f"This script trains {' and '.join(_KINDS)}")
    if config.model_type not in ("auto", kind):
        raise ModelError(
            f"model_type is {config.model_type}, but {base} is a {found}", "Use the recipe for this kind of model"
        )
    return kind


def _load_vae(vae: Path | str, dtype: torch.dtype, **options: str | None) -> Any:
    where = {name: value for name, value in options.items() if value is not None}
    try:
        config = AutoencoderKL.load_config(str(vae), **{k: v for k, v in where.items() if k != "variant"})
        # SDXL's own VAE overflows in fp16, and its config has force_upcast; a corrected VAE lacks both.
        upcast = bool(config.get("force_upcast", True)) and dtype == torch.float16
        return AutoencoderKL.from_pretrained(str(vae), dtype=torch.float32 if upcast else dtype, **where)
    except LOADING_ERRORS as error:
        raise _unloadable("VAE", vae, error) from error


def _check_trainable(models: Models, base: Path | str) -> None:
    channels = models.unet.config.in_channels
    if channels != _LATENT_CHANNELS:
        raise ModelError(
            f"the UNet of {base} takes {channels} channels, not {_LATENT_CHANNELS}",
            "Inpainting, depth and other special models cannot be trained by this script",
        )
    if models.vae.config.latent_channels != _LATENT_CHANNELS:
        raise ModelError(
            f"the VAE makes {models.vae.config.latent_channels} channels of latents, the UNet takes {channels}",
            "Use a VAE that belongs to this kind of model",
        )
    if "beta_schedule" not in models.sampling_config:
        # DDPM's defaults would give wrong noise and a useless result.
        raise ModelError(
            f"the noise of {base} is that of an {models.sampling_config.get('_class_name')}",
            "Models whose noise is made as Stable Diffusion's, by betas, can be trained",
        )
    prediction = models.noise_schedule.config.prediction_type
    if prediction not in ("epsilon", "v_prediction"):
        raise ModelError(f"{base} predicts {prediction!r}", "Models that predict epsilon or v can be trained")


def _unloadable(part: str, place: Path | str, error: Exception) -> ModelError | HubError:
    if isinstance(place, str) and is_unreachable(error):
        # The error text of diffusers would blame the model.
        return HubError(
            f"the {part} {place} cannot be fetched: the hub cannot be reached, this machine's cache does not have it, "
            "and there is no directory of that name, here or among the inputs",
            "Wait, or name a directory in the format of diffusers that the machine has, or that is among the inputs",
        )
    reason = " ".join(str(error).split())
    return ModelError(
        f"the {part} {place} cannot be loaded ({reason})",
        "Name a complete directory in the format of diffusers, or a model on the hub that this machine can fetch",
    )


def _uses_mask(encoder: Any) -> bool:
    return bool(getattr(encoder.config, "use_attention_mask", False))


def _fingerprint(place: Path | str, revision: str | None) -> str:
    """Compute the fingerprint of a model.

    The fingerprint of a model on the hub is its commit, because a branch moves. The fingerprint of a directory covers
    all bytes, because merged LoRA weights differ only in the middle of a file.
    """
    hasher = hashlib.blake2b(digest_size=16)
    if isinstance(place, str):
        hasher.update(f"{place}@{_commit_of(place, revision) or revision}".encode())
        return hasher.hexdigest()
    for file in sorted(path for path in place.rglob("*") if path.is_file()):
        size_bytes, digest = hash_file(file)
        hasher.update(f"\0{file.relative_to(place).as_posix()}\0{size_bytes}\0{digest}".encode())
    return hasher.hexdigest()


def _commit_of(name: str, revision: str | None) -> str | None:
    """Return the commit in the hub's cache, which has the files in snapshots/<commit>."""
    for file in ("model_index.json", "config.json"):
        found = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent.name
    return None


_BUSY = frozenset((408, 425, 429))
"""Temporary refusals, after which a repeated request can succeed."""

LOADING_ERRORS = (OSError, ValueError, TypeError, RuntimeError, httpx.HTTPError)
"""Errors of loading a model, from files and from the hub."""


def is_unreachable(error: BaseException) -> bool:
    """Return True if the hub was unreachable or unable to answer, which says nothing about the model.

    diffusers wraps the errors of the hub's library; the outermost conclusive error of the chain counts.
    """
    found = False
    for one in _chain(error):
        if isinstance(one, HfHubHTTPError):
            status = one.response.status_code
            return status >= 500 or status in _BUSY
        if isinstance(one, (httpx.HTTPError, ConnectionError, TimeoutError)):
            return True
        # The hub's library raises this error without an answer and with an empty cache, but also above refusals, which
        # follow in the chain.
        found = found or isinstance(one, LocalEntryNotFoundError)
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes and contexts."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
