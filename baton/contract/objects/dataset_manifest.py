"""The manifest of a pushed folder: an object beside the files that lists them and records an unfinished push."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from baton.contract.base import Blake3, RelativePath, SizeBytes, WireModel

DATASET_MANIFEST = ".baton/dataset.json"
"""Path of the manifest below the prefix of the push. The manifest is not an input of a job."""
MAX_DATASET_FILES = 500_000
MAX_DATASET_MANIFEST_BYTES = 256 * 1024 * 1024


class DatasetFile(WireModel):
    """A file of a pushed folder.

    Example: `{"path": "dogs/1.jpg", "size_bytes": 1024,
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"}`
    """

    path: RelativePath
    """Path below the prefix."""
    size_bytes: SizeBytes
    blake3: Blake3


class DatasetManifest(WireModel):
    """Files that pushes to one prefix have stored.

    `unfinished` is True while a push changes the files; `files` then lists the files before this push. The stored
    document omits a false `unfinished`.
    Example: `{"version": 1, "files": [{"path": "dogs/1.jpg", "size_bytes": 1024,
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"}]}`
    """

    version: Literal[1] = 1
    files: Annotated[list[DatasetFile], Field(max_length=MAX_DATASET_FILES)]
    unfinished: bool = False

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("'files' names a path twice")
        return self


def is_manifest(key: str) -> bool:
    """Return True if the key is that of a dataset manifest below any prefix."""
    return key == DATASET_MANIFEST or key.endswith(f"/{DATASET_MANIFEST}")


class PushedFiles:
    """Files below `prefixes` by key, merged from the manifests of all folders that contain them."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        self.files: dict[str, DatasetFile] = {}
        self.folders: dict[str, str] = {}
        """Folder whose manifest describes the file, by key."""
        self._prefixes = tuple(prefixes)

    def add(self, manifest_key: str, data: bytes) -> None:
        """Add the manifest stored at `manifest_key`. Raises ValueError for an invalid or unfinished manifest."""
        folder = manifest_key.removesuffix(DATASET_MANIFEST)
        try:
            manifest = DatasetManifest.model_validate_json(data)
        except ValidationError as error:
            raise ValueError(
                f"{manifest_key} is no manifest of a data set ({error.error_count()} faults): push {folder} again"
            ) from error
        if manifest.unfinished:
            raise ValueError(f"a push to {folder} was not finished: repeat it")
        for file in manifest.files:
            key = folder + file.path
            # The manifest of a separately pushed subfolder is never older than the outer folder's, therefore the
            # longest folder wins.
            if key.startswith(self._prefixes) and len(folder) >= len(self.folders.get(key, "")):
                self.files[key], self.folders[key] = file, folder
