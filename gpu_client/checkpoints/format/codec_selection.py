"""Select the codec that stores a chunk in the least time, by a sample of the chunk and the upload speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.contract.checkpoints.manifest import Codec
from gpu_client.checkpoints.format.chunking import Width
from gpu_client.checkpoints.format.codecs import Buffer, encode

ASSUMED_UPLOAD_BYTES_PER_S = 300e6
"""Upload speed before the first measurement. At this speed no codec pays, because the cost of encoding is certain and
the gain is not."""

PLANES_BYTES_PER_S = 300e6
"""Encoding speed of one core, because the training needs the other cores. The speed is a constant, so that a repeated
commit selects the same codecs, and workers with equal networks write equal packs."""
DELTA_BYTES_PER_S = 400e6

PLANES_PAY_BELOW = 0.9
"""Bound for `planes` as a share of the time of `raw`; below 1, because the estimate errs and encoding takes cores."""
DELTA_PAYS_BELOW = 0.6
"""Bound for `delta` as a share of the best other codec's time; below 1, because a restore also fetches the base."""

GUESSED_WIDTHS: tuple[Width, ...] = (1, 2, 4)
"""Element widths to try if the file declares none."""

_SAMPLE_BYTES = 16 * 1024
_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec and the width of its elements."""

    codec: Codec
    width: Width = 1


@dataclass(frozen=True, slots=True)
class CodecRates:
    """Speeds of the upload and of encoding, in bytes per second."""

    upload: float
    planes: float = PLANES_BYTES_PER_S
    delta: float = DELTA_BYTES_PER_S

    @classmethod
    def at_speed(cls, upload_bytes_per_s: float | None) -> CodecRates:
        """Return the rates for a measured upload speed; None means not measured yet."""
        return cls(upload_bytes_per_s or ASSUMED_UPLOAD_BYTES_PER_S)

    def seconds_per_byte(self, codec: Codec, share: float) -> float:
        """Return the seconds per byte from the file to the store for a codec that leaves `share` of the bytes."""
        if codec == "raw":
            return 1 / self.upload
        return 1 / (self.delta if codec == "delta" else self.planes) + share / self.upload

    def may_pay(self, codec: Codec) -> bool:
        """Return False if encoding alone takes longer than the upload of the raw bytes."""
        return self.seconds_per_byte(codec, 0.0) < _pays_below(codec) * self.seconds_per_byte("raw", 1.0)


def select_samples(size_bytes: int) -> list[tuple[int, int]]:
    """Return offsets and sizes of the sampled pieces of a chunk: first, middle, last."""
    if size_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, size_bytes)]
    step = (size_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1)
    return [(index * step // 8 * 8, _SAMPLE_BYTES) for index in range(_SAMPLES)]


def choose_codec(sample: Buffer, *, width: Width | None, base_sample: Buffer | None, rates: CodecRates) -> CodecChoice:
    """Choose the codec of a chunk by a sample of its bytes. `base_sample`: the base's bytes at equal offsets."""
    best, best_s = CodecChoice("raw"), rates.seconds_per_byte("raw", 1.0)
    # The order is the cost of a restore, so that a tie goes to the cheaper codec.
    candidates: list[tuple[Codec, Buffer | None]] = [("planes", None)]
    if base_sample is not None:
        candidates.append(("delta", base_sample))
    for codec, base in candidates:
        if not rates.may_pay(codec):
            continue
        share, found = _smallest(codec, sample, base, (width,) if width else GUESSED_WIDTHS)
        seconds = rates.seconds_per_byte(codec, share)
        if seconds < _pays_below(codec) * best_s:
            best, best_s = CodecChoice(codec, found), seconds
    return best


def _pays_below(codec: Codec) -> float:
    return DELTA_PAYS_BELOW if codec == "delta" else PLANES_PAY_BELOW


def _smallest(codec: Codec, sample: Buffer, base: Buffer | None, widths: Sequence[Width]) -> tuple[float, Width]:
    """Return the smallest encoded share of the sample, and its width."""
    left = min((len(encode(codec, sample, width=width, base=base)), width) for width in widths)
    return left[0] / len(sample), left[1]
