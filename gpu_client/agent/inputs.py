"""Fetching a job's input files into its data directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from contract.work import WorkItem
from gpu_client.transport.api import BatonClient
from gpu_client.transport.cancel import CancelEvent
from gpu_client.transport.errors import ObjectMissing, UnsafePath
from gpu_client.transport.transfer import Download, Transfer


def fetch_inputs(
    client: BatonClient,
    transfer: Transfer,
    item: WorkItem,
    data_dir: Path,
    *,
    require_free: Callable[[int], None],
    cancel: CancelEvent,
) -> int:
    """Download every input, page by page while the page's URLs live. Returns the number of files.

    Raises ObjectMissing if there is nothing below the inputs' prefixes, UnsafePath if two inputs claim one path.
    """
    seen: set[str] = set()
    for page in client.inputs(item.id, item.lease_token):
        repeated = seen & {found.path for found in page.inputs}
        if repeated:
            raise UnsafePath(f"two inputs would be stored as {min(repeated)}: give them different 'into' directories")
        seen |= {found.path for found in page.inputs}
        require_free(sum(found.size_bytes for found in page.inputs))
        downloads = [
            Download(
                name=found.key, url=found.url, root=data_dir, path=found.path, size_bytes=found.size_bytes, fsync=False
            )
            for found in page.inputs
        ]
        transfer.download(downloads, cancel=cancel)
    if item.inputs and not seen:
        prefixes = ", ".join(ref.prefix for ref in item.inputs)
        raise ObjectMissing(f"no object lies below {prefixes} in {item.data_bucket}")
    return len(seen)
