"""Store the settings that determine the result in every checkpoint, and detect changed settings at a resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_client.training.checkpoint.checkpoint_directory import parse_step
from gpu_client.training.checkpoint.state_files import stored_structure
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.data.batches import PictureBatches
from gpu_client.training.errors import CheckpointMismatchError

FREE = frozenset(
    {
        # Folders. The bytes of the images identify the images.
        *("instance_data_dir", "class_data_dir", "cache_dir"),
        # A requirement for the base model, not its identity.
        "model_type",
        # Intervals and display. Existing class images stay unchanged.
        *("checkpointing_steps", "sample_batch_size", "num_inference_steps", "guidance_scale"),
        *("validation_prompt", "validation_epochs", "num_validation_images"),
        # Time and memory.
        *("gradient_checkpointing", "cache_latents", "cache_text_embeddings", "deterministic", "cpu_threads"),
    }
)
"""Fields that may change between two attempts. All other fields determine the result."""

_LENGTH = ("max_train_steps", "num_train_epochs")
_OF_NO_LENGTH = frozenset({"constant", "constant_with_warmup"})
"""Schedulers whose learning rate does not depend on the number of steps."""
_SWITCHES = {
    "text_encoder_lr": "train_text_encoder",
    "bucket_step": "aspect_ratio_buckets",
    "unmasked_weight": "use_masks",
    "ema_decay": "use_ema",
    "class_prompt": "with_prior_preservation",
    "prior_loss_weight": "with_prior_preservation",
    "num_class_images": "with_prior_preservation",
}
"""Fields without effect while another field is off."""


class LearningSettings:
    """Settings of this run. total: the run's number of steps."""

    def __init__(self, config: DreamboothConfig, total: int) -> None:
        self._values: dict[str, Any] = {
            name: value for name, value in config.model_dump().items() if name not in FREE
        } | {"lora_alpha": config.lora_alpha if config.lora_alpha is not None else float(config.lora_rank)}
        self._total = total

    def as_values(self) -> dict[str, Any]:
        """Return the settings as plain data, for a checkpoint."""
        return {"values": dict(self._values), "total": self._total}

    def require_same(self, checkpoint: Path | None) -> None:
        """Compare with the settings of a checkpoint. Raises CheckpointMismatchError with every differing field.

        The method accepts an unreadable checkpoint; the restore reports the damage.
        """
        if checkpoint is None:
            return
        state = stored_structure(checkpoint, "instance")
        stored = state.get("settings") if isinstance(state, Mapping) else None
        if stored is None:
            return
        before: Mapping[str, Any] = stored["values"]
        changes = [_change(name, before, self._values) for name in self._changed(before)]
        why_not = self._why_of_no_other_length(stored["total"], parse_step(checkpoint))
        if why_not:
            lengths = [name for name in _LENGTH if before.get(name) != self._values[name]]
            # If only the images differ, `lengths` is empty; the restored order compares the images.
            changes += [f"{_change(name, before, self._values)} ({why_not})" for name in lengths]
        if changes:
            raise CheckpointMismatchError(
                f"{checkpoint} was written with other settings: {'; '.join(changes)}",
                "Restore the old values to continue, or train with the new ones from the start: in another "
                "--output-dir, or as a new job",
            )

    def _changed(self, before: Mapping[str, Any]) -> list[str]:
        """List the differing fields of both runs that have an effect in either run."""
        same_rank = before.get("lora_rank") == self._values["lora_rank"]
        return [
            name
            for name, value in self._values.items()
            if name not in _LENGTH
            and (name != "lora_alpha" or same_rank)  # The default of alpha is the rank.
            and name in before
            and before[name] != value
            and (name not in _SWITCHES or (before.get(_SWITCHES[name]) and self._values[_SWITCHES[name]]))
        ]

    def _why_of_no_other_length(self, total_before: int, done: int) -> str | None:
        if self._total == total_before:
            return None
        if self._total < done:
            return f"{done} steps are trained already"
        scheduler = self._values["lr_scheduler"]
        if scheduler in _OF_NO_LENGTH:
            return None
        return f"the learning rate of lr_scheduler {scheduler} follows from the number of steps"


class OrderWithSettings:
    """State of the session with the order of the instance's batches and the settings."""

    def __init__(self, batches: PictureBatches, settings: LearningSettings, checkpoint: Path | None) -> None:
        """Raises CheckpointMismatchError if `checkpoint`, from which the run resumes, has other settings."""
        settings.require_same(checkpoint)
        self._batches = batches
        self._settings = settings

    def state_dict(self) -> dict[str, Any]:
        """Return the batches' state and the settings."""
        return {**self._batches.state_dict(), "settings": self._settings.as_values()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the batches; `LearningSettings.require_same` checks the settings."""
        self._batches.load_state_dict(state)


def _change(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name} was {before.get(name)!r}, is {now[name]!r}"
