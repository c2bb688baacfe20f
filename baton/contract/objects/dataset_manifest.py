"""What a pushed folder consists of: an object beside its files, which says too whether all of them are stored."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from baton.contract.base import Blake3, RelativePath, SizeBytes, WireModel

DATASET_MANIFEST = ".baton/dataset.json"
"""Its path below the prefix that was pushed to. It is no input of a job."""
MAX_DATASET_FILES = 500_000
MAX_DATASET_MANIFEST_BYTES = 256 * 1024 * 1024


class DatasetFile(WireModel):
    """One file.

    Example: `{"path": "dogs/1.jpg", "size_bytes": 1024,
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"}`
    """

    path: RelativePath
    """Below the prefix."""
    size_bytes: SizeBytes
    blake3: Blake3


class DatasetManifest(WireModel):
    """All files that pushes to one prefix have stored.

    `unfinished`: a push has begun to change them, and these are the files of before; not written where it is false.
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
    """True for the key of such an object, whatever its prefix."""
    return key == DATASET_MANIFEST or key.endswith(f"/{DATASET_MANIFEST}")
