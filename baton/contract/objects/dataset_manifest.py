"""The manifest of a pushed folder: an object beside the files that lists them and records an unfinished push."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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
