"""The calls that list the artifacts stored by a job's attempts."""

from __future__ import annotations

import re

from baton.contract.base import MAX_STEP, AnswerModel, Cursor, Epoch, EpochSeconds, PageLimit, WireModel

_STEP = re.compile(r"(?:^|[-_.])step[-_]?([0-9]{1,13})(?=[-_.]|$)")


def step_of(path: str) -> int | None:
    """Return the step in the name of an output: 500 for `validation/step-000500-0.png`; None if there is none."""
    found = _STEP.search(path.rpartition("/")[2])
    return int(found[1]) if found and int(found[1]) <= MAX_STEP else None


class StoredArtifactsQuery(WireModel):
    """Query of `GET /job/{id}/artifacts`. Example: `?limit=100`"""

    limit: PageLimit | None = None
    cursor: Cursor | None = None


class StoredArtifact(AnswerModel):
    """A file that an attempt has stored, and where to GET it until `expires_at` of the page.

    Example: `{"path": "validation/step-000500-0.png", "epoch": 1, "step": 500, "size_bytes": 1312, "bucket":
    "training-checkpoints", "key": "jobs/.../artifacts/1/validation/step-000500-0.png", "url": "https://..."}`
    """

    path: str
    epoch: Epoch
    """Attempt that stored the file; the last one if several attempts stored the path."""
    seat: int | None = None
    """Node of an elastic job whose attempt stored the file, counted at its seat; None for another job."""
    step: int | None = None
    """Step in the file's name, from `step-<number>`."""
    size_bytes: int | None = None
    bucket: str
    key: str
    url: str


class StoredArtifactsPage(AnswerModel):
    """Page of the artifacts of a job.

    `final`: the job is complete, and these are its outputs. Otherwise they are what its attempts have stored so far:
    none of it is an output before the job is complete.

    Example: `{"artifacts": [], "next_cursor": null, "expires_at": 1790000900, "expires_in_s": 900, "final": false}`
    """

    artifacts: list[StoredArtifact]
    next_cursor: str | None = None
    expires_at: EpochSeconds
    expires_in_s: int
    """Seconds until `expires_at`, for clients that do not know the server's clock."""
    final: bool
