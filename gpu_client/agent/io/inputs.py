"""Download a job's inputs into its data directory, and verify each input against the manifest of its push."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from baton.contract.objects.dataset_manifest import MAX_DATASET_MANIFEST_BYTES, PushedFiles, is_manifest
from baton.contract.worker.calls import InputObject, InputPage, WorkItem
from gpu_client.agent.workspace.slots import DiskFullError
from gpu_client.transport.errors import (
    ChecksumMismatch,
    DiskFull,
    ObjectMissing,
    TransferError,
    UnsafePath,
    UrlExpired,
)
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.net.digests import hash_file
from gpu_client.transport.transfer.manager import Download, Transfer

logger = logging.getLogger("baton.inputs")

MAX_EXPIRED_ROUNDS = 3
"""Limit of successive expiries of a page's URLs without a complete file."""


class InputsApi(Protocol):
    """Control-plane API of `fetch_inputs`, implemented by BatonClient."""

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        """Return one page of the job's inputs, with fresh URLs."""
        ...


class InputsDiffer(TransferError):  # noqa: N818 - named as the errors of transfers are
    """Error of stored inputs that differ from the pushed inputs."""


def fetch_inputs(
    client: InputsApi,
    transfer: Transfer,
    item: WorkItem,
    data_dir: Path,
    *,
    require_free: Callable[[int], None],
    cancel: CancelEvent,
) -> int:
    """Download every input, page by page, with new URLs after an expiry. Returns the number of files.

    Files that other jobs and earlier attempts have shared are fetched if possible, and not counted.

    Raises ObjectMissing if no object lies below the inputs' prefixes, UnsafePath if two inputs have one path,
    InputsDiffer if files are missing or differ from the pushed files, or if the push was not finished.
    """
    seen: dict[str, str] = {}
    """Object key by path."""
    pushed = _PushedInputs([ref.prefix for ref in item.inputs])
    for cursor, page in _iterate_pages(client, item):
        own = [found for found in page.inputs if not found.shared]
        for around in page.manifests:
            pushed.add_manifest(around.key, around.url, transfer, cancel)
        for found in own:
            if is_manifest(found.path):
                pushed.add_manifest(found.key, found.url, transfer, cancel)
        inputs = [found for found in own if not is_manifest(found.path)]
        for found in inputs:
            if found.path in seen:
                raise UnsafePath(f"two inputs would be stored as {found.path}: give them different 'into' directories")
            seen[found.path] = found.key
        require_free(sum(found.size_bytes for found in inputs))
        _fetch_page(client, transfer, item, data_dir, cursor=cursor, inputs=inputs, pushed=pushed, cancel=cancel)
        for found in page.inputs:
            if found.shared and found.path not in seen:
                _fetch_shared(
                    client,
                    transfer,
                    item,
                    data_dir,
                    cursor=cursor,
                    found=found,
                    require_free=require_free,
                    cancel=cancel,
                )
    if item.inputs and not seen:
        prefixes = ", ".join(ref.prefix for ref in item.inputs)
        raise ObjectMissing(f"no object lies below {prefixes} in {item.data_bucket}")
    pushed.require_all(data_dir, seen, cancel)
    return len(seen)


class _PushedInputs(PushedFiles):
    """Pushed files of the inputs' prefixes, and the verified paths below the data directory."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        super().__init__(prefixes)
        self._verified: set[str] = set()
        """Verified paths below the data directory. Two paths may have one object, therefore keys do not suffice."""

    def __bool__(self) -> bool:
        return bool(self.files)

    def add_manifest(self, manifest_key: str, url: str, transfer: Transfer, cancel: CancelEvent) -> None:
        """Read a manifest. Raises InputsDiffer for an invalid or unfinished manifest, and the errors of a download."""
        data = transfer.read(url, name=manifest_key, max_bytes=MAX_DATASET_MANIFEST_BYTES, cancel=cancel)
        try:
            self.add(manifest_key, data)
        except ValueError as error:
            raise InputsDiffer(str(error)) from error

    def digest(self, found: InputObject) -> str | None:
        """Return the input's expected BLAKE3; None if unknown. Raises InputsDiffer if the size differs."""
        file = self.files.get(found.key)
        if file is None:
            return None
        if file.size_bytes != found.size_bytes:
            raise InputsDiffer(
                f"input {found.key} has {found.size_bytes} bytes, and was pushed with {file.size_bytes}:"
                f" push {self.folders[found.key]} again"
            )
        self._verified.add(found.path)
        return file.blake3

    def require_all(self, data_dir: Path, seen: Mapping[str, str], cancel: CancelEvent) -> None:
        """Raise InputsDiffer if a pushed file is missing; verify files that arrived before their manifest.

        `seen`: object key by path below the data directory.
        """
        lacking = sorted(self.files.keys() - set(seen.values()))
        if lacking:
            raise InputsDiffer(
                f"{len(lacking)} of {len(self.files)} files that were pushed are not stored any more,"
                f" {lacking[0]} among them: push {self.folders[lacking[0]]} again"
            )
        for path in sorted(seen.keys() - self._verified):
            file = self.files.get(seen[path])
            if file is not None and hash_file(data_dir / path, cancel=cancel).blake3 != file.blake3:
                raise InputsDiffer(
                    f"input {seen[path]} has other bytes than were pushed: push {self.folders[seen[path]]} again"
                )


def _iterate_pages(client: InputsApi, item: WorkItem) -> Iterator[tuple[str | None, InputPage]]:
    """Yield all pages with their cursors. The generator requests a page when the caller asks for the page."""
    cursor: str | None = None
    while True:
        page = client.inputs_page(item.id, item.lease_token, cursor=cursor)
        yield cursor, page
        if page.next_cursor is None:
            return
        cursor = page.next_cursor


def _fetch_page(
    client: InputsApi,
    transfer: Transfer,
    item: WorkItem,
    data_dir: Path,
    *,
    cursor: str | None,
    inputs: Sequence[InputObject],
    pushed: _PushedInputs,
    cancel: CancelEvent,
) -> None:
    waiting = {found.path: found for found in inputs}
    fruitless = 0
    while True:
        try:
            transfer.download(
                [_download(found, data_dir, pushed.digest(found)) for found in waiting.values()], cancel=cancel
            )
            return
        except ChecksumMismatch as error:
            if not pushed:
                raise
            # Two wrong downloads mean that the stored object has changed, or the network damages data.
            raise InputsDiffer(f"an input has other bytes than were pushed: {error}; push the folder again") from error
        except UrlExpired as error:
            # A complete file has its final name.
            left = {path for path in waiting if not (data_dir / path).exists()}
            fruitless = fruitless + 1 if len(left) == len(waiting) else 0
            if fruitless >= MAX_EXPIRED_ROUNDS:
                raise
            logger.info("%s; asking again for %d inputs", error, len(left))
            fresh = {found.path: found for found in client.inputs_page(item.id, item.lease_token, cursor=cursor).inputs}
            gone = left - fresh.keys()
            if gone:
                raise ObjectMissing(f"input {min(gone)} was removed while it was fetched") from error
            waiting = {path: fresh[path] for path in sorted(left)}


def _fetch_shared(
    client: InputsApi,
    transfer: Transfer,
    item: WorkItem,
    data_dir: Path,
    *,
    cursor: str | None,
    found: InputObject,
    require_free: Callable[[int], None],
    cancel: CancelEvent,
) -> None:
    """Download a file of an earlier job or attempt. After a failure the training produces the file itself."""
    try:
        require_free(found.size_bytes)
        try:
            transfer.download([_download(found, data_dir, found.blake3)], cancel=cancel)
        except UrlExpired:
            # The job's own inputs came first and may have outlasted the page's URLs, therefore the page is requested
            # again.
            page = client.inputs_page(item.id, item.lease_token, cursor=cursor)
            fresh = [one for one in page.inputs if one.shared and one.path == found.path]
            if not fresh:
                raise
            transfer.download([_download(fresh[0], data_dir, fresh[0].blake3)], cancel=cancel)
    except (TransferError, DiskFull, DiskFullError) as error:
        logger.warning("a shared file is not available: %s", error)
    else:
        logger.info("shared with this job: %s (%d bytes)", found.path, found.size_bytes)


def _download(found: InputObject, data_dir: Path, blake3: str | None) -> Download:
    return Download(
        name=found.key,
        url=found.url,
        root=data_dir,
        path=found.path,
        size_bytes=found.size_bytes,
        blake3=blake3,
        fsync=False,
    )
