"""The manifest of a pushed folder: written last, so that a worker can tell a whole push from half of one."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from contract.datasets import DATASET_MANIFEST, MAX_DATASET_FILES, DatasetFile, DatasetManifest, is_manifest
from contract.names import DATA_BUCKET
from contract.transfers import ObjectView
from gpu_client.cli.errors import CliError
from gpu_client.transport.api import BatonClient
from gpu_client.transport.cancel import CancelEvent
from gpu_client.transport.digests import FileDigest, hash_file

_HASHERS = 4


def write_manifest(
    client: BatonClient,
    folder: str,
    files: Mapping[str, Path],
    *,
    sent: Mapping[str, FileDigest],
    stored: Mapping[str, ObjectView],
    cancel: CancelEvent,
) -> None:
    """Say what lies below `folder` (PREFIX/) now, where the manifest there does not say so already.

    `files` are all of this push, by key, `sent` what was uploaded of them, `stored` what was listed before. What
    earlier pushes put beside them stays in it while it is stored. Folders in it that were pushed by themselves before
    have manifests of their own: these are told the same, and first. Raises what transfers raise.
    """
    entries = _entries(files, sent, cancel)
    inner = sorted(key.removesuffix(DATASET_MANIFEST) for key in stored if is_manifest(key))
    for place in (*(place for place in inner if place != folder), folder):
        below = {name: file for name, file in entries.items() if name.startswith(place)}
        if below:
            _write(client, place, below, stored, cancel)


def _write(
    client: BatonClient,
    folder: str,
    entries: dict[str, DatasetFile],
    stored: Mapping[str, ObjectView],
    cancel: CancelEvent,
) -> None:
    """One manifest. `entries`: by key; the others that it has and that are stored stay in it."""
    key = folder + DATASET_MANIFEST
    data = _bytes(folder, entries)
    if key in stored:
        if stored[key].etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest():
            return
        before = {folder + file.path: file for file in _read(client, key, cancel)}
        kept = {
            name: file
            for name, file in before.items()
            if name not in entries and name in stored and stored[name].size_bytes == file.size_bytes
        }
        require_room(len(entries) + len(kept))
        data = _bytes(folder, entries | kept)
        if data == _bytes(folder, before):
            return
    with tempfile.TemporaryDirectory(prefix="baton-") as place:
        path = Path(place, "dataset.json")
        path.write_bytes(data)
        client.upload_files(DATA_BUCKET, {key: path}, cancel=cancel)


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


def _bytes(folder: str, entries: Mapping[str, DatasetFile]) -> bytes:
    """The manifest of a folder, from entries by key; the same for the same files."""
    files = [entries[name].model_copy(update={"path": name.removeprefix(folder)}) for name in sorted(entries)]
    return DatasetManifest(files=files).model_dump_json().encode()


def _read(client: BatonClient, key: str, cancel: CancelEvent) -> list[DatasetFile]:
    """What the stored manifest names; nothing if it is none, and is to be written anew."""
    with tempfile.TemporaryDirectory(prefix="baton-") as place:
        path = Path(place, "dataset.json")
        client.download(DATA_BUCKET, key, path, cancel=cancel)
        try:
            return DatasetManifest.model_validate_json(path.read_bytes()).files
        except ValidationError:
            return []
