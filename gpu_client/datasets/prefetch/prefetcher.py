"""Fetch the selected files into a directory: find the missing files, fetch and verify them, write the manifest."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_client.datasets.prefetch.errors import PrefetchCode, PrefetchError
from gpu_client.datasets.prefetch.partial_file import RANGE_UNITS, UNIT_BYTES, PartialFile, is_complete, partial_path
from gpu_client.datasets.prefetch.selection import PREFETCH_MANIFEST, FileSource, ListedFile, PrefetchManifest
from gpu_client.transport.errors import ChecksumMismatch, ObjectMissing, TransferError, UrlExpired
from gpu_client.transport.limits.thread_batch import run_batch
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.net.files import TEMPORARY_NAME, local_errors, safe_destination, write_whole
from gpu_client.transport.transfer.manager import Progress, Transfer

MAX_FRUITLESS_ROUNDS = 3
"""Limit of successive links to a file without an arrived byte."""


MAX_LARGE_FILES = 4
"""Limit of simultaneous files with several ranges, because each file has a thread for each connection."""


@dataclass(frozen=True)
class WantedFile:
    """Selected file and its source."""

    source: FileSource
    file: ListedFile


class Prefetcher:
    """Prefetcher into the directory `root`, which no other process may use meanwhile."""

    def __init__(self, root: Path, transfer: Transfer, *, threads: int, cancel: CancelEvent) -> None:
        self._root = root
        self._transfer = transfer
        self._threads = threads
        self._cancel = cancel

    def find_missing(self, wanted: Sequence[WantedFile], progress: Progress | None = None) -> list[WantedFile]:
        """Return the files without a complete, verified copy. Removes partial files of other versions."""
        partials = {partial_path(safe_destination(self._root, one.file.path), one.file) for one in wanted}
        for folder in {path.parent for path in partials}:
            for path in folder.iterdir():
                if TEMPORARY_NAME.fullmatch(path.name) and path not in partials:
                    path.unlink()
        missing: set[str] = set()

        def verify(one: WantedFile, flight: CancelEvent) -> None:
            if not is_complete(self._root / one.file.path, one.file, flight):
                missing.add(one.file.path)
            if progress is not None:
                progress(one.file.size_bytes)

        run_batch(wanted, verify, workers=self._threads, cancel=self._cancel)
        return [one for one in wanted if one.file.path in missing]

    def fetch(self, missing: Sequence[WantedFile], progress: Progress) -> None:
        """Fetch and verify files; a failed file does not stop the others. Worker threads call `progress`.

        Raises PrefetchError for a small disk before the first byte, and for failed files at the end; DiskFull,
        Unreachable and TransferCanceled at once.
        """
        self._require_space([one.file for one in missing])
        with local_errors(f"removing {PREFETCH_MANIFEST}"):
            (self._root / PREFETCH_MANIFEST).unlink(missing_ok=True)
        failures: dict[str, TransferError] = {}

        def fetch(one: WantedFile, flight: CancelEvent) -> None:
            try:
                self._fetch(one, flight, progress)
            except TransferError as error:
                failures[one.file.path] = error

        large = [one for one in missing if one.file.size_bytes > RANGE_UNITS * UNIT_BYTES]
        small = [one for one in missing if one.file.size_bytes <= RANGE_UNITS * UNIT_BYTES]
        run_batch(small, fetch, workers=self._threads, cancel=self._cancel)
        run_batch(large, fetch, workers=min(self._threads, MAX_LARGE_FILES), cancel=self._cancel)
        if failures:
            raise PrefetchError(
                PrefetchCode.FILES_MISSING,
                f"{len(failures)} of {len(missing)} files could not be fetched",
                "Repeat the command: it fetches the missing files.",
                problems=[str(failures[path]) for path in sorted(failures)],
            )

    def finish(self, manifest: PrefetchManifest) -> Path:
        """Write the manifest and return its path."""
        path = self._root / PREFETCH_MANIFEST
        write_whole(path, manifest.model_dump_json(indent=1).encode())
        return path

    def _fetch(self, one: WantedFile, flight: CancelEvent, progress: Progress) -> None:
        destination = safe_destination(self._root, one.file.path)
        for last in (False, True):
            with PartialFile(destination, one.file) as part:
                progress(part.arrived_bytes)
                self._fill(part, one, flight, progress)
                try:
                    part.commit(flight)
                except ChecksumMismatch:
                    # The network can alter bytes, therefore only a second mismatch proves a wrong file.
                    progress(-one.file.size_bytes)
                    if last:
                        raise
                else:
                    return

    def _fill(self, part: PartialFile, one: WantedFile, flight: CancelEvent, progress: Progress) -> None:
        """Fetch the missing ranges, with a new link after an expiry."""
        fruitless = 0
        while ranges := part.missing():
            before_bytes = part.arrived_bytes
            try:
                link = one.source.link(one.file, flight)
                requests = [part.request(link, offset, size_bytes) for offset, size_bytes in ranges]
                self._transfer.fetch_ranges(requests, cancel=flight, progress=progress)
            except (ChecksumMismatch, ObjectMissing):
                raise
            except TransferError as error:
                # Hosts of files refuse an expired URL in different forms, therefore any refusal causes a new link.
                if not isinstance(error, UrlExpired) and isinstance(error.__cause__, OSError):
                    raise
                fruitless = 0 if part.arrived_bytes > before_bytes else fruitless + 1
                if fruitless == MAX_FRUITLESS_ROUNDS:
                    raise

    def _require_space(self, files: Sequence[ListedFile]) -> None:
        needed_bytes = sum(file.size_bytes for file in files)
        for file in files:
            path = partial_path(self._root / file.path, file)
            needed_bytes -= min(file.size_bytes, path.stat().st_blocks * 512) if path.exists() else 0
        free_bytes = shutil.disk_usage(self._root).free
        if needed_bytes > free_bytes:
            raise PrefetchError(
                PrefetchCode.DISK_TOO_SMALL,
                f"{self._root} has {free_bytes} free bytes, and the files need {needed_bytes} more",
                "Free disk space, or select fewer files with --max-files.",
            )
