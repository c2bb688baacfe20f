"""Tensors that cost time to make and that training does not change: kept in the checkpoints for later attempts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class TensorCache:
    """Tensors by key, on the CPU. One of the session's states: an attempt finds what the one before it has made."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.made = 0
        """How many were made, not found."""

    def get(self, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor of this key, made now if it is new."""
        if key not in self._tensors:
            self._tensors[key] = make().detach().cpu().contiguous()
            self.made += 1
        return self._tensors[key]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors, in the order of their keys."""
        return dict(sorted(self._tensors.items()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another attempt has made."""
        self._tensors = dict(state)
