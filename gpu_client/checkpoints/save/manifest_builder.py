"""Build a manifest and its new packs from a directory.

The builder reads every byte once: several threads read, hash and encode spans; one thread adds the chunks in order. Raw
chunks stay in their files; the builder writes only encoded chunks, to a spool.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from baton.contract.base import MAX_PATH_BYTES
from baton.contract.checkpoints.manifest import (
    MANIFEST_VERSION,
    MAX_FILE_BYTES,
    MAX_MANIFEST_FILES,
    Chunk,
    ChunkedFile,
    Codec,
    Manifest,
    Pack,
)
from gpu_client.checkpoints.format.chunking import MAX_COARSENESS, Width, cut_spans
from gpu_client.checkpoints.format.codec_selection import CodecRates
from gpu_client.checkpoints.format.packing import LARGE_CHUNK_BYTES, PackWriter, StoredDigest
from gpu_client.checkpoints.local.directory_files import BadDirectory, require_storable, resolve_files
from gpu_client.checkpoints.local.sanitizer import sanitize_metrics
from gpu_client.checkpoints.save.chunk_encoder import ChunkEncoder, EncodedChunk, SourceSpan
from gpu_client.checkpoints.save.chunk_index import ChunkIndex, StoredChunk
from gpu_client.checkpoints.save.source_files import HASH_WORKERS, SourceFile, SpanBuffers, Spool
from gpu_client.transport.errors import DiskFull, TransferError
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set
from gpu_client.transport.net.files import local_errors
from gpu_client.transport.transfer.transfer_requests import Segment

logger = logging.getLogger(__name__)

MAX_CHUNKS = 20_000
"""Maximum chunks of a checkpoint, because one request contains all chunks and the paths of the files."""

_AHEAD = HASH_WORKERS + 1
"""Number of filled buffers ahead of the buffer whose chunks the builder adds."""
_BUFFER_BYTES = 1024 * 1024
"""Minimum size of a buffer; a larger span enlarges all buffers."""
_SPANS_PER_BUFFER = 256
"""Maximum spans of a batch. Small files share a batch, because a thread switch costs more than a small read."""


_Batch = list[tuple[str, int]]
"""Paths and span numbers."""


@dataclass(slots=True)
class _Draft:
    """Draft of a chunk of the manifest. `pack`: a stored pack, or the number of a new pack."""

    blake3: str
    size_bytes: int
    codec: Codec = "raw"
    width: Width = 1
    pack: Pack | int | None = None
    offset: int = 0
    stored_bytes: int = 0
    base: int | None = None


class ManifestBuilder:
    """Builder of one manifest. `rates`: None disables encoding."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        known: ChunkIndex,
        rates: CodecRates | None,
        spool: Spool,
        cancel: CancelEvent | None,
    ) -> None:
        self._known = known
        self._spool = spool
        self._cancel = cancel
        self._files = {path: SourceFile(place) for path, place in paths.items()}
        self._pieces = _cut(self._files)
        spans = [piece.span for pieces in self._pieces.values() for piece in pieces]
        # A delta adds its base to the manifest's chunks, therefore deltas are possible only for half of MAX_CHUNKS.
        self._deltas = 2 * len(spans) <= MAX_CHUNKS
        self._buffer_bytes = max([_BUFFER_BYTES, *(span.size_bytes for span in spans)])
        self._buffers = SpanBuffers(self._buffer_bytes)
        self._encoder = ChunkEncoder(known, self._buffers, rates, deltas=self._deltas, is_stored=self._is_stored)
        self._drafts: list[_Draft] = []
        self._index: dict[str, int] = {}
        """Index in `_drafts`, by BLAKE3."""
        self._chunks_of = {path: [-1] * len(pieces) for path, pieces in self._pieces.items()}
        self._writer = PackWriter(sum(span.size_bytes for span in spans))
        self.new_bytes = 0
        self.encode_s = 0.0

    def close(self) -> None:
        """Remove the spool."""
        try:
            self._spool.close()
        except (DiskFull, TransferError) as error:
            logger.warning("%s", error)

    def run(self) -> None:
        """Read every span once. Raises FileChanged, TransferError, TransferCanceled."""
        with ThreadPoolExecutor(HASH_WORKERS, thread_name_prefix="hash") as threads:
            waiting: deque[tuple[_Batch, Future[tuple[bytearray, list[EncodedChunk]]]]] = deque()
            try:
                for batch in self._batches():
                    waiting.append((batch, threads.submit(self._encode_batch, batch)))
                    if len(waiting) == _AHEAD:
                        self._take(*waiting.popleft())
                while waiting:
                    self._take(*waiting.popleft())
            finally:
                for _, future in waiting:
                    future.cancel()
        self._writer.finish()
        for file in self._files.values():
            file.require_unchanged()

    def _batches(self) -> Iterator[_Batch]:
        """Yield all spans in batches that fit one buffer."""
        batch: _Batch = []
        size_bytes = 0
        # Large chunks come first: other jobs may have equal large chunks, and small chunks between them would shift the
        # cuts of packs.
        for large in (True, False):
            for path, pieces in self._pieces.items():
                for number, piece in enumerate(pieces):
                    if (piece.span.size_bytes >= LARGE_CHUNK_BYTES) is not large:
                        continue
                    if size_bytes + piece.span.size_bytes > self._buffer_bytes or len(batch) == _SPANS_PER_BUFFER:
                        yield batch
                        batch, size_bytes = [], 0
                    batch.append((path, number))
                    size_bytes += piece.span.size_bytes
        if batch:
            yield batch

    @property
    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """Return the local segments of the new packs, by BLAKE3."""
        return {new.pack.blake3: new.segments for new in self._writer.packs}

    def packs(self) -> list[Pack]:
        """Return the manifest's packs."""
        return list(self._packs().values())

    def chunks(self) -> list[Chunk]:
        """Return the manifest's chunks."""
        index = {blake3: number for number, blake3 in enumerate(self._packs())}
        return [self._chunk(draft, index) for draft in self._drafts]

    def files(self) -> list[ChunkedFile]:
        """Return the manifest's files."""
        return [
            ChunkedFile(path=path, size_bytes=file.size_bytes, chunks=self._chunks_of[path])
            for path, file in self._files.items()
        ]

    def _encode_batch(self, batch: _Batch) -> tuple[bytearray, list[EncodedChunk]]:
        """Read and encode a batch, in one of the threads."""
        buffer = self._buffers.take()
        free = memoryview(buffer)
        found = []
        for path, number in batch:
            if self._cancel is not None:
                stop_if_set(self._cancel)
            piece = self._pieces[path][number]
            found.append(self._encoder.encode_span(piece, free[: piece.span.size_bytes]))
            if found[-1].raw is not None:  # Otherwise the next span reuses the cached memory.
                free = free[piece.span.size_bytes :]
        return buffer, found

    def _take(self, batch: _Batch, future: Future[tuple[bytearray, list[EncodedChunk]]]) -> None:
        buffer, found = future.result()
        for (path, number), encoded in zip(batch, found, strict=True):
            index = self._index.get(encoded.blake3)
            if index is None:
                index = self._add(self._pieces[path][number], encoded)
            self._chunks_of[path][number] = index
            self.encode_s += encoded.encode_s
        self._buffers.give(buffer)

    def _chunk(self, draft: _Draft, packs: Mapping[str, int]) -> Chunk:
        """Build a chunk without default fields, because one request contains thousands of chunks."""
        fields: dict[str, Any] = {"blake3": draft.blake3, "size_bytes": draft.size_bytes}
        if draft.pack is not None:
            fields |= {"pack": packs[self._pack_of(draft.pack).blake3], "offset": draft.offset}
        if draft.codec != "raw":
            fields["codec"] = draft.codec
        if draft.codec in ("planes", "delta"):
            fields |= {"length_bytes": draft.stored_bytes, "width": draft.width}
        if draft.base is not None:
            fields["base"] = draft.base
        return Chunk(**fields)

    def _add(self, piece: SourceSpan, encoded: EncodedChunk) -> int:
        """Add the first occurrence of a chunk. Returns the chunk's index."""
        stored = self._stored(encoded.blake3)
        if stored is not None:
            return self._add_stored(stored)
        if encoded.stored is None:
            return self._append(_Draft(encoded.blake3, piece.span.size_bytes, codec="zeros"))
        digest, segment = encoded.stored, Segment(piece.file.path, piece.span.offset, piece.span.size_bytes)
        draft = _Draft(encoded.blake3, piece.span.size_bytes)
        spooled = self._spool_if_possible(encoded)
        if spooled is not None:
            segment = spooled
            draft.codec, draft.width = encoded.choice.codec, encoded.choice.width
            if encoded.base is not None:
                draft.base = self._index_of(encoded.base)
        elif encoded.encoded is not None and encoded.raw is not None:
            digest = StoredDigest.of(encoded.raw, bytes.fromhex(encoded.blake3))
        draft.pack, draft.offset = self._writer.add(encoded.blake3, digest, segment)
        draft.stored_bytes = digest.size_bytes
        self.new_bytes += draft.size_bytes
        return self._append(draft)

    def _add_stored(self, stored: StoredChunk) -> int:
        chunk = stored.chunk
        base = self._index_of(stored.base) if stored.base is not None else None
        return self._append(
            _Draft(
                chunk.blake3,
                chunk.size_bytes,
                codec=chunk.codec,
                width=chunk.width,
                pack=stored.pack,
                offset=chunk.offset,
                stored_bytes=chunk.stored_bytes,
                base=base,
            )
        )

    def _index_of(self, stored: StoredChunk) -> int:
        index = self._index.get(stored.chunk.blake3)
        return self._add_stored(stored) if index is None else index

    def _append(self, draft: _Draft) -> int:
        self._drafts.append(draft)
        self._index[draft.blake3] = len(self._drafts) - 1
        return len(self._drafts) - 1

    def _spool_if_possible(self, encoded: EncodedChunk) -> Segment | None:
        """Spool an encoded chunk. A full disk disables encoding and gives None, so that the commit continues."""
        if encoded.encoded is None:
            return None
        try:
            return self._spool.append(encoded.encoded)
        except (DiskFull, TransferError) as error:
            logger.warning("no more chunks of this checkpoint are encoded: %s", error)
            self._encoder.rates = None
            return None

    def _is_stored(self, blake3: str) -> bool:
        """Return True if a chunk needs no storing. Thread-safe."""
        return blake3 in self._index or self._stored(blake3) is not None

    def _stored(self, blake3: str) -> StoredChunk | None:
        stored = self._known.find(blake3)
        return None if stored is not None and stored.base is not None and not self._deltas else stored

    def _packs(self) -> dict[str, Pack]:
        """Return the packs of the chunks by BLAKE3, in the order of the chunks."""
        packs = (self._pack_of(draft.pack) for draft in self._drafts if draft.pack is not None)
        return {pack.blake3: pack for pack in packs}

    def _pack_of(self, pack: Pack | int) -> Pack:
        return self._writer.packs[pack].pack if isinstance(pack, int) else pack


def _cut(files: Mapping[str, SourceFile]) -> dict[str, list[SourceSpan]]:
    """Cut all files, as coarsely as necessary for the manifest's limit of chunks."""
    for coarseness in range(MAX_COARSENESS + 1):
        pieces: dict[str, list[SourceSpan]] = {}
        for path, file in files.items():
            with local_errors(f"reading {path}"):
                spans = cut_spans(file.path, file.size_bytes, coarseness=coarseness)
            pieces[path] = [SourceSpan(path, file, span) for span in spans]
        if sum(map(len, pieces.values())) <= MAX_CHUNKS:
            break
    return pieces


@dataclass
class LocalManifest:
    """A manifest and the local bytes of its new packs. `close` removes the spool."""

    manifest: Manifest
    packs: Mapping[str, tuple[Segment, ...]]
    """Segments of the new packs, by BLAKE3. All other packs of the manifest are probably stored."""
    new_bytes: int
    """Raw bytes of the chunks in new packs."""
    hash_s: float
    """Duration of the build in seconds."""
    encode_s: float
    """Encoding time, summed over the threads."""
    close: Callable[[], None]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each pack, new or stored, by BLAKE3."""
        return {pack.blake3: pack.size_bytes for pack in self.manifest.packs}


def build_manifest(
    directory: Path,
    *,
    job_id: str,
    step: int,
    epoch: int,
    metrics: Mapping[str, float] | None = None,
    created_by: Literal["session", "script"] = "session",
    tag: str = "",
    known: ChunkIndex | None = None,
    upload_bytes_per_s: float | None = None,
    spool: Path | None = None,
    cancel: CancelEvent | None = None,
) -> LocalManifest:
    """Cut, hash, encode and pack the files of a checkpoint directory. Equal arguments give equal manifests.

    spool: a directory for encoded chunks; None disables encoding. The function omits metrics that the contract refuses
    (NaN, invalid names). Raises BadDirectory, FileChanged, TransferError (unreadable), TransferCanceled.
    """
    started = time.monotonic()
    paths = resolve_files(directory)
    if not 1 <= len(paths) <= MAX_MANIFEST_FILES:
        raise BadDirectory(f"{directory} has {len(paths)} files; a checkpoint has 1 to {MAX_MANIFEST_FILES}")
    require_storable(paths, max_path_bytes=MAX_PATH_BYTES, max_bytes=MAX_FILE_BYTES)
    rates = CodecRates.at_speed(upload_bytes_per_s) if spool is not None else None
    build = ManifestBuilder(paths, known or ChunkIndex(), rates, Spool(spool or directory), cancel)
    try:
        build.run()
        manifest = Manifest(
            version=MANIFEST_VERSION,
            job_id=job_id,
            step=step,
            epoch=epoch,
            packs=build.packs(),
            chunks=build.chunks(),
            files=build.files(),
            metrics=sanitize_metrics(dict(metrics or {})),
            created_by=created_by,
            tag=tag,
        )
    except ValidationError as error:
        build.close()
        raise BadDirectory(f"{directory} cannot be a checkpoint: {error.errors()[0]['msg']}") from error
    except BaseException:
        build.close()
        raise
    return LocalManifest(
        manifest,
        build.segments,
        new_bytes=build.new_bytes,
        hash_s=time.monotonic() - started,
        encode_s=build.encode_s,
        close=build.close,
    )
