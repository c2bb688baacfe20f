"""The original Dreambooth orchestrator's job body, and the shapes of its answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from baton.contract.base import AnswerModel, JobId, JsonObject, KeyPrefix, WireModel
from baton.contract.jobs.job import JobState

Timestamp = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}$")]
"""In UTC, as SQLite's `datetime('now')` writes it."""


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


class OriginalJob(AnswerModel):
    """A job for a client of the original orchestrator: its instants are text. The other fields are those of JobView.

    Example: `{"id": "146683a1-...", "status": "pending", "created_at": "2024-02-27 18:31:14", "started_at": null, ...}`
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    id: JobId
    status: JobState
    created_at: Timestamp
    started_at: Timestamp | None
    completed_at: Timestamp | None
    canceled_at: Timestamp | None
    failed_at: Timestamp | None


class OriginalEvent(AnswerModel):
    """An event for a client of the original orchestrator. The other fields are those of EventView.

    Example: `{"id": "146683a1-...#1", "job_id": "146683a1-...", "event_type": "created", "event_data": {}, ...}`
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    id: str
    job_id: JobId
    event_type: str
    event_data: JsonObject
    timestamp: Timestamp
