"""Combine optimizer, learning rate schedule, loss scaling and moving average into one update."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.errors import ConfigError
from gpu_client.training.dreambooth.model.lora import Lora


class Optimization:
    """Update of the weights by gradients. `states` are for the session."""

    def __init__(self, lora: Lora, config: DreamboothConfig, total_steps: int, device: torch.device) -> None:
        """Make the optimizer. Raises ConfigError if the warm-up is longer than the training."""
        if config.lr_warmup_steps > total_steps:
            raise ConfigError(
                [f"lr_warmup_steps: the warm-up of {config.lr_warmup_steps} steps does not end within {total_steps}"]
            )
        self._config = config
        self._parameters = lora.parameters()
        self.optimizer = _optimizer(lora, config)
        self.scheduler = _scheduler(self.optimizer, config, total_steps)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.mixed_precision == "fp16")
        self._ema = _Average(self._parameters, decay=config.ema_decay) if config.use_ema else None

    @property
    def states(self) -> dict[str, Any]:
        """Return the states that change with an update, by name."""
        states: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return states if self._ema is None else {**states, "ema": self._ema}

    @property
    def learning_rate(self) -> float:
        """Return the UNet's learning rate of the next update."""
        return float(self.scheduler.get_last_lr()[0])

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one batch of the step."""
        self.scaler.scale(loss / self._config.gradient_accumulation_steps).backward()  # type: ignore[no-untyped-call,unused-ignore]

    def update(self) -> torch.Tensor:
        """Update the weights; return the norm of the gradients."""
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler.get_scale() >= scale:  # A lower scale means an overflow without a change of weights.
            self.scheduler.step()
            if self._ema is not None:
                self._ema.step(self._parameters)
        return norm

    def use_average(self) -> None:
        """Replace the weights by their average, if configured, until `use_weights`."""
        if self._ema is not None:
            self._ema.store(self._parameters)
            self._ema.copy_to(self._parameters)

    def use_weights(self) -> None:
        """Undo `use_average`."""
        if self._ema is not None:
            self._ema.restore(self._parameters)


class _Average(EMAModel):  # type: ignore[misc,unused-ignore]
    """Moving average of the weights, always on the weights' device."""

    shadow_params: list[torch.Tensor]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore an average on the weights' device; diffusers would leave the average on the CPU."""
        devices = [average.device for average in self.shadow_params]
        super().load_state_dict(state_dict)
        self.shadow_params = [average.to(device) for average, device in zip(self.shadow_params, devices, strict=True)]


def _optimizer(lora: Lora, config: DreamboothConfig) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": lora.parameters("unet"), "lr": config.learning_rate}]
    text = [name for name in lora.modules if name != "unet"]
    if text:
        groups.append({"params": lora.parameters(*text), "lr": config.text_encoder_lr})
    # The start of the training has checked that the library exists.
    kind: Any = import_module("bitsandbytes.optim").AdamW8bit if config.use_8bit_adam else torch.optim.AdamW
    optimizer: torch.optim.Optimizer = kind(
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.adam_weight_decay,
        eps=config.adam_epsilon,
    )
    return optimizer


def _scheduler(optimizer: torch.optim.Optimizer, config: DreamboothConfig, total_steps: int) -> Any:
    name = config.lr_scheduler
    if name == "constant" and config.lr_warmup_steps:
        name = "constant_with_warmup"  # diffusers' "constant" ignores the warm-up.
    elif name == "polynomial" and config.lr_warmup_steps == total_steps:
        # A warm-up over all steps makes all schedules equal, while polynomial would divide by zero remaining steps.
        name = "constant_with_warmup"
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=total_steps,
        num_cycles=config.lr_num_cycles,
        power=config.lr_power,
    )
