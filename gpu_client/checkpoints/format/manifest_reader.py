"""Parse and check a stored manifest, and compute the places of its chunks."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pydantic import ValidationError

from baton.contract.checkpoints.calls import CheckpointRef
from baton.contract.checkpoints.manifest import MANIFEST_VERSION, Manifest, parse_manifest
from gpu_client.transport.net.digests import digest_bytes

MAX_MANIFEST_BYTES = 16 * 1024 * 1024


class BadManifest(Exception):  # noqa: N818 - a finding about stored bytes, reported as damage
    """Error of stored bytes that are not the manifest of the requested checkpoint."""


class UnknownVersion(Exception):  # noqa: N818 - no damage: another release can read the manifest
    """Error of an intact manifest whose version this release cannot read."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Place of a chunk: an index in the manifest's `files`, and an offset in this file."""

    file: int
    offset: int


def read_manifest(data: bytes, *, job_id: str, ref: CheckpointRef) -> Manifest:
    """Parse and verify the manifest of checkpoint `ref` of the job.

    Raises BadManifest for any other bytes, UnknownVersion for another version.
    """
    if ref.manifest_blake3 is not None and digest_bytes(data).blake3 != ref.manifest_blake3:
        raise BadManifest("the bytes of the manifest do not match its digest")
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
        raise BadManifest(f"the manifest belongs to job {named[0]}, step {named[1]}, epoch {named[2]}")
    return manifest


def _version(data: bytes) -> int | None:
    """Return the version that the manifest declares, or None."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    version = found.get("version") if isinstance(found, dict) else None
    return version if isinstance(version, int) and not isinstance(version, bool) else None


def map_places(manifest: Manifest) -> dict[int, list[ChunkPlace]]:
    """Return the places of each chunk, by index; omit `zeros` chunks, which need no write."""
    places: dict[int, list[ChunkPlace]] = {}
    skipped = [chunk.codec == "zeros" for chunk in manifest.chunks]
    sizes = [chunk.size_bytes for chunk in manifest.chunks]
    for number, file in enumerate(manifest.files):
        offset = 0
        for index in file.chunks:
            if not skipped[index]:
                places.setdefault(index, []).append(ChunkPlace(number, offset))
            offset += sizes[index]
    return places


def count_written_bytes(manifest: Manifest) -> int:
    """Return the disk space of the files in bytes, on a disk that stores holes."""
    sizes = [0 if chunk.codec == "zeros" else chunk.size_bytes for chunk in manifest.chunks]
    return sum(sizes[index] for file in manifest.files for index in file.chunks)
