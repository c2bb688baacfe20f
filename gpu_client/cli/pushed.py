"""The manifest of a pushed folder: written last, so that a worker can tell a whole push from half of one."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from contract.datasets import DATASET_MANIFEST, MAX_DATASET_FILES, DatasetFile, DatasetManifest
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
) -> bool:
    """Say what lies below `folder` (PREFIX/) now; false if the manifest there says so already.

    `files` are all of this push, by key, `sent` what was uploaded of them, `stored` what was listed before. What
    earlier pushes put beside them stays in it while it is stored. Raises what transfers raise.
    """
    key = folder + DATASET_MANIFEST
    entries = _entries(folder, files, sent, cancel)
    data = _bytes(entries)
    if key in stored:
        if stored[key].etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest():
            return False
        before = _read(client, key, cancel)
        for name, file in ((folder + file.path, file) for file in before):
            if name not in files and name in stored and stored[name].size_bytes == file.size_bytes:
                entries[name] = file
        require_room(len(entries))
        data = _bytes(entries)
        if data == _bytes({folder + file.path: file for file in before}):
            return False
    with tempfile.TemporaryDirectory(prefix="baton-") as place:
        path = Path(place, "dataset.json")
        path.write_bytes(data)
        client.upload_files(DATA_BUCKET, {key: path}, cancel=cancel)
    return True


def require_room(files: int) -> None:
    """Raises CliError if no manifest could name so many."""
    if files > MAX_DATASET_FILES:
        raise CliError(
            f"{files} files are too many for one prefix: {MAX_DATASET_FILES} at most",
            "Pack small files together (tar, webdataset), or push them to several prefixes.",
        )


def _entries(
    folder: str, files: Mapping[str, Path], sent: Mapping[str, FileDigest], cancel: CancelEvent
) -> dict[str, DatasetFile]:
    left = [name for name in files if name not in sent]
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="hash") as pool:
        hashed = dict(zip(left, pool.map(lambda name: hash_file(files[name], cancel=cancel), left), strict=True))
    return {
        name: DatasetFile(path=name.removeprefix(folder), size_bytes=digest.size_bytes, blake3=digest.blake3)
        for name, digest in (hashed | dict(sent)).items()
    }


def _bytes(entries: Mapping[str, DatasetFile]) -> bytes:
    """The manifest; the same for the same files."""
    return DatasetManifest(files=[entries[name] for name in sorted(entries)]).model_dump_json().encode()


def _read(client: BatonClient, key: str, cancel: CancelEvent) -> list[DatasetFile]:
    """What the stored manifest names; nothing if it is none, and is to be written anew."""
    with tempfile.TemporaryDirectory(prefix="baton-") as place:
        path = Path(place, "dataset.json")
        client.download(DATA_BUCKET, key, path, cancel=cancel)
        try:
            return DatasetManifest.model_validate_json(path.read_bytes()).files
        except ValidationError:
            return []
