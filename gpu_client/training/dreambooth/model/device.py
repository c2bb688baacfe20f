"""Select the device, check the machine's capabilities before any load, and seed the generators."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
from collections.abc import Mapping

import numpy as np
import torch
from accelerate import PartialState

from gpu_client.training.dreambooth.config import DreamboothConfig
from gpu_client.training.dreambooth.errors import ConfigError

log = logging.getLogger("baton.training")

WEIGHT_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def select_device(variables: Mapping[str, str] = os.environ) -> torch.device:
    """Return the GPU, or the device that accelerate selects. Raises ConfigError in a run of several processes."""
    processes = int(variables.get("WORLD_SIZE") or 1)
    if processes > 1:
        raise ConfigError(
            [f"this run has {processes} processes: a LoRA is trained by one, `accelerate launch --num_processes 1`"]
        )
    device: torch.device = PartialState().device
    return device


def check_machine(config: DreamboothConfig, device: torch.device) -> None:
    """Check the machine's capabilities. Raises ConfigError."""
    problems = []
    on_gpu = device.type == "cuda"
    if config.mixed_precision == "bf16" and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        problems.append(
            f"mixed_precision: {torch.cuda.get_device_name(device)} has no bf16: use fp16, or a GPU of the Ampere "
            "generation or newer"
        )
    if config.use_8bit_adam and importlib.util.find_spec("bitsandbytes") is None:
        problems.append("use_8bit_adam: bitsandbytes is not installed here: install it, or set use_8bit_adam to false")
    elif config.use_8bit_adam and not on_gpu:
        problems.append("use_8bit_adam: it needs a CUDA device, and there is none")
    if problems:
        raise ConfigError(problems)
    if config.mixed_precision != "no" and not on_gpu:
        log.warning("mixed_precision %s saves no time on a CPU", config.mixed_precision)


def make_reproducible(config: DreamboothConfig, device: torch.device) -> None:
    """Seed every global generator, and request reproducible results."""
    for seed in (random.seed, torch.manual_seed):
        seed(config.seed)
    np.random.seed(config.seed % 2**32)
    if device.type == "cpu":
        torch.set_num_threads(config.cpu_threads)
    if device.type == "cpu" or config.deterministic:
        # cuBLAS reads the variable at the first matrix multiplication, therefore the variable is set here.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
