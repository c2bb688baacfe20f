"""Fetching a job's input files into its data directory, each verified where a push has said what it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from baton.contract.datasets import (
    DATASET_MANIFEST,
    MAX_DATASET_MANIFEST_BYTES,
    DatasetFile,
    DatasetManifest,
    is_manifest,
)
from baton.contract.work import InputObject, InputPage, WorkItem
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
"""How often a page's URLs may run out without a single file having arrived."""


class InputsApi(Protocol):
    """The one call that is needed; BatonClient has it."""

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        """One page of the job's inputs, with fresh URLs."""
        ...


class InputsDiffer(TransferError):  # noqa: N818 - named as the errors of transfers are
    """What is stored is not what was pushed."""


def fetch_inputs(
    client: InputsApi,
    transfer: Transfer,
    item: WorkItem,
    data_dir: Path,
    *,
    require_free: Callable[[int], None],
    cancel: CancelEvent,
) -> int:
    """Download every input, page by page; a page whose URLs ran out is asked for again. Returns the number of files.

    What other jobs and earlier attempts have shared is fetched too if that can be, and not counted.

    Raises ObjectMissing if there is nothing below the inputs' prefixes, UnsafePath if two inputs claim one path,
    InputsDiffer if there are other files than were pushed, some of them are lacking, or the push was not finished.
    """
    seen: dict[str, str] = {}
    """The key of each path."""
    pushed = _PushedFiles([ref.prefix for ref in item.inputs])
    for cursor, page in _pages(client, item):
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


class _PushedFiles:
    """What the manifests of pushed folders say of the inputs, by key."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = tuple(prefixes)
        self._files: dict[str, DatasetFile] = {}
        self._folders: dict[str, str] = {}
        """Whose manifest says it."""
        self._verified: set[str] = set()
        """Paths below the data directory: two inputs may hold one object."""

    def __bool__(self) -> bool:
        return bool(self._files)

    def add_manifest(self, manifest_key: str, url: str, transfer: Transfer, cancel: CancelEvent) -> None:
        """Read one. Raises InputsDiffer if it is none or its push was not finished, what a download raises."""
        folder = manifest_key.removesuffix(DATASET_MANIFEST)
        data = transfer.read(url, name=manifest_key, max_bytes=MAX_DATASET_MANIFEST_BYTES, cancel=cancel)
        try:
            manifest = DatasetManifest.model_validate_json(data)
        except ValidationError as error:
            raise InputsDiffer(
                f"{manifest_key} is no manifest of a data set ({error.error_count()} faults): push {folder} again"
            ) from error
        if manifest.unfinished:
            raise InputsDiffer(f"a push to {folder} was not finished: repeat it")
        for file in manifest.files:
            key = folder + file.path
            # Of a folder that was pushed by itself as well, the manifest in it is never the older one.
            if key.startswith(self._prefixes) and len(folder) >= len(self._folders.get(key, "")):
                self._files[key], self._folders[key] = file, folder

    def digest(self, found: InputObject) -> str | None:
        """The BLAKE3 that the input must have; None if nobody has said. Raises InputsDiffer if its size is another."""
        file = self._files.get(found.key)
        if file is None:
            return None
        if file.size_bytes != found.size_bytes:
            raise InputsDiffer(
                f"input {found.key} has {found.size_bytes} bytes, and was pushed with {file.size_bytes}:"
                f" push {self._folders[found.key]} again"
            )
        self._verified.add(found.path)
        return file.blake3

    def require_all(self, data_dir: Path, seen: Mapping[str, str], cancel: CancelEvent) -> None:
        """Nothing that was pushed is lacking, and what arrived before its manifest is verified too.

        `seen`: the key of each path below the data directory.
        """
        lacking = sorted(self._files.keys() - set(seen.values()))
        if lacking:
            raise InputsDiffer(
                f"{len(lacking)} of {len(self._files)} files that were pushed are not stored any more,"
                f" {lacking[0]} among them: push {self._folders[lacking[0]]} again"
            )
        for path in sorted(seen.keys() - self._verified):
            file = self._files.get(seen[path])
            if file is not None and hash_file(data_dir / path, cancel=cancel).blake3 != file.blake3:
                raise InputsDiffer(
                    f"input {seen[path]} has other bytes than were pushed: push {self._folders[seen[path]]} again"
                )


def _pages(client: InputsApi, item: WorkItem) -> Iterator[tuple[str | None, InputPage]]:
    """All pages, each with the cursor that asks for it. The next one is asked for when this one is done."""
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
    pushed: _PushedFiles,
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
            # Altered twice on the way, or altered where it is stored: the sentence has the file's name.
            raise InputsDiffer(f"an input has other bytes than were pushed: {error}; push the folder again") from error
        except UrlExpired as error:
            # A file that has its name is complete.
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
    """What an earlier job has left for this one, or an earlier attempt. Without it, the training makes it itself."""
    try:
        require_free(found.size_bytes)
        try:
            transfer.download([_download(found, data_dir, found.blake3)], cancel=cancel)
        except UrlExpired:
            # The job's own inputs, which come first, may have taken longer than URLs live.
            page = client.inputs_page(item.id, item.lease_token, cursor=cursor)
            fresh = [one for one in page.inputs if one.shared and one.path == found.path]
            if not fresh:
                raise
            transfer.download([_download(fresh[0], data_dir, fresh[0].blake3)], cancel=cancel)
    except (TransferError, DiskFull, DiskFullError) as error:
        logger.warning("what was shared with this job is done without: %s", error)
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
