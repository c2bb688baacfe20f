"""The configuration of a Dreambooth job as a typed object: every parameter with its bounds, checked as a whole.

The first groups are the fields of the original orchestrator's job, with its defaults; the bounds are ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpu_client.training.dreambooth.errors import ConfigError

PIXELS_PER_LATENT = 8
"""Images are this many times larger than their latents in both directions."""

Prompt = Annotated[str, Field(min_length=1, max_length=1024)]
Steps = Annotated[int, Field(ge=1, le=10**7)]
Rate = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Place = Annotated[str, Field(min_length=1, max_length=512)]
"""A directory, or a name on the hub."""


class DreamboothConfig(BaseModel):
    """The parameters of a Dreambooth LoRA training. A name that is not listed here is refused.

    The recipes `dreambooth-lora-sd` and `dreambooth-lora-sdxl` say the same for the control plane, which refuses at
    submit what would be refused here; tests/unit/contract/test_recipe_dreambooth.py compares the two.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    # What to learn.
    instance_prompt: Prompt
    """Names the subject: `a photo of sks dog`. Of every image, unless use_captions."""
    class_prompt: Prompt | None = None
    """Names its class: `a photo of a dog`."""
    instance_data_dir: str = "instance"
    """Where the images lie, in the data directory. If it does not exist there, the data directory itself is meant."""
    class_data_dir: str = "class"
    """Where images of the class lie, in the data directory, if there are any: what is missing is generated."""

    # The base model.
    pretrained_model_name_or_path: Place = "stabilityai/stable-diffusion-xl-base-1.0"
    """A directory (also one in the data directory) in the format of diffusers, or a name on the hub."""
    pretrained_vae_model_name_or_path: Place | None = None
    """A VAE to use instead of the base model's."""
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    variant: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    model_type: Literal["auto", "sd", "sdxl"] = "auto"
    """What the base model has to be; "auto" takes either."""

    # How long.
    max_train_steps: Steps = 500
    num_train_epochs: Annotated[int, Field(ge=1, le=10**6)] = 1
    """More than 1 replaces max_train_steps, and so does 1 where those are not given."""
    train_batch_size: Annotated[int, Field(ge=1, le=4096)] = 1
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=4096)] = 4
    """Batches to a step."""
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
    """Steps in which the learning rate rises from 0; honoured by every scheduler, "constant" too."""
    lr_num_cycles: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Of cosine_with_restarts."""
    lr_power: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """Of polynomial."""
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
    """Scales the LoRA by alpha / rank; lora_rank unless said."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    # The images.
    resolution: Annotated[int, Field(ge=64, le=8192)] = 1024
    center_crop: bool = False
    """Cut out the middle of what is not square; else a different part each time."""
    random_flip: bool = False
    aspect_ratio_buckets: bool = False
    """Keep aspect ratios: images of similar ones are trained together, with about resolution x resolution pixels."""
    bucket_step: Annotated[int, Field(ge=8, le=1024)] = 64
    """Widths and heights of buckets are multiples of it."""
    use_captions: bool = False
    """Each image has its own prompt, in `<name>.txt` beside it, or in captions.jsonl or metadata.jsonl."""
    use_masks: bool = False
    """`<name>.mask.png` beside an image says what counts (white) and what does not (black)."""
    unmasked_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How much a black pixel counts."""
    cache_latents: bool = False
    """Encode each image once, not in every epoch; later attempts find the latents in the checkpoint."""
    cache_text_embeddings: bool = False
    """Encode each prompt once, and keep the text encoders out of the GPU's memory."""

    # The loss.
    with_prior_preservation: bool = False
    prior_loss_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    num_class_images: Annotated[int, Field(ge=0, le=100_000)] = 100
    sample_batch_size: Annotated[int, Field(ge=1, le=1024)] = 4
    """Images that are generated at once."""
    snr_gamma: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Min-SNR weighting; 5 is usual."""
    use_ema: bool = False
    """Keep a moving average of the LoRA: it is what pictures are made with, and what is written in the end."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999

    # Pictures.
    validation_prompt: Prompt | None = None
    validation_epochs: Annotated[int, Field(ge=1, le=10**6)] = 50
    num_validation_images: Annotated[int, Field(ge=1, le=64)] = 4
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] = 25
    """Of validation pictures and class images."""
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = 7.5

    # The machine.
    seed: Annotated[int, Field(ge=0, le=2**53 - 1)] = 0
    """What JSON's numbers hold exactly."""
    cache_dir: str | None = None
    """Generated class images are kept here for later jobs on this machine; ~/.cache/baton/dreambooth unless said,
    nowhere if empty."""
    deterministic: bool = False
    """Ask CUDA for reproducible results too, at some cost. On a CPU they always are."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads where the training runs on a CPU; results depend on their number."""

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Self:
        """The configuration from a job's parameters. Raises ConfigError naming every fault."""
        try:
            return cls.model_validate(dict(parameters))
        except ValidationError as error:
            raise ConfigError([fault for found in error.errors() for fault in _faults(found)]) from error

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, given: Any) -> Any:
        """What is null was not given: the original's job has a column for each field. And YAML reads `no` as false."""
        if not isinstance(given, dict):
            return given
        said = {name: value for name, value in given.items() if value is not None}
        return said | {"mixed_precision": "no"} if said.get("mixed_precision") is False else said

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
        """How many steps are trained. A step may reach into the next epoch: none is shorter than the others."""
        if not self._by_epochs:
            return self.max_train_steps
        return -(-self.num_train_epochs * batches_per_epoch // self.gradient_accumulation_steps)


_POLYNOMIAL_END = 1e-7


class _InconsistentError(ValueError):
    """Fields that are allowed one by one contradict each other: "fields: reason" of each contradiction."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def read_config_file(path: Path) -> dict[str, Any]:
    """The parameters in a JSON or YAML file. Raises ConfigError."""
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
