"""What the fork server loads once for all training processes."""

from __future__ import annotations

import gc

import accelerate  # noqa: F401
import lightning.pytorch  # noqa: F401
import safetensors.torch  # noqa: F401
import torch._dynamo  # noqa: F401 - otherwise the first optimizer of every process imports it, for seconds
import transformers.trainer  # noqa: F401

import gpu_client.training.digits  # noqa: F401

# The objects of these libraries live until the end, and each `gc.collect()` of the Trainer would visit all of them.
gc.freeze()
