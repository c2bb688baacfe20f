"""Assemble a checkpoint's files from chunks that arrive in any order, and verify each chunk.

Ranges with raw chunks only are streamed: arriving bytes go directly to their places.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from blake3 import blake3

from baton.contract.checkpoints.manifest import Chunk, Manifest
from gpu_client.checkpoints.format.codecs import BadChunk, decode
from gpu_client.checkpoints.format.manifest_reader import map_places
from gpu_client.checkpoints.restore.restore_plan import ChunkPart, PackRange, find_bases
from gpu_client.transport.errors import ChecksumMismatch
from gpu_client.transport.limits.thread_batch import run_batch
from gpu_client.transport.net.cancellation import CancelEvent, Flight, stop_if_set
from gpu_client.transport.net.files import local_errors, safe_destination
from gpu_client.transport.transfer.transfer_requests import Segment

WORKERS = 4
PIECE_BYTES = 4 * 1024 * 1024
LARGE_BYTES = 64 * 1024 * 1024
"""Chunk size in bytes above which chunks are decoded one at a time."""

MAX_OPEN_FILES = 128
_ZEROS = bytes(PIECE_BYTES)


class FileAssembler:
    """Writer of the files of `manifest` below the new directory `content`. `scratch`: a file beside the directory.

    The files have their final sizes from the start, so that unwritten bytes stay holes. Several threads may deliver
    chunks. A `delta` that arrives before its base waits in the scratch file until `decode_waiting`.
    """

    def __init__(self, manifest: Manifest, content: Path, scratch: Path, *, cancel: CancelEvent | None) -> None:
        self._chunks = manifest.chunks
        self._packs = manifest.packs
        self._cancel = cancel
        self._lock = threading.Lock()
        self._large = threading.Lock()
        self._files = _OpenFiles(MAX_OPEN_FILES)
        self._scratch = scratch
        self._scratch_bytes = 0
        self._done: set[int] = set()
        self._arrived: dict[int, dict[int, int]] = {}
        """Sizes of the written parts by start, by chunk, for each `raw` chunk in several parts."""
        self._waiting: dict[int, int] = {}
        """Offset of the stored bytes in the scratch file, for each `delta` with a missing base."""
        self._mismatched: set[int] = set()
        self._given_up: set[int] = set()
        _require_zeros(manifest.chunks, cancel)
        with local_errors(f"making {content}"):
            content.mkdir()
            scratch.touch()
        self._paths = [safe_destination(content, file.path) for file in manifest.files]
        for path, file in zip(self._paths, manifest.files, strict=True):
            self._check()
            with local_errors(f"making {path}"):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                try:
                    os.truncate(descriptor, file.size_bytes)
                finally:
                    os.close(descriptor)
        self._places: dict[int, list[tuple[Path, int]]] = {
            index: [(self._paths[place.file], place.offset) for place in places]
            for index, places in map_places(manifest).items()
        }

    def missing(self) -> set[int]:
        """Return the chunks of the files that have not arrived."""
        with self._lock:
            return self._places.keys() - self._done

    def missing_bases(self) -> set[int]:
        """Return the missing bases of the deltas among `missing`, and reserve places for these bases."""
        bases = find_bases(self._chunks, self.missing())
        for base in bases - self._places.keys():
            self._places[base] = [(self._scratch, self._reserve(self._chunks[base].size_bytes))]
        with self._lock:
            return bases - self._done

    def deliver(self, found: PackRange, data: memoryview) -> None:
        """Add the bytes of a range. Raises ChecksumMismatch for a chunk that does not verify."""
        for part in found.parts:
            self._check()
            if not self.has(part.chunk):
                stored = data[part.offset - found.offset :][: part.size_bytes]
                self._take(part, stored)

    def has(self, index: int) -> bool:
        """Return True if all stored bytes of a chunk have arrived."""
        with self._lock:
            return index in self._done or index in self._waiting

    def write(self, index: int, start: int, raw: memoryview) -> None:
        """Write bytes of a chunk to all places of the chunk; `finish_chunk` or `finish_part` verifies the bytes."""
        self._check()
        for path, offset in self._places[index]:
            self._files.write(path, offset + start, raw)

    def finish_chunk(self, index: int, digest: str) -> None:
        """Finish a chunk whose written bytes have this BLAKE3. Raises ChecksumMismatch for another digest."""
        if digest == self._chunks[index].blake3:
            self._finished(index)
        else:
            self._altered(index)

    def finish_part(self, part: ChunkPart) -> None:
        """Finish a part of a large chunk; the last part verifies the chunk."""
        chunk = self._chunks[part.chunk]
        with self._lock:
            arrived = self._arrived.setdefault(part.chunk, {})
            arrived[part.start] = part.size_bytes
            complete = sum(arrived.values()) == chunk.size_bytes
            if complete:
                del self._arrived[part.chunk]
        if not complete:
            return
        digest = blake3()
        path, offset = self._places[part.chunk][0]
        for start in range(0, chunk.size_bytes, PIECE_BYTES):
            self._check()
            digest.update(self._files.read(path, offset + start, min(PIECE_BYTES, chunk.size_bytes - start)))
        if digest.hexdigest() == chunk.blake3:
            self._finished(part.chunk)
        else:
            self._mark_mismatched(part.chunk)

    def copy(self, index: int, source: Segment) -> bool:
        """Copy a chunk from a local file. Returns False if the local bytes do not verify."""
        digest = blake3()
        try:
            descriptor = os.open(source.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            for start in range(0, source.size_bytes, PIECE_BYTES):
                try:
                    piece = os.pread(descriptor, min(PIECE_BYTES, source.size_bytes - start), source.offset + start)
                except OSError:
                    return False
                digest.update(piece)
                self.write(index, start, memoryview(piece))
        finally:
            os.close(descriptor)
        if digest.hexdigest() != self._chunks[index].blake3:
            return False
        self._finished(index)
        return True

    def decode_waiting(self) -> None:
        """Decode the waiting deltas whose bases have arrived."""
        with self._lock:
            ready = [(index, offset) for index, offset in self._waiting.items() if self._has_base(index)]

        def work(item: tuple[int, int], flight: Flight) -> None:
            index, offset = item
            stored = self._files.read(self._scratch, offset, self._chunks[index].stored_bytes)
            try:
                self._decode(index, memoryview(stored))
            except ChecksumMismatch:
                self._mark_mismatched(index)
            with self._lock:
                del self._waiting[index]

        run_batch(ready, work, workers=WORKERS, cancel=self._cancel)

    def take_mismatched(self) -> set[int]:
        """Return the complete chunks that did not verify, for a second fetch.

        Raises ChecksumMismatch for a chunk that an earlier call returned.
        """
        with self._lock:
            mismatched, self._mismatched = self._mismatched, set()
        for index in sorted(mismatched & self._given_up):
            raise self._mismatch(index)
        self._given_up |= mismatched
        return mismatched

    def finish(self) -> None:
        """Sync all files to the disk. Raises ChecksumMismatch if a chunk is missing."""
        for index in sorted(self.missing()):
            raise ChecksumMismatch(f"chunk {self._chunks[index].blake3} is missing after all ranges were fetched")
        run_batch(self._paths, lambda path, _: self._files.sync(path), workers=WORKERS, cancel=self._cancel)
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _take(self, part: ChunkPart, stored: memoryview) -> None:
        chunk = self._chunks[part.chunk]
        if part.size_bytes < chunk.stored_bytes:
            self.write(part.chunk, part.start, stored)
            self.finish_part(part)
        elif chunk.codec == "delta" and not self._has_base(part.chunk):
            offset = self._reserve(part.size_bytes)
            self._files.write(self._scratch, offset, stored)
            with self._lock:
                self._waiting[part.chunk] = offset
        else:
            self._decode(part.chunk, stored)

    def _decode(self, index: int, stored: memoryview) -> None:
        chunk = self._chunks[index]
        if chunk.size_bytes > LARGE_BYTES:
            with self._large:
                self._decode_now(index, chunk, stored)
        else:
            self._decode_now(index, chunk, stored)

    def _decode_now(self, index: int, chunk: Chunk, stored: memoryview) -> None:
        base = None if chunk.base is None else self._base(chunk.base)
        try:
            raw = memoryview(decode(chunk.codec, stored, size_bytes=chunk.size_bytes, width=chunk.width, base=base))
        except BadChunk as error:
            self._altered(index, error)
            return
        if len(raw) != chunk.size_bytes or blake3(raw).hexdigest() != chunk.blake3:
            self._altered(index)
            return
        self.write(index, 0, raw)
        self._finished(index)

    def _altered(self, index: int, cause: BadChunk | None = None) -> None:
        """Raise ChecksumMismatch, so that the caller fetches the range again.

        The method only marks a chunk after its second fetch; `take_mismatched` raises for such a chunk.
        """
        with self._lock:
            again = index in self._given_up
        if not again:
            raise self._mismatch(index) from cause
        self._mark_mismatched(index)

    def _base(self, index: int) -> bytes:
        chunk = self._chunks[index]
        if chunk.codec == "zeros":
            return bytes(chunk.size_bytes)
        path, offset = self._places[index][0]
        return self._files.read(path, offset, chunk.size_bytes)

    def _has_base(self, index: int) -> bool:
        base = self._chunks[index].base
        return base is None or base in self._done or self._chunks[base].codec == "zeros"

    def _finished(self, index: int) -> None:
        with self._lock:
            self._done.add(index)

    def _mark_mismatched(self, index: int) -> None:
        with self._lock:
            self._mismatched.add(index)

    def _reserve(self, size_bytes: int) -> int:
        """Reserve bytes in the scratch file. Returns their offset."""
        with self._lock:
            offset = self._scratch_bytes
            self._scratch_bytes += size_bytes
        return offset

    def _mismatch(self, index: int) -> ChecksumMismatch:
        chunk = self._chunks[index]
        place = "" if chunk.pack is None else f" in pack {self._packs[chunk.pack].blake3}"
        return ChecksumMismatch(f"chunk {chunk.blake3}{place} has bytes that do not match its digest")

    def _check(self) -> None:
        if self._cancel is not None:
            stop_if_set(self._cancel)


class _OpenFiles:
    """Pool of at most `max_open` open files, for reads and writes at offsets by several threads."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: dict[Path, _OpenFile] = {}

    def write(self, path: Path, offset: int, raw: memoryview) -> None:
        with self._opened(path) as opened, opened.writing, local_errors(f"writing {path}"):
            while raw:
                written = os.pwrite(opened.descriptor, raw, offset)
                raw, offset = raw[written:], offset + written

    def read(self, path: Path, offset: int, size_bytes: int) -> bytes:
        """Read bytes at an offset. Raises ChecksumMismatch if the file is shorter."""
        pieces: list[bytes] = []
        with self._opened(path) as opened, local_errors(f"reading {path}"):
            while size_bytes and (piece := os.pread(opened.descriptor, size_bytes, offset)):
                pieces.append(piece)
                size_bytes, offset = size_bytes - len(piece), offset + len(piece)
        if size_bytes:
            raise ChecksumMismatch(f"{path} is shorter than the bytes written to it")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def sync(self, path: Path) -> None:
        with self._opened(path) as opened, local_errors(f"writing {path}"):
            os.fsync(opened.descriptor)

    def close(self) -> None:
        with self._lock:
            self._open = {}

    @contextmanager
    def _opened(self, path: Path) -> Iterator[_OpenFile]:
        with self._lock:
            opened = self._open.get(path)
        if opened is None:
            with local_errors(f"opening {path}"):
                opened = _OpenFile(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
            with self._lock:
                if len(self._open) < self._max_open:
                    opened = self._open.setdefault(path, opened)
        yield opened


class _OpenFile:
    """A descriptor that closes with its last reference. A thread may outlive a batch, and the number of a descriptor
    that was closed earlier could name another file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.writing = threading.Lock()
        """Lock for one write at a time; without the lock, the kernel would serialize the writes by spinning."""

    def __del__(self) -> None:
        os.close(self.descriptor)


def _require_zeros(chunks: Iterable[Chunk], cancel: CancelEvent | None) -> None:
    """Raise ChecksumMismatch if the digest of a `zeros` chunk is not the digest of zeros."""
    for chunk in chunks:
        if chunk.codec != "zeros":
            continue
        digest = blake3()
        for start in range(0, chunk.size_bytes, PIECE_BYTES):
            if cancel is not None:
                stop_if_set(cancel)
            digest.update(_ZEROS[: min(PIECE_BYTES, chunk.size_bytes - start)])
        if digest.hexdigest() != chunk.blake3:
            raise ChecksumMismatch(
                f"chunk {chunk.blake3} is declared as {chunk.size_bytes} zeros and has another digest"
            )


def can_stream(found: PackRange, chunks: Sequence[Chunk]) -> bool:
    """Return True if the range has raw parts only, without overlap, as RawStream requires."""
    return all(chunks[part.chunk].codec == "raw" for part in found.parts) and all(
        one.offset + one.size_bytes <= other.offset for one, other in pairwise(found.parts)
    )


class RawStream:
    """Stream of a raw range's bytes, in order. A chunk counts once all its bytes are written and verified."""

    def __init__(self, found: PackRange, chunks: Sequence[Chunk], assembly: FileAssembler) -> None:
        self._found = found
        self._chunks = chunks
        self._assembly = assembly
        self.begin()

    def begin(self) -> None:
        """Start or restart at the first byte; verified chunks stay."""
        self._at = self._found.offset
        self._number = 0
        self._begin_part()

    @property
    def complete(self) -> bool:
        """Return True once all parts have arrived."""
        return self._number == len(self._found.parts)

    def take(self, piece: memoryview) -> None:
        """Add the next bytes. Raises ChecksumMismatch at the end of a chunk that does not verify."""
        end = self._at + len(piece)
        while not self.complete:
            part = self._found.parts[self._number]
            part_end = part.offset + part.size_bytes
            begin = max(self._at, part.offset)
            if begin < end:
                self._take_some(part, begin - part.offset, piece[begin - self._at : part_end - self._at])
            if part_end > end:
                break
            self._end_part(part)
        self._at = end

    def _begin_part(self) -> None:
        self._hasher = blake3()
        self._has_chunk = not self.complete and self._assembly.has(self._found.parts[self._number].chunk)

    def _take_some(self, part: ChunkPart, start: int, raw: memoryview) -> None:
        if self._has_chunk:
            return
        self._assembly.write(part.chunk, part.start + start, raw)
        if part.size_bytes == self._chunks[part.chunk].size_bytes:
            self._hasher.update(raw)

    def _end_part(self, part: ChunkPart) -> None:
        has_chunk, digest = self._has_chunk, self._hasher.hexdigest()
        self._number += 1
        self._begin_part()
        if has_chunk:
            return
        if part.size_bytes == self._chunks[part.chunk].size_bytes:
            self._assembly.finish_chunk(part.chunk, digest)
        else:
            self._assembly.finish_part(part)
