"""From a directory to a manifest and the packs that are new.

Every byte is read once: what is hashed for its chunk's name is what is hashed for its pack's, and encoded. A chunk that
is stored as it is stays where it is, in its file; only encoded ones are written anew, to a spool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from baton.contract.base import MAX_PATH_BYTES
from baton.contract.manifest import MANIFEST_VERSION, MAX_FILE_BYTES, MAX_MANIFEST_FILES, Manifest
from gpu_client.checkpoints.building import Build
from gpu_client.checkpoints.choosing import Rates
from gpu_client.checkpoints.errors import BadDirectory
from gpu_client.checkpoints.hashing import digest_bytes
from gpu_client.checkpoints.known import Known
from gpu_client.checkpoints.metrics import usable_metrics
from gpu_client.checkpoints.sources import Spool
from gpu_client.checkpoints.tree import files_of, require_storable
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.transfer.transfer_requests import Segment

__all__ = ["LocalManifest", "build_manifest", "manifest_digest"]


@dataclass
class LocalManifest:
    """A manifest, and where the bytes of its new packs lie. `close` removes what was encoded for it."""

    manifest: Manifest
    packs: Mapping[str, tuple[Segment, ...]]
    """By BLAKE3. The other packs of the manifest are stored already, as far as is known."""
    new_bytes: int
    """Of the files, in chunks that lie in new packs."""
    hash_s: float
    """Wall-clock time of the whole."""
    encode_s: float
    """Of all threads together."""
    close: Callable[[], None]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each pack, new or not, by BLAKE3."""
        return {pack.blake3: pack.size_bytes for pack in self.manifest.packs}


def manifest_digest(manifest: Manifest) -> str:
    """BLAKE3 of the manifest's one JSON text: what the control plane stores and names it by."""
    return digest_bytes(manifest.canonical_bytes()).blake3


def build_manifest(
    directory: Path,
    *,
    job_id: str,
    step: int,
    epoch: int,
    metrics: Mapping[str, float] | None = None,
    created_by: Literal["session", "script"] = "session",
    tag: str = "",
    known: Known | None = None,
    upload_bytes_per_s: float | None = None,
    spool: Path | None = None,
    cancel: CancelEvent | None = None,
) -> LocalManifest:
    """Cut, hash, encode and pack the files of a checkpoint directory. The same arguments give the same manifest.

    `spool` is a directory for encoded chunks; without one nothing is encoded. Metrics that the contract does not admit
    (NaN, odd names) are left out. Raises BadDirectory, FileChanged, TransferError (unreadable), TransferCanceled.
    """
    started = time.monotonic()
    paths = files_of(directory)
    if not 1 <= len(paths) <= MAX_MANIFEST_FILES:
        raise BadDirectory(f"{directory} has {len(paths)} files; a checkpoint has 1 to {MAX_MANIFEST_FILES}")
    require_storable(paths, max_path_bytes=MAX_PATH_BYTES, max_bytes=MAX_FILE_BYTES)
    rates = Rates.of(upload_bytes_per_s) if spool is not None else None
    build = Build(paths, known or Known(), rates, Spool(spool or directory), cancel)
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
            metrics=usable_metrics(dict(metrics or {})),
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
