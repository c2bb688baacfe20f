"""The settings that decide what is learned, noted in every checkpoint: nobody goes on with others by accident."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_client.training.checkpoint.checkpoint_directory import step_of
from gpu_client.training.checkpoint.state_files import stored_structure
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.data.batches import PictureBatches
from gpu_client.training.errors import CheckpointMismatchError

FREE = frozenset(
    {
        # Where things lie. That the images are the same is known by their bytes.
        *("instance_data_dir", "class_data_dir", "cache_dir"),
        # What is asked of a base model, not which one.
        "model_type",
        # How often something is kept or shown. Class images that are made already stay as they are.
        *("checkpointing_steps", "sample_batch_size", "num_inference_steps", "guidance_scale"),
        *("validation_prompt", "validation_epochs", "num_validation_images"),
        # Time and memory.
        *("gradient_checkpointing", "cache_latents", "cache_text_embeddings", "deterministic", "cpu_threads"),
    }
)
"""Fields that may change between two attempts. The others decide what is learned."""

_LENGTH = ("max_train_steps", "num_train_epochs")
_OF_NO_LENGTH = frozenset({"constant", "constant_with_warmup"})
"""Schedulers whose learning rate does not depend on how many steps there will be."""
_SWITCHES = {
    "text_encoder_lr": "train_text_encoder",
    "bucket_step": "aspect_ratio_buckets",
    "unmasked_weight": "use_masks",
    "ema_decay": "use_ema",
    "class_prompt": "with_prior_preservation",
    "prior_loss_weight": "with_prior_preservation",
    "num_class_images": "with_prior_preservation",
}
"""Fields that mean nothing while another one is off."""


class LearningSettings:
    """What this run would learn by. total: its steps."""

    def __init__(self, config: DreamboothConfig, total: int) -> None:
        self._values: dict[str, Any] = {
            name: value for name, value in config.model_dump().items() if name not in FREE
        } | {"lora_alpha": config.lora_alpha if config.lora_alpha is not None else float(config.lora_rank)}
        self._total = total

    def noted(self) -> dict[str, Any]:
        """As it stands in a checkpoint: plain data."""
        return {"values": dict(self._values), "total": self._total}

    def require_same(self, checkpoint: Path | None) -> None:
        """Raises CheckpointMismatchError naming every field in which the run that wrote the checkpoint differs.

        A checkpoint that cannot be read passes here: the restore reports the damage.
        """
        if checkpoint is None:
            return
        state = stored_structure(checkpoint, "instance")
        noted = state.get("settings") if isinstance(state, Mapping) else None
        if noted is None:
            return
        before: Mapping[str, Any] = noted["values"]
        changes = [_change(name, before, self._values) for name in self._changed(before)]
        why_not = self._why_of_no_other_length(noted["total"], step_of(checkpoint))
        if why_not:
            lengths = [name for name in _LENGTH if before.get(name) != self._values[name]]
            # None differs where there are other images: those are compared when the order is restored.
            changes += [f"{_change(name, before, self._values)} ({why_not})" for name in lengths]
        if changes:
            raise CheckpointMismatchError(
                f"{checkpoint} was written with other settings: {'; '.join(changes)}",
                "Put the old values back to go on with it, or train with the new ones from the start: in another "
                "--output-dir, or as a new job",
            )

    def _changed(self, before: Mapping[str, Any]) -> list[str]:
        """The fields that both know, that differ, and that mean something in either run."""
        same_rank = before.get("lora_rank") == self._values["lora_rank"]
        return [
            name
            for name, value in self._values.items()
            if name not in _LENGTH
            and (name != "lora_alpha" or same_rank)  # it follows from the rank where nobody says it
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
    """The order of the instance's batches as one of the session's states, with the settings noted in it.

    They are no state of their own: an older version on another machine would refuse a state that it does not know.
    """

    def __init__(self, batches: PictureBatches, settings: LearningSettings, checkpoint: Path | None) -> None:
        """Raises CheckpointMismatchError for a checkpoint, the one to continue from, that was written with others."""
        settings.require_same(checkpoint)
        self._batches = batches
        self._settings = settings

    def state_dict(self) -> dict[str, Any]:
        """The batches' state, and the settings."""
        return {**self._batches.state_dict(), "settings": self._settings.noted()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The batches' part of it; see `LearningSettings.require_same` for the other."""
        self._batches.load_state_dict(state)


def _change(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name} was {before.get(name)!r}, is {now[name]!r}"
