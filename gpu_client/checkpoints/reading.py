"""What has to be fetched to have a checkpoint's files: its chunks, their places, the ranges of its packs. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from baton.contract.checkpoints import CheckpointRef
from baton.contract.manifest import MANIFEST_VERSION, Chunk, Manifest, parse_manifest
from gpu_client.checkpoints.hashing import digest_bytes

MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_RANGE_BYTES = 16 * 1024 * 1024
"""Bytes of one request. Only a single encoded chunk, which is decoded as a whole, may have more."""

MAX_GAP_BYTES = 1024 * 1024
"""Bytes that nobody wants and that are fetched all the same, because another request would cost more."""


class BadManifest(Exception):  # noqa: N818 - a finding about stored bytes, reported as damage
    """Stored bytes are not the manifest of the checkpoint they are said to be."""


class UnknownVersion(Exception):  # noqa: N818 - no damage: somebody else can read it
    """The manifest is sound, but of a version that this program cannot read."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes of a chunk belong: an index in the manifest's `files`, and the offset in that file."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class Part:
    """Stored bytes of a chunk: all of them, or some of a `raw` one that is longer than a range."""

    chunk: int
    start: int
    """Where in the stored bytes of the chunk it begins."""
    offset: int
    """Where in the pack it begins."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a pack that are fetched by one request, and what in them is wanted."""

    pack: int
    offset: int
    size_bytes: int
    parts: tuple[Part, ...]


def read_manifest(data: bytes, *, job_id: str, ref: CheckpointRef) -> Manifest:
    """The manifest of checkpoint `ref` of the job.

    Raises BadManifest if the bytes are anything else, UnknownVersion if they have another version.
    """
    if ref.manifest_blake3 is not None and digest_bytes(data).blake3 != ref.manifest_blake3:
        raise BadManifest("the manifest has other bytes than its digest says")
    try:
        manifest = parse_manifest(data)
    except ValidationError as error:
        version = _version(data)
        if version is not None and version != MANIFEST_VERSION:
            raise UnknownVersion(
                f"its manifest has version {version}; this worker reads version {MANIFEST_VERSION}: "
                "use a worker of the release that wrote it"
            ) from error
        raise BadManifest(f"the manifest cannot be read: {error.errors()[0]['msg']}") from error
    named = (manifest.job_id, manifest.step, manifest.epoch)
    if named != (job_id, ref.step, ref.epoch):
        raise BadManifest(f"the manifest is that of job {named[0]}, step {named[1]}, epoch {named[2]}")
    return manifest


def _version(data: bytes) -> int | None:
    """What the manifest says of itself; None if it says nothing usable."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    version = found.get("version") if isinstance(found, dict) else None
    return version if isinstance(version, int) and not isinstance(version, bool) else None


def places_of(manifest: Manifest) -> dict[int, list[Place]]:
    """Where each chunk belongs, by its index. Of `zeros` nothing is said: they need no writing."""
    places: dict[int, list[Place]] = {}
    silent = [chunk.codec == "zeros" for chunk in manifest.chunks]
    sizes = [chunk.size_bytes for chunk in manifest.chunks]
    for number, file in enumerate(manifest.files):
        offset = 0
        for index in file.chunks:
            if not silent[index]:
                places.setdefault(index, []).append(Place(number, offset))
            offset += sizes[index]
    return places


def written_bytes(manifest: Manifest) -> int:
    """Bytes that the files take on a disk that knows holes."""
    sizes = [0 if chunk.codec == "zeros" else chunk.size_bytes for chunk in manifest.chunks]
    return sum(sizes[index] for file in manifest.files for index in file.chunks)


def scratch_bytes(manifest: Manifest) -> int:
    """Bytes of the bases that no file has: room that is needed beside the files."""
    used = {index for file in manifest.files for index in file.chunks}
    return sum(manifest.chunks[index].size_bytes for index in bases_of(manifest.chunks, used) - used)


def bases_of(chunks: Sequence[Chunk], wanted: Iterable[int]) -> set[int]:
    """The chunks without which the `delta`s among `wanted` cannot be decoded, `zeros` left out."""
    bases = {chunks[index].base for index in wanted}
    return {base for base in bases if base is not None and chunks[base].codec != "zeros"}


def plan_ranges(manifest: Manifest, wanted: Collection[int]) -> list[Range]:
    """The requests that bring the `wanted` chunks, each once. Packs that hold bases of others come first."""
    parts: dict[int, list[Part]] = {}
    for index in wanted:
        chunk = manifest.chunks[index]
        if chunk.pack is not None:
            parts.setdefault(chunk.pack, []).extend(_parts(index, chunk))
    first = {manifest.chunks[base].pack for base in bases_of(manifest.chunks, wanted)}
    return [
        found
        for pack in sorted(parts, key=lambda pack: (pack not in first, pack))
        for found in _ranges_of(pack, manifest.packs[pack].size_bytes, parts[pack])
    ]


def _parts(index: int, chunk: Chunk) -> list[Part]:
    step = MAX_RANGE_BYTES if chunk.codec == "raw" else chunk.stored_bytes
    return [
        Part(index, start, chunk.offset + start, min(step, chunk.stored_bytes - start))
        for start in range(0, chunk.stored_bytes, step)
    ]


def _ranges_of(pack: int, pack_bytes: int, parts: list[Part]) -> list[Range]:
    parts.sort(key=lambda part: (part.offset, part.size_bytes))
    # Of a pack that is mostly wanted the rest is taken along.
    max_gap_bytes = pack_bytes if 2 * sum(part.size_bytes for part in parts) > pack_bytes else MAX_GAP_BYTES
    ranges: list[Range] = []
    together: list[Part] = []
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


def _range(pack: int, parts: list[Part], end: int) -> Range:
    return Range(pack, parts[0].offset, end - parts[0].offset, tuple(parts))
