"""Capture and restore the random states of a process: generators of Python, numpy, torch and the GPUs."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from gpu_client.training.errors import CheckpointWriteError

log = logging.getLogger("baton.training")


def capture_random() -> dict[str, Any]:
    """Capture the state of every global generator of this process, as plain data and tensors."""
    version, internal, gauss_next = random.getstate()
    captured: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss_next": gauss_next},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        import numpy as np

        state = np.random.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":
            raise CheckpointWriteError(
                f"numpy's global generator is {state['bit_generator']}, whose state cannot be stored",
                "Use the default global generator, or a numpy Generator of your own that you reseed by step",
            )
        captured["numpy"] = {
            "key": torch.from_numpy(state["state"]["key"].astype("int64")),
            "pos": int(state["state"]["pos"]),
            "has_gauss": int(state["has_gauss"]),
            "gauss": float(state["gauss"]),
        }
    # In a process without GPU use, the query would create a context on every device.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        captured["cuda"] = torch.cuda.get_rng_state_all()
    return captured


def restore_random(captured: Mapping[str, Any]) -> None:
    """Restore every global generator from `capture_random`'s result."""
    python = captured["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss_next"]))
    torch.set_rng_state(captured["torch"])
    if "numpy" in captured:
        import numpy as np

        numpy_state = captured["numpy"]
        np.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": numpy_state["key"].numpy().astype("uint32"), "pos": numpy_state["pos"]},
                "has_gauss": numpy_state["has_gauss"],
                "gauss": numpy_state["gauss"],
            }
        )
    cuda = captured.get("cuda", [])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(min(len(cuda), devices)):
        torch.cuda.set_rng_state(cuda[index], index)
    if cuda and len(cuda) != devices:
        log.warning(
            "the checkpoint holds random states of %d GPUs, this machine has %d: random numbers drawn on the GPU "
            "will differ from an uninterrupted run",
            len(cuda),
            devices,
        )
