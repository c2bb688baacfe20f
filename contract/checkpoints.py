"""Checkpoints: the manifest, and the calls that commit and list them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contract.base import (
    AnswerModel,
    Blake3,
    Crc64,
    Epoch,
    EpochSeconds,
    JobId,
    Metrics,
    RelativePath,
    SizeBytes,
    Step,
    WireModel,
)

MANIFEST_VERSION: Literal[1] = 1
MAX_MANIFEST_FILES = 10_000
MAX_MISSING_PER_ANSWER = 1000
"""Presigned URLs are long: one answer stays below Lambda's 6 MB."""


class ManifestFile(WireModel):
    """One file of a checkpoint; its bytes are the blob named by `blake3`.

    Example: `{"path": "model.safetensors", "size_bytes": 1024,
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262", "crc64nvme": "UvieJR3alJI="}`
    """

    path: RelativePath
    size_bytes: SizeBytes
    blake3: Blake3
    crc64nvme: Crc64


class Manifest(WireModel):
    """What a checkpoint consists of. Stored as `manifests/<step>-<epoch>.json`; never changes.

    Example: `{"version": 1, "job_id": "146683a1-cb76-4702-9fef-fcccd32594f1", "step": 100, "epoch": 2,
    "files": [{"path": "model.safetensors", "size_bytes": 1024,
    "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262", "crc64nvme": "UvieJR3alJI="}],
    "metrics": {"loss": 0.4}, "created_by": "session"}`
    """

    version: Literal[1] = MANIFEST_VERSION
    job_id: JobId
    step: Step
    epoch: Epoch
    files: Annotated[list[ManifestFile], Field(min_length=1, max_length=MAX_MANIFEST_FILES)]
    metrics: Metrics = {}
    created_by: Literal["session", "script"] = "session"

    @model_validator(mode="after")
    def _paths_fit_together(self) -> Self:
        """Each path once, and none both a file and a directory of another."""
        paths = {file.path for file in self.files}
        if len(paths) != len(self.files):
            raise ValueError("'files' names a path twice")
        for path in paths:
            parts = path.split("/")
            for end in range(1, len(parts)):
                if "/".join(parts[:end]) in paths:
                    raise ValueError(f"{path[:80]!r} lies below another file of the checkpoint")
        sizes: dict[str, tuple[int, str]] = {}
        for file in self.files:
            if sizes.setdefault(file.blake3, (file.size_bytes, file.crc64nvme)) != (
                file.size_bytes,
                file.crc64nvme,
            ):
                raise ValueError(f"blob {file.blake3} is declared with two sizes or checksums")
        return self

    def canonical_bytes(self) -> bytes:
        """The bytes that are stored and whose BLAKE3 names the manifest: compact JSON, files sorted by path."""
        files = sorted(self.files, key=lambda file: file.path)
        metrics = dict(sorted(self.metrics.items()))
        return self.model_copy(update={"files": files, "metrics": metrics}).model_dump_json().encode()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, each path counted."""
        return sum(file.size_bytes for file in self.files)


class BlobUpload(AnswerModel):
    """Where to PUT a missing blob; the headers must be sent exactly as given. 412 means it is already there.

    Example: `{"blake3": "<64 hex>", "url": "https://...", "headers": {"if-none-match": "*"}}`
    """

    blake3: Blake3
    url: str
    headers: dict[str, str]


class CommitAnswer(AnswerModel):
    """Answer to `POST /job/{id}/checkpoints`.

    Not committed: upload the missing blobs and post the same manifest again. Committed: the checkpoint exists.
    Example: `{"committed": true, "step": 100, "epoch": 2, "missing": []}`
    """

    committed: bool
    step: Step
    epoch: Epoch
    missing: list[BlobUpload] = []
    more_missing: bool = False
    """True when the list was cut; post the manifest again after uploading these."""


class CheckpointRef(AnswerModel):
    """A committed checkpoint in a claim: where its manifest can be fetched.

    Example: `{"step": 100, "epoch": 2, "manifest_url": "https://...", "manifest_blake3": "<64 hex>",
    "total_bytes": 4096}`
    """

    step: Step
    epoch: Epoch
    manifest_url: str
    manifest_blake3: Blake3 | None = None
    total_bytes: int
    legacy_key: str | None = None
    """Set for a zip uploaded by an original client; `manifest_url` then fetches that zip."""


class CheckpointView(AnswerModel):
    """A committed checkpoint as users see it.

    Example: `{"step": 100, "epoch": 2, "committed_at": 1790000000, "num_files": 4, ...}`
    """

    step: Step
    epoch: Epoch
    committed_at: EpochSeconds
    num_files: int
    total_bytes: int
    metrics: Metrics = {}
    manifest_key: str
    current: bool
    """True for the one that the next attempt resumes from."""
    pinned: bool = False
    damaged: bool = False


class CheckpointPage(AnswerModel):
    """Newest first. Example: `{"checkpoints": [], "next_cursor": null}`"""

    checkpoints: list[CheckpointView]
    next_cursor: str | None = None


class BlobUrlsRequest(WireModel):
    """Body of `POST /job/{id}/checkpoints/{step}/urls`: which blobs of a committed checkpoint to fetch.

    Example: `{"blake3": ["af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"]}`.
    Without digests the first thousand are meant.
    """

    blake3: Annotated[list[Blake3], Field(max_length=MAX_MISSING_PER_ANSWER)] = []


class BlobUrls(AnswerModel):
    """Example: `{"urls": {"<64 hex>": "https://..."}, "expires_at": 1790000900}`"""

    urls: dict[str, str]
    expires_at: EpochSeconds


class DamagedRequest(WireModel):
    """Body of `POST /job/{id}/checkpoints/{step}/damaged`: this checkpoint's bytes do not verify.

    Example: `{"epoch": 2, "message": "blob 3f... has other bytes than its digest says"}`
    """

    epoch: Epoch
    message: Annotated[str, Field(max_length=512)] = ""
