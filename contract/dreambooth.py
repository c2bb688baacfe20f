"""The original Dreambooth orchestrator's job body."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from contract.base import KeyPrefix, WireModel


class DreamboothSubmit(WireModel):
    """The original orchestrator's job body: becomes the recipe `dreambooth-lora-sdxl@1`.

    Example: `{"instance_prompt": "timberdog", "instance_data_prefix": "timber/", "max_train_steps": 1400}`
    """

    instance_prompt: Annotated[str, Field(min_length=1, max_length=1024)]
    instance_data_prefix: Annotated[KeyPrefix, Field(min_length=1)]
    class_prompt: Annotated[str, Field(max_length=1024)] | None = None
    class_data_prefix: KeyPrefix | None = None
    max_train_steps: Annotated[int, Field(ge=1, le=10**7)] = 500
    num_train_epochs: Annotated[int, Field(ge=1, le=10**6)] = 1
    train_batch_size: Annotated[int, Field(ge=1, le=4096)] = 1
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 2e-6
    use_8bit_adam: bool = False
    mixed_precision: Literal["no", "fp16", "bf16"] = "fp16"
    resolution: Annotated[int, Field(ge=64, le=8192, multiple_of=8)] = 1024
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=4096)] = 4
    lr_scheduler: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
    ] = "constant"
    lr_warmup_steps: Annotated[int, Field(ge=0, le=10**7)] = 0
    train_text_encoder: bool = True
    text_encoder_lr: Annotated[float, Field(gt=0, le=10)] = 5e-6
    gradient_checkpointing: bool = False
    with_prior_preservation: bool = False
    prior_loss_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    num_class_images: Annotated[int, Field(ge=0, le=100_000)] = 100
    sample_batch_size: Annotated[int, Field(ge=1, le=1024)] = 4
    validation_prompt: Annotated[str, Field(max_length=1024)] | None = None
    validation_epochs: Annotated[int, Field(ge=1, le=10**6)] = 50
    checkpointing_steps: Annotated[int, Field(ge=1, le=10**7)] = 100
    center_crop: bool = False
    random_flip: bool = False
