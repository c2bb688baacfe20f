"""Define the limits of a job: required hardware, retries, times, retention of checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton.contract.base import MAX_STEP, EpochSeconds, MetricName, WireModel
from baton.contract.worker.lease_grace import LEASE_INTERVALS, SWEEP_INTERVAL_S, revocation_grace_s


class Requirements(WireModel):
    """Resources that a worker must declare to receive the job. Unset means no requirement.

    Example: `{"min_vram_gib": 24, "gpu_models": ["RTX 4090", "A100"]}`
    """

    min_vram_gib: Annotated[float, Field(ge=0, le=4096)] | None = None
    min_disk_gib: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    min_gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    gpu_models: Annotated[list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=32)] = []
    image: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")] | None = None
    """Container image that the worker must declare. Without tag or digest, every image of that name matches."""


class Retention(WireModel):
    """Which committed checkpoints are kept. The newest one always is.

    Example: `{"keep_last": 3, "keep_every_steps": 1000, "keep_best_metric": "loss", "keep_best_mode": "min"}`
    """

    keep_last: Annotated[int, Field(ge=1, le=1000)] = 3
    keep_every_steps: Annotated[int, Field(ge=1, le=MAX_STEP)] | None = None
    keep_best_metric: MetricName | None = None
    keep_best_mode: Literal["min", "max"] = "min"


class Policy(WireModel):
    """Limits and patience. Lost machines, failures and node faults are counted apart.

    Example: `{"max_failures": 3, "max_runtime_s": 86400}`
    """

    max_failures: Annotated[int, Field(ge=1, le=1000)] = 3
    max_interruptions: Annotated[int, Field(ge=1, le=100_000)] = 100
    max_fruitless_interruptions: Annotated[int, Field(ge=1, le=100_000)] = 10
    """Lost machines in a row without a new checkpoint. A job that reaches the limit probably kills its machines."""
    max_node_faults: Annotated[int, Field(ge=1, le=1000)] = 10
    backoff_s: Annotated[int, Field(ge=0, le=86_400)] = 15
    """Pause after the first failure; doubles with each further failure, up to an hour."""
    avoid_machine_s: Annotated[int, Field(ge=0, le=30 * 86_400)] = 86_400
    """Time for which a machine that failed the job cannot claim the job again."""
    max_runtime_s: Annotated[int, Field(ge=1, le=365 * 86_400)] | None = None
    """Running time, summed over all attempts, after which the job fails."""
    deadline_at: EpochSeconds | None = None
    heartbeat_interval_s: Annotated[int, Field(ge=1, le=600)] = 30
    """The lease lasts three intervals."""
    no_progress_timeout_s: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """The worker fails the attempt if neither the step nor the training's reported progress between steps has advanced
    for this long. Unset: on a rented machine the worker restarts a training that stands still by the preset
    `preset-stuck` and prints nothing, once; then it fails the attempt. 0: never."""
    stop_grace_s: Annotated[int, Field(ge=0, le=3600)] = 30
    """Time between the request to stop and SIGKILL."""
    checkpoint_every: Literal["auto"] | Annotated[int, Field(ge=5, le=86_400)] | None = None
    """Seconds after which the worker asks the training for a checkpoint. `auto` computes the interval from the measured
    costs of checkpoints and interruptions. Unset: only the training decides."""
    retention: Retention = Retention()

    @property
    def max_silence_s(self) -> int:
        """Return the age in seconds of the last heartbeat at which the sweeper takes the job from its machine."""
        lease_s = LEASE_INTERVALS * self.heartbeat_interval_s
        return lease_s + revocation_grace_s(self.heartbeat_interval_s) + SWEEP_INTERVAL_S
