"""The names that training scripts, generators and readers import: `from baton import Session`.

Python loads each name from its module at its first use, so that `import baton.contract` loads neither torch nor
`gpu_client`: Lambda has only the contract.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_client.controller.learning_rate import LearningRate
    from gpu_client.ring.core.ring import make_ring, open_ring
    from gpu_client.ring.generating.writer import RingWriter
    from gpu_client.ring.reading.loader import RingLoader
    from gpu_client.ring.reading.mixed_loader import MixedLoader
    from gpu_client.ring.reading.reader import RingReader
    from gpu_client.ring.settings import RingSettings
    from gpu_client.ring.tools.recording import Recorded
    from gpu_client.ring.tools.wirehead import WireheadGenerator, WireheadManager
    from gpu_client.ring.tools.wirehead_datasets import MongoheadDataset, MongoTupleheadDataset
    from gpu_client.ring.tools.wirehead_log import SwapLog, WireheadLogger, WireheadSnapshot
    from gpu_client.training.errors import (
        CheckpointDamagedError,
        CheckpointMismatchError,
        CheckpointWriteError,
        SessionError,
    )
    from gpu_client.training.integrations.hf_callback import BatonCallback
    from gpu_client.training.integrations.lightning_callback import LightningCallback
    from gpu_client.training.integrations.trainer_shards import ShardBatches
    from gpu_client.training.resumable_loader import BatchSampler, ResumableLoader
    from gpu_client.training.session.session import Session

_MODULES = {
    # Training scripts.
    "Session": "gpu_client.training.session.session",
    "BatchSampler": "gpu_client.training.resumable_loader",
    "ResumableLoader": "gpu_client.training.resumable_loader",
    "LearningRate": "gpu_client.controller.learning_rate",
    "BatonCallback": "gpu_client.training.integrations.hf_callback",
    "ShardBatches": "gpu_client.training.integrations.trainer_shards",
    "LightningCallback": "gpu_client.training.integrations.lightning_callback",
    "SessionError": "gpu_client.training.errors",
    "CheckpointDamagedError": "gpu_client.training.errors",
    "CheckpointMismatchError": "gpu_client.training.errors",
    "CheckpointWriteError": "gpu_client.training.errors",
    # Generators of samples, and trainings that read them.
    "make_ring": "gpu_client.ring.core.ring",
    "open_ring": "gpu_client.ring.core.ring",
    "RingSettings": "gpu_client.ring.settings",
    "RingWriter": "gpu_client.ring.generating.writer",
    "RingReader": "gpu_client.ring.reading.reader",
    "RingLoader": "gpu_client.ring.reading.loader",
    "MixedLoader": "gpu_client.ring.reading.mixed_loader",
    "Recorded": "gpu_client.ring.tools.recording",
    # Wirehead's names, on a ring.
    "WireheadGenerator": "gpu_client.ring.tools.wirehead",
    "WireheadManager": "gpu_client.ring.tools.wirehead",
    "MongoheadDataset": "gpu_client.ring.tools.wirehead_datasets",
    "MongoTupleheadDataset": "gpu_client.ring.tools.wirehead_datasets",
    "WireheadLogger": "gpu_client.ring.tools.wirehead_log",
    "SwapLog": "gpu_client.ring.tools.wirehead_log",
    "WireheadSnapshot": "gpu_client.ring.tools.wirehead_log",
}

__all__ = [
    "BatchSampler",
    "BatonCallback",
    "CheckpointDamagedError",
    "CheckpointMismatchError",
    "CheckpointWriteError",
    "LearningRate",
    "LightningCallback",
    "MixedLoader",
    "MongoTupleheadDataset",
    "MongoheadDataset",
    "Recorded",
    "ResumableLoader",
    "RingLoader",
    "RingReader",
    "RingSettings",
    "RingWriter",
    "Session",
    "SessionError",
    "ShardBatches",
    "SwapLog",
    "WireheadGenerator",
    "WireheadLogger",
    "WireheadManager",
    "WireheadSnapshot",
    "make_ring",
    "open_ring",
]


def __getattr__(name: str) -> Any:
    """Load the public name `name` from its module. Raises AttributeError for any other name."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
