"""Fetching a job's input files into its data directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from contract.work import InputObject, InputPage, WorkItem
from gpu_client.transport.cancel import CancelEvent
from gpu_client.transport.errors import ObjectMissing, UnsafePath, UrlExpired
from gpu_client.transport.transfer import Download, Transfer

logger = logging.getLogger("baton.inputs")

MAX_EXPIRED_ROUNDS = 3
"""How often a page's URLs may run out without a single file having arrived."""


class InputsApi(Protocol):
    """The one call that is needed; BatonClient has it."""

    def inputs_page(self, job_id: str, lease_token: str, *, cursor: str | None = None) -> InputPage:
        """One page of the job's inputs, with fresh URLs."""
        ...


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

    Raises ObjectMissing if there is nothing below the inputs' prefixes, UnsafePath if two inputs claim one path.
    """
    seen: set[str] = set()
    for cursor, page in _pages(client, item):
        for found in page.inputs:
            if found.path in seen:
                raise UnsafePath(f"two inputs would be stored as {found.path}: give them different 'into' directories")
            seen.add(found.path)
        require_free(sum(found.size_bytes for found in page.inputs))
        _fetch_page(client, transfer, item, data_dir, cursor=cursor, page=page, cancel=cancel)
    if item.inputs and not seen:
        prefixes = ", ".join(ref.prefix for ref in item.inputs)
        raise ObjectMissing(f"no object lies below {prefixes} in {item.data_bucket}")
    return len(seen)


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
    page: InputPage,
    cancel: CancelEvent,
) -> None:
    waiting = {found.path: found for found in page.inputs}
    fruitless = 0
    while True:
        try:
            transfer.download([_download(found, data_dir) for found in waiting.values()], cancel=cancel)
            return
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


def _download(found: InputObject, data_dir: Path) -> Download:
    return Download(
        name=found.key, url=found.url, root=data_dir, path=found.path, size_bytes=found.size_bytes, fsync=False
    )
