"""Goodput: the time of an attempt by purpose, and the sizes of its checkpoints."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from baton.contract.base import WireModel

Seconds = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**15)]


class Goodput(WireModel):
    """Time of an attempt so far by its use, and the bytes of its checkpoints.

    Example: `{"productive_s": 812.5, "repeated_s": 31.0, "stalled_s": 1.25, "transferring_s": 12.0, "idle_s": 9.5,
    "checkpoints_committed": 8, "raw_bytes": 1184000000, "reused_bytes": 396000000, "encoded_bytes": 610000000,
    "uploaded_bytes": 610000000}`
    """

    # A newer worker may send more fields; its heartbeats must not fail for them.
    model_config = ConfigDict(extra="ignore")

    productive_s: Seconds = 0.0
    """Training of steps that no attempt had reached before."""
    repeated_s: Seconds = 0.0
    """Training of steps that an earlier attempt had reached, behind its last checkpoint."""
    stalled_s: Seconds = 0.0
    """Pauses of the training while it took checkpoints."""
    transferring_s: Seconds = 0.0
    """Waiting for transfers of checkpoints, inputs and outputs."""
    idle_s: Seconds = 0.0
    """The remaining time, such as the start and the end of the training."""
    checkpoints_committed: Count = 0
    checkpoints_skipped: Count = 0
    raw_bytes: Count = 0
    """Bytes of the files of all committed checkpoints."""
    reused_bytes: Count = 0
    """Part of `raw_bytes` that is not stored again: bytes of an earlier chunk, or zeros."""
    encoded_bytes: Count = 0
    """Encoded size of the remaining bytes."""
    uploaded_bytes: Count = 0
    """Part of `encoded_bytes` that was uploaded; other jobs of the tenant may have stored the rest."""
