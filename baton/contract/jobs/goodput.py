"""Where the time of an attempt goes, and what its checkpoints weigh."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from baton.contract.base import WireModel

Seconds = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**15)]


class Goodput(WireModel):
    """Where the time of an attempt went so far, and its checkpoints' bytes.

    Example: `{"productive_s": 812.5, "repeated_s": 31.0, "stalled_s": 1.25, "transferring_s": 12.0, "idle_s": 9.5,
    "checkpoints_committed": 8, "raw_bytes": 1184000000, "reused_bytes": 396000000, "encoded_bytes": 610000000,
    "uploaded_bytes": 610000000}`
    """

    # A later worker may tell more: no heartbeat is refused for that.
    model_config = ConfigDict(extra="ignore")

    productive_s: Seconds = 0.0
    """Training of steps that no attempt had reached before."""
    repeated_s: Seconds = 0.0
    """Training of steps that an earlier attempt had reached, behind its last checkpoint."""
    stalled_s: Seconds = 0.0
    """The training stood still to take checkpoints."""
    transferring_s: Seconds = 0.0
    """The training waited for bytes: checkpoint, inputs, outputs."""
    idle_s: Seconds = 0.0
    """The rest: the start of the training, the end."""
    checkpoints_committed: Count = 0
    checkpoints_skipped: Count = 0
    raw_bytes: Count = 0
    """Of all committed checkpoints' files."""
    reused_bytes: Count = 0
    """Of these, what is not stored anew: an earlier checkpoint has it, the same one has it twice, or it is zeros."""
    encoded_bytes: Count = 0
    """What the rest has become."""
    uploaded_bytes: Count = 0
    """Of these, what was sent: the tenant's other jobs may have stored the same."""
