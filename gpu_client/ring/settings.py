"""What a ring is, decided once when it is made; everybody who opens it later finds it there."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Codec = Literal["none", "zstd", "lz4", "uint8", "uint16"]
MAX_CAP = 1_000_000
_MAX_PER_INSERT = 1e6
PACK_BYTES = 64 * 1024 * 1024
"""Unless `pack_bytes` says otherwise."""

_MANIFESTS_BETWEEN, _SLOT_BYTES, _RECORDS_BYTES = 4, 64, 64 * 1024


def _per_insert(given: Any) -> Any:
    """A number, or a pair of them; as text `4` or `2,8`. Two equal ones are one."""
    parts = given.split(",") if isinstance(given, str) else given
    if parts is None:
        return None
    if not isinstance(parts, list | tuple):
        parts = [parts]
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError):
        numbers = []
    # Nobody may wait for ever: a reader may read something, and not less than writers wait for.
    low, high = (numbers[0], numbers[-1]) if numbers else (0.0, 0.0)
    if len(numbers) != len(parts) or len(parts) > 2 or not (0 <= low <= high <= _MAX_PER_INSERT and high > 0):
        raise ValueError(
            f"{given!r} is neither a number nor a pair MIN,MAX (0 <= MIN <= MAX <= {_MAX_PER_INSERT:g}, MAX > 0)"
        )
    return high if math.isclose(low, high) else (low, high)


class RingSettings(BaseModel):
    """Immutable; stored as `ring.json`. All times are in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cap: int = Field(ge=1, le=MAX_CAP)
    """So many samples can be read at a time."""
    mode: Literal["generation", "rolling"] = "rolling"
    """generation: all of them are replaced when `cap` new ones are there. rolling: the oldest, every few moments."""
    publish_interval_s: float = Field(default=0.25, ge=0.005, le=3600)
    """rolling: new samples wait no longer than this to be readable. How often is looked for them in both modes."""
    publish_every_samples: int | None = Field(default=None, ge=1, le=MAX_CAP)
    """rolling: as soon as so many new samples wait they are readable, whatever the interval is. Each writer looks
    for it behind each object that it puts."""
    min_size: int = Field(default=1, ge=1, le=MAX_CAP)
    """Nothing is read before so many samples are there."""
    max_ahead: int | None = Field(default=None, ge=1, le=MAX_CAP)
    """Writers wait while so many finished samples are not readable yet; unset: one cap of them."""
    samples_per_insert: Annotated[float | tuple[float, float] | None, BeforeValidator(_per_insert)] = None
    """How often a sample is read in the mean: writers or readers that are ahead of it wait. Of a pair, writers wait
    below the first, readers above the second, and nobody in between. Unset: nobody does."""
    max_age_s: float | None = Field(default=None, gt=0)
    """Older samples are not read; by the clocks of who writes and who reads. `RingDataset` refuses such a ring."""
    max_uses: int | None = Field(default=None, ge=1)
    """No training takes a sample more often. `RingDataset`, where each process reads by index, refuses such a ring."""
    retain: int = Field(default=3, ge=2, le=1000)
    """So many of the newest manifests can be read, with all that they list."""
    lease_s: float = Field(default=15.0, ge=0.05, le=3600)
    """Who was not heard of for half as long again is taken for dead; what it has left is gone after twice as long."""
    pack: int = Field(default=1, ge=1, le=100_000)
    """Samples in one object at most; a writer that dies loses at most so many."""
    pack_bytes: int | None = Field(default=None, ge=4096, le=1024 * 1024 * 1024)
    """So large are the samples of one object together at most, as they are put; a single one may be larger. Unset:
    `PACK_BYTES`."""
    max_bytes: int | None = Field(default=None, ge=1)
    """So many bytes are stored at most, all files together: writers wait while another object would be more."""
    codec: Codec = "none"
    quantise: dict[str, Literal["uint8", "uint16"]] = {}
    """By path, as in `sample['image']`: arrays that are kept with a loss."""
    shapes: Literal["same", "any"] = "same"
    """same: a sample whose arrays have other shapes than the first one's is refused."""
    finite: bool = True
    """Samples with NaN or infinity are refused."""
    fsync: Annotated[bool | None, AfterValidator(lambda given: given or None)] = None
    """Flush writes to the disk before `put` returns, so that a loss of power undoes none of them. For directories only.
    False is stored as unset, so that versions without this setting can open the ring."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_size > self.cap:
            raise ValueError(f"min_size is {self.min_size} and cap only {self.cap}: nothing would ever be read")
        if self.pack > self.cap:
            raise ValueError(f"pack is {self.pack} and cap only {self.cap}: one object would be more than the ring")
        if self.pack_bytes is not None and self.pack == 1:
            raise ValueError(f"pack_bytes is {self.pack_bytes} and pack 1: each sample is an object of its own anyway")
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
                f"publish_every_samples is {every} and mode generation: each is published when it is complete"
            )
        if every is not None and every > self.cap:
            raise ValueError(
                f"publish_every_samples is {every} and cap only {self.cap}: it would be more than the ring"
            )
        if every is not None and every > self.ahead:
            raise ValueError(
                f"max_ahead is {self.max_ahead} and publish_every_samples {every}: writers would wait before so many do"
            )
        return self

    @property
    def most_pack_bytes(self) -> int:
        """The samples of one object together, unless it has a single one."""
        return self.pack_bytes or PACK_BYTES

    @property
    def notes_bytes(self) -> int:
        """Of `max_bytes`, what manifests and records may grow by between two measurements: samples leave it free."""
        return _MANIFESTS_BETWEEN * _SLOT_BYTES * self.cap + _RECORDS_BYTES

    @property
    def ahead(self) -> int:
        """Finished samples that may wait to become readable."""
        return max(self.max_ahead or self.cap, self.pack)

    @property
    def reads_per_insert(self) -> tuple[float, float] | None:
        """How often a sample is to be read in the mean, at least and at most."""
        given = self.samples_per_insert
        return (given, given) if isinstance(given, float) else given
