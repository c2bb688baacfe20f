"""What becomes of one span: read once, recognised, or encoded in the way that pays. Runs in several threads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from awscrt import checksums
from blake3 import blake3

from gpu_client.checkpoints.format.chunking import Span
from gpu_client.checkpoints.format.codec_selection import CodecChoice, CodecRates, choose_codec, select_samples
from gpu_client.checkpoints.format.codecs import encode, hash_zeros, is_all_zero
from gpu_client.checkpoints.format.packing import StoredDigest
from gpu_client.checkpoints.save.chunk_index import ChunkIndex, StoredChunk
from gpu_client.checkpoints.save.source_files import SourceFile, SpanBuffers
from gpu_client.transport.transfer.transfer_requests import Segment

logger = logging.getLogger(__name__)

MIN_ENCODED_BYTES = 4096
"""Smaller chunks are stored as they are."""

_READ_BYTES = 512 * 1024
"""Read, and hashed while they are still in the processor's cache."""

RAW = CodecChoice("raw")
ZEROS = CodecChoice("zeros")


@dataclass(frozen=True, slots=True)
class SourceSpan:
    """A span of a file, and the file's path in the checkpoint."""

    path: str
    file: SourceFile
    span: Span


@dataclass(slots=True)
class EncodedChunk:
    """What was found. `stored` is of `encoded`, else of the bytes as they are; None for what needs no storing. `raw` is
    kept only where something may be encoded."""

    blake3: str
    choice: CodecChoice = RAW
    raw: memoryview | None = None
    stored: StoredDigest | None = None
    encoded: bytes | None = None
    base: StoredChunk | None = None
    encode_s: float = 0.0


class ChunkEncoder:
    """`is_stored` says whether a chunk (by BLAKE3) needs no storing: it is stored, or this checkpoint had it before."""

    def __init__(
        self,
        known: ChunkIndex,
        buffers: SpanBuffers,
        rates: CodecRates | None,
        *,
        deltas: bool,
        is_stored: Callable[[str], bool],
    ) -> None:
        self._known = known
        self._buffers = buffers
        self._deltas = deltas
        self._is_stored = is_stored
        self.rates = rates
        """None: nothing is encoded (any more)."""

    def encode_span(self, piece: SourceSpan, raw: memoryview) -> EncodedChunk:
        """Read the piece, unless it is a hole, into `raw`, which has its size. Raises FileChanged, TransferError.

        Where nothing is encoded only the first bytes of `raw` are used, and what is in them afterwards means nothing.
        """
        rates = self.rates
        pays = rates is not None and (rates.may_pay("planes") or rates.may_pay("delta"))
        whole = pays and len(raw) >= MIN_ENCODED_BYTES
        hasher, crc64nvme, zero = blake3(), 0, True
        for view in piece.file.pieces(piece.span.offset, len(raw), raw if whole else raw[:_READ_BYTES]):
            zero = zero and is_all_zero(view)
            hasher.update(view)
            if not whole:
                crc64nvme = checksums.crc64nvme(view, crc64nvme)
        if zero:
            return EncodedChunk(hash_zeros(len(raw)), ZEROS)
        digest = hasher.digest()
        looked = EncodedChunk(digest.hex())
        if self._is_stored(looked.blake3):
            return looked
        if not whole or rates is None:
            looked.stored = StoredDigest(len(raw), digest, crc64nvme)
            return looked
        looked.raw = raw
        started = time.monotonic()
        self._encode(piece, looked, raw, rates)
        looked.encode_s = time.monotonic() - started
        looked.stored = StoredDigest.of(raw, digest) if looked.encoded is None else StoredDigest.of(looked.encoded)
        return looked

    def _encode(self, piece: SourceSpan, looked: EncodedChunk, raw: memoryview, rates: CodecRates) -> None:
        places = select_samples(len(raw))
        sample = b"".join(raw[offset : offset + size] for offset, size in places)
        base, segment = self._base(piece)
        base_sample = _sample(segment, places) if segment else None
        choice = choose_codec(sample, width=piece.span.width, base_sample=base_sample, rates=rates)
        encoded = None
        if choice.codec == "delta" and segment and base:
            encoded = self._delta(raw, choice.width, segment, base.chunk.blake3)
            if encoded is None:
                base, choice = None, choose_codec(sample, width=piece.span.width, base_sample=None, rates=rates)
        if choice.codec == "planes":
            base, encoded = None, encode("planes", raw, width=choice.width)
        if encoded is not None and len(encoded) < len(raw):
            looked.choice, looked.encoded, looked.base = choice, encoded, base

    def _base(self, piece: SourceSpan) -> tuple[StoredChunk | None, Segment | None]:
        """The chunk to take the difference to, and where its bytes lie here."""
        if not self._deltas or self._known.raw is None:
            return None, None
        base = self._known.base_for(piece.path, piece.span.offset, piece.span.size_bytes)
        return base, self._known.raw.find(base.chunk.blake3) if base else None

    def _delta(self, raw: memoryview, width: int, segment: Segment, digest: str) -> bytes | None:
        """None if the bytes there are not those of the base (any more)."""
        buffer = self._buffers.take()
        try:
            base = memoryview(buffer)[: segment.size_bytes]
            if not _fill(segment, base) or blake3(base).hexdigest() != digest:
                logger.warning("%s has other bytes than the chunk that is to be the base of a delta", segment.path)
                return None
            return encode("delta", raw, width=width, base=base)
        finally:
            self._buffers.give(buffer)


def _fill(segment: Segment, view: memoryview) -> bool:
    """False if the segment has not so many bytes: nothing that is only good to save time may stop a commit."""
    try:
        with segment.path.open("rb", buffering=0) as file:
            file.seek(segment.offset)
            return len(view) == segment.size_bytes == file.readinto(view)
    except OSError:
        return False


def _sample(segment: Segment, places: Sequence[tuple[int, int]]) -> bytes | None:
    """The bytes at these places of the segment; None if it has not so many."""
    try:
        with segment.path.open("rb", buffering=0) as file:
            sample = b"".join(os.pread(file.fileno(), size, segment.offset + offset) for offset, size in places)
    except OSError:
        return None
    return sample if len(sample) == sum(size for _, size in places) else None
