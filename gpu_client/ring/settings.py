"""Define the settings of a ring, which are fixed at its creation and stored in the ring."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Codec = Literal["none", "zstd", "lz4", "uint8", "uint16"]
MAX_CAP = 1_000_000
_MAX_PER_INSERT = 1e6
PACK_BYTES = 64 * 1024 * 1024
"""Default of `pack_bytes`."""

_MANIFESTS_BETWEEN, _SLOT_BYTES, _RECORDS_BYTES = 4, 64, 64 * 1024


def _per_insert(given: Any) -> Any:
    """Parse a number or a pair, also as text (`4`, `2,8`). A pair of equal numbers becomes one number."""
    parts = given.split(",") if isinstance(given, str) else given
    if parts is None:
        return None
    if not isinstance(parts, list | tuple):
        parts = [parts]
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError):
        numbers = []
    # A maximum of 0, or a minimum above the maximum, would make both sides wait forever.
    low, high = (numbers[0], numbers[-1]) if numbers else (0.0, 0.0)
    if len(numbers) != len(parts) or len(parts) > 2 or not (0 <= low <= high <= _MAX_PER_INSERT and high > 0):
        raise ValueError(
            f"{given!r} is neither a number nor a pair MIN,MAX (0 <= MIN <= MAX <= {_MAX_PER_INSERT:g}, MAX > 0)"
        )
    return high if math.isclose(low, high) else (low, high)


class RingSettings(BaseModel):
    """Immutable settings, stored as `ring.json`. All times are in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cap: int = Field(ge=1, le=MAX_CAP)
    """Maximum number of readable samples."""
    mode: Literal["generation", "rolling"] = "rolling"
    """generation: `cap` new samples replace all samples at once. rolling: new samples replace the oldest continuously.
    """
    publish_interval_s: float = Field(default=0.25, ge=0.005, le=3600)
    """Interval between two publications; in mode rolling, new samples become readable within the interval."""
    publish_every_samples: int | None = Field(default=None, ge=1, le=MAX_CAP)
    """rolling: number of waiting samples that causes a publication before the end of the interval.

    Each writer checks the number after each object.
    """
    min_size: int = Field(default=1, ge=1, le=MAX_CAP)
    """Number of readable samples before the first read."""
    max_ahead: int | None = Field(default=None, ge=1, le=MAX_CAP)
    """Number of finished unreadable samples at which writers wait. Unset: `cap`."""
    samples_per_insert: Annotated[float | tuple[float, float] | None, BeforeValidator(_per_insert)] = None
    """Mean number of reads of a sample, kept by back-pressure on the side that is ahead.

    With a pair, writers wait below the first number and readers above the second. Unset: no side waits.
    """
    max_age_s: float | None = Field(default=None, gt=0)
    """Age above which readers ignore samples, by the clocks of writers and readers.

    `RingDataset` refuses a ring with this setting.
    """
    max_uses: int | None = Field(default=None, ge=1)
    """Maximum number of reads of a sample by a training.

    `RingDataset`, whose caller chooses the index, refuses a ring with this setting.
    """
    retain: int = Field(default=3, ge=2, le=1000)
    """Number of newest manifests that the collector keeps with all their samples."""
    lease_s: float = Field(default=15.0, ge=0.05, le=3600)
    """Duration of a lease. A process without a renewal in 1.5 leases is dead; its garbage is gone after 2 leases."""
    pack: int = Field(default=1, ge=1, le=100_000)
    """Maximum number of samples in one object, which a killed writer can lose."""
    pack_bytes: int | None = Field(default=None, ge=4096, le=1024 * 1024 * 1024)
    """Maximum size of the samples of one object before encoding; a single sample may be larger. Unset: `PACK_BYTES`."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Maximum number of stored bytes of all files; a writer waits while another object would exceed the maximum."""
    codec: Codec = "none"
    quantise: dict[str, Literal["uint8", "uint16"]] = {}
    """Lossy codec of arrays by path, such as `sample['image']`."""
    shapes: Literal["same", "any"] = "same"
    """same: refuse a sample whose arrays differ in shape from the arrays of the first sample."""
    finite: bool = True
    """True to refuse samples with NaN or infinity."""
    fsync: Annotated[bool | None, AfterValidator(lambda given: given or None)] = None
    """True to flush writes to the disk before `put` returns, so that a loss of power undoes no write.

    For directories only. False is stored as unset.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_size > self.cap:
            raise ValueError(f"min_size is {self.min_size} and cap only {self.cap}: no sample would ever be read")
        if self.pack > self.cap:
            raise ValueError(f"pack is {self.pack} and cap only {self.cap}: one object would exceed the ring")
        if self.pack_bytes is not None and self.pack == 1:
            raise ValueError(f"pack_bytes is {self.pack_bytes} and pack 1: each sample is an object of its own")
        if self.mode == "generation" and self.max_ahead is not None and self.max_ahead < self.cap:
            raise ValueError(
                f"max_ahead is {self.max_ahead} and cap {self.cap}: writers would wait before a generation is complete"
            )
        if self.max_bytes is not None and self.max_bytes <= self.notes_bytes:
            raise ValueError(
                f"max_bytes is {self.max_bytes}, and the lists of cap {self.cap} alone may take {self.notes_bytes}:"
                " no sample would ever fit"
            )
        every = self.publish_every_samples
        if every is not None and self.mode == "generation":
            raise ValueError(
                f"publish_every_samples is {every} and mode generation: a generation is published when complete"
            )
        if every is not None and every > self.cap:
            raise ValueError(
                f"publish_every_samples is {every} and cap only {self.cap}: the number would exceed the ring"
            )
        if every is not None and every > self.ahead:
            raise ValueError(
                f"max_ahead is {self.max_ahead} and publish_every_samples {every}: writers would wait first"
            )
        return self

    @property
    def most_pack_bytes(self) -> int:
        """Return the maximum size in bytes of the samples of one object; a single sample may be larger."""
        return self.pack_bytes or PACK_BYTES

    @property
    def notes_bytes(self) -> int:
        """Return the bytes of `max_bytes` for the growth of manifests and records between two measurements."""
        return _MANIFESTS_BETWEEN * _SLOT_BYTES * self.cap + _RECORDS_BYTES

    @property
    def ahead(self) -> int:
        """Return the maximum number of finished unreadable samples."""
        return max(self.max_ahead or self.cap, self.pack)

    @property
    def reads_per_insert(self) -> tuple[float, float] | None:
        """Return minimum and maximum of the mean number of reads of a sample."""
        given = self.samples_per_insert
        return (given, given) if isinstance(given, float) else given
