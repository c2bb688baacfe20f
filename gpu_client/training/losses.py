"""The losses that a Hugging Face Trainer trains on: it hands its callbacks only a mean of them, every so many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


class OddLosses:
    """A model's losses of one step, to find those that are NaN or infinite.

    A hook on the model sees the loss of each forward; one counts that gradients came to. Those of evaluations do not,
    nor does a loss that the Trainer replaces by one of its own.
    """

    def __init__(self) -> None:
        self._trained: list[torch.Tensor] = []
        self._handle: Any = None

    def watch(self, model: nn.Module) -> None:
        """From the next forward on, of this model alone; again for the same one costs nothing."""
        if self._handle is None:
            self._handle = model.register_forward_hook(self)

    def leave(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._trained.clear()

    def __call__(self, model: nn.Module, inputs: object, outputs: object) -> None:
        """The hook. Does nothing while torch.compile traces the model, whose graph it would break, nor in a copy."""
        if torch.compiler.is_compiling() or self._handle is None:
            return
        loss: object = None
        if isinstance(outputs, Mapping):
            loss = outputs.get("loss")
        elif isinstance(outputs, tuple | list) and outputs:
            loss = outputs[0]
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(partial(self._came, loss.detach()))

    def _came(self, loss: torch.Tensor, gradient: torch.Tensor) -> None:
        self._trained.append(loss)

    def forget(self) -> None:
        """A step is over whose loss is known otherwise: nothing is read."""
        self._trained.clear()

    def of_step(self) -> float | None:
        """The sum of those that are not finite since it was asked last; None where all are. Waits for the GPU."""
        odd = [value for value in map(_value, self._trained) if not math.isfinite(value)]
        self._trained.clear()
        return sum(odd) if odd else None

    def __reduce__(self) -> tuple[type[OddLosses], tuple[()]]:
        """A copy of the model, or a file of it, has a hook that keeps nothing, for nobody asks it."""
        return OddLosses, ()


def _value(loss: torch.Tensor) -> float:
    # Of a loss for each sample the mean: it is as little a number as any of them.
    return float(loss.mean().item())
