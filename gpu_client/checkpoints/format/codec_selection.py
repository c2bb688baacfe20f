"""Which codec a chunk gets: the one by which it is stored soonest, by a sample of it and the speed of the upload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.contract.manifest import Codec
from gpu_client.checkpoints.format.chunking import Width
from gpu_client.checkpoints.format.codecs import Buffer, encode

ASSUMED_UPLOAD_BYTES_PER_S = 300e6
"""While no upload has been measured: so fast a line that nothing is encoded. What that costs is certain, what it saves
is not."""

PLANES_BYTES_PER_S = 300e6
"""What one core encodes; the training wants the others. Constants, not measured anew: a commit that is repeated must
choose as it did, and workers on equal lines shall choose alike, for only then do they write equal packs."""
DELTA_BYTES_PER_S = 400e6

PLANES_PAY_BELOW = 0.9
"""Taken only if it needs less than this share of the time: that is estimated, and the training wants the cores too."""
DELTA_PAYS_BELOW = 0.6
"""Of the time of the best other codec: who reads the checkpoint has to fetch the base as well."""

GUESSED_WIDTHS: tuple[Width, ...] = (1, 2, 4)
"""Tried where nobody says how wide an element is."""

_SAMPLE_BYTES = 16 * 1024
_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec, and the width that goes with it."""

    codec: Codec
    width: Width = 1


@dataclass(frozen=True, slots=True)
class CodecRates:
    """Bytes per second: of the upload, and of encoding."""

    upload: float
    planes: float = PLANES_BYTES_PER_S
    delta: float = DELTA_BYTES_PER_S

    @classmethod
    def at_speed(cls, upload_bytes_per_s: float | None) -> CodecRates:
        """For a measured speed, or None."""
        return cls(upload_bytes_per_s or ASSUMED_UPLOAD_BYTES_PER_S)

    def seconds_per_byte(self, codec: Codec, share: float) -> float:
        """From the file to the store, if the codec leaves `share` of the bytes."""
        if codec == "raw":
            return 1 / self.upload
        return 1 / (self.delta if codec == "delta" else self.planes) + share / self.upload

    def may_pay(self, codec: Codec) -> bool:
        """False if it would not pay even if nothing were left to upload."""
        return self.seconds_per_byte(codec, 0.0) < _pays_below(codec) * self.seconds_per_byte("raw", 1.0)


def select_samples(size_bytes: int) -> list[tuple[int, int]]:
    """Offsets and sizes of the pieces of a chunk that stand for all of it: first, middle, last."""
    if size_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, size_bytes)]
    step = (size_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1)
    return [(index * step // 8 * 8, _SAMPLE_BYTES) for index in range(_SAMPLES)]


def choose_codec(sample: Buffer, *, width: Width | None, base_sample: Buffer | None, rates: CodecRates) -> CodecChoice:
    """The codec for a chunk of which this is a sample; `base_sample` is of what lies in its base at the same places."""
    best, best_s = CodecChoice("raw"), rates.seconds_per_byte("raw", 1.0)
    # in the order of what they demand of whoever reads the checkpoint
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
    """What share of the sample is left, and by which width."""
    left = min((len(encode(codec, sample, width=width, base=base)), width) for width in widths)
    return left[0] / len(sample), left[1]
