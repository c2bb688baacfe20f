"""Digests of many files at once; those of one come from the transport, which verifies with them too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpu_client.transport.limits.thread_batch import run_batch
from gpu_client.transport.net.cancellation import CancelEvent, Flight
from gpu_client.transport.net.digests import Digester, FileDigest, digest_bytes, hash_file

__all__ = ["Digester", "FileDigest", "digest_bytes", "hash_file", "hash_files"]

HASH_WORKERS = 2
"""One core hashes gigabytes per second: more threads would only fight with the training for cores."""


def hash_files(files: Mapping[str, Path], *, cancel: CancelEvent | None = None) -> dict[str, FileDigest]:
    """The digest of each file under its name, in the order of `files`. Raises what `hash_file` raises."""
    digests: dict[str, FileDigest] = {}

    def work(entry: tuple[str, Path], flight: Flight) -> None:
        name, path = entry
        digests[name] = hash_file(path, cancel=flight)

    run_batch(list(files.items()), work, workers=HASH_WORKERS, cancel=cancel)
    return {name: digests[name] for name in files}
