"""From a directory to a manifest, and back from bytes to a manifest that can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from contract.base import MAX_PATH_BYTES
from contract.checkpoints import MAX_MANIFEST_FILES, CheckpointRef, Manifest, ManifestFile
from gpu_client.checkpoints.errors import BadDirectory
from gpu_client.checkpoints.hashing import digest_bytes, hash_files
from gpu_client.checkpoints.metrics import usable_metrics
from gpu_client.checkpoints.tree import files_of, require_storable
from gpu_client.transport.cancel import CancelEvent

MAX_MANIFEST_BYTES = 16 * 1024 * 1024


class BadManifest(Exception):  # noqa: N818 - a finding about stored bytes, reported as damage
    """Stored bytes are not the manifest of the checkpoint they are said to be."""


@dataclass(frozen=True)
class LocalManifest:
    """A manifest, and the local file of each of its blobs."""

    manifest: Manifest
    blobs: Mapping[str, Path]
    """By BLAKE3; of several files with the same bytes, one."""

    @property
    def blob_sizes(self) -> dict[str, int]:
        """Bytes of each blob, by BLAKE3."""
        return {file.blake3: file.size_bytes for file in self.manifest.files}


def build_manifest(
    directory: Path,
    *,
    job_id: str,
    step: int,
    epoch: int,
    metrics: Mapping[str, float] | None = None,
    created_by: Literal["session", "script"] = "session",
    cancel: CancelEvent | None = None,
) -> LocalManifest:
    """Hash all files of a checkpoint directory.

    Metrics that the contract does not admit (NaN, odd names) are left out. Raises BadDirectory, FileChanged,
    TransferError (unreadable), TransferCanceled.
    """
    paths = files_of(directory)
    if not 1 <= len(paths) <= MAX_MANIFEST_FILES:
        raise BadDirectory(f"{directory} has {len(paths)} files; a checkpoint has 1 to {MAX_MANIFEST_FILES}")
    require_storable(paths, max_path_bytes=MAX_PATH_BYTES)
    digests = hash_files(paths, cancel=cancel)
    try:
        files = [
            ManifestFile(path=path, size_bytes=digest.size_bytes, blake3=digest.blake3, crc64nvme=digest.crc64nvme)
            for path, digest in digests.items()
        ]
        manifest = Manifest(
            version=1,
            job_id=job_id,
            step=step,
            epoch=epoch,
            files=files,
            metrics=usable_metrics(dict(metrics or {})),
            created_by=created_by,
        )
    except ValidationError as error:
        raise BadDirectory(f"{directory} cannot be a checkpoint: {error.errors()[0]['msg']}") from error
    return LocalManifest(manifest, {digest.blake3: paths[path] for path, digest in digests.items()})


def manifest_digest(manifest: Manifest) -> str:
    """BLAKE3 of the manifest's one JSON text: what the control plane stores and names it by."""
    return digest_bytes(manifest.canonical_bytes()).blake3


def read_manifest(data: bytes, *, job_id: str, ref: CheckpointRef) -> Manifest:
    """The manifest of checkpoint `ref` of the job. Raises BadManifest if the bytes are anything else."""
    if ref.manifest_blake3 is not None and digest_bytes(data).blake3 != ref.manifest_blake3:
        raise BadManifest("the manifest has other bytes than its digest says")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise BadManifest(f"the manifest cannot be read: {error.errors()[0]['msg']}") from error
    named = (manifest.job_id, manifest.step, manifest.epoch)
    if named != (job_id, ref.step, ref.epoch):
        raise BadManifest(f"the manifest is that of job {named[0]}, step {named[1]}, epoch {named[2]}")
    return manifest
