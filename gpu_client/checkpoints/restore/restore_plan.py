"""Plan the ranges of packs to fetch for the chunks of a checkpoint. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from baton.contract.checkpoints.manifest import Chunk, Manifest

MAX_RANGE_BYTES = 16 * 1024 * 1024
"""Maximum bytes of one request. Only a single encoded chunk, which is decoded as a whole, may exceed the bound."""

MAX_GAP_BYTES = 1024 * 1024
"""Maximum bytes of a gap that is fetched in vain, because another request would cost more."""


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Stored bytes of a chunk: all bytes, or a part of a `raw` chunk that is longer than a range."""

    chunk: int
    start: int
    """Offset in the stored bytes of the chunk."""
    offset: int
    """Offset in the pack."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PackRange:
    """Bytes of a pack for one request, and the needed parts in these bytes."""

    pack: int
    offset: int
    size_bytes: int
    parts: tuple[ChunkPart, ...]


def count_scratch_bytes(manifest: Manifest) -> int:
    """Return the disk space, in bytes, of the bases that no file contains."""
    used = {index for file in manifest.files for index in file.chunks}
    return sum(manifest.chunks[index].size_bytes for index in find_bases(manifest.chunks, used) - used)


def find_bases(chunks: Sequence[Chunk], wanted: Iterable[int]) -> set[int]:
    """Return the bases of the `delta` chunks among `wanted`, without `zeros`."""
    bases = {chunks[index].base for index in wanted}
    return {base for base in bases if base is not None and chunks[base].codec != "zeros"}


def plan_ranges(manifest: Manifest, wanted: Collection[int]) -> list[PackRange]:
    """Return the ranges that contain each of the `wanted` chunks once. Packs with bases come first."""
    parts: dict[int, list[ChunkPart]] = {}
    for index in wanted:
        chunk = manifest.chunks[index]
        if chunk.pack is not None:
            parts.setdefault(chunk.pack, []).extend(_parts(index, chunk))
    first = {manifest.chunks[base].pack for base in find_bases(manifest.chunks, wanted)}
    return [
        found
        for pack in sorted(parts, key=lambda pack: (pack not in first, pack))
        for found in _ranges_of(pack, manifest.packs[pack].size_bytes, parts[pack])
    ]


def _parts(index: int, chunk: Chunk) -> list[ChunkPart]:
    step = MAX_RANGE_BYTES if chunk.codec == "raw" else chunk.stored_bytes
    return [
        ChunkPart(index, start, chunk.offset + start, min(step, chunk.stored_bytes - start))
        for start in range(0, chunk.stored_bytes, step)
    ]


def _ranges_of(pack: int, pack_bytes: int, parts: list[ChunkPart]) -> list[PackRange]:
    parts.sort(key=lambda part: (part.offset, part.size_bytes))
    # One request fetches a pack as a whole if more than half of its bytes are needed.
    max_gap_bytes = pack_bytes if 2 * sum(part.size_bytes for part in parts) > pack_bytes else MAX_GAP_BYTES
    ranges: list[PackRange] = []
    together: list[ChunkPart] = []
    end = 0
    for part in parts:
        part_end = part.offset + part.size_bytes
        if together and (
            part.offset - end > max_gap_bytes or max(end, part_end) - together[0].offset > MAX_RANGE_BYTES
        ):
            ranges.append(_range(pack, together, end))
            together, end = [], 0
        together.append(part)
        end = max(end, part_end)
    ranges.append(_range(pack, together, end))
    return ranges


def _range(pack: int, parts: list[ChunkPart], end: int) -> PackRange:
    return PackRange(pack, parts[0].offset, end - parts[0].offset, tuple(parts))
