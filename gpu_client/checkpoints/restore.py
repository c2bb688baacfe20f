"""Bringing back the newest checkpoint whose bytes verify.

Damage (a missing or altered blob, a manifest that is none) is reported, so that nobody is sent there again and steps go
on from the next older checkpoint, which is tried then. Trouble on the way there (network, disk, a refused request) is
not damage: it is raised, and nothing is thrown away. A checkpoint appears under its name complete and verified or not
at all.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from contract.checkpoints import MAX_MISSING_PER_ANSWER, BlobUrls, CheckpointRef, Manifest, ManifestFile
from contract.errors import ErrorCode
from contract.work import WorkItem
from gpu_client.checkpoints.errors import RestoreFailed
from gpu_client.checkpoints.legacy_zip import BadZip, unpack
from gpu_client.checkpoints.manifest import MAX_MANIFEST_BYTES, BadManifest, read_manifest
from gpu_client.transport.cancel import CancelEvent, stop_if_set
from gpu_client.transport.errors import (
    ChecksumMismatch,
    DiskFull,
    NotFound,
    ObjectMissing,
    UnsafePath,
    UrlExpired,
)
from gpu_client.transport.files import CHUNK_BYTES, StagedFile, local_errors, safe_destination, sync_directory
from gpu_client.transport.transfer import Download, Progress, Transfer

__all__ = ["RestoreFailed", "Restored", "restore"]

logger = logging.getLogger(__name__)

MAX_EXPIRED_ROUNDS = 5
"""Times in a row that fresh URLs may run out without one more blob having arrived."""

RESERVE_BYTES = 64 * 1024 * 1024
"""Space that must be left on the disk beside the checkpoint."""


class RestoreApi(Protocol):
    """The calls that a restore needs; BatonClient has them."""

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        """Where to fetch blobs."""
        ...

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        """Say that a checkpoint does not verify."""
        ...


@dataclass(frozen=True)
class Restored:
    """A checkpoint on this machine: `path` is its directory, `checkpoint-<step>`."""

    step: int
    epoch: int
    path: Path
    total_bytes: int


class _Damaged(Exception):  # noqa: N818 - a finding, reported
    """The checkpoint's bytes do not verify."""


def restore(
    client: RestoreApi,
    transfer: Transfer,
    item: WorkItem,
    directory: Path,
    *,
    cancel: CancelEvent | None = None,
    progress: Progress | None = None,
) -> Restored | None:
    """Restore the newest sound checkpoint of the claim to `directory`/checkpoint-<step>, replacing what is there.

    None if the job has no checkpoint, or if all of them were found and reported damaged: then it starts from step 0.
    Raises RestoreFailed if there are checkpoints that could be neither fetched nor reported damaged, Unreachable,
    DiskFull, TransferError, TransferCanceled, ApiError (LeaseLost above all).
    """
    unexplained: list[str] = []
    for ref in item.resume:
        attempt = _Attempt(client, transfer, item, ref, directory, cancel=cancel, progress=progress)
        try:
            return attempt.run()
        except _Damaged as error:
            logger.error("checkpoint of step %d (epoch %d) is damaged: %s", ref.step, ref.epoch, error)
            try:
                client.report_damaged(item.id, ref.step, item.lease_token, epoch=ref.epoch, message=str(error))
            except NotFound:
                unexplained.append(f"step {ref.step} cannot be reported as damaged: unknown to the control plane")
        except UrlExpired as error:
            # no older one instead: the control plane would refuse its next steps, which this one has already
            raise RestoreFailed(f"checkpoint of step {ref.step}: {error}") from error
    if unexplained:
        raise RestoreFailed("no checkpoint could be fetched: " + "; ".join(unexplained))
    if item.resume:
        logger.error("all %d checkpoints of job %s are damaged: it starts from step 0", len(item.resume), item.id)
    return None


class _Attempt:
    """One checkpoint, fetched aside and then given its name."""

    def __init__(
        self,
        client: RestoreApi,
        transfer: Transfer,
        item: WorkItem,
        ref: CheckpointRef,
        directory: Path,
        *,
        cancel: CancelEvent | None,
        progress: Progress | None,
    ) -> None:
        self._client = client
        self._transfer = transfer
        self._item = item
        self._ref = ref
        self._directory = directory
        self._aside = directory / f".restore-{ref.step}-{ref.epoch}"
        self._cancel = cancel
        self._progress = progress

    def run(self) -> Restored:
        """Raises _Damaged, and everything that is no finding about the checkpoint."""
        try:
            with local_errors(f"preparing {self._aside}"):
                self._directory.mkdir(parents=True, exist_ok=True)
                _remove(self._aside)
                self._aside.mkdir()
            return self._fetch()
        except (ChecksumMismatch, ObjectMissing, UnsafePath, BadManifest, BadZip) as error:
            raise _Damaged(str(error)) from error
        finally:
            _remove(self._aside)

    def _fetch(self) -> Restored:
        content = self._aside / "content"
        if self._ref.legacy_key is not None:
            total_bytes = self._fetch_zip(content)
        else:
            manifest = self._manifest()
            total_bytes = manifest.total_bytes
            self._require_space(total_bytes)
            self._fetch_files(manifest, content)
        if self._cancel is not None:
            stop_if_set(self._cancel)
        path = self._directory / f"checkpoint-{self._ref.step}"
        with local_errors(f"putting {path} in place"):
            _remove(path)
            content.rename(path)
        sync_directory(self._directory)
        return Restored(self._ref.step, self._ref.epoch, path, total_bytes)

    def _manifest(self) -> Manifest:
        name = f"manifest of step {self._ref.step}"
        data = self._transfer.read(self._ref.manifest_url, name=name, max_bytes=MAX_MANIFEST_BYTES, cancel=self._cancel)
        try:
            return read_manifest(data, job_id=self._item.id, ref=self._ref)
        except BadManifest as error:
            # altered on the way? The store is asked once more before it is blamed
            logger.warning("%s; fetching it once more", error)
            data = self._transfer.read(
                self._ref.manifest_url, name=name, max_bytes=MAX_MANIFEST_BYTES, cancel=self._cancel
            )
            return read_manifest(data, job_id=self._item.id, ref=self._ref)

    def _fetch_zip(self, content: Path) -> int:
        self._require_space(self._ref.total_bytes)
        download = Download(
            name=self._ref.legacy_key or "",
            url=self._ref.manifest_url,
            root=self._aside,
            path="checkpoint.zip",
            size_bytes=self._ref.total_bytes,
        )
        self._transfer.download([download], cancel=self._cancel, progress=self._progress)
        archive = self._aside / "checkpoint.zip"
        return unpack(archive, content, cancel=self._cancel, available_bytes=self._free_bytes() - RESERVE_BYTES)

    def _fetch_files(self, manifest: Manifest, content: Path) -> None:
        """Each blob once, to the first path that names it; further paths get copies of the verified file."""
        first: dict[str, ManifestFile] = {}
        copies: list[tuple[ManifestFile, ManifestFile]] = []
        for file in manifest.files:
            original = first.setdefault(file.blake3, file)
            if original is not file:
                copies.append((original, file))
        blobs = list(first.values())
        for start in range(0, len(blobs), MAX_MISSING_PER_ANSWER):
            self._fetch_blobs(blobs[start : start + MAX_MISSING_PER_ANSWER], content)
        for original, copy in copies:
            self._copy(content / original.path, safe_destination(content, copy.path))

    def _fetch_blobs(self, blobs: Sequence[ManifestFile], content: Path) -> None:
        waiting = list(blobs)
        fruitless = 0
        while waiting:
            urls = self._urls([file.blake3 for file in waiting])
            downloads = [
                Download(
                    name=f"blob {file.blake3}",
                    url=urls[file.blake3],
                    root=content,
                    path=file.path,
                    size_bytes=file.size_bytes,
                    blake3=file.blake3,
                )
                for file in waiting
            ]
            try:
                self._transfer.download(downloads, cancel=self._cancel, progress=self._progress)
                return
            except UrlExpired:
                # a file that has its name is complete and verified
                left = [file for file in waiting if not (content / file.path).exists()]
                fruitless = fruitless + 1 if len(left) == len(waiting) else 0
                if fruitless >= MAX_EXPIRED_ROUNDS:
                    raise
                waiting = left

    def _urls(self, digests: Sequence[str]) -> Mapping[str, str]:
        try:
            answer = self._client.blob_urls(self._item.id, self._ref.step, digests, lease_token=self._item.lease_token)
        except NotFound as error:
            if error.code != ErrorCode.CHECKPOINT_NOT_FOUND:
                raise
            # its own copy of the manifest is damaged or gone
            raise _Damaged(error.message) from error
        absent = [digest for digest in digests if digest not in answer.urls]
        if absent:
            raise _Damaged(f"blob {absent[0]} is not to be had")
        return answer.urls

    def _copy(self, source: Path, destination: Path) -> None:
        with local_errors(f"copying to {destination}"):
            opened = source.open("rb")
        with opened, StagedFile(destination, fsync=True) as file:
            while True:
                if self._cancel is not None:
                    stop_if_set(self._cancel)
                with local_errors(f"reading {source}"):
                    piece = opened.read(CHUNK_BYTES)
                if not piece:
                    break
                file.write(memoryview(piece))
            file.commit()

    def _free_bytes(self) -> int:
        with local_errors(f"looking at the disk of {self._directory}"):
            return shutil.disk_usage(self._directory).free

    def _require_space(self, needed_bytes: int) -> None:
        """Better before an hour of download than after it."""
        free_bytes = self._free_bytes()
        if free_bytes < needed_bytes + RESERVE_BYTES:
            raise DiskFull(f"the checkpoint needs {needed_bytes} bytes; {free_bytes} are free in {self._directory}")


def _remove(path: Path) -> None:
    """Remove a directory tree, or a file or link in its place."""
    with local_errors(f"removing {path}"):
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
