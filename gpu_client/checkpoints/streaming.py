"""Ranges of which all that is wanted is `raw`: there is nothing to decode, so bytes go to their places as they come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from blake3 import blake3

from baton.contract.manifest import Chunk
from gpu_client.checkpoints.assembly import Assembly
from gpu_client.checkpoints.reading import Part, Range

PIECE_BYTES = 4 * 1024 * 1024
"""Received, hashed and written in turn. Smaller ones would stay in the processor's cache, but threads that take turns
at the interpreter more often lose more by that."""


def can_stream(found: Range, chunks: Sequence[Chunk]) -> bool:
    """Whether a RawStream can take the range: no part is encoded, and none has bytes of another."""
    return all(chunks[part.chunk].codec == "raw" for part in found.parts) and all(
        one.offset + one.size_bytes <= other.offset for one, other in pairwise(found.parts)
    )


class RawStream:
    """Takes the bytes of such a range in order. A chunk counts when all of it is written and verifies."""

    def __init__(self, found: Range, chunks: Sequence[Chunk], assembly: Assembly) -> None:
        self._found = found
        self._chunks = chunks
        self._assembly = assembly
        self.begin()

    def begin(self) -> None:
        """From the first byte on, perhaps once more: what was verified is left as it is."""
        self._at = self._found.offset
        self._number = 0
        self._begin_part()

    @property
    def complete(self) -> bool:
        """All that is wanted has come."""
        return self._number == len(self._found.parts)

    def take(self, piece: memoryview) -> None:
        """The next bytes. Raises ChecksumMismatch at the end of a chunk that does not verify."""
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
        self._there = not self.complete and self._assembly.has(self._found.parts[self._number].chunk)

    def _take_some(self, part: Part, start: int, raw: memoryview) -> None:
        if self._there:
            return
        self._assembly.write(part.chunk, part.start + start, raw)
        if part.size_bytes == self._chunks[part.chunk].size_bytes:
            self._hasher.update(raw)

    def _end_part(self, part: Part) -> None:
        there, digest = self._there, self._hasher.hexdigest()
        self._number += 1
        self._begin_part()
        if there:
            return
        if part.size_bytes == self._chunks[part.chunk].size_bytes:
            self._assembly.written(part.chunk, digest)
        else:
            self._assembly.part_written(part)
