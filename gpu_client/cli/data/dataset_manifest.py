"""Write the manifest of a pushed folder before and after the upload, so that workers detect an unfinished push."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from baton.contract.names import DATA_BUCKET
from baton.contract.objects.dataset_manifest import (
    DATASET_MANIFEST,
    MAX_DATASET_FILES,
    DatasetFile,
    DatasetManifest,
    is_manifest,
)
from baton.contract.objects.transfers import ObjectView
from gpu_client.cli.core.errors import CliError
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.net.digests import FileDigest, hash_file

_HASHERS = 4


class PushManifests:
    """Manifests of a pushed folder and of its subfolders that were pushed separately; subfolders are written first.

    `folder`: PREFIX/. `files`: all files of this push by key. `stored`: objects listed before the push. `removed`:
    stored keys to delete. Files of earlier pushes stay in the manifests while they are stored.
    """

    def __init__(
        self,
        client: BatonClient,
        folder: str,
        files: Mapping[str, Path],
        *,
        stored: Mapping[str, ObjectView],
        removed: Collection[str],
        cancel: CancelEvent,
    ) -> None:
        self._client = client
        self._folder = folder
        self._files = files
        self._stored = stored
        self._removed = frozenset(removed)
        self._cancel = cancel
        inner = sorted(key.removesuffix(DATASET_MANIFEST) for key in stored if is_manifest(key))
        self._places = [*(place for place in inner if place != folder), folder]
        self._begun: dict[str, DatasetManifest] = {}
        """Manifests before this push, by folder."""

    def begin(self, send: Collection[str]) -> None:
        """Mark the folders of changed keys as unfinished, before the first upload or deletion.

        Readers refuse the folders until `finish`. Raises CliError if a manifest would have too many files.
        """
        for place in self._places:
            if any(key.startswith(place) for key in (*send, *self._removed)):
                before = self._read(place)
                require_manifest_capacity(
                    sum(name.startswith(place) for name in self._files) + len(self._retained_entries(place, before))
                )
                if not before.unfinished:
                    self._store(place, before.model_copy(update={"unfinished": True}))
                self._begun[place] = before

    def finish(self, sent: Mapping[str, FileDigest]) -> None:
        """Write the manifests that differ from the stored manifests. `sent`: digests of the uploaded files."""
        entries = _hash_files(self._files, sent, self._cancel)
        for place in self._places:
            below = {name: file for name, file in entries.items() if name.startswith(place)}
            if below or place in self._begun:
                self._finish(place, below)

    def _finish(self, place: str, entries: dict[str, DatasetFile]) -> None:
        begun = place in self._begun
        listed = self._stored.get(place + DATASET_MANIFEST)
        manifest = _manifest(place, entries)
        if listed is not None and not begun and listed.etag.strip('"') == _md5(manifest):
            return
        before = self._begun.get(place) or self._read(place)
        kept = self._retained_entries(place, before)
        require_manifest_capacity(len(entries) + len(kept))
        manifest = _manifest(place, entries | kept)
        if begun or listed is None or manifest != before:
            self._store(place, manifest)

    def _retained_entries(self, place: str, before: DatasetManifest) -> dict[str, DatasetFile]:
        """Return the manifest's other files by key, if they are stored with the listed size."""
        named = {place + file.path: file for file in before.files}
        return {
            name: file.model_copy(update={"path": name})
            for name, file in named.items()
            if name not in self._files
            and name not in self._removed
            and name in self._stored
            and self._stored[name].size_bytes == file.size_bytes
        }

    def _read(self, place: str) -> DatasetManifest:
        """Download the manifest of a folder. Returns an empty manifest for a missing or invalid one."""
        key = place + DATASET_MANIFEST
        if key not in self._stored:
            return DatasetManifest(files=[])
        with tempfile.TemporaryDirectory(prefix="baton-") as folder:
            path = Path(folder, "dataset.json")
            self._client.download(DATA_BUCKET, key, path, cancel=self._cancel)
            try:
                return DatasetManifest.model_validate_json(path.read_bytes())
            except ValidationError:
                return DatasetManifest(files=[])

    def _store(self, place: str, manifest: DatasetManifest) -> None:
        with tempfile.TemporaryDirectory(prefix="baton-") as folder:
            path = Path(folder, "dataset.json")
            path.write_bytes(_serialize(manifest))
            self._client.upload_files(DATA_BUCKET, {place + DATASET_MANIFEST: path}, cancel=self._cancel)


def require_manifest_capacity(files: int) -> None:
    """Raise CliError if the number of files exceeds the limit of a manifest."""
    if files > MAX_DATASET_FILES:
        raise CliError(
            f"{files} files exceed the limit of one prefix: {MAX_DATASET_FILES}",
            "Pack small files (tar, webdataset), or push to several prefixes.",
        )


def _hash_files(
    files: Mapping[str, Path], sent: Mapping[str, FileDigest], cancel: CancelEvent
) -> dict[str, DatasetFile]:
    """Return an entry for each file by key, with the key as path; hash the files that this push did not upload."""
    left = [name for name in files if name not in sent]
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="hash") as pool:
        hashed = dict(zip(left, pool.map(lambda name: hash_file(files[name], cancel=cancel), left), strict=True))
    return {
        name: DatasetFile(path=name, size_bytes=digest.size_bytes, blake3=digest.blake3)
        for name, digest in (hashed | dict(sent)).items()
    }


def _manifest(place: str, entries: Mapping[str, DatasetFile]) -> DatasetManifest:
    """Build the manifest of a folder; equal files give equal bytes."""
    files = [entries[name].model_copy(update={"path": name.removeprefix(place)}) for name in sorted(entries)]
    return DatasetManifest(files=files)


def _serialize(manifest: DatasetManifest) -> bytes:
    # Finished manifests omit the field, so that agents without this field can read these manifests.
    return manifest.model_dump_json(exclude=None if manifest.unfinished else {"unfinished"}).encode()


def _md5(manifest: DatasetManifest) -> str:
    return hashlib.md5(_serialize(manifest), usedforsecurity=False).hexdigest()
