"""Restore the newest checkpoint whose bytes verify.

After damage (a missing or altered pack, an unreadable manifest) the restore reports the checkpoint to the control
plane, so that no later claim lists the checkpoint, and tries the next older one. Other errors (network, disk, a refused
request, a manifest of another version) are no damage: the restore raises them, and no checkpoint is lost. A checkpoint
appears under its name complete and verified or not at all. The restore copies chunks from the local cache where
possible.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from baton.contract.checkpoints.calls import MAX_MISSING_PER_ANSWER, BlobUrls, CheckpointRef
from baton.contract.checkpoints.manifest import Manifest
from baton.contract.errors import ErrorCode
from gpu_client.checkpoints.format.legacy_zip import BadZip, unpack
from gpu_client.checkpoints.format.manifest_reader import (
    MAX_MANIFEST_BYTES,
    BadManifest,
    UnknownVersion,
    count_written_bytes,
    read_manifest,
)
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.checkpoints.restore.file_assembler import PIECE_BYTES, WORKERS, FileAssembler, RawStream, can_stream
from gpu_client.checkpoints.restore.restore_plan import PackRange, count_scratch_bytes, plan_ranges
from gpu_client.transport.errors import (
    BatonError,
    ChecksumMismatch,
    DiskFull,
    NotFound,
    ObjectMissing,
    UnsafePath,
    UrlExpired,
)
from gpu_client.transport.limits.thread_batch import run_batch
from gpu_client.transport.net.cancellation import CancelEvent, Flight, stop_if_set
from gpu_client.transport.net.files import local_errors, sync_directory
from gpu_client.transport.transfer.manager import Download, Progress, RangeDownload, Transfer
from gpu_client.transport.transfer.transfer_requests import Segment

logger = logging.getLogger(__name__)

MAX_EXPIRED_ROUNDS = 5
"""Limit of successive rounds in which fresh URLs expire before another range arrives."""

RESERVE_BYTES = 64 * 1024 * 1024
"""Disk space in bytes that must stay free beside the checkpoint."""


class RestoreFailed(BatonError):  # noqa: N818
    """Error of a job with committed checkpoints of which none could be fetched. A start from step 0 would lose them."""


class RestoreApi(Protocol):
    """Control-plane API of a restore, implemented by BatonClient."""

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        """Return presigned URLs of packs."""
        ...

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        """Report a damaged checkpoint."""
        ...


class RestoreClaim(Protocol):
    """Part of a claim that a restore reads; WorkItem implements the protocol."""

    @property
    def id(self) -> str: ...
    @property
    def lease_token(self) -> str: ...
    @property
    def checkpoint_job(self) -> str: ...
    @property
    def resume(self) -> Sequence[CheckpointRef]: ...


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint: `path` is its directory, `checkpoint-<step>`."""

    step: int
    epoch: int
    path: Path
    total_bytes: int
    fetched_bytes: int = 0
    """Fetched stored bytes; the stored bytes of an encoded chunk are fewer than its raw bytes."""
    local_bytes: int = 0
    """Bytes from the local cache."""


class _Damaged(Exception):  # noqa: N818 - caught here and reported
    """Error of a checkpoint whose bytes do not verify."""


def restore(
    client: RestoreApi,
    transfer: Transfer,
    item: RestoreClaim,
    directory: Path,
    *,
    store: LocalChunkCache | None = None,
    cancel: CancelEvent | None = None,
    progress: Progress | None = None,
) -> Restored | None:
    """Restore the newest intact checkpoint of the claim to `directory`/checkpoint-<step>, replacing that path.

    The function copies chunks from `store` where possible; afterwards `store` contains only the restored checkpoint.

    Returns None if the job has no checkpoint, or if all were reported as damaged: the job starts from step 0. Raises
    RestoreFailed if a checkpoint could be neither fetched nor reported as damaged, Unreachable, DiskFull,
    TransferError, TransferCanceled, ApiError (such as LeaseLost).
    """
    unexplained: list[str] = []
    for ref in item.resume:
        attempt = _CheckpointRestore(
            client, transfer, item, ref, directory, store=store, cancel=cancel, progress=progress
        )
        try:
            return attempt.run()
        except _Damaged as error:
            logger.error("checkpoint of step %d (epoch %d) is damaged: %s", ref.step, ref.epoch, error)
            try:
                client.report_damaged(item.id, ref.step, item.lease_token, epoch=ref.epoch, message=str(error))
            except NotFound:
                unexplained.append(f"step {ref.step} cannot be reported as damaged: unknown to the control plane")
        except (UnknownVersion, UrlExpired) as error:
            # An older checkpoint does not help, because the control plane refuses commits of steps up to this
            # checkpoint's step.
            raise RestoreFailed(f"checkpoint of step {ref.step}: {error}") from error
    if unexplained:
        raise RestoreFailed("no checkpoint could be fetched: " + "; ".join(unexplained))
    if store is not None:
        store.clear()
    if item.resume:
        logger.error("all %d checkpoints of job %s are damaged: it starts from step 0", len(item.resume), item.id)
    return None


class _CheckpointRestore:
    """Restore of one checkpoint into a temporary directory, which is renamed at the end."""

    def __init__(
        self,
        client: RestoreApi,
        transfer: Transfer,
        item: RestoreClaim,
        ref: CheckpointRef,
        directory: Path,
        *,
        store: LocalChunkCache | None,
        cancel: CancelEvent | None,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._client = client
        self._transfer = transfer
        self._item = item
        self._ref = ref
        self._directory = directory
        self._aside = directory / f".restore-{ref.step}-{ref.epoch}"
        self._cancel = cancel
        self._progress = progress

    def run(self) -> Restored:
        """Fetch and place the checkpoint. Raises _Damaged for damage, and the errors of the transfer and the disk."""
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
        manifest: Manifest | None = None
        fetched_bytes = local_bytes = 0
        if self._ref.legacy_key is not None:
            total_bytes = fetched_bytes = self._fetch_zip(content)
        else:
            manifest = self._manifest()
            total_bytes = manifest.total_bytes
            fetched_bytes, local_bytes = self._assemble(manifest, content)
        if self._cancel is not None:
            stop_if_set(self._cancel)
        path = self._directory / f"checkpoint-{self._ref.step}"
        with local_errors(f"putting {path} in place"):
            _remove(path)
            content.rename(path)
            sync_directory(self._directory)
        if self._store is not None:
            if manifest is None:
                self._store.clear()
            else:
                self._store.record_restored(manifest, path)
        return Restored(self._ref.step, self._ref.epoch, path, total_bytes, fetched_bytes, local_bytes)

    def _manifest(self) -> Manifest:
        name = f"manifest of step {self._ref.step}"
        data = self._transfer.read(self._ref.manifest_url, name=name, max_bytes=MAX_MANIFEST_BYTES, cancel=self._cancel)
        try:
            return read_manifest(data, job_id=self._item.checkpoint_job, ref=self._ref)
        except BadManifest as error:
            # The network can alter bytes, therefore a manifest counts as damaged only after two fetches.
            logger.warning("%s; fetching it once more", error)
            data = self._transfer.read(
                self._ref.manifest_url, name=name, max_bytes=MAX_MANIFEST_BYTES, cancel=self._cancel
            )
            return read_manifest(data, job_id=self._item.checkpoint_job, ref=self._ref)

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

    def _assemble(self, manifest: Manifest, content: Path) -> tuple[int, int]:
        """Assemble all files of the checkpoint. Returns the numbers of fetched and locally copied bytes."""
        self._require_space(count_written_bytes(manifest) + count_scratch_bytes(manifest))
        assembly = FileAssembler(manifest, content, self._aside / "scratch", cancel=self._cancel)
        try:
            local_bytes = self._copy(manifest, assembly, assembly.missing())
            self._copy(manifest, assembly, assembly.missing_bases())
            ranges = plan_ranges(manifest, assembly.missing() | assembly.missing_bases())
            fetched_bytes = 0
            while ranges:
                fetched_bytes += sum(found.size_bytes for found in ranges)
                self._fetch_ranges(manifest, ranges, assembly)
                assembly.decode_waiting()
                ranges = plan_ranges(manifest, assembly.take_mismatched())
            assembly.finish()
        finally:
            assembly.close()
        return fetched_bytes, local_bytes

    def _copy(self, manifest: Manifest, assembly: FileAssembler, chunks: set[int]) -> int:
        """Copy the chunks of the local cache. Returns the number of their bytes."""
        if self._store is None:
            return 0
        known = [(index, self._store.find(manifest.chunks[index].blake3)) for index in sorted(chunks)]
        here = [(index, source) for index, source in known if source is not None]
        copied: list[int] = []

        def work(item: tuple[int, Segment], _: Flight) -> None:
            if assembly.copy(*item):
                copied.append(manifest.chunks[item[0]].size_bytes)
            else:
                logger.warning("%s in the local cache has changed; fetching the chunk", item[1].path)

        run_batch(here, work, workers=WORKERS, cancel=self._cancel)
        return sum(copied)

    def _fetch_ranges(self, manifest: Manifest, ranges: Sequence[PackRange], assembly: FileAssembler) -> None:
        """Fetch all ranges, in groups of packs whose URLs one call returns."""
        packs = list(dict.fromkeys(found.pack for found in ranges))
        for start in range(0, len(packs), MAX_MISSING_PER_ANSWER):
            group = set(packs[start : start + MAX_MISSING_PER_ANSWER])
            self._fetch_group(manifest, [found for found in ranges if found.pack in group], assembly)

    def _fetch_group(self, manifest: Manifest, ranges: Sequence[PackRange], assembly: FileAssembler) -> None:
        waiting = dict(enumerate(ranges))
        fruitless = 0
        while waiting:
            before = len(waiting)
            urls = self._urls(list(dict.fromkeys(manifest.packs[found.pack].blake3 for found in waiting.values())))
            downloads = [
                self._download(manifest, found, urls, assembly, partial(waiting.pop, number, None))
                for number, found in waiting.items()
            ]
            try:
                self._transfer.fetch_ranges(downloads, cancel=self._cancel, progress=self._progress)
                return
            except UrlExpired:
                # Arrived ranges are verified, in place, and no longer in `waiting`.
                fruitless = fruitless + 1 if len(waiting) == before else 0
                if fruitless >= MAX_EXPIRED_ROUNDS:
                    raise

    @staticmethod
    def _download(
        manifest: Manifest,
        found: PackRange,
        urls: Mapping[str, str],
        assembly: FileAssembler,
        arrived: Callable[[], object],
    ) -> RangeDownload:
        pack = manifest.packs[found.pack]
        download = partial(
            RangeDownload,
            name=f"pack {pack.blake3}",
            url=urls[pack.blake3],
            offset=found.offset,
            size_bytes=found.size_bytes,
            object_bytes=pack.size_bytes,
        )

        def deliver(data: memoryview) -> None:
            assembly.deliver(found, data)
            arrived()

        def deliver_some(data: memoryview) -> None:
            stream.take(data)
            if stream.complete:
                arrived()

        if not can_stream(found, manifest.chunks):
            return download(deliver=deliver)
        stream = RawStream(found, manifest.chunks, assembly)
        return download(deliver=deliver_some, piece_bytes=PIECE_BYTES, begin=stream.begin)

    def _urls(self, digests: Sequence[str]) -> Mapping[str, str]:
        try:
            answer = self._client.blob_urls(self._item.id, self._ref.step, digests, lease_token=self._item.lease_token)
        except NotFound as error:
            if error.code != ErrorCode.CHECKPOINT_NOT_FOUND:
                raise
            # The control plane's copy of the manifest is damaged or missing.
            raise _Damaged(error.message) from error
        absent = [digest for digest in digests if digest not in answer.urls]
        if absent:
            raise _Damaged(f"pack {absent[0]} is missing from the store")
        return answer.urls

    def _free_bytes(self) -> int:
        with local_errors(f"reading the free space of {self._directory}"):
            return shutil.disk_usage(self._directory).free

    def _require_space(self, needed_bytes: int) -> None:
        """Raise DiskFull before the download if the checkpoint does not fit even after emptying the local cache."""

        def is_enough() -> bool:
            return self._free_bytes() >= needed_bytes + RESERVE_BYTES

        if not is_enough() and self._store is not None:
            self._store.free_space(is_enough)
        if not is_enough():
            free_bytes = self._free_bytes()
            raise DiskFull(
                f"the checkpoint needs {needed_bytes} bytes and leaves {RESERVE_BYTES} as a reserve; "
                f"{free_bytes} are free in {self._directory}"
            )


def _remove(path: Path) -> None:
    """Remove a directory tree, a file or a link."""
    with local_errors(f"removing {path}"):
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
