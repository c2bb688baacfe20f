"""Check the parameters of a Dreambooth job, one by one and as a whole.

The parameters of the original orchestrator's job keep their names and, except the learning rate, their defaults. The
bounds are Baton's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpu_client.training.dreambooth.errors import ConfigError

PIXELS_PER_LATENT = 8
"""Ratio of an image's side to the side of its latent."""

Prompt = Annotated[str, Field(min_length=1, max_length=1024)]
Steps = Annotated[int, Field(ge=1, le=10**7)]
Rate = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Place = Annotated[str, Field(min_length=1, max_length=512)]
"""Directory, or name on the hub."""


class DreamboothConfig(BaseModel):
    """Parameters of a Dreambooth LoRA training; other names are refused.

    The recipes `dreambooth-lora-sd` and `dreambooth-lora-sdxl` repeat the bounds: a published version must
    not change with this class, and the control plane, which refuses at submit, has no code of the training.
    tests/unit/contract/test_recipe_dreambooth.py compares the newest versions with this class.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    # The subject.
    instance_prompt: Prompt
    """Prompt that names the subject, such as `a photo of sks dog`; for every image, unless use_captions is set."""
    class_prompt: Prompt | None = None
    """Prompt that names the subject's class, such as `a photo of a dog`."""
    instance_data_dir: str = "instance"
    """Folder of the images in the data directory; the data directory itself, if the folder does not exist."""
    class_data_dir: str = "class"
    """Folder of the class images in the data directory; the training generates missing images."""

    # The base model.
    pretrained_model_name_or_path: Place = "stabilityai/stable-diffusion-xl-base-1.0"
    """Directory in the format of diffusers (possibly in the data directory), or name on the hub."""
    pretrained_vae_model_name_or_path: Place | None = None
    """VAE that replaces the base model's VAE."""
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    variant: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    model_type: Literal["auto", "sd", "sdxl"] = "auto"
    """Required kind of the base model; "auto" accepts both kinds."""

    # The length.
    max_train_steps: Steps = 500
    num_train_epochs: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Number of epochs. A value above 1 replaces max_train_steps, and so does an explicit 1 without max_train_steps."""
    train_batch_size: Annotated[int, Field(ge=1, le=4096)] = 1
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=4096)] = 4
    """Batches per optimizer step."""
    checkpointing_steps: Steps = 100

    # The optimizer.
    learning_rate: Rate = 1e-4
    text_encoder_lr: Rate = 5e-6
    train_text_encoder: bool = True
    use_8bit_adam: bool = False
    lr_scheduler: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
    ] = "constant"
    lr_warmup_steps: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Steps in which the learning rate rises from 0, with every scheduler, including "constant"."""
    lr_num_cycles: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Cycles of cosine_with_restarts."""
    lr_power: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """Power of polynomial."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_weight_decay: Annotated[float, Field(ge=0, le=10)] = 1e-2
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0, le=10**6)] = 1.0
    mixed_precision: Literal["no", "fp16", "bf16"] = "fp16"
    gradient_checkpointing: bool = False

    # The LoRA.
    lora_rank: Annotated[int, Field(ge=1, le=1024)] = 4
    lora_alpha: Annotated[float, Field(gt=0, le=65536)] | None = None
    """Alpha of the LoRA, which is scaled by alpha / rank; None: lora_rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    # The images.
    resolution: Annotated[int, Field(ge=64, le=8192)] = 1024
    center_crop: bool = False
    """True to crop the middle of an image, False to crop a random part at each use."""
    random_flip: bool = False
    aspect_ratio_buckets: bool = False
    """True to keep aspect ratios: a batch has images of similar ratio, of about resolution x resolution pixels."""
    bucket_step: Annotated[int, Field(ge=8, le=1024)] = 64
    """Divisor of the widths and heights of buckets."""
    use_captions: bool = False
    """True to read each image's own prompt from `<name>.txt` beside the image, captions.jsonl or metadata.jsonl."""
    use_masks: bool = False
    """True to weigh the loss by `<name>.mask.png` beside each image: white by 1, black by unmasked_weight."""
    unmasked_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of a black mask pixel."""
    cache_latents: bool = False
    """True to encode each image once instead of in every epoch; the checkpoint keeps the latents for later attempts."""
    cache_text_embeddings: bool = False
    """True to encode each prompt once, and to keep the text encoders out of the GPU's memory."""

    # The loss.
    with_prior_preservation: bool = False
    prior_loss_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    num_class_images: Annotated[int, Field(ge=0, le=100_000)] = 100
    sample_batch_size: Annotated[int, Field(ge=1, le=1024)] = 4
    """Number of class images generated at once."""
    snr_gamma: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Gamma of Min-SNR weighting; 5 is usual."""
    use_ema: bool = False
    """True to keep a moving average of the LoRA, from which validation pictures and the result are made."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999

    # Pictures.
    validation_prompt: Prompt | None = None
    validation_epochs: Annotated[int, Field(ge=1, le=10**6)] = 50
    num_validation_images: Annotated[int, Field(ge=1, le=64)] = 4
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 25
    """Denoising steps of validation pictures and class images."""
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 7.5

    # The machine.
    seed: Annotated[int, Field(ge=0, le=2**53 - 1)] = 0
    """Seed of all random numbers; a JSON number represents every value up to the bound exactly."""
    cache_dir: str | None = None
    """Folder that keeps generated class images for later jobs; None: ~/.cache/baton/dreambooth; "": no folder."""
    deterministic: bool = False
    """True to make CUDA's results reproducible, at some cost. Results of a CPU are always reproducible."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of a training on a CPU; the results depend on the number."""

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Self:
        """Make the configuration from a job's parameters. Raises ConfigError with every fault."""
        try:
            return cls.model_validate(dict(parameters))
        except ValidationError as error:
            raise ConfigError([fault for found in error.errors() for fault in _faults(found)]) from error

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, given: Any) -> Any:
        """Drop nulls, because the original's job has every field; read false as "no", which YAML reads as false."""
        if not isinstance(given, dict):
            return given
        given_values = {name: value for name, value in given.items() if value is not None}
        return (
            given_values | {"mixed_precision": "no"} if given_values.get("mixed_precision") is False else given_values
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        faults = [f"{fields}: {reason}" for wrong, fields, reason in self._contradictions() if wrong]
        if faults:
            raise _InconsistentError(faults)
        return self

    def _contradictions(self) -> list[tuple[bool, str, str]]:
        random_crop = not (self.center_crop or self.aspect_ratio_buckets)
        return [
            (
                self.resolution % PIXELS_PER_LATENT != 0,
                "resolution",
                f"{self.resolution} is not divisible by {PIXELS_PER_LATENT}",
            ),
            (
                self.bucket_step % PIXELS_PER_LATENT != 0,
                "bucket_step",
                f"{self.bucket_step} is not divisible by {PIXELS_PER_LATENT}",
            ),
            (
                self.aspect_ratio_buckets and self.bucket_step > self.resolution,
                "bucket_step, resolution",
                f"a bucket_step of {self.bucket_step} leaves no bucket for a resolution of {self.resolution}",
            ),
            (
                self.with_prior_preservation and not (self.class_prompt or "").strip(),
                "class_prompt",
                "with_prior_preservation needs a prompt that names the class",
            ),
            (
                self.with_prior_preservation and self.num_class_images == 0,
                "num_class_images",
                "with_prior_preservation needs at least 1",
            ),
            (
                self.cache_text_embeddings and self.train_text_encoder,
                "cache_text_embeddings, train_text_encoder",
                "embeddings that are cached cannot be trained: choose one of the two",
            ),
            (
                self.cache_latents and random_crop,
                "cache_latents, center_crop",
                "a cached latent is always the same crop: set center_crop or aspect_ratio_buckets",
            ),
            (
                not self._by_epochs and self.lr_warmup_steps > self.max_train_steps,
                "lr_warmup_steps, max_train_steps",
                f"the warm-up of {self.lr_warmup_steps} steps does not end within {self.max_train_steps}",
            ),
            (
                self.lr_scheduler == "polynomial" and self.learning_rate <= _POLYNOMIAL_END,
                "learning_rate, lr_scheduler",
                f"polynomial ends at {_POLYNOMIAL_END}: the learning rate must be larger",
            ),
        ]

    @property
    def _by_epochs(self) -> bool:
        given = self.model_fields_set
        return self.num_train_epochs > 1 or ("num_train_epochs" in given and "max_train_steps" not in given)

    def total_steps(self, batches_per_epoch: int) -> int:
        """Return the number of steps. All steps have equally many batches; a step may reach into the next epoch."""
        if not self._by_epochs:
            return self.max_train_steps
        return -(-self.num_train_epochs * batches_per_epoch // self.gradient_accumulation_steps)


_POLYNOMIAL_END = 1e-7


class _InconsistentError(ValueError):
    """Error of contradicting fields; `faults` contains "fields: reason" of each contradiction."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the parameters in a JSON or YAML file. Raises ConfigError."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        try:
            parameters = json.loads(text)
        except ValueError:
            parameters = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"{path}: cannot be read ({error})"]) from error
    if not isinstance(parameters, dict):
        raise ConfigError([f"{path}: holds no mapping of names to values"])
    return parameters


def _faults(error: Any) -> list[str]:
    inconsistent = error.get("ctx", {}).get("error")
    if isinstance(inconsistent, _InconsistentError):
        return inconsistent.faults
    reason = str(error["msg"])
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        reason = "is no parameter of this training"
    elif error["type"] == "missing":
        reason = "is needed"
    return [f"{place}: {reason}" if place else reason]
