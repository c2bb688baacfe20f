"""Identify a client of the original orchestrator, which has no lease token.

Such a client echoes three things: its machine id where the variable is set, the `checkpoint_prefix` of its claim, and,
without knowing, its API key and source address. The prefix names the attempt, therefore a key below the prefix works
as a fencing token.
"""

from __future__ import annotations

import re

from functions.domain.stored import Record

FIRST_PROGRESS_FACTOR = 2
"""The first checkpoint may take so many times as long as the later ones: models are loaded and class images made."""


class Claimant(Record):
    """The client that claimed a job without a lease token."""

    key_id: str
    source_address: str
    progress_by: int
    """Heartbeats are refused from this instant on, unless `/progress` puts it off."""


def attempts_prefix(job_id: str) -> str:
    """Return what all keys of objects that original clients stored for the job begin with."""
    return f"jobs/{job_id}/attempt-"


def attempt_prefix(job_id: str, epoch: int) -> str:
    """Return the prefix in the checkpoints bucket under which attempt `epoch` of an original client stores objects."""
    return f"{attempts_prefix(job_id)}{epoch}/"


def attempt_of(job_id: str, key: str | None) -> int | None:
    """Return the epoch that an object key names; None for a key outside the attempts of the job."""
    found = re.match(rf"jobs/{re.escape(job_id)}/attempt-([0-9]{{1,9}})/", key or "")
    return int(found[1]) if found else None
