"""Define the calls that commit, list and read checkpoints; manifest.py defines a checkpoint's content."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, Blake3, Epoch, EpochSeconds, Metrics, Step, WireModel

MAX_MISSING_PER_ANSWER = 1000
"""Bound of presigned URLs in one answer, which stays below Lambda's 6 MB."""


class BlobUpload(AnswerModel):
    """Target of the PUT of a missing pack; the headers must be sent exactly as given. 412 means it is already there.

    Example: `{"blake3": "<64 hex>", "url": "https://...", "headers": {"if-none-match": "*"}}`
    """

    blake3: Blake3
    url: str
    headers: dict[str, str]


class CommitAnswer(AnswerModel):
    """Answer to `POST /job/{id}/checkpoints`.

    Not committed: upload the missing packs and post the same manifest again. Committed: the checkpoint exists.
    Example: `{"committed": true, "step": 100, "epoch": 2, "missing": []}`
    """

    committed: bool
    step: Step
    epoch: Epoch
    missing: list[BlobUpload] = []
    more_missing: bool = False
    """True if `missing` is truncated; post the manifest again after uploading these."""


class CheckpointRef(AnswerModel):
    """A committed checkpoint: where its manifest can be fetched.

    Example: `{"step": 100, "epoch": 2, "manifest_url": "https://...", "manifest_blake3": "<64 hex>",
    "total_bytes": 4096}`
    """

    step: Step
    epoch: Epoch
    manifest_url: str
    manifest_blake3: Blake3 | None = None
    total_bytes: int
    legacy_key: str | None = None
    """Key of a zip that an original client uploaded; `manifest_url` then fetches that zip."""


class CheckpointView(AnswerModel):
    """A committed checkpoint as users see it.

    Example: `{"step": 100, "epoch": 2, "committed_at": 1790000000, "num_files": 4, ...}`
    """

    step: Step
    epoch: Epoch
    committed_at: EpochSeconds
    num_files: int
    total_bytes: int
    """Bytes of the checkpoint's files."""
    new_bytes: int = 0
    """Bytes of the packs that earlier checkpoints of the job do not have."""
    metrics: Metrics = {}
    manifest_key: str
    current: bool
    """True for the checkpoint that the next attempt resumes from."""
    pinned: bool = False
    damaged: bool = False
    tag: str = ""
    """The name under which a rule or command keeps the checkpoint; empty for none."""


class CheckpointPage(AnswerModel):
    """Newest first. Example: `{"checkpoints": [], "next_cursor": null}`"""

    checkpoints: list[CheckpointView]
    next_cursor: str | None = None


class BlobUrlsRequest(WireModel):
    """Body of `POST /job/{id}/checkpoints/{step}/urls`: which packs of a committed checkpoint to fetch.

    Example: `{"blake3": ["af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"]}`.
    Without digests the first thousand are meant.
    """

    blake3: Annotated[list[Blake3], Field(max_length=MAX_MISSING_PER_ANSWER)] = []


class BlobUrls(AnswerModel):
    """Example: `{"urls": {"<64 hex>": "https://..."}, "expires_at": 1790000900, "checkpoint": {"step": 100, "epoch": 2,
    "manifest_url": "https://...", "total_bytes": 4096}}`"""

    urls: dict[str, str]
    expires_at: EpochSeconds
    checkpoint: CheckpointRef | None = None
    """The checkpoint and its manifest, for readers without a claim; None from an older control plane."""


class DamagedRequest(WireModel):
    """Body of `POST /job/{id}/checkpoints/{step}/damaged`: this checkpoint's bytes do not verify.

    Example: `{"epoch": 2, "message": "chunk 3f... has other bytes than its digest says"}`
    """

    epoch: Epoch
    message: Annotated[str, Field(max_length=512)] = ""
