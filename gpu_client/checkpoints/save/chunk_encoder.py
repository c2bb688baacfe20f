"""Read each span once, and recognize or encode its chunk. Several threads run this code."""

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
"""Chunk size in bytes below which chunks are stored raw."""

_READ_BYTES = 512 * 1024
"""Bytes of one read; few enough that hashing finds the bytes in the processor's cache."""

RAW = CodecChoice("raw")
ZEROS = CodecChoice("zeros")


@dataclass(frozen=True, slots=True)
class SourceSpan:
    """Span of a file, and the file's path in the checkpoint."""

    path: str
    file: SourceFile
    span: Span


@dataclass(slots=True)
class EncodedChunk:
    """Result of one span.

    stored: digests of `encoded`, or of the raw bytes of an unencoded chunk; None for a chunk that needs no storing.
    raw: the bytes, only for chunks that may be encoded.
    """

    blake3: str
    choice: CodecChoice = RAW
    raw: memoryview | None = None
    stored: StoredDigest | None = None
    encoded: bytes | None = None
    base: StoredChunk | None = None
    encode_s: float = 0.0


class ChunkEncoder:
    """Encoder of spans. `is_stored`: returns True for a chunk (by BLAKE3) that is stored or occurred earlier."""

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
        """Speeds for the choice of codecs; None disables encoding."""

    def encode_span(self, piece: SourceSpan, raw: memoryview) -> EncodedChunk:
        """Read the span into `raw`, which has the span's size, and encode the chunk. Raises FileChanged, TransferError.

        Without encoding, only the first bytes of `raw` serve as a buffer, and their final content is arbitrary.
        """
        rates = self.rates
        pays = rates is not None and (rates.may_pay("planes") or rates.may_pay("delta"))
        encodes = pays and len(raw) >= MIN_ENCODED_BYTES
        hasher, crc64nvme, zero = blake3(), 0, True
        for view in piece.file.pieces(piece.span.offset, len(raw), raw if encodes else raw[:_READ_BYTES]):
            zero = zero and is_all_zero(view)
            hasher.update(view)
            if not encodes:
                crc64nvme = checksums.crc64nvme(view, crc64nvme)
        if zero:
            return EncodedChunk(hash_zeros(len(raw)), ZEROS)
        digest = hasher.digest()
        result = EncodedChunk(digest.hex())
        if self._is_stored(result.blake3):
            return result
        if not encodes or rates is None:
            result.stored = StoredDigest(len(raw), digest, crc64nvme)
            return result
        result.raw = raw
        started = time.monotonic()
        self._encode(piece, result, raw, rates)
        result.encode_s = time.monotonic() - started
        result.stored = StoredDigest.of(raw, digest) if result.encoded is None else StoredDigest.of(result.encoded)
        return result

    def _encode(self, piece: SourceSpan, result: EncodedChunk, raw: memoryview, rates: CodecRates) -> None:
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
            result.choice, result.encoded, result.base = choice, encoded, base

    def _base(self, piece: SourceSpan) -> tuple[StoredChunk | None, Segment | None]:
        """Return the base of a delta and the local segment of its bytes."""
        if not self._deltas or self._known.raw is None:
            return None, None
        base = self._known.base_for(piece.path, piece.span.offset, piece.span.size_bytes)
        return base, self._known.raw.find(base.chunk.blake3) if base else None

    def _delta(self, raw: memoryview, width: int, segment: Segment, digest: str) -> bytes | None:
        """Encode a delta. Returns None if the local bytes differ from the base."""
        buffer = self._buffers.take()
        try:
            base = memoryview(buffer)[: segment.size_bytes]
            if not _fill(segment, base) or blake3(base).hexdigest() != digest:
                logger.warning(
                    "%s no longer has the bytes of the chunk that would be the base of a delta", segment.path
                )
                return None
            return encode("delta", raw, width=width, base=base)
        finally:
            self._buffers.give(buffer)


def _fill(segment: Segment, view: memoryview) -> bool:
    """Read the segment into `view`. Returns False if the segment is shorter, because a missing base stops no commit."""
    try:
        with segment.path.open("rb", buffering=0) as file:
            file.seek(segment.offset)
            return len(view) == segment.size_bytes == file.readinto(view)
    except OSError:
        return False


def _sample(segment: Segment, places: Sequence[tuple[int, int]]) -> bytes | None:
    """Return the bytes at the given places of the segment; None if the segment is shorter."""
    try:
        with segment.path.open("rb", buffering=0) as file:
            sample = b"".join(os.pread(file.fileno(), size, segment.offset + offset) for offset, size in places)
    except OSError:
        return None
    return sample if len(sample) == sum(size for _, size in places) else None
