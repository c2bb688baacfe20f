"""What runs inside the training process: the session, the resumable data order, the example scripts.

`from gpu_client.training import Session` is the whole entry point. Names are loaded on first use, so that
`gpu_client.training.channel` can be imported where torch is not installed (the agent's tests do).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_client.training.callback import BatonCallback
    from gpu_client.training.errors import (
        CheckpointDamagedError,
        CheckpointMismatchError,
        CheckpointWriteError,
        SessionError,
    )
    from gpu_client.training.sampler import BatchSampler, ResumableLoader
    from gpu_client.training.session import Session

__all__ = [
    "BatchSampler",
    "BatonCallback",
    "CheckpointDamagedError",
    "CheckpointMismatchError",
    "CheckpointWriteError",
    "ResumableLoader",
    "Session",
    "SessionError",
]

_HOMES = {
    "BatchSampler": "sampler",
    "BatonCallback": "callback",
    "CheckpointDamagedError": "errors",
    "CheckpointMismatchError": "errors",
    "CheckpointWriteError": "errors",
    "ResumableLoader": "sampler",
    "Session": "session",
    "SessionError": "errors",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in, at its first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
