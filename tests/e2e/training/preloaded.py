"""Import the libraries of all training processes once, in the fork server."""

from __future__ import annotations

import gc

import accelerate  # noqa: F401
import lightning.pytorch  # noqa: F401
import safetensors.torch  # noqa: F401
import transformers.trainer  # noqa: F401

import gpu_client.training.digits  # noqa: F401

# The objects of these libraries live until the end, and each `gc.collect()` of the Trainer would visit all of them.
gc.freeze()
