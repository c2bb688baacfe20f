"""Add the LoRA (trainable matrices beside the frozen weights), store its state, and export it for pipelines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict
from torch import nn

from gpu_client.training.checkpoint.safetensors_file import FileContents, write
from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.model.base_model import Models

WEIGHTS_FILE = "pytorch_lora_weights.safetensors"
UNET_TARGETS = ["to_k", "to_out.0", "to_q", "to_v"]
TEXT_TARGETS = ["k_proj", "out_proj", "q_proj", "v_proj"]
# Names in diffusers, in transformers since version 5, and in earlier versions of transformers.
_CHECKPOINTING = ("enable_gradient_checkpointing", "activation_checkpointing_enable", "gradient_checkpointing_enable")


class Lora:
    """Trainable weights, in float32. A state of the session."""

    def __init__(self, models: Models, config: DreamboothConfig) -> None:
        """Add the matrices to the models; their initial values come from torch's global generator."""
        self._alpha = config.lora_alpha if config.lora_alpha is not None else float(config.lora_rank)
        self._config = config
        self.modules: dict[str, Any] = {"unet": models.unet}
        if config.train_text_encoder:
            self.modules |= models.text_encoders
        self.trainable: dict[str, nn.Parameter] = {}
        """The matrices by their places. A search of all weights for them would take longer than their update."""
        self._targets = {name: UNET_TARGETS if name == "unet" else TEXT_TARGETS for name in self.modules}
        for name, module in self.modules.items():
            module.add_adapter(
                LoraConfig(
                    r=config.lora_rank,
                    lora_alpha=self._alpha,
                    lora_dropout=config.lora_dropout,
                    init_lora_weights="gaussian",
                    target_modules=self._targets[name],
                )
            )
            for place, parameter in module.named_parameters():
                if parameter.requires_grad:
                    # Half precision would lose updates of 1e-6.
                    parameter.data = parameter.data.float()
                    self.trainable[f"{name}.{place}"] = parameter
        if config.gradient_checkpointing:
            for module in self.modules.values():
                next(getattr(module, name) for name in _CHECKPOINTING if hasattr(module, name))()
        # Adapters begin in training mode, whose dropout would draw from the training's generator during the generation
        # of class images. A job with provided class images must train like a job that generates class images.
        self.training(False)

    def parameters(self, *names: str) -> list[nn.Parameter]:
        """Return the trainable parameters of the named modules; without names, of all modules."""
        return [parameter for name, parameter in self.trainable.items() if not names or name.partition(".")[0] in names]

    def training(self, on: bool) -> None:
        """Switch dropout and gradient checkpointing on or off."""
        for module in self.modules.values():
            module.train(on)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return every matrix by its place in the model."""
        return {name: parameter.detach() for name, parameter in self.trainable.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the matrices. Raises ValueError if places, ranks or shapes differ."""
        own = self.state_dict()
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())
            raise ValueError(f"the LoRA of the checkpoint has other places: {len(odd)} differ, {odd[0]} is the first")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"{name} is {list(state[name].shape)} in the checkpoint, {list(tensor.shape)} here: "
                    "lora_rank or the base model is another"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def export(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the file for `load_lora_weights`. metadata: texts for the file's header."""
        tensors: dict[str, torch.Tensor] = {}
        adapters: dict[str, Any] = {}
        for name, module in self.modules.items():
            layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(module))
            # CLIPTextModel lost a level in transformers 5, while loaders expect the level in files.
            above = "text_model." if name != "unet" and not hasattr(module, "text_model") else ""
            tensors |= {f"{name}.{above}{key}": tensor.detach().cpu() for key, tensor in layers.items()}
            facts = {"r": self._config.lora_rank, "lora_alpha": self._alpha, "target_modules": self._targets[name]}
            adapters |= {f"{name}.{key}": value for key, value in facts.items()}
        header = {**metadata, "lora_adapter_metadata": json.dumps(adapters, sort_keys=True)}
        # safetensors' own writer orders the header's texts arbitrarily; this writer makes equal files of equal LoRAs.
        write(path, FileContents(tensors, header))
