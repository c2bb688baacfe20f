"""The manifest of a pushed folder: written first and last, so that a worker can tell a whole push from half of one."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from baton.contract.datasets import DATASET_MANIFEST, MAX_DATASET_FILES, DatasetFile, DatasetManifest, is_manifest
from baton.contract.names import DATA_BUCKET
from baton.contract.transfers import ObjectView
from gpu_client.cli.core.errors import CliError
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.net.digests import FileDigest, hash_file

_HASHERS = 4


class Manifests:
    """What is said of a pushed folder: by its manifest, and by those of folders in it that were pushed by themselves
    before. These are told the same, and first.

    `folder`: PREFIX/. `files` are all of this push, by key; `stored` is what was listed before it, and `removed` what
    of that is to be deleted. What earlier pushes put beside its files stays in the manifests while it is stored.
    Methods raise what transfers raise.
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
        """What was there before, by place."""

    def begin(self, send: Collection[str]) -> None:
        """Say that not all is there, before the first of these keys is stored or a removed one deleted.

        Whoever reads the folder from now on is told so, until `finish`. Raises CliError if no manifest could name all.
        """
        for place in self._places:
            if any(key.startswith(place) for key in (*send, *self._removed)):
                before = self._read(place)
                require_room(sum(name.startswith(place) for name in self._files) + len(self._kept(place, before)))
                if not before.unfinished:
                    self._store(place, before.model_copy(update={"unfinished": True}))
                self._begun[place] = before

    def finish(self, sent: Mapping[str, FileDigest]) -> None:
        """Say what lies there now, where a manifest does not say so already. `sent`: what was uploaded of the files."""
        entries = _entries(self._files, sent, self._cancel)
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
        kept = self._kept(place, before)
        require_room(len(entries) + len(kept))
        manifest = _manifest(place, entries | kept)
        if begun or listed is None or manifest != before:
            self._store(place, manifest)

    def _kept(self, place: str, before: DatasetManifest) -> dict[str, DatasetFile]:
        """What the manifest names beside the files of this push, and is stored as it says, by key."""
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
        """The stored one; an empty one if there is none, or what is stored is none and is to be written anew."""
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
            path.write_bytes(_bytes(manifest))
            self._client.upload_files(DATA_BUCKET, {place + DATASET_MANIFEST: path}, cancel=self._cancel)


def require_room(files: int) -> None:
    """Raises CliError if no manifest could name so many."""
    if files > MAX_DATASET_FILES:
        raise CliError(
            f"{files} files are too many for one prefix: {MAX_DATASET_FILES} at most",
            "Pack small files together (tar, webdataset), or push them to several prefixes.",
        )


def _entries(files: Mapping[str, Path], sent: Mapping[str, FileDigest], cancel: CancelEvent) -> dict[str, DatasetFile]:
    """By key, with the key as their path."""
    left = [name for name in files if name not in sent]
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="hash") as pool:
        hashed = dict(zip(left, pool.map(lambda name: hash_file(files[name], cancel=cancel), left), strict=True))
    return {
        name: DatasetFile(path=name, size_bytes=digest.size_bytes, blake3=digest.blake3)
        for name, digest in (hashed | dict(sent)).items()
    }


def _manifest(place: str, entries: Mapping[str, DatasetFile]) -> DatasetManifest:
    """Of a folder, from entries by key; the same for the same files."""
    files = [entries[name].model_copy(update={"path": name.removeprefix(place)}) for name in sorted(entries)]
    return DatasetManifest(files=files)


def _bytes(manifest: DatasetManifest) -> bytes:
    # Left out where it is false: agents that do not know it read manifests of finished pushes.
    return manifest.model_dump_json(exclude=None if manifest.unfinished else {"unfinished"}).encode()


def _md5(manifest: DatasetManifest) -> str:
    return hashlib.md5(_bytes(manifest), usedforsecurity=False).hexdigest()
